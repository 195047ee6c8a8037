// Grouped-query attention of one layer as doors hold it, and a call of it.
#pragma once

#include <cstdint>
#include <string>

#include "doors.hpp"

namespace moesaic {

// The parameters of one layer, checked when they are given; the caller owns them.
struct GqaLayer {
  struct Scale {  // of a norm
    const void* weight = nullptr;
    Kind kind = Kind::kFloat32;
  };

  std::string name;
  int64_t width, heads, groups, head_width;  // D, H, G, C
  bool is_normed_whole;                      // queries and keys over all heads, not head by head
  float norm_eps, head_norm_eps;
  int64_t half;                              // pairs of columns that turn
  bool is_interleaved;
  int64_t kv_block, kv_lanes, window;
  bool is_chunked;
  float softmax_scale;
  const float* sinks;
  Kind seam;
  Scale norm, q_norm, k_norm;
  Matrix q{}, k{}, v{}, o{};

  int64_t q_width() const { return heads * head_width; }
  int64_t k_width() const { return groups * head_width; }
};

// The pools of a layer, and their kind.
struct KvPools {
  uintptr_t keys;
  int64_t key_bytes;
  uintptr_t values;
  int64_t value_bytes, kind;
};

struct GqaCall {
  uintptr_t x;  // [T, D]
  int64_t x_numbers;
  uintptr_t y, cosines, sines;  // [T, D]; [T, C'] float32
  int64_t angles;
  KvPools pools;
  uintptr_t slots;  // of the new tokens
  KvStep step;
};

// y = x + o(attention(q, k, v of norm(x))); all but addresses is checked.
void run_gqa(Kernels& kernels, const GqaLayer& layer, const GqaCall& call);

}  // namespace moesaic
