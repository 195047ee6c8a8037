"""dots.llm1: per-head norms of queries and keys, windows on some layers, DeepSeek-V3's gate."""

from __future__ import annotations

from moesaic.models.names import (
    DEEPSEEK_FFN,
    GQA,
    NORMS,
    PER_EXPERT,
    ROTARY_BUFFERS,
    STACKED,
    WeightMap,
)

DOTS1 = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        **DEEPSEEK_FFN,
    },
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS,),
)
