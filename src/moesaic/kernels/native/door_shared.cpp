// The shared expert within a call that has the routed ones, too: see shared_layer.hpp.
#include "shared_layer.hpp"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <numeric>
#include <string>

#include "check.hpp"
#include "doors.hpp"

namespace nb = nanobind;

namespace moesaic {
namespace {

constexpr int64_t kScaledRows = 8;  // of a task

struct Scaling {
  const LevelTable* table;
  const Moe* call;
};

void scale_task(void* context, int64_t task) {
  const Scaling& scaling = *static_cast<Scaling*>(context);
  scaling.table->moe_combine(*scaling.call, task * kScaledRows,
                             std::min((task + 1) * kScaledRows, scaling.call->num_tokens));
}

// Rows times a number each, rounded once: what a combine of one choice does.
void scale_rows(Kernels& kernels, const SharedLayer& layer, const uint8_t* rows, const float* factors, int32_t* ids,
                int64_t num_tokens, uint8_t* to) {
  std::iota(ids, ids + num_tokens, 0);
  Moe call{};
  call.width = layer.width;
  call.num_choices = 1;
  call.seam = layer.seam;
  call.weights = factors;
  call.y = to;
  call.num_tokens = num_tokens;
  call.job_of_choice = ids;
  call.out = const_cast<uint8_t*>(rows);  // a combine reads it
  Scaling scaling{kernels.table, &call};
  std::lock_guard<std::mutex> turn(kernels.turn);
  kernels.team.run((num_tokens + kScaledRows - 1) / kScaledRows, scale_task, &scaling);
}

}  // namespace

const uint8_t* run_shared(Kernels& kernels, const SharedLayer& layer, const uint8_t* x, int64_t num_tokens,
                          Buffer& memory) {
  const Kind seam = layer.seam;
  const auto whole = [&](int64_t numbers, int64_t bytes) { return (num_tokens * numbers * bytes + 63) / 64 * 64; };
  const int64_t inner = whole(layer.inner_width, bytes_of(seam)), row = whole(layer.width, bytes_of(seam));
  const int64_t number = whole(1, 4);
  uint8_t* gate = memory.of(3 * inner + 2 * row + 3 * number);
  uint8_t *up = gate + inner, *hidden = up + inner, *result = hidden + inner, *scaled = result + row;
  uint8_t *logit = scaled + row, *factor = logit + number, *ids = factor + number;
  Linear inputs[3];
  int count = 0;
  if (layer.is_gated) inputs[count++] = {layer.gate, x, gate, num_tokens, seam, seam};
  inputs[count++] = {layer.up, x, up, num_tokens, seam, seam};
  const bool is_scaled = layer.open.data != nullptr;
  if (is_scaled) inputs[count++] = {layer.open, x, logit, num_tokens, seam, seam};
  run_linears(kernels, inputs, count);
  const int64_t width = layer.inner_width;
  run_act(kernels, {layer.activation, layer.is_gated ? gate : up, layer.is_gated ? up : nullptr, hidden, num_tokens,
                    width, width, width, seam, seam});
  const Linear output{layer.down, hidden, result, num_tokens, seam, seam};
  run_linears(kernels, &output, 1);
  if (!is_scaled) return result;
  const Activation logistic{Function::kSigmoid, std::numeric_limits<float>::infinity(), 1.0f};
  run_act(kernels, {logistic, logit, nullptr, factor, num_tokens, 1, 1, 1, seam, Kind::kFloat32});
  scale_rows(kernels, layer, result, reinterpret_cast<const float*>(factor), reinterpret_cast<int32_t*>(ids),
             num_tokens, scaled);
  return scaled;
}

namespace {

void make_shared(SharedLayer* self, int64_t layer_idx, int64_t width, int64_t inner_width, bool is_gated, int function,
                 bool is_bfloat16) {
  const std::string name = "shared expert of layer " + std::to_string(layer_idx);
  check_size(name, "the width", width, 1);
  check_size(name, "the inner width", inner_width, 1);
  const Activation activation{static_cast<Function>(function), std::numeric_limits<float>::infinity(), 1.0f};
  check(activation, is_gated, name);
  new (self) SharedLayer{layer_idx, width, inner_width, is_bfloat16 ? Kind::kBfloat16 : Kind::kFloat32, activation,
                         is_gated, {}, {}, {}, {}};
}

// `which`: gate, up, down or open. Floats are of the seam's kind and have no gaps.
void set_matrix(SharedLayer& layer, const std::string& which, uintptr_t data, int64_t num_bytes, int64_t shards,
                int64_t bits, int64_t group, bool has_zeros) {
  const std::string name = layer.name() + ", weight " + which;
  Matrix* to = which == "gate" ? &layer.gate : which == "up" ? &layer.up : which == "down" ? &layer.down : &layer.open;
  if (to == &layer.open && which != "open") fail(name, "weights are gate, up, down and open");
  const bool is_down = to == &layer.down;
  const int64_t width = is_down ? layer.inner_width : layer.width;
  const int64_t columns = is_down ? layer.width : to == &layer.open ? 1 : layer.inner_width;
  const Matrix matrix{reinterpret_cast<const void*>(data), columns, width, shards, layer.seam, width, bits, group, 1,
                      has_zeros};
  if (!matrix.is_packed() && has_zeros) fail(name, "zero points belong to weights of 4 bits");
  check(matrix, name);
  check_bytes(matrix, num_bytes, name);
  *to = matrix;
}

}  // namespace

void bind_shared(nb::module_& module) {
  nb::class_<SharedLayer>(module, "SharedLayer")
      .def("__init__", make_shared, nb::arg("layer_idx"), nb::arg("width"), nb::arg("inner_width"),
           nb::arg("is_gated"), nb::arg("function"), nb::arg("is_bfloat16"))
      .def("set_matrix", set_matrix, nb::arg("which"), nb::arg("data"), nb::arg("num_bytes"), nb::arg("shards"),
           nb::arg("bits"), nb::arg("group"), nb::arg("has_zeros"));
}

}  // namespace moesaic
