"""Qwen3.5-MoE's text model, alone or beside a vision tower: Qwen3-Next with its projections split."""

from __future__ import annotations

from dataclasses import replace

from moesaic.models.names import GQA, NORMS, PER_EXPERT, STACKED, Unused, WeightMap, gated

_TEXT = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": {
            **GQA,
            "qkv": "linear_attn.in_proj_qkv.weight",
            "z": "linear_attn.in_proj_z.weight",
            "b": "linear_attn.in_proj_b.weight",
            "a": "linear_attn.in_proj_a.weight",
            "conv": "linear_attn.conv1d.weight",
            "decay_log": "linear_attn.A_log",
            "decay_bias": "linear_attn.dt_bias",
            "out_norm": "linear_attn.norm.weight",
            "out": "linear_attn.out_proj.weight",
        },
        "router": {"weight": "mlp.gate.weight"},
        "shared": {**gated("mlp.shared_expert"), "output_gate": "mlp.shared_expert_gate.weight"},
    },
    experts=(PER_EXPERT, STACKED),
    unused=(
        Unused(pattern=r"mtp\..*", reason="multi-token prediction layers, which only draft tokens"),
        Unused(pattern=r"model\.visual\..*", reason="vision tower; only the text model runs"),
    ),
)

QWEN3_5_MOE = replace(
    _TEXT,
    wrapped=replace(
        _TEXT,
        embedding="model.language_model.embed_tokens.weight",
        norm="model.language_model.norm.weight",
        layer_prefix="model.language_model.layers.{layer}.",
    ),
)
