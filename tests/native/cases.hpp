// Seeded random calls of every kernel of a level. A case runs one call and gives its results as floats; the same seed
// gives the same call on every level.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "kernels.hpp"

namespace moesaic {

using Floats = std::vector<float>;
using Bytes = std::vector<uint8_t>;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}

  uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33) ^ static_cast<uint32_t>(state_ >> 60);
  }
  int64_t within(int64_t low, int64_t high) { return low + bits() % static_cast<uint32_t>(high - low + 1); }
  bool flag() { return within(0, 1) == 1; }
  template <class Number>
  Number one_of(std::initializer_list<Number> all) {
    return all.begin()[within(0, static_cast<int64_t>(all.size()) - 1)];
  }
  // In -size to size.
  float number(float size = 2.0f) { return (static_cast<float>(within(0, 1 << 20)) / (1 << 19) - 1.0f) * size; }
  Floats numbers(int64_t count, float size = 2.0f) {
    Floats all(static_cast<size_t>(count));
    for (float& one : all) one = number(size);
    return all;
  }
  Kind kind() { return flag() ? Kind::kFloat32 : Kind::kBfloat16; }

 private:
  uint64_t state_;
};

inline int64_t least_of(int64_t a, int64_t b) { return a < b ? a : b; }

// Numbers as a kind keeps them, cut.
inline Bytes as_kind(const Floats& numbers, Kind kind) {
  Bytes bytes(numbers.size() * static_cast<size_t>(bytes_of(kind)));
  for (size_t i = 0; i < numbers.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &numbers[i], sizeof bits);
    const uint16_t upper = static_cast<uint16_t>(bits >> 16);
    if (kind == Kind::kFloat32)
      std::memcpy(&bytes[4 * i], &bits, 4);
    else
      std::memcpy(&bytes[2 * i], &upper, 2);
  }
  return bytes;
}

inline void append(Floats& all, const Bytes& bytes, Kind kind) {
  for (size_t i = 0; i < bytes.size(); i += static_cast<size_t>(bytes_of(kind))) {
    uint32_t bits = 0;
    std::memcpy(kind == Kind::kFloat32 ? reinterpret_cast<uint8_t*>(&bits) : reinterpret_cast<uint8_t*>(&bits) + 2,
                &bytes[i], static_cast<size_t>(bytes_of(kind)));
    float value;
    std::memcpy(&value, &bits, sizeof value);
    all.push_back(value);
  }
}

inline Floats floats_of(const Bytes& bytes, Kind kind) {
  Floats all;
  append(all, bytes, kind);
  return all;
}

inline Bytes room(int64_t numbers, Kind kind) { return Bytes(static_cast<size_t>(numbers * bytes_of(kind))); }

// A weight with the memory that it points to.
struct Weight {
  Matrix matrix;
  Bytes data;
};

inline Weight float_weight(Random& random, int64_t columns, int64_t width, int64_t shards, Kind kind,
                           int64_t sections) {
  Weight weight{Matrix::of_floats(nullptr, columns, width, shards, kind, width + random.within(0, 3)), {}};
  weight.matrix.sections = sections;
  weight.data = as_kind(random.numbers(columns * weight.matrix.stride), kind);
  weight.matrix.data = weight.data.data();
  return weight;
}

// Random bytes, but for scales, which are numbers of float16 that are neither tiny nor infinite, and zero points, which
// are numbers of the weights.
inline Weight packed_weight(Random& random, int64_t columns, int64_t width, int64_t shards, int64_t bits,
                            int64_t group, int64_t sections) {
  Weight weight{Matrix::of_panels(nullptr, columns, width, shards, bits, group, sections, bits == 4 && random.flag()),
                {}};
  const Matrix& matrix = weight.matrix;
  weight.data.resize(static_cast<size_t>(matrix.weight_bytes()));
  for (uint8_t& byte : weight.data) byte = static_cast<uint8_t>(random.bits());
  for (int64_t at = 0; at < matrix.weight_bytes(); at += matrix.group_bytes())
    for (int64_t i = 0; i < kPanelRows; ++i) {
      const uint16_t scale = static_cast<uint16_t>(random.within(0, 1) << 15 | random.within(2, 8) << 10 |
                                                   random.within(0, 1023));
      std::memcpy(&weight.data[static_cast<size_t>(at + 2 * i)], &scale, sizeof scale);
      if (matrix.has_zeros) weight.data[static_cast<size_t>(at + 2 * kPanelRows + i)] &= 15;
    }
  weight.matrix.data = weight.data.data();
  return weight;
}

