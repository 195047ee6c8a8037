"""DeepSeek-V3: latent attention, a selection bias beside the gate, shared experts as one wide network."""

from __future__ import annotations

from moesaic.models.names import (
    DEEPSEEK_FFN,
    MLA,
    MTP_LAYERS,
    NORMS,
    PER_EXPERT,
    ROTARY_BUFFERS,
    STACKED,
    WeightMap,
)

DEEPSEEK_V3 = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": MLA,
        **DEEPSEEK_FFN,
    },
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS, MTP_LAYERS),
)
