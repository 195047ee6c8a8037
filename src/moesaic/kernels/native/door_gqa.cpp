// Grouped-query attention of one layer in one call, with the norm before it and the residual after it: bit for bit what
// the doors that it goes through give one after the other.
//
//   norm -> q, k, v (one run of the team) -> norms of heads -> rotation -> pool -> attention -> o -> x + that
#include <nanobind/stl/string.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "check.hpp"
#include "doors.hpp"
#include "gqa.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

constexpr int64_t kAddedNumbers = 64 * 1024;  // guess: of a task, some 10 us

struct Sum {
  const LevelTable* table;
  const void *a, *b;
  void* y;
  Kind kind;
  int64_t count;
};

void add_task(void* context, int64_t task) {
  const Sum& sum = *static_cast<Sum*>(context);
  sum.table->add_numbers(sum.kind, sum.a, sum.b, sum.y, task * kAddedNumbers,
                         std::min((task + 1) * kAddedNumbers, sum.count));
}

// Memory between the steps of a call, which grows to the largest of this thread.
struct Room {
  uint8_t *normed, *q, *q_normed, *k, *k_normed, *v, *q_turned, *k_turned, *attended, *out;
};

Room room_of(const GqaLayer& layer, int64_t tokens) {
  thread_local Buffer buffer;
  const auto whole = [&](int64_t width) {
    return static_cast<size_t>((tokens * width * bytes_of(layer.seam) + 63) / 64 * 64);
  };
  const size_t x = whole(layer.width), q = whole(layer.q_width()), k = whole(layer.k_width());
  uint8_t* at = buffer.of(2 * x + 4 * q + 4 * k);
  const auto take = [&](size_t num_bytes) {
    uint8_t* taken = at;
    at += num_bytes;
    return taken;
  };
  Room room{};
  for (uint8_t** of_x : {&room.normed, &room.out}) *of_x = take(x);
  for (uint8_t** of_q : {&room.q, &room.q_normed, &room.q_turned, &room.attended}) *of_q = take(q);
  for (uint8_t** of_k : {&room.k, &room.k_normed, &room.v, &room.k_turned}) *of_k = take(k);
  return room;
}

// Queries or keys as they are looked up: normed and turned where the layer does so. Returns where they are.
const uint8_t* turned(Kernels& kernels, const GqaLayer& layer, const GqaLayer::Scale& norm, int64_t tokens,
                      int64_t heads, const float* cosines, const float* sines, const uint8_t* from, uint8_t* normed,
                      uint8_t* to) {
  const int64_t width = heads * layer.head_width;
  if (norm.weight != nullptr) {
    const int64_t row = layer.is_normed_whole ? width : layer.head_width;
    run_norm(kernels, {from, norm.weight, nullptr, normed, tokens * width / row, row, layer.head_norm_eps,
                       NormKind::kRms, layer.seam, norm.kind, layer.seam});
    from = normed;
  }
  if (layer.half == 0) return from;
  run_rotation(kernels, {from, cosines, sines, to, tokens, heads, layer.head_width, layer.half, width,
                         layer.head_width, layer.is_interleaved, layer.seam});
  return to;
}

}  // namespace

