"""Granite MoE: the experts of a layer in two tensors, under names of its own."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, ROTARY_BUFFERS, Stacked, WeightMap

GRANITEMOE = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "router": {"weight": ("block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight")},
    },
    experts=(
        Stacked(gate_up="block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"),
        Stacked(gate_up="block_sparse_moe.experts.gate_up_proj", down="block_sparse_moe.experts.down_proj"),
    ),
    unused=(ROTARY_BUFFERS,),
)
