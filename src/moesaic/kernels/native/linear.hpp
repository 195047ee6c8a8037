// y = x @ weight.T, float32 inside, one tree per result element:
//
//   leaf s of `shards`    lane l adds x[k] * w[k] over its k in ascending order, from +0
//                         lanes meet as l and l + half, until one is left
//   leaves                meet as neighbours (0, 1), (2, 3), ...; the root is rounded once
//
// The order does not know how many rows there are, which thread runs, or how rows are tiled.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moesaic {

enum class Kind : int { kFloat32 = 0, kBfloat16 = 1 };

struct Linear {
  const void* x;       // [rows, width], contiguous, of `kind`
  const void* weight;  // [columns, width], rows `stride` elements apart, of `kind`
  void* y;             // [rows, columns], contiguous, of `out`
  int64_t rows, columns, width, stride;
  int64_t shards;  // a power of two that divides width
  Kind kind, out;
};

}  // namespace moesaic
