// The kernels of one level, as the doors call them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attention.hpp"
#include "elementwise.hpp"
#include "gate.hpp"
#include "linear.hpp"
#include "moe.hpp"
#include "norm.hpp"
#include "state.hpp"

namespace moesaic {

struct LevelTable {
  const char* name;
  // Bytes of a row of x in the form in which it meets a weight.
  size_t (*row_bytes)(const Matrix&);
  // A call first prepares its rows into scratch, then runs its strips; rows and strips may be split over threads.
  void (*prepare)(const Linear&, uint8_t* scratch, int64_t first_row, int64_t end_row);
  void (*run)(const Linear&, const uint8_t* scratch, int64_t first_strip, int64_t end_strip);
  void (*act_rows)(const Elementwise&, int64_t first_row, int64_t end_row);
  void (*softmax_rows)(const Softmax&, int64_t first_row, int64_t end_row);
  void (*add_numbers)(Kind, const void* a, const void* b, void* y, int64_t first, int64_t end);
  // The stages of a layer's routed experts; weights at `then`, or null, come to the cache meanwhile.
  void (*moe_rows)(const Moe&, int64_t first_row, int64_t end_row);
  void (*moe_inner)(const Moe&, int64_t slot, int64_t first_column, int64_t end_column, const uint8_t* then);
  void (*moe_down)(const Moe&, int64_t slot, int64_t first_column, int64_t end_column, const uint8_t* then);
  void (*moe_combine)(const Moe&, int64_t first_token, int64_t end_token);
  // Floats of scratch of a tile, and of a node: what some lanes hold of its rows.
  size_t (*attention_scratch_floats)(const Attention&, const AttentionTile&);
  size_t (*node_floats)(const Attention&, const AttentionTile&);
  // A tile whole, with a node for each level of the tree of lanes and one more; or lane by lane, and then its nodes
  // joined, of which `is_there` says whether they have anything.
  void (*attend)(const Attention&, const AttentionTile&, float* scratch, float* nodes);
  bool (*attend_lane)(const Attention&, const AttentionTile&, int64_t lane, float* scratch, float* node);
  void (*attend_join)(const Attention&, const AttentionTile&, float* nodes, bool* is_there);
  void (*write_kv)(const KvWrite&, int64_t first_token, int64_t end_token, float* row);
  void (*norm_rows)(const Norm&, int64_t first_row, int64_t end_row, float* row);
  void (*rotate)(const Rotation&, int64_t first_token, int64_t end_token);
  size_t (*gate_scratch_floats)(const Gate&);
  void (*gate_rows)(const Gate&, int64_t first_row, int64_t end_row, float* scratch, int64_t* group_ids);
  void (*convolve)(const Conv&, int64_t first_channel, int64_t end_channel);
  void (*delta_head)(const Delta&, int64_t row, int64_t head, float* out);
};

const LevelTable& portable_level();
#if defined(MOESAIC_X86)
const LevelTable& avx2_level();
const LevelTable& avx512_level();
const LevelTable& avx512_vnni_level();
const LevelTable& avx512_bf16_level();
#elif defined(MOESAIC_ARM64)
const LevelTable& neon_level();
const LevelTable& neon_dotprod_level();
#endif

}  // namespace moesaic