inline Floats multiply(const LevelTable& level, const Matrix& weight, const Floats& x, int64_t rows, Kind kind,
                       Kind out) {
  const Bytes bytes = as_kind(x, kind);
  Bytes y = room(rows * weight.columns, out), scratch(level.row_bytes(weight) * static_cast<size_t>(rows));
  const Linear call{weight, bytes.data(), y.data(), rows, kind, out};
  level.prepare(call, scratch.data(), 0, rows);
  level.run(call, scratch.data(), 0, weight.num_strips());
  return floats_of(y, out);
}

inline Floats packed_matmul(const LevelTable& level, Random& random) {
  const int64_t shards = random.one_of<int64_t>({1, 2, 4}), group = random.one_of<int64_t>({32, 64, 128});
  const int64_t width = shards * group * random.within(1, 3) - random.within(0, 31), rows = random.within(1, 19);
  const Weight weight = packed_weight(random, random.within(1, 70), width, shards, random.one_of<int64_t>({4, 8}),
                                      group, 1);
  Floats x = random.numbers(rows * width);
  if (random.flag()) x[static_cast<size_t>(random.within(0, rows * width - 1))] = INFINITY;
  return multiply(level, weight.matrix, x, rows, random.kind(), random.kind());
}

inline Floats float_matmul(const LevelTable& level, Random& random) {
  const int64_t shards = random.one_of<int64_t>({1, 2, 8}), width = shards * random.within(1, 70);
  const int64_t rows = random.within(1, 19);
  const Kind kind = random.kind();
  const Weight weight = float_weight(random, random.within(1, 40), width, shards, kind, 1);
  return multiply(level, weight.matrix, random.numbers(rows * width), rows, kind, random.kind());
}

inline Activation any_activation(Random& random, bool has_up) {
  const int64_t last = static_cast<int64_t>(Function::kEnd) - 1;
  Function function = static_cast<Function>(random.within(0, last));
  if (!has_up && function == Function::kSwigluClamped) function = Function::kSilu;
  const bool is_limited = function == Function::kSwigluClamped || function == Function::kSoftcap;
  return {function, is_limited ? 7.0f : INFINITY, 1.702f};
}

inline Floats activation(const LevelTable& level, Random& random) {
  const int64_t rows = random.within(1, 4), columns = random.within(1, 300), stride = columns + random.within(0, 9);
  const bool has_up = random.flag();
  const Kind kind = random.kind(), out = random.kind();
  Floats gate = random.numbers(rows * stride, random.one_of({1.0f, 10.0f, 120.0f}));
  for (const float special : {INFINITY, -INFINITY, NAN, -0.0f, 3e38f, -3e38f, 1e-40f})
    gate[static_cast<size_t>(random.within(0, rows * stride - 1))] = special;
  const Bytes of_gate = as_kind(gate, kind), of_up = as_kind(random.numbers(rows * stride), kind);
  Bytes y = room(rows * columns, out);
  level.act_rows({any_activation(random, has_up), of_gate.data(), has_up ? of_up.data() : nullptr, y.data(), rows,
                  columns, stride, stride, kind, out},
                 0, rows);
  return floats_of(y, out);
}

inline Floats softmax(const LevelTable& level, Random& random) {
  const int64_t rows = random.within(1, 4), columns = random.within(1, 100);
  const Floats x = random.numbers(rows * columns, 20.0f);
  Floats y(x.size());
  level.softmax_rows({x.data(), y.data(), rows, columns}, 0, rows);
  return y;
}

inline Floats norm(const LevelTable& level, Random& random) {
  const int64_t rows = random.within(1, 4), width = random.within(1, 200);
  const Kind kind = random.kind(), weight_kind = random.kind(), out = random.kind();
  const Bytes x = as_kind(random.numbers(rows * width), kind), weight = as_kind(random.numbers(width), weight_kind);
  const bool has_weight = random.flag(), has_bias = random.flag();
  Bytes y = room(rows * width, out);
  Floats row(static_cast<size_t>(width + 16));
  level.norm_rows({x.data(), has_weight ? weight.data() : nullptr, has_bias ? weight.data() : nullptr, y.data(), rows,
                   width, 1e-6f, static_cast<NormKind>(random.within(0, 2)), kind, weight_kind, out},
                  0, rows, row.data());
  return floats_of(y, out);
}

