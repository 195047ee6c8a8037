// The experts of one layer as doors hold them, and how their stages are cut into tasks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels.hpp"
#include "moe.hpp"
#include "router_layer.hpp"
#include "shared_layer.hpp"

namespace moesaic {

constexpr int64_t kInnerUnit = 32;  // columns: two panels, and a block of the hidden row
constexpr int64_t kCombineNumbers = 32 * 1024;  // guess: products of one task, some 10 us

// Checked as slots are added; the weights belong to the caller.
struct MoeLayer {
  int64_t layer_idx, width, inner_width, num_choices, shards;
  bool is_gated, is_weight_on_input;
  Kind seam;
  Activation activation;
  std::vector<Expert> slots;
  std::vector<int64_t> slot_bytes;  // weights and biases
  std::vector<int64_t> slot_of_expert;

  std::string name() const { return "experts of layer " + std::to_string(layer_idx); }
};

// Columns of a task of a matmul that reads some `task_bytes`, by the bytes of one.
inline int64_t tile_of(int64_t column_bytes, int64_t task_bytes) {
  return std::max<int64_t>(1, task_bytes / (kInnerUnit * column_bytes)) * kInnerUnit;
}

inline int64_t column_bytes(const Matrix& weight) {
  return std::max<int64_t>(1, weight.strip_bytes() / (weight.is_packed() ? kPanelRows : 1));
}

// Whether router and shared expert, null where there is none, are of the layer that these experts are of.
void check_fit(const RouterLayer& router, const SharedLayer* shared, const MoeLayer& layer);

// y = x + experts(norm(x)), the shared expert among them: the sparse half of a layer, all of whose experts are here. Writes
// what was chosen, [T, K] each. All but addresses is checked; what does not end in time throws.
void moe_half(Kernels& kernels, const RouterLayer& router, const SharedLayer* shared, const MoeLayer& layer, uintptr_t x,
              int64_t num_x, uintptr_t experts, uintptr_t weights, uintptr_t y, int64_t num_tokens, double timeout_s);

// What a result is added to, one after the other and each time rounded: the shared expert's, the residual; null: nothing.
struct Added {
  const void* rows[2];  // [T, D]
};

inline void add_all(const LevelTable& table, const Moe& call, const Added& added, int64_t first_token,
                    int64_t end_token) {
  for (const void* rows : added.rows)
    if (rows != nullptr)
      table.add_numbers(call.seam, rows, call.y, call.y, first_token * call.width, end_token * call.width);
}

}  // namespace moesaic
