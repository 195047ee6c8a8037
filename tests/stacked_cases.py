"""Families whose experts come stacked: variants that must agree with transformers, changes that must show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from checkpoints import gemma4_config, gpt_oss_config
from parity import (
    Family,
    Mutation,
    each_layer,
    experts,
    field,
    gates,
    mixers,
    ropes,
    scalings,
    softmax_scaled,
)

from moesaic.spec.families import read_config
from moesaic.spec.model import GqaSpec, LayerSpec, RopeSpec, TemperatureSpec

GPT_OSS = Family(
    variants={
        "as_released": {},
        "no_attention_bias": {"attention_bias": False},
        "another_clamp": {"swiglu_limit": 0.7, "swiglu_alpha": 1.1},
        "all_windows": {"layer_types": ["sliding_attention"] * 3},
        "truncated_yarn": {"rope_scaling": gpt_oss_config()["rope_scaling"] | {"truncate": True}},
    },
    mutations={
        "no sinks": Mutation(change=mixers(has_sinks=False), drops=r"sinks"),
        "no windows": Mutation(change=mixers(window=None)),
        "windows everywhere": Mutation(change=mixers(window=24)),
        "windows one longer": Mutation(change=mixers(window=25)),
        "no q, k and v bias": Mutation(change=mixers(has_qkv_bias=False), drops=r"[qkv]_proj\.bias"),
        "no o bias": Mutation(change=mixers(has_out_bias=False), drops=r"o_proj\.bias"),
        "softmax scale": Mutation(change=softmax_scaled(1.1)),
        "no yarn": Mutation(change=ropes(scaling=None)),
        "truncated yarn": Mutation(change=scalings(truncate=True)),
        "yarn attention factor": Mutation(change=scalings(attention_factor=1.0)),
        "interleaved rope": Mutation(change=ropes(is_interleaved=True)),
        "no expert biases": Mutation(change=experts(has_bias=False), drops=r"experts\..*_bias"),
        "no clamp": Mutation(change=experts(activation_limit=None)),
        "another slope": Mutation(change=experts(activation_alpha=1.5)),
        "plain silu": Mutation(change=experts(activation="silu")),
        "no router bias": Mutation(change=gates(has_logit_bias=False), drops=r"router\.bias"),
        "softmax before the choice": Mutation(change=gates(order="score_then_topk")),
        "one expert more": Mutation(change=experts(experts_per_token=4)),
        "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
    },
)


def _rotated(**changes: Any) -> Mutation:
    """The layers with rope, changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, GqaSpec)
        return layer if layer.mixer.rope is None else replace(layer, mixer=replace(layer.mixer, **changes))

    return Mutation(change=each_layer(change))


def _unrotated(**changes: Any) -> Mutation:
    """The layers without rope, changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, GqaSpec)
        return replace(layer, mixer=replace(layer.mixer, **changes)) if layer.mixer.rope is None else layer

    return Mutation(change=each_layer(change))


_ROPE = RopeSpec(theta=1000.0, dim=16, is_interleaved=True)
LLAMA4 = Family(
    variants={
        "as_scout": {},
        "as_maverick": {"use_qk_norm": False, "moe_layers": None, "interleave_moe_layer_step": 2},
        "one_expert": {"num_experts_per_tok": 1},
        "no_temperature": {"attn_temperature_tuning": False},
        "no_chunks": {"attention_chunk_size": None},
        "chunk_of_one_block": {"attention_chunk_size": 16, "attention_bias": True},
        "llama3_rope": {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    mutations={
        "a window that trails": _rotated(is_chunked=False),
        "no chunks": _rotated(is_chunked=False, window=None),
        "chunks one longer": _rotated(window=25),
        "no q and k norms": _rotated(qk_norm="none"),
        "no rope": _rotated(rope=None),
        "rope by halves": _rotated(rope=replace(_ROPE, is_interleaved=False)),
        "another rope theta": _rotated(rope=replace(_ROPE, theta=1100.0)),
        "rope in every layer": _unrotated(rope=_ROPE),
        "chunks in every layer": _unrotated(window=24, is_chunked=True),
        "norms in every layer": _unrotated(qk_norm="l2"),
        "no temperature": _unrotated(temperature=None),
        "a weaker temperature": _unrotated(temperature=TemperatureSpec(scale=0.4, interval=16)),
        "a slower temperature": _unrotated(temperature=TemperatureSpec(scale=0.5, interval=17)),
        "temperature in every layer": _rotated(temperature=TemperatureSpec(scale=0.5, interval=16)),
        "softmax scale": Mutation(change=softmax_scaled(1.1)),
        "weights on the output": Mutation(change=experts(weight_on="output")),
        "no shared expert": Mutation(change=experts(shared=None), drops="shared_expert"),
        "one expert more": Mutation(change=experts(experts_per_token=3)),
        "softmax scores": Mutation(change=gates(score="softmax")),
        "renormalised": Mutation(change=gates(is_renormalised=True)),
        "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
    },
)


def _of_kind(is_full: bool, **changes: Any) -> Mutation:
    """The mixers of the full layers, or of those with a window, changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        assert isinstance(mixer, GqaSpec)
        return replace(layer, mixer=replace(mixer, **changes)) if (mixer.window is None) == is_full else layer

    return Mutation(change=each_layer(change))