inline Floats rotation(const LevelTable& level, Random& random) {
  const int64_t tokens = random.within(1, 5), heads = random.within(1, 4), width = random.within(2, 70);
  const int64_t half = random.within(0, width / 2);
  const Kind kind = random.kind();
  const Bytes x = as_kind(random.numbers(tokens * heads * width), kind);
  const Floats cosines = random.numbers(tokens * half, 1.0f), sines = random.numbers(tokens * half, 1.0f);
  Bytes y = room(tokens * heads * width, kind);
  level.rotate({x.data(), cosines.data(), sines.data(), y.data(), tokens, heads, width, half, heads * width, width,
                random.flag(), kind},
               0, tokens);
  return floats_of(y, kind);
}

inline Floats gate(const LevelTable& level, Random& random) {
  const int64_t rows = random.within(1, 6), groups = random.one_of<int64_t>({1, 2, 4});
  const int64_t kept = random.within(1, groups), size = random.within(2, 20), experts = groups * size;
  const int64_t chosen = random.within(1, least_of(kept * size, 8));
  Floats logits = random.numbers(rows * experts, 6.0f);
  if (random.flag()) logits[0] = NAN;
  const Floats bias = random.numbers(experts, 0.1f), scales = random.numbers(experts);
  std::vector<int64_t> ids(static_cast<size_t>(rows * chosen)), group_ids(static_cast<size_t>(groups));
  Floats weights(ids.size());
  const Gate call{logits.data(), random.flag() ? bias.data() : nullptr, random.flag() ? scales.data() : nullptr,
                  ids.data(), weights.data(), rows, experts, chosen, groups, kept, random.flag(), random.flag(),
                  random.flag(), random.flag(), 1e-20f, 0.0f, 2.5f};
  Floats scratch(level.gate_scratch_floats(call));
  level.gate_rows(call, 0, rows, scratch.data(), group_ids.data());
  for (const int64_t id : ids) weights.push_back(static_cast<float>(id));
  return weights;
}

// Two sequences, one of which begins.
inline std::vector<StateRow> state_rows(Random& random) {
  const int64_t first = random.within(1, 5);
  return {{0, first, -1, 0}, {first, random.within(1, 5), 1, 2}};
}

inline Floats convolution(const LevelTable& level, Random& random) {
  const std::vector<StateRow> rows = state_rows(random);
  const int64_t tokens = rows[0].num_tokens + rows[1].num_tokens, channels = random.within(1, 40), taps = 4;
  const Kind kind = random.kind(), weight_kind = random.kind(), tail_kind = random.kind(), out = random.kind();
  const Bytes x = as_kind(random.numbers(tokens * channels), kind);
  const Bytes weight = as_kind(random.numbers(channels * taps), weight_kind);
  Bytes tails = as_kind(random.numbers(3 * (taps - 1) * channels), tail_kind), y = room(tokens * channels, out);
  level.convolve({x.data(), weight.data(), tails.data(), y.data(), rows.data(), 2, channels, taps, kind, weight_kind,
                  tail_kind, out},
                 0, channels);
  Floats all = floats_of(y, out);
  append(all, tails, tail_kind);
  return all;
}

inline Floats delta(const LevelTable& level, Random& random) {
  const std::vector<StateRow> rows = state_rows(random);
  const int64_t tokens = rows[0].num_tokens + rows[1].num_tokens, groups = random.within(1, 2);
  const int64_t heads = groups * random.within(1, 2), keys = random.within(1, 20), values = random.within(1, 70);
  const Kind out = random.kind();
  const Floats q = random.numbers(tokens * groups * keys, 0.5f), k = random.numbers(tokens * groups * keys, 0.5f);
  const Floats v = random.numbers(tokens * heads * values), beta = random.numbers(tokens * heads, 1.0f);
  Floats decay = random.numbers(tokens * heads, 1.0f), states = random.numbers(3 * heads * keys * values);
  for (float& one : decay) one -= 1.0f;
  Bytes y = room(tokens * heads * values, out);
  Floats row(static_cast<size_t>(values));
  const Delta call{q.data(), k.data(), v.data(), decay.data(), beta.data(), states.data(), y.data(), rows.data(), 2,
                   heads, groups, keys, values, out};
  for (int64_t r = 0; r < 2; ++r)
    for (int64_t head = 0; head < heads; ++head) level.delta_head(call, r, head, row.data());
  Floats all = floats_of(y, out);
  all.insert(all.end(), states.begin(), states.end());
  return all;
}