void run_gqa(Kernels& kernels, const GqaLayer& layer, const GqaCall& call) {
  const KvStep& step = call.step;
  const KvPools& pools = call.pools;
  const int64_t num_tokens = step.num_tokens;
  check_size(layer.name, "tokens", num_tokens);
  if (call.x_numbers != num_tokens * layer.width)
    fail(layer.name, "x has " + std::to_string(call.x_numbers) + " numbers, " + std::to_string(num_tokens) +
                         " rows of " + std::to_string(layer.width) + " have " +
                         std::to_string(num_tokens * layer.width));
  if (layer.half > 0 && call.angles != num_tokens * layer.half)
    fail(layer.name, std::to_string(call.angles) + " cosines for " + std::to_string(num_tokens) + " rows of " +
                         std::to_string(layer.half));
  if (pools.kind < 0 || pools.kind > 3)
    fail(layer.name, "a pool's kind is 0 to 3, got " + std::to_string(pools.kind));
  for (const Matrix* matrix : {&layer.q, &layer.k, &layer.v, &layer.o})
    if (matrix->data == nullptr) fail(layer.name, "not all of q, k, v and o were given");
  if (num_tokens == 0) return;
  if (call.x == 0 || call.y == 0 || pools.keys == 0 || pools.values == 0 ||
      (layer.half > 0 && (call.cosines == 0 || call.sines == 0)))
    fail(layer.name, "a tensor has no storage");
  const Room room = room_of(layer, num_tokens);
  const Kind seam = layer.seam;
  const void* x = reinterpret_cast<const void*>(call.x);
  run_norm(kernels, {x, layer.norm.weight, nullptr, room.normed, num_tokens, layer.width, layer.norm_eps,
                     NormKind::kRms, seam, layer.norm.kind, seam});
  const Linear inputs[] = {{layer.q, room.normed, room.q, num_tokens, seam, seam},
                           {layer.k, room.normed, room.k, num_tokens, seam, seam},
                           {layer.v, room.normed, room.v, num_tokens, seam, seam}};
  run_linears(kernels, inputs, 3);
  const float *cos = reinterpret_cast<const float*>(call.cosines), *sin = reinterpret_cast<const float*>(call.sines);
  const uint8_t* q = turned(kernels, layer, layer.q_norm, num_tokens, layer.heads, cos, sin, room.q, room.q_normed,
                            room.q_turned);
  const uint8_t* k = turned(kernels, layer, layer.k_norm, num_tokens, layer.groups, cos, sin, room.k, room.k_normed,
                            room.k_turned);
  const KvKind kind = static_cast<KvKind>(pools.kind);
  const auto write = [&](const uint8_t* from, uintptr_t pool, int64_t pool_bytes) {
    run_kv_write(kernels,
                 {from, reinterpret_cast<uint8_t*>(pool), reinterpret_cast<const int64_t*>(call.slots), num_tokens,
                  layer.groups, layer.head_width, layer.kv_block, seam, kind},
                 pool_bytes, step);
  };
  write(k, pools.keys, pools.key_bytes);
  write(room.v, pools.values, pools.value_bytes);
  run_attention(kernels,
                {q, reinterpret_cast<const uint8_t*>(pools.keys), reinterpret_cast<const uint8_t*>(pools.values),
                 layer.sinks, room.attended, layer.heads, layer.groups, layer.head_width, layer.head_width,
                 layer.head_width, layer.kv_block, layer.kv_lanes, layer.window, layer.is_chunked,
                 layer.softmax_scale, seam, kind},
                pools.key_bytes, pools.value_bytes, step);
  const Linear output{layer.o, room.attended, room.out, num_tokens, seam, seam};
  run_linears(kernels, &output, 1);
  Sum sum{kernels.table, x, room.out, reinterpret_cast<void*>(call.y), seam, call.x_numbers};
  if (call.x_numbers <= kAddedNumbers) return add_task(&sum, 0);
  std::lock_guard<std::mutex> turn(kernels.turn);
  kernels.team.run((call.x_numbers + kAddedNumbers - 1) / kAddedNumbers, add_task, &sum);
}

