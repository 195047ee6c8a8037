"""ERNIE 4.5: a selection bias stored as one row, shared experts as one network, biases on all or none."""

from __future__ import annotations

from moesaic.models.names import (
    GQA,
    NORMS,
    PER_EXPERT,
    ROTARY_BUFFERS,
    STACKED,
    Row,
    Unused,
    WeightMap,
    gated,
)

ERNIE4_5_MOE = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "dense": gated("mlp"),
        "router": {
            "weight": "mlp.gate.weight",
            "selection_bias": Row(key="mlp.moe_statics.e_score_correction_bias"),
        },
        "shared": gated("mlp.shared_experts"),
    },
    experts=(PER_EXPERT, STACKED),
    unused=(
        ROTARY_BUFFERS,
        Unused(
            pattern=r"model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\.\d+\..*",
            reason="multi-token prediction layer, which only drafts tokens",
        ),
    ),
)