inline Bytes pool(const LevelTable& level, Random& random, int64_t blocks, int64_t groups, int64_t width,
                  int64_t kv_block, KvKind pool_kind) {
  const int64_t tokens = blocks * kv_block;
  const Kind kind = random.kind();
  const Bytes x = as_kind(random.numbers(tokens * groups * width), kind);
  std::vector<int64_t> slots(static_cast<size_t>(tokens));
  for (int64_t i = 0; i < tokens; ++i) slots[static_cast<size_t>(i)] = tokens - 1 - i;
  Bytes bytes(static_cast<size_t>(tokens * groups * kv_row_bytes(pool_kind, width)));
  Floats row(static_cast<size_t>(width));
  level.write_kv({x.data(), bytes.data(), slots.data(), tokens, groups, width, kv_block, kind, pool_kind}, 0, tokens,
                 row.data());
  return bytes;
}

inline Floats kv_write(const LevelTable& level, Random& random) {
  const KvKind kind = static_cast<KvKind>(random.within(0, 3));
  Floats all;
  for (const uint8_t byte : pool(level, random, 2, random.within(1, 3), random.within(1, 70), 8, kind))
    all.push_back(byte);
  return all;
}

inline Floats attention(const LevelTable& level, Random& random) {
  const KvKind kind = static_cast<KvKind>(random.within(0, 3));
  const int64_t groups = random.within(1, 3), shared = random.within(1, 4), heads = groups * shared;
  const int64_t key_width = random.flag() ? random.within(1, 70) : 64;
  const int64_t value_width = random.flag() ? random.within(1, 70) : 64;
  const int64_t kv_block = random.one_of<int64_t>({1, 4, 8, 16, 32}), lanes = random.one_of<int64_t>({1, 2, 4, 16});
  const int64_t length = random.within(1, 130), tokens = random.within(1, least_of(length, 5));
  const int64_t blocks = (length - 1) / kv_block + 1;
  const Bytes keys = pool(portable_level(), random, blocks, groups, key_width, kv_block, kind);
  const Bytes values = pool(portable_level(), random, blocks, groups, value_width, kv_block, kind);
  const Kind of_q = random.kind();
  const Bytes q = as_kind(random.numbers(tokens * heads * key_width), of_q);
  const Floats sinks = random.numbers(heads);
  std::vector<int32_t> table;
  for (int64_t i = 0; i < blocks; ++i) table.push_back(static_cast<int32_t>((i + 1) % blocks));
  Bytes y = room(tokens * heads * value_width, of_q);
  const Attention call{q.data(), keys.data(), values.data(), random.flag() ? sinks.data() : nullptr, y.data(), heads,
                       groups, key_width, value_width, value_width, kv_block, lanes,
                       random.one_of<int64_t>({0, 5, 40}), random.flag(), 0.25f, of_q, kind};
  const int64_t at_once = random.within(1, groups);
  const bool is_split = random.flag();
  for (int64_t group = 0; group < groups; group += at_once) {
    const AttentionTile tile{0, length - tokens, tokens, 0, shared, group, least_of(at_once, groups - group),
                             table.data()};
    const size_t stride = level.node_floats(call, tile);
    Floats scratch(level.attention_scratch_floats(call, tile)), nodes(stride * static_cast<size_t>(lanes + 7));
    if (!is_split) {
      level.attend(call, tile, scratch.data(), nodes.data());
      continue;
    }
    bool is_there[kMaxLanes];
    for (int64_t lane = 0; lane < lanes; ++lane)
      is_there[lane] = level.attend_lane(call, tile, lane, scratch.data(),
                                         nodes.data() + stride * static_cast<size_t>(lane));
    level.attend_join(call, tile, nodes.data(), is_there);
  }
  return floats_of(y, of_q);
}