def _gemma_rope(layer_idx: int, **changes: Any) -> Any:
    """The rope of a layer of the config, its scaling changed."""
    mixer = read_config(gemma4_config(), name="gemma4").layers[layer_idx].mixer
    assert isinstance(mixer, GqaSpec)
    assert mixer.rope is not None
    return replace(mixer.rope, **changes)


_SCALING = _gemma_rope(1).scaling
GEMMA4 = Family(
    variants={
        "as_released": {},
        "values_of_their_own": {"attention_k_eq_v": False},
        "no_experts": {"enable_moe_block": False},
        "no_soft_cap": {"final_logit_softcapping": None, "attention_bias": True},
    },
    mutations={
        "no window": _of_kind(False, window=None),
        "a window one longer": _of_kind(False, window=25),
        "another rope theta in windows": _of_kind(False, rope=_gemma_rope(0, theta=1100.0)),
        "another rope theta in full layers": _of_kind(True, rope=_gemma_rope(1, theta=5500.0)),
        "every pair turns": _of_kind(True, rope=_gemma_rope(1, scaling=None)),
        "more pairs turn": _of_kind(True, rope=_gemma_rope(1, scaling=replace(_SCALING, proportion=0.5))),
        "a rope factor": _of_kind(True, rope=_gemma_rope(1, scaling=replace(_SCALING, factor=2.0))),
        "no q and k norms": Mutation(change=mixers(qk_norm="none"), drops=r"self_attn\.[qk]_norm"),
        "no value norm": Mutation(change=mixers(has_value_norm=False)),
        "softmax scale": Mutation(change=softmax_scaled(1.1)),
        "no norms after the halves": Mutation(
            change=each_layer(lambda layer: replace(layer, has_out_norms=False)),
            drops=r"post_(attention|feedforward)_layernorm\.",
        ),
        "no layer scalars": Mutation(
            change=each_layer(lambda layer: replace(layer, has_scale=False)), drops="layer_scalar"
        ),
        "no norms of the branches": Mutation(
            change=experts(has_branch_norms=False), drops=r"feedforward_layernorm_\d"
        ),
        "no norm before the router": Mutation(change=gates(has_input_norm=False), drops=r"router\.scale"),
        "no scales of experts": Mutation(change=gates(has_expert_scale=False), drops="per_expert_scale"),
        "not renormalised": Mutation(change=gates(is_renormalised=False)),
        "one expert more": Mutation(change=experts(experts_per_token=4)),
        "another activation": Mutation(change=experts(activation="silu")),
        "no embedding scale": Mutation(change=field(embedding_scale=1.0)),
        "no soft cap": Mutation(change=field(logit_softcap=None)),
        "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
    },
)

STACKED_FAMILIES: Mapping[str, Family] = {"gpt_oss": GPT_OSS, "llama4": LLAMA4, "gemma4": GEMMA4}
