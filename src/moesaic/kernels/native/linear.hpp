// y = x @ weight.T, float32 inside, one tree per result element:
//
//   leaf s of `shards`    lane l adds x[k] * w[k] over its k in ascending order, from +0
//                         lanes meet as l and l + half, until one is left
//   leaves                meet as neighbours (0, 1), (2, 3), ...; the root is rounded once
//
// The order does not know how many rows there are, which thread runs, or how rows are tiled. Packed weights have a
// leaf of their own: see packed.hpp.
#pragma once

#include "matrix.hpp"

namespace moesaic {

struct Linear {
  Matrix weight;
  const void* x;  // [rows, width], contiguous, of `kind`
  void* y;        // [rows, columns], contiguous, of `out`
  int64_t rows;
  Kind kind, out;
};

}  // namespace moesaic
