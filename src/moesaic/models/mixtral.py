"""Mixtral: its files call the sparse block block_sparse_moe and the parts w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, ROTARY_BUFFERS, STACKED, PerExpert, WeightMap

MIXTRAL = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "router": {"weight": ("block_sparse_moe.gate.weight", "mlp.gate.weight")},
    },
    experts=(
        PerExpert(
            gate="block_sparse_moe.experts.{expert}.w1.weight",
            up="block_sparse_moe.experts.{expert}.w3.weight",
            down="block_sparse_moe.experts.{expert}.w2.weight",
        ),
        STACKED,
    ),
    unused=(ROTARY_BUFFERS,),
)