inline Floats experts(const LevelTable& level, Random& random, bool is_packed) {
  const int64_t tokens = random.within(1, 20), choices = random.within(1, 3), num_slots = 4, jobs = tokens * choices;
  const int64_t group = random.one_of<int64_t>({32, 64});
  const int64_t width = random.within(1, 100), inner_width = 2 * random.within(1, 50);
  const Kind seam = random.kind(), kind = random.kind();
  Moe call{};
  call.is_gated = random.flag();
  call.is_weight_on_input = random.flag();
  const int64_t sections = call.is_gated ? 2 : 1;
  std::vector<Weight> weights;
  const Bytes inner_bias = as_kind(random.numbers(sections * inner_width), is_packed ? Kind::kFloat32 : kind);
  const Bytes down_bias = as_kind(random.numbers(width), is_packed ? Kind::kFloat32 : kind);
  const bool has_bias = random.flag();
  std::vector<Expert> slots;
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    const int64_t bits = random.one_of<int64_t>({4, 8});
    const auto add = [&](int64_t columns, int64_t row, int64_t of_sections, int64_t shards) {
      weights.push_back(is_packed ? packed_weight(random, columns, row, 1, bits, group, of_sections)
                                  : float_weight(random, columns, row, shards, kind, of_sections));
      return weights.back().matrix;
    };
    const Matrix inner = add(sections * inner_width, width, sections, 1), down = add(width, inner_width, 1, 2);
    slots.push_back({inner, down, has_bias ? inner_bias.data() : nullptr, has_bias ? down_bias.data() : nullptr});
    call.hidden_bytes = std::max<uint64_t>(call.hidden_bytes, level.row_bytes(down));
  }
  for (const Expert& expert : slots) call.form[form_of(expert.inner)] = &expert.inner;
  std::vector<int32_t> offsets{0}, choice_of_job, job_of_choice(static_cast<size_t>(jobs)), slot_of(job_of_choice);
  for (int32_t& slot : slot_of) slot = static_cast<int32_t>(random.within(0, num_slots - 1));
  for (int64_t slot = 0; slot < num_slots; ++slot) {
    for (int64_t choice = 0; choice < jobs; ++choice)
      if (slot_of[static_cast<size_t>(choice)] == slot) {
        job_of_choice[static_cast<size_t>(choice)] = static_cast<int32_t>(choice_of_job.size());
        choice_of_job.push_back(static_cast<int32_t>(choice));
      }
    offsets.push_back(static_cast<int32_t>(choice_of_job.size()));
  }
  const Bytes x = as_kind(random.numbers(tokens * width, 1.0f), seam);
  const Floats of_choices = random.numbers(jobs, 1.0f);
  Bytes y = room(tokens * width, seam), out = room(jobs * width, seam);
  call.num_rows = call.is_weight_on_input ? jobs : tokens;
  Bytes rows[kForms];
  for (int form = 0; form < kForms; ++form) {
    if (call.form[form] == nullptr) continue;
    rows[form].resize(level.row_bytes(*call.form[form]) * static_cast<size_t>(call.num_rows));
    call.rows[form] = rows[form].data();
  }
  Bytes hidden(call.hidden_bytes * static_cast<size_t>(jobs));
  call.slots = slots.data();
  call.width = width, call.inner_width = inner_width, call.num_choices = choices;
  call.seam = seam;
  call.activation = any_activation(random, call.is_gated);
  call.x = x.data(), call.weights = of_choices.data(), call.y = y.data(), call.num_tokens = tokens;
  call.offsets = offsets.data();
  call.choice_of_job = choice_of_job.data(), call.job_of_choice = job_of_choice.data();
  call.hidden = hidden.data(), call.out = out.data();
  level.moe_rows(call, 0, call.num_rows);
  for (int64_t slot = 0; slot < num_slots; ++slot) level.moe_inner(call, slot, 0, inner_width, nullptr);
  for (int64_t slot = 0; slot < num_slots; ++slot) level.moe_down(call, slot, 0, width, nullptr);
  level.moe_combine(call, 0, tokens);
  return floats_of(y, seam);
}

}  // namespace moesaic
