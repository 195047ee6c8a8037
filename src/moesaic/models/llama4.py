"""Llama 4's text model, alone or in the model that also sees: a shared expert, experts for x @ W."""

from __future__ import annotations

from dataclasses import replace

from moesaic.models.names import GQA, NORMS, ROTARY_BUFFERS, Stacked, Unused, WeightMap, gated

_TEXT = WeightMap(
    layers={
        "norm": NORMS,
        "mixer": GQA,
        "dense": gated("feed_forward"),
        "router": {"weight": "feed_forward.router.weight"},
        "shared": gated("feed_forward.shared_expert"),
    },
    experts=(
        Stacked(
            gate_up="feed_forward.experts.gate_up_proj",
            down="feed_forward.experts.down_proj",
            is_transposed=True,
        ),
    ),
    unused=(ROTARY_BUFFERS,),
)

LLAMA4 = replace(
    _TEXT,
    wrapped=replace(
        _TEXT,
        unused=(
            Unused(
                pattern=r"(vision_model|multi_modal_projector)\..*",
                reason="part of the vision tower, and only text is run",
            ),
        ),
        embedding="language_model.model.embed_tokens.weight",
        norm="language_model.model.norm.weight",
        head="language_model.lm_head.weight",
        layer_prefix="language_model.model.layers.{layer}.",
    ),
)
