// The expert of a layer that every token shares, as doors hold it.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.hpp"

namespace moesaic {

// Checked as its weights are given; they belong to the caller.
struct SharedLayer {
  int64_t layer_idx, width, inner_width;  // D, F
  Kind seam;
  Activation activation;
  bool is_gated;
  Matrix gate{}, up{}, down{};  // [F, D], [F, D], [D, F]
  Matrix open{};                // [1, D]: the result is multiplied by its logistic; no data: it is not

  std::string name() const { return "shared expert of layer " + std::to_string(layer_idx); }
};

// [T, D] of the seam's kind within `memory`: bit for bit what the doors of matmuls and activations give.
const uint8_t* run_shared(Kernels& kernels, const SharedLayer& layer, const uint8_t* x, int64_t num_tokens,
                          Buffer& memory);

}  // namespace moesaic
