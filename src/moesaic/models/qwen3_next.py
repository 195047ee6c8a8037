"""Qwen3-Next: gated delta-rule layers among gated attention, a gated shared expert; projections fused."""

from __future__ import annotations

from moesaic.models.names import GQA, NORMS, PER_EXPERT, ROTARY_BUFFERS, STACKED, Unused, WeightMap, gated

QWEN3_NEXT = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": {
            **GQA,
            "qkvz": "linear_attn.in_proj_qkvz.weight",
            "ba": "linear_attn.in_proj_ba.weight",
            "conv": "linear_attn.conv1d.weight",
            "decay_log": "linear_attn.A_log",
            "decay_bias": "linear_attn.dt_bias",
            "out_norm": "linear_attn.norm.weight",
            "out": "linear_attn.out_proj.weight",
        },
        "dense": gated("mlp"),
        "router": {"weight": "mlp.gate.weight"},
        "shared": {**gated("mlp.shared_expert"), "output_gate": "mlp.shared_expert_gate.weight"},
    },
    experts=(PER_EXPERT, STACKED),
    unused=(
        ROTARY_BUFFERS,
        Unused(pattern=r"mtp\..*", reason="multi-token prediction layers, which only draft tokens"),
    ),
)
