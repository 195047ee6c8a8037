"""GLM-4.7-Flash: DeepSeek-V3's latent attention, gate and shared experts in other sizes."""

from __future__ import annotations

from moesaic.models.names import (
    BIASED_GATE,
    MLA,
    MTP_LAYERS,
    NORMS,
    PER_EXPERT,
    ROTARY_BUFFERS,
    STACKED,
    WeightMap,
    gated,
)

GLM4_MOE_LITE = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": MLA,
        "dense": gated("mlp"),
        "router": BIASED_GATE,
        "shared": gated("mlp.shared_experts"),
    },
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS, MTP_LAYERS),
)
