// Attention over a paged KV pool, prefill and decode alike, float32 inside. One tree per row (a position and a head):
//
//   score     q * scale is rounded; its products with a key are fused and added in ascending order, in four parts
//             of the columns (the last takes what is left over); parts meet as (0, 1), (2, 3), then those two
//   block     visible positions alone: peak' = the greater of peak and the block's greatest score,
//             weight = exp(score - peak'); mass = mass * exp(peak - peak') + the weights, whose halves meet as
//             (i, i + n/2); values = values * exp(peak - peak'), then fused products weight * value by position
//   lane      folds its blocks (block number % lanes) in ascending order
//   lanes     meet as (i, i + n/2): both scaled to the greater peak, then added; an empty lane changes nothing
//   sink      meets last, as a lane of mass 1 without a value; then values / mass, rounded once
//
// A score or a weight is multiplied by its position's scale where the pool has scales. Nothing of this knows how many
// rows or sequences there are, how they are tiled, or which thread runs; what is not visible is not multiplied.
//
// A pool is [blocks, groups, kv_block] rows. A row of int8 or fp8 (e4m3) is a byte a number, then its scale, float32.
#pragma once

#include <cstddef>
#include <cstdint>

#include "linear.hpp"

namespace moesaic {

constexpr int64_t kMaxLanes = 64;

enum class KvKind : int { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kFp8 = 3 };

constexpr int64_t kv_row_bytes(KvKind kind, int64_t width) {
  return kind == KvKind::kFloat32 ? 4 * width : kind == KvKind::kBfloat16 ? 2 * width : width + 4;
}

// Positions [first_position, first_position + positions) of one sequence, and some heads of each of some groups: `rows`
// rows a group.
struct AttentionTile {
  int64_t first_token, first_position, positions, first_head, heads, first_group, groups;
  const int32_t* table;  // block ids by position / kv_block

  int64_t rows() const { return positions * heads; }
};

struct Attention {
  const void* q;          // [tokens, heads, key_width], contiguous, of `kind`
  const uint8_t* keys;    // pool with rows of key_width
  const uint8_t* values;  // pool with rows of value_row_width, of which the first value_width numbers are the value
  const float* sinks;     // [heads] or null
  void* y;                // [tokens, heads, value_width], contiguous, of `kind`
  int64_t heads, groups, key_width, value_width, value_row_width, kv_block, lanes;
  int64_t window;  // visible positions, the row's own included; 0: all
  bool is_chunked;  // the window starts at a multiple of itself, it does not trail
  float scale;
  Kind kind;
  KvKind pool;

  int64_t heads_per_group() const { return heads / groups; }
  int64_t key_bytes() const { return kv_row_bytes(pool, key_width); }
  int64_t value_bytes() const { return kv_row_bytes(pool, value_row_width); }
  // The first position that `position` sees.
  int64_t oldest(int64_t position) const {
    if (window == 0) return 0;
    if (is_chunked) return position / window * window;
    return position < window ? 0 : position - window + 1;
  }
};

// A step's new rows of keys or values on their way into a pool; blocks that begin are cleared before.
struct KvWrite {
  const void* x;          // [tokens, groups, width], contiguous, of `kind`
  uint8_t* pool;
  const int64_t* slots;   // [tokens], block * kv_block + offset
  int64_t tokens, groups, width, kv_block;
  Kind kind;
  KvKind pool_kind;
};

}  // namespace moesaic
