"""dots.llm1: per-head norms of queries and keys, windows on some layers, DeepSeek-V3's gate."""

from __future__ import annotations

from moesaic.models.names import (
    BIASED_GATE,
    GQA,
    NORMS,
    PER_EXPERT,
    ROTARY_BUFFERS,
    STACKED,
    WeightMap,
    gated,
)

DOTS1 = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "dense": gated("mlp"),
        "router": BIASED_GATE,
        "shared": gated("mlp.shared_experts"),
    },
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS,),
)
