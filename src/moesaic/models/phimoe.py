"""Phi-3.5-MoE: Mixtral's names, layer norms with biases, a bias on the head."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, ROTARY_BUFFERS, STACKED, W123, WeightMap

PHIMOE = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "router": {"weight": ("block_sparse_moe.gate.weight", "mlp.router.weight", "mlp.gate.weight")},
    },
    experts=(W123, STACKED),
    unused=(ROTARY_BUFFERS,),
)
