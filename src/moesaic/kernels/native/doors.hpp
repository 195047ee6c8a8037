// Doors: each checks the shapes and pointers of its calls and hands them to a level. One file a door.
#pragma once

#include <nanobind/nanobind.h>

#include "kernels.hpp"

namespace moesaic {

// What doors lend each other: calls whose shapes were checked.
void run_norm(Kernels& kernels, const Norm& call);
void run_rotation(Kernels& kernels, const Rotation& call);
void check_gate(const Gate& call);
void run_gate(Kernels& kernels, const Gate& call);
void run_act(Kernels& kernels, const Elementwise& call);
// Matmuls of the same rows x, as one run of the team.
void run_linears(Kernels& kernels, const Linear* calls, int count);

// What a step reads and writes in a pool: its sequences, the ids of their blocks, and the blocks that begin. The tables
// and the pool's bytes are checked by what takes them.
struct KvStep {
  uintptr_t rows;
  int64_t num_rows;
  uintptr_t ids;
  int64_t num_ids, num_tokens;
  uintptr_t fresh;
  int64_t num_fresh;
};
void run_attention(Kernels& kernels, const Attention& call, int64_t key_bytes, int64_t value_bytes, const KvStep& step);
void run_kv_write(Kernels& kernels, const KvWrite& call, int64_t pool_bytes, const KvStep& step);

void bind_attention(nanobind::class_<Kernels>& kernels);
void bind_elementwise(nanobind::class_<Kernels>& kernels);
void bind_gqa(nanobind::module_& module, nanobind::class_<Kernels>& kernels);
void bind_layers(nanobind::class_<Kernels>& kernels);
void bind_matmul(nanobind::class_<Kernels>& kernels);
void bind_moe(nanobind::module_& module, nanobind::class_<Kernels>& kernels);
void bind_moe_ranks(nanobind::module_& module);
void bind_router(nanobind::module_& module);
void bind_shared(nanobind::module_& module);
void bind_stack(nanobind::module_& module);
void bind_wire(nanobind::module_& module);

}  // namespace moesaic
