// What stands before the routed experts of a layer, as doors hold it: norm, the router's matmul, gate.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.hpp"

namespace moesaic {

// Checked when it is made; the weights belong to the caller.
struct RouterLayer {
  int64_t layer_idx, width;
  Kind seam;
  const void* norm;  // [D] of `norm_kind`, or null
  Kind norm_kind;
  float norm_eps;
  Matrix weight;            // [E, D] float32
  const float* logit_bias;  // [E] or null
  Gate gate;                // without rows

  std::string name() const { return "router of layer " + std::to_string(layer_idx); }
};

// Where rows of a call go, and what is chosen for them.
struct RouterRows {
  uint8_t* normed;   // [T, D] of the seam's kind
  float* logits;     // [T, E]
  int64_t* experts;  // [T, K]
  float* weights;    // [T, K]
};

// Rows are normed, and each chooses: bit for bit what the doors of norm, matmul and gate give one after the other.
void run_router(Kernels& kernels, const RouterLayer& layer, const void* x, int64_t num_tokens, const RouterRows& to);

}  // namespace moesaic
