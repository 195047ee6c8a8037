// Functions of single numbers, float32 inside: each number's bits follow that number alone.
#pragma once

#include "matrix.hpp"

namespace moesaic {

enum class Function : int {
  kSilu = 0,
  kGelu,      // x times the normal distribution
  kGeluTanh,  // its approximation by tanh
  kRelu,
  kRelu2,
  kSwigluClamped,  // (up + 1) * gate * logistic(slope * gate), gate at most `limit`, up within it
  kSigmoid,
  kSoftcap,  // limit * tanh(gate / limit)
  kSoftplus,
  kEnd
};

struct Activation {
  Function function;
  float limit, slope;  // infinity and any number where the function has none
};

struct Elementwise {
  Activation activation;
  const void* gate;  // [rows, columns] of `kind`
  const void* up;    // alike, or null: the function's value is multiplied by it
  void* y;           // [rows, columns], contiguous, of `out`
  int64_t rows, columns;
  int64_t gate_stride, up_stride;  // numbers from row to row
  Kind kind, out;
};

// e^(x - greatest) / sum over each row; the sum adds lanes in ascending order, which then meet as l and l + half.
struct Softmax {
  const float* x;  // [rows, columns], contiguous
  float* y;        // alike
  int64_t rows, columns;
};

}  // namespace moesaic
