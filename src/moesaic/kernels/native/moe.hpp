// The routed experts of one layer in one call, bit for bit what the ops give one after the other:
//
//   rows      x of each token in the form in which it meets the weights, once, however many experts read it
//   inner     gate and up of a tile of an expert's inner columns, biases, activation     -> hidden rows
//   down      a tile of an expert's result columns, bias                                 -> a row for each job
//   combine   rows times their weights, added as neighbours over a token's choices       -> y
//
// Values are rounded to the seam's kind after gate and up, after the activation, after down, and at the end; products
// and sums of the combine are rounded apart in float32. A job is a choice of a token; jobs are sorted by (slot, token).
#pragma once

#include "elementwise.hpp"
#include "matrix.hpp"

namespace moesaic {

struct Expert {
  Matrix inner, down;      // [2F, D] gate then up, or [F, D]; [D, F]
  const void* inner_bias;  // [2F] or [F], of the weights' kind, float32 beside packed ones; or null
  const void* down_bias;   // [D]
};

constexpr int kForms = 4;  // of rows of x: float32, bfloat16, of 4 bits, of 8 bits

inline int form_of(const Matrix& inner) {
  if (inner.is_packed()) return inner.bits == 4 ? 2 : 3;
  return static_cast<int>(inner.kind);
}

// What the stages read and write. Pointers alone: levels use no containers of the standard library.
struct Moe {
  // the layer
  const Expert* slots;
  int64_t width, inner_width, num_choices;  // D, F, K
  bool is_gated, is_weight_on_input;
  Kind seam;
  Activation activation;
  // the call
  const void* x;         // [T, D] of the seam's kind
  const float* weights;  // [T, K]
  void* y;               // [T, D] of the seam's kind
  int64_t num_tokens, num_rows;  // rows of x in their form: a token's, or a job's where the weight is on the input
  const int32_t* offsets;        // slot s has jobs offsets[s] .. offsets[s + 1]
  const int32_t* choice_of_job;  // job -> t * K + k
  const int32_t* job_of_choice;
  // memory
  const Matrix* form[kForms];  // one that such rows meet; null: no slot of the call does
  uint8_t* rows[kForms];
  uint8_t* hidden;
  uint64_t hidden_bytes;  // from row to row
  void* out;              // [J, D] of the seam's kind
};

}  // namespace moesaic
