"""GLM-4.5 to 4.7: half of each head rotated, DeepSeek-V3's gate and shared experts."""

from __future__ import annotations

from moesaic.models.names import (
    DEEPSEEK_FFN,
    GQA,
    MTP_LAYERS,
    NORMS,
    PER_EXPERT,
    ROTARY_BUFFERS,
    STACKED,
    WeightMap,
)

GLM4_MOE = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        **DEEPSEEK_FFN,
    },
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS, MTP_LAYERS),
)