namespace {

void gqa(Kernels& kernels, const GqaLayer& layer, uintptr_t x, int64_t x_numbers, uintptr_t y, uintptr_t cosines,
         uintptr_t sines, int64_t angles, uintptr_t keys, int64_t key_bytes, uintptr_t values, int64_t value_bytes,
         int64_t pool_kind, uintptr_t slots, int64_t num_tokens, uintptr_t fresh, int64_t num_fresh, uintptr_t rows,
         int64_t num_rows, uintptr_t ids, int64_t num_ids) {
  run_gqa(kernels, layer,
          {x, x_numbers, y, cosines, sines, angles, {keys, key_bytes, values, value_bytes, pool_kind}, slots,
           {rows, num_rows, ids, num_ids, num_tokens, fresh, num_fresh}});
}

void make_layer(GqaLayer* self, int64_t layer_idx, int64_t width, int64_t heads, int64_t groups, int64_t head_width,
                bool is_normed_whole, float norm_eps, float head_norm_eps, int64_t half, bool is_interleaved,
                int64_t kv_block, int64_t kv_lanes, int64_t window, bool is_chunked, float softmax_scale,
                uintptr_t sinks, bool is_bfloat16) {
  const std::string name = "attention of layer " + std::to_string(layer_idx);
  check_size(name, "the width", width, 1);
  const auto check_range = [&](const char* which, int64_t value, int64_t least, int64_t most) {
    if (value < least || value > most)
      fail(name, std::string(which) + " must be in " + std::to_string(least) + " to " + std::to_string(most) +
                     ", got " + std::to_string(value));
  };
  check_range("heads", heads, 1, 1 << 16);
  check_range("groups", groups, 1, heads);
  check_range("a head's width", head_width, 1, 1 << 14);
  check_range("half of the turned columns", half, 0, head_width / 2);
  check_range("kv_block", kv_block, 1, 1 << 12);
  check_range("kv_lanes", kv_lanes, 1, kMaxLanes);
  check_range("the window", window, 0, INT32_MAX);
  const auto is_power = [](int64_t value) { return (value & (value - 1)) == 0; };
  if (heads % groups != 0 || !is_power(kv_block) || !is_power(kv_lanes))
    fail(name, "groups must divide heads, kv_block and kv_lanes be powers of two; got " + std::to_string(groups) +
                   ", " + std::to_string(heads) + ", " + std::to_string(kv_block) + ", " + std::to_string(kv_lanes));
  new (self) GqaLayer{name, width, heads, groups, head_width, is_normed_whole, norm_eps, head_norm_eps, half,
                      is_interleaved, kv_block, kv_lanes, window, is_chunked, softmax_scale,
                      reinterpret_cast<const float*>(sinks), is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32,
                      {}, {}, {}, {}, {}, {}, {}};
}

// `which`: one of q, k, v and o. Floats are of the seam's kind and have no gaps.
void set_matrix(GqaLayer& layer, const std::string& which, uintptr_t data, int64_t num_bytes, int64_t shards,
                int64_t bits, int64_t group, bool has_zeros) {
  const std::string name = layer.name + ", weight " + which;
  if (which.size() != 1 || std::string("qkvo").find(which) == std::string::npos)
    fail(name, "weights are q, k, v and o");
  const bool is_out = which == "o";
  const int64_t width = is_out ? layer.q_width() : layer.width;
  const int64_t columns = is_out ? layer.width : which == "q" ? layer.q_width() : layer.k_width();
  if (bits == 0 && has_zeros) fail(name, "zero points belong to weights of 4 bits");
  const Matrix matrix{reinterpret_cast<const void*>(data), columns, width, shards, layer.seam, width, bits, group, 1,
                      has_zeros};
  check(matrix, name);
  check_bytes(matrix, num_bytes, name);
  (is_out ? layer.o : which == "q" ? layer.q : which == "k" ? layer.k : layer.v) = matrix;
}

// `which`: "norm", before all, or that of "q" or "k".
void set_norm(GqaLayer& layer, const std::string& which, uintptr_t weight, int64_t numbers, bool is_bfloat16) {
  const int64_t heads = !layer.is_normed_whole ? 1 : which == "q" ? layer.heads : layer.groups;
  const int64_t expected = which == "norm" ? layer.width : heads * layer.head_width;
  if (which != "norm" && which != "q" && which != "k") fail(layer.name, "norms are norm, q and k, not " + which);
  if (weight == 0 || numbers != expected)
    fail(layer.name, "norm " + which + " has " + std::to_string(numbers) + " numbers, not " +
                         std::to_string(expected));
  (which == "norm" ? layer.norm : which == "q" ? layer.q_norm : layer.k_norm) = {
      reinterpret_cast<const void*>(weight), is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32};
}

}  // namespace

void bind_gqa(nb::module_& module, nb::class_<Kernels>& kernels) {
  nb::class_<GqaLayer>(module, "GqaLayer")
      .def("__init__", make_layer, nb::arg("layer_idx"), nb::arg("width"), nb::arg("heads"), nb::arg("groups"),
           nb::arg("head_width"), nb::arg("is_normed_whole"), nb::arg("norm_eps"), nb::arg("head_norm_eps"),
           nb::arg("half"), nb::arg("is_interleaved"), nb::arg("kv_block"), nb::arg("kv_lanes"), nb::arg("window"),
           nb::arg("is_chunked"), nb::arg("softmax_scale"), nb::arg("sinks"), nb::arg("is_bfloat16"))
      .def("set_matrix", set_matrix, nb::arg("which"), nb::arg("data"), nb::arg("num_bytes"), nb::arg("shards"),
           nb::arg("bits"), nb::arg("group"), nb::arg("has_zeros"))
      .def("set_norm", set_norm, nb::arg("which"), nb::arg("weight"), nb::arg("numbers"), nb::arg("is_bfloat16"));
  kernels.def("gqa", gqa, nb::call_guard<nb::gil_scoped_release>(), nb::arg("layer"), nb::arg("x"),
              nb::arg("x_numbers"), nb::arg("y"), nb::arg("cosines"), nb::arg("sines"), nb::arg("angles"),
              nb::arg("keys"), nb::arg("key_bytes"), nb::arg("values"), nb::arg("value_bytes"), nb::arg("pool_kind"),
              nb::arg("slots"), nb::arg("num_tokens"), nb::arg("fresh"), nb::arg("num_fresh"), nb::arg("rows"),
              nb::arg("num_rows"), nb::arg("ids"), nb::arg("num_ids"));
}

}  // namespace moesaic
