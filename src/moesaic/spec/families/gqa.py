"""Families with grouped-query attention and no shared expert: Llama, Mixtral, OLMoE, gpt-oss and more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moesaic.spec.families.keys import Keys
from moesaic.spec.families.parts import (
    MAX_LAYERS,
    Source,
    assemble,
    num_layers,
    read_activation,
    read_dense,
    read_gqa,
    read_moe,
)
from moesaic.spec.model import Activation, GateSpec, GqaSpec, LayerSpec, ModelSpec, MoeSpec

_WINDOWED = {"full_attention": "full", "sliding_attention": "sliding"}


def read_llama(source: Source) -> ModelSpec:
    """Dense Llama 2 and 3."""
    keys = source.keys
    has_bias = keys.flag("attention_bias")
    mixer = _attention(keys, has_qkv_bias=has_bias, has_out_bias=has_bias)
    layer = LayerSpec(mixer=mixer, ffn=read_dense(keys, has_bias=keys.flag("mlp_bias")))
    return assemble(source, [layer] * num_layers(keys))


def read_mixtral(source: Source) -> ModelSpec:
    """Softmax over all experts, the chosen renormalised: the same as softmax over the chosen."""
    keys = source.keys
    mixer = _attention(keys, window=keys.whole_or_none("sliding_window"))
    moe = _moe(keys, GateSpec(score="softmax"), experts_key="num_local_experts")
    return assemble(source, [LayerSpec(mixer=mixer, ffn=moe)] * num_layers(keys))


def read_olmoe(source: Source) -> ModelSpec:
    """Norms over all of Q and all of K at once; weights not renormalised unless the config says so."""
    keys = source.keys
    has_bias = keys.flag("attention_bias")
    mixer = _attention(
        keys,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        qk_norm="full",
        qkv_clip=keys.number_or_none("clip_qkv", low=0.0, is_open=True),
    )
    gate = GateSpec(score="softmax", is_renormalised=keys.flag("norm_topk_prob"))
    moe = _moe(keys, gate, experts_key="num_experts")
    return assemble(source, [LayerSpec(mixer=mixer, ffn=moe)] * num_layers(keys))


def read_granitemoe(source: Source) -> ModelSpec:
    """Mixtral's shape with four multipliers: embedding, attention, residual, logits."""
    keys = source.keys
    has_bias = keys.flag("attention_bias")
    scale = keys.number("attention_multiplier")
    mixer = _attention(keys, has_qkv_bias=has_bias, has_out_bias=has_bias, softmax_scale=scale)
    moe = _moe(keys, GateSpec(score="softmax", order="topk_then_score"), experts_key="num_local_experts")
    return assemble(
        source,
        [LayerSpec(mixer=mixer, ffn=moe)] * num_layers(keys),
        embedding_scale=keys.number("embedding_multiplier"),
        residual_scale=keys.number("residual_multiplier"),
        logit_scale=1.0 / keys.number("logits_scaling", low=0.0, is_open=True),
    )


def read_phimoe(source: Source) -> ModelSpec:
    """Sparsemixer routing, whose jitter also counts at inference; layer norms with biases."""
    keys = source.keys
    has_bias = keys.flag("attention_bias")
    window = keys.whole_or_none("sliding_window")
    mixer = _attention(keys, has_qkv_bias=has_bias, has_out_bias=has_bias, window=window)
    mixer, reasons = _phimoe_rope(keys, mixer), []
    if (kind := _scaling_kind(mixer)) not in (None, "longrope"):
        reasons.append(f"rope scaling {kind} under model_type phimoe is not run; longrope is")
    jitter = keys.number("router_jitter_noise", low=0.0)
    gate = GateSpec(score="sparsemixer", is_renormalised=False, jitter=jitter)
    moe = _moe(keys, gate, experts_key="num_local_experts")
    if moe.experts_per_token != 2:
        reasons.append(
            f"sparsemixer chooses two experts; num_experts_per_tok {moe.experts_per_token} is not run"
        )
    return assemble(
        source,
        [LayerSpec(mixer=mixer, ffn=moe)] * num_layers(keys),
        reasons=reasons,
        norm="layer",
        has_norm_bias=True,
        has_head_bias=keys.flag("lm_head_bias"),
    )


def _phimoe_rope(keys: Keys, mixer: GqaSpec) -> GqaSpec:
    """Attention whose cosines and sines are scaled by the config's own factors.

    `long_mscale` goes with the long frequencies and `short_mscale` with the short ones, which the positions
    served decide.
    """
    if mixer.rope is None or mixer.rope.scaling is None:
        return mixer
    scaling = mixer.rope.scaling
    blocks = (keys.below("rope_scaling"), keys.below("rope_parameters"))
    block = next(block for block in blocks if block is not None and block.config)
    scales = {name: block.number(name, low=0.0) for name in ("short_mscale", "long_mscale")}
    is_long = keys.whole("max_position_embeddings") > (scaling.original_max_position or 0)
    scaling = replace(scaling, attention_factor=scales["long_mscale" if is_long else "short_mscale"])
    return replace(mixer, rope=replace(mixer.rope, scaling=scaling))


