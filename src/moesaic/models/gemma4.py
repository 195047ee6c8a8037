"""Gemma 4's text model, alone or in the model that also sees and hears: norms on both sides of everything."""

from __future__ import annotations

from dataclasses import replace

from moesaic.models.names import GQA, ROTARY_BUFFERS, Stacked, Unused, WeightMap, gated

_TEXT = WeightMap(
    layers={
        "norm": {
            "mixer": "input_layernorm.weight",
            "mixer_out": "post_attention_layernorm.weight",
            "ffn": "pre_feedforward_layernorm.weight",
            "ffn_out": "post_feedforward_layernorm.weight",
            "shared_out": "post_feedforward_layernorm_1.weight",
            "routed_in": "pre_feedforward_layernorm_2.weight",
            "routed_out": "post_feedforward_layernorm_2.weight",
            "scale": "layer_scalar",
        },
        "mixer": GQA,
        "dense": gated("mlp"),
        "router": {
            "weight": "router.proj.weight",
            "input_scale": "router.scale",
            "expert_scale": "router.per_expert_scale",
        },
        "shared": gated("mlp"),
    },
    experts=(Stacked(gate_up="experts.gate_up_proj", down="experts.down_proj"),),
    unused=(ROTARY_BUFFERS,),
)

GEMMA4 = replace(
    _TEXT,
    wrapped=replace(
        _TEXT,
        unused=(
            Unused(
                pattern=r"model\.(vision_tower|audio_tower|embed_vision|embed_audio)\..*",
                reason="part of the vision or audio tower, and only text is run",
            ),
        ),
        embedding="model.language_model.embed_tokens.weight",
        norm="model.language_model.norm.weight",
        layer_prefix="model.language_model.layers.{layer}.",
    ),
)
