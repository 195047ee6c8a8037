// Doors: each checks the shapes and pointers of its calls and hands them to a level. One file a door.
#pragma once

#include <nanobind/nanobind.h>

#include "kernels.hpp"

namespace moesaic {

void bind_attention(nanobind::class_<Kernels>& kernels);
void bind_elementwise(nanobind::class_<Kernels>& kernels);
void bind_layers(nanobind::class_<Kernels>& kernels);
void bind_matmul(nanobind::class_<Kernels>& kernels);
void bind_moe(nanobind::module_& module, nanobind::class_<Kernels>& kernels);
void bind_moe_ranks(nanobind::module_& module);
void bind_wire(nanobind::module_& module);

}  // namespace moesaic
