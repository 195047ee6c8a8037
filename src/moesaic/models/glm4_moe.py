"""GLM-4.5 to 4.7: half of each head rotated, DeepSeek-V3's gate and shared experts."""

from __future__ import annotations

from moesaic.models.names import (
    BIASED_GATE,
    GQA,
    MTP_LAYERS,
    NORMS,
    PER_EXPERT,
    ROTARY_BUFFERS,
    STACKED,
    WeightMap,
    gated,
)

GLM4_MOE = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "dense": gated("mlp"),
        "router": BIASED_GATE,
        "shared": gated("mlp.shared_experts"),
    },
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS, MTP_LAYERS),
)
