"""Mixtral: its files call the sparse block block_sparse_moe and the parts w1 (gate), w3 (up), w2 (down)."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, ROTARY_BUFFERS, STACKED, W123, WeightMap

MIXTRAL = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "router": {"weight": ("block_sparse_moe.gate.weight", "mlp.gate.weight")},
    },
    experts=(W123, STACKED),
    unused=(ROTARY_BUFFERS,),
)
