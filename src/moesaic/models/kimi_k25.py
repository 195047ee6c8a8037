"""Kimi K2.5: DeepSeek-V3's layers inside a model that also sees; what reads images is known and unused."""

from __future__ import annotations

from moesaic.models.names import (
    DEEPSEEK_FFN,
    MLA,
    NORMS,
    PER_EXPERT,
    STACKED,
    Unused,
    WeightMap,
)

KIMI_K25 = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": MLA,
        **DEEPSEEK_FFN,
    },
    experts=(PER_EXPERT, STACKED),
    unused=(
        Unused(pattern=r"vision_tower\..*|mm_projector\..*", reason="images are not read, only text"),
        Unused(
            pattern=r"language_model\.model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
            reason="rotary frequencies follow from the config",
        ),
    ),
    embedding="language_model.model.embed_tokens.weight",
    norm="language_model.model.norm.weight",
    head="language_model.lm_head.weight",
    layer_prefix="language_model.model.layers.{layer}.",
)
