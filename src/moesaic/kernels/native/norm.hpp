// Norms over rows, rotation of heads, float32 inside. Products and sums are rounded apart, so that all levels agree.
//
//   sum       vector i of a row (8 numbers, zeros behind the last) goes to chain i % 4, each ascending from +0;
//             chains meet as (0, 1), (2, 3), then those two; lanes meet as l and l + half
//   rms       x * (1 / sqrt(sum(x^2) / width + eps)), rounded to the weight's kind, times the weight, rounded again
//   l2        x * (1 / sqrt(sum(x^2) + eps)), float32
//   layer     with m = sum(x) / width: (x - m) * (1 / sqrt(sum((x - m)^2) / width + eps)) * weight + bias
//   rotation  of the pair (a, b): a cos - b sin, b cos + a sin
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.hpp"

namespace moesaic {

enum class NormKind : int { kRms = 0, kL2 = 1, kLayer = 2 };

struct Norm {
  const void* x;       // [rows, width], contiguous, of `kind`
  const void* weight;  // [width], of `weight_kind`, or null
  const void* bias;    // the same
  void* y;             // [rows, width], contiguous, of `out`
  int64_t rows, width;
  float eps;
  NormKind norm;
  Kind kind, weight_kind, out;
};

struct Rotation {
  const void* x;  // [tokens, heads, width], the last contiguous, the others so many numbers apart
  const float *cosines, *sines;  // [tokens, half]
  void* y;                       // the same, contiguous
  int64_t tokens, heads, width, half, token_stride, head_stride;
  bool is_interleaved;  // pairs are neighbours; else `half` apart
  Kind kind;
};

}  // namespace moesaic
