// Norm and router of a layer: see router_layer.hpp. What they choose goes on to the experts in the same call: door_moe.cpp,
// door_moe_ranks.cpp.
#include "router_layer.hpp"

#include <string>

#include "check.hpp"
#include "doors.hpp"

namespace nb = nanobind;

namespace moesaic {

void run_router(Kernels& kernels, const RouterLayer& layer, const void* x, int64_t num_tokens, const RouterRows& to) {
  const int64_t num_experts = layer.weight.columns;
  run_norm(kernels, {x, layer.norm, nullptr, to.normed, num_tokens, layer.width, layer.norm_eps, NormKind::kRms,
                     layer.seam, layer.norm_kind, layer.seam});
  const Linear linear{layer.weight, to.normed, to.logits, num_tokens, layer.seam, Kind::kFloat32};
  run_linears(kernels, &linear, 1);
  for (int64_t token = 0; layer.logit_bias != nullptr && token < num_tokens; ++token) {
    float* logits = to.logits + token * num_experts;
    kernels.table->add_numbers(Kind::kFloat32, logits, layer.logit_bias, logits, 0, num_experts);
  }
  Gate gate = layer.gate;
  gate.rows = num_tokens;
  gate.logits = to.logits;
  gate.ids = to.experts;
  gate.weights = to.weights;
  run_gate(kernels, gate);
}

namespace {

void make_router(RouterLayer* self, int64_t layer_idx, int64_t width, int64_t experts, int64_t chosen, uintptr_t norm,
                 bool is_norm_bfloat16, float norm_eps, uintptr_t weight, uintptr_t logit_bias,
                 uintptr_t selection_bias, uintptr_t expert_scale, int64_t groups, int64_t groups_kept,
                 bool is_sigmoid, bool is_topk_first, bool is_top2_sum, bool is_renormalised, float epsilon,
                 float floor, float scale, bool is_bfloat16) {
  const std::string name = "router of layer " + std::to_string(layer_idx);
  check_size(name, "the width", width, 1);
  const Matrix matrix =
      Matrix::of_floats(reinterpret_cast<const void*>(weight), experts, width, 1, Kind::kFloat32, width);
  check(matrix, name);
  const auto floats = [](uintptr_t address) { return reinterpret_cast<const float*>(address); };
  const Gate gate{nullptr, floats(selection_bias), floats(expert_scale), nullptr, nullptr, 0, experts, chosen, groups,
                  groups_kept, is_sigmoid, is_topk_first, is_top2_sum, is_renormalised, epsilon, floor, scale};
  check_gate(gate);
  const auto kind = [](bool is_half) { return is_half ? Kind::kBfloat16 : Kind::kFloat32; };
  new (self) RouterLayer{layer_idx, width, kind(is_bfloat16), reinterpret_cast<const void*>(norm),
                         kind(is_norm_bfloat16), norm_eps, matrix, floats(logit_bias), gate};
}

}  // namespace

void bind_router(nb::module_& module) {
  nb::class_<RouterLayer>(module, "RouterLayer")
      .def("__init__", make_router, nb::arg("layer_idx"), nb::arg("width"), nb::arg("experts"), nb::arg("chosen"),
           nb::arg("norm"), nb::arg("is_norm_bfloat16"), nb::arg("norm_eps"), nb::arg("weight"),
           nb::arg("logit_bias"), nb::arg("selection_bias"), nb::arg("expert_scale"), nb::arg("groups"),
           nb::arg("groups_kept"), nb::arg("is_sigmoid"), nb::arg("is_topk_first"), nb::arg("is_top2_sum"),
           nb::arg("is_renormalised"), nb::arg("epsilon"), nb::arg("floor"), nb::arg("scale"),
           nb::arg("is_bfloat16"));
}

}  // namespace moesaic
