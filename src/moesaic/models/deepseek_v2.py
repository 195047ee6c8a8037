"""DeepSeek-V2: latent attention, a softmax gate without a bias, shared experts as one wide network."""

from __future__ import annotations

from moesaic.models.names import MLA, NORMS, PER_EXPERT, ROTARY_BUFFERS, STACKED, WeightMap, gated

DEEPSEEK_V2 = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": MLA,
        "dense": gated("mlp"),
        "router": {"weight": "mlp.gate.weight"},
        "shared": gated("mlp.shared_experts"),
    },
    experts=(PER_EXPERT, STACKED),
    unused=(ROTARY_BUFFERS,),
)
