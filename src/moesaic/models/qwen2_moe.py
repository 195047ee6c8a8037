"""Qwen2-MoE: biased queries, keys and values; a shared expert behind a sigmoid gate of its own."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, PER_EXPERT, ROTARY_BUFFERS, STACKED, WeightMap, gated

QWEN2_MOE = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "dense": gated("mlp"),
        "router": {"weight": "mlp.gate.weight"},
        "shared": {**gated("mlp.shared_expert"), "output_gate": "mlp.shared_expert_gate.weight"},
    },
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS,),
)