def _scaling_kind(mixer: GqaSpec) -> str | None:
    return None if mixer.rope is None or mixer.rope.scaling is None else mixer.rope.scaling.kind


def read_minimax_m2(source: Source) -> ModelSpec:
    """Norms over all of Q and K, half of each head rotated, sigmoid gate with a selection bias."""
    keys = source.keys
    rotary_dim, head_dim = keys.whole_or_none("rotary_dim"), keys.whole("head_dim")
    if rotary_dim is not None and not keys.has("partial_rotary_factor"):
        if rotary_dim > head_dim:
            raise keys.fault("rotary_dim", rotary_dim, f"at most {keys.path('head_dim')} ({head_dim})")
        defaults = {**keys.defaults, "partial_rotary_factor": rotary_dim / head_dim}
        keys = Keys(
            keys.config, where=keys.where, prefix=keys.prefix, defaults=defaults, aliases=keys.aliases
        )
    mixer = _attention(keys, qk_norm="full")
    gate = GateSpec(score="sigmoid", has_selection_bias=True)
    moe = _moe(keys, gate, experts_key="num_local_experts")
    return assemble(source, [LayerSpec(mixer=mixer, ffn=moe)] * num_layers(keys))


def read_gpt_oss(source: Source) -> ModelSpec:
    """Windows on every second layer, a sink per head, biased experts with a clamped gate."""
    keys = source.keys
    count = num_layers(keys)
    has_bias = keys.flag("attention_bias")
    names = keys.names_or_none("layer_types", _WINDOWED, length=count) or tuple(
        "full" if i % 2 else "sliding" for i in range(count)
    )
    facts: dict[str, Any] = {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "has_sinks": True}
    mixers = {
        "full": _attention(keys, **facts),
        "sliding": _attention(keys, window=keys.whole_or_none("sliding_window"), **facts),
    }
    gate = GateSpec(score="softmax", order="topk_then_score", is_renormalised=False, has_logit_bias=True)
    moe = _moe(
        keys,
        gate,
        experts_key="num_local_experts",
        activation="swiglu_clamped",
        activation_limit=keys.number("swiglu_limit", low=0.0, is_open=True),
        activation_alpha=keys.number("swiglu_alpha"),
        has_bias=True,
    )
    return assemble(source, [LayerSpec(mixer=mixers[name], ffn=moe) for name in names])


def read_dbrx(source: Source) -> ModelSpec:
    """Sizes in two nested objects, layer norms without biases, clipped QKV."""
    keys = source.keys
    attention = keys.below("attn_config", defaults={"kv_n_heads": 1})
    ffn = keys.below(
        "ffn_config",
        defaults={
            "ffn_hidden_size": 3584,
            "moe_num_experts": 4,
            "moe_top_k": 1,
            "moe_normalize_expert_weights": 1.0,
        },
    )
    if attention is None or ffn is None:
        raise keys.missing("attn_config" if attention is None else "ffn_config")
    hidden, max_position = keys.whole("d_model"), keys.whole("max_seq_len")
    renamed = Keys(
        {
            "num_attention_heads": keys.whole("n_heads"),
            "num_key_value_heads": attention.whole("kv_n_heads"),
            "rope_theta": attention.number_or_none("rope_theta", low=0.0, is_open=True)
            or keys.number_or_none("rope_theta", low=0.0, is_open=True),
        },
        where=keys.where,
    )
    clip = attention.number_or_none("clip_qkv", low=0.0, is_open=True)
    mixer = read_gqa(renamed, hidden=hidden, max_position=max_position, qkv_clip=clip)
    power = ffn.number_or_none("moe_normalize_expert_weights")
    moe = read_moe(
        ffn,
        hidden=hidden,
        gate=GateSpec(score="softmax", is_renormalised=power is not None),
        experts_key="moe_num_experts",
        chosen_key="moe_top_k",
        width_key="ffn_hidden_size",
        activation=_dbrx_activation(ffn),
    )
    reasons = () if power in (None, 1.0) else (f"weights divided by their {power:g}-norm are not run",)
    return assemble(
        source,
        [LayerSpec(mixer=mixer, ffn=moe)] * keys.whole("n_layers", high=MAX_LAYERS),
        reasons=reasons,
        hidden_key="d_model",
        position_key="max_seq_len",
        eps_key="layer_norm_eps",
        norm="layer",
    )


def _dbrx_activation(ffn: Keys) -> Activation:
    function = ffn.below("ffn_act_fn")
    return "silu" if function is None else read_activation(function, "name")


def _attention(keys: Keys, **facts: Any) -> GqaSpec:
    return read_gqa(
        keys,
        hidden=keys.whole("hidden_size"),
        max_position=keys.whole("max_position_embeddings"),
        **facts,
    )


def _moe(keys: Keys, gate: GateSpec, *, experts_key: str, **facts: Any) -> MoeSpec:
    return read_moe(
        keys,
        hidden=keys.whole("hidden_size"),
        gate=gate,
        experts_key=experts_key,
        width_key="intermediate_size",
        **facts,
    )
