"""DeepSeek-V3: latent attention, a selection bias beside the gate, shared experts as one wide network."""

from __future__ import annotations

from moesaic.models.names import (
    NORMS,
    PER_EXPERT,
    ROTARY_BUFFERS,
    STACKED,
    Unused,
    WeightMap,
    gated,
    with_biases,
)

DEEPSEEK_V3 = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": {
            **with_biases(
                {
                    "q": "self_attn.q_proj",
                    "q_a": "self_attn.q_a_proj",
                    "q_b": "self_attn.q_b_proj",
                    "kv_a": "self_attn.kv_a_proj_with_mqa",
                    "kv_b": "self_attn.kv_b_proj",
                    "o": "self_attn.o_proj",
                }
            ),
            "q_a_norm": "self_attn.q_a_layernorm.weight",
            "kv_a_norm": "self_attn.kv_a_layernorm.weight",
        },
        "dense": gated("mlp"),
        "router": {
            "weight": "mlp.gate.weight",
            "selection_bias": "mlp.gate.e_score_correction_bias",
        },
        "shared": gated("mlp.shared_experts"),
    },
    experts=(PER_EXPERT, STACKED),
    unused=(
        ROTARY_BUFFERS,
        Unused(
            pattern=r"model\.layers\.(\d+)\..*",
            reason="multi-token prediction layer, which only drafts tokens",
            marker="eh_proj.weight",
        ),
    ),
)
