"""Qwen3-MoE: per-head norms of queries and keys; layers of the config's choice are dense."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, PER_EXPERT, ROTARY_BUFFERS, STACKED, WeightMap, gated

QWEN3_MOE = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "dense": gated("mlp"),
        "router": {"weight": "mlp.gate.weight"},
    },
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS,),
)
