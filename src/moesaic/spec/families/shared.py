"""Families with grouped-query attention and shared experts: GLM-4.5, dots.llm1, ERNIE 4.5, Llama 4."""

from __future__ import annotations

from typing import Any

from moesaic.spec.families.keys import Keys
from moesaic.spec.families.parts import (
    MAX_EXPERTS,
    MAX_LAYERS,
    Source,
    assemble,
    choose_ffn,
    num_layers,
    read_activation,
    read_dense,
    read_gqa,
    read_moe,
    read_shared,
    read_sigmoid_gate,
    sparse_after,
)
from moesaic.spec.model import (
    DenseSpec,
    GateSpec,
    GqaSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    TemperatureSpec,
)

_WINDOWED = {"full_attention": "full", "sliding_attention": "sliding"}
_CHUNKED = {"full_attention": "full", "chunked_attention": "chunked"}


def read_glm4_moe(source: Source) -> ModelSpec:
    """GLM-4.5 to 4.7: half of each head rotated, DeepSeek-V3's gate."""
    keys = source.keys
    count = num_layers(keys)
    mixer = _attention(
        keys,
        may_floor=True,  # the class's own defaults, 4096 over 96 heads, do not divide
        has_qkv_bias=keys.flag("attention_bias"),
        qk_norm="head" if keys.flag("use_qk_norm") else "none",
    )
    halves = choose_ffn(sparse_after(keys, count), lambda: _sigmoid_moe(keys), lambda: read_dense(keys))
    num_mtp = keys.whole_or_none("num_nextn_predict_layers", low=0, high=64) or 0
    return assemble(
        source,
        [LayerSpec(mixer=mixer, ffn=ffn) for ffn in halves],
        mtp_layers=(LayerSpec(mixer=mixer, ffn=halves[-1]),) * num_mtp,
    )


def read_dots1(source: Source) -> ModelSpec:
    """dots.llm1: per-head norms, windows from `max_window_layers` on, DeepSeek-V3's gate."""
    keys = source.keys
    count = num_layers(keys)
    window = keys.whole_or_none("sliding_window")
    names = keys.names_or_none("layer_types", _WINDOWED, length=count)
    if names is None:
        first = keys.whole_or_none("max_window_layers", low=0)
        first = count if first is None else first
        names = tuple("sliding" if window is not None and i >= first else "full" for i in range(count))
    has_bias = keys.flag("attention_bias")
    facts: dict[str, Any] = {"has_qkv_bias": has_bias, "has_out_bias": has_bias, "qk_norm": "head"}
    mixers = {"full": _attention(keys, **facts), "sliding": _attention(keys, window=window, **facts)}
    halves = choose_ffn(sparse_after(keys, count), lambda: _sigmoid_moe(keys), lambda: read_dense(keys))
    layers = [LayerSpec(mixer=mixers[name], ffn=ffn) for name, ffn in zip(names, halves, strict=True)]
    return assemble(source, layers)


def read_ernie4_5_moe(source: Source) -> ModelSpec:
    """Softmax gate with a selection bias; sparse layers between two bounds, at an interval."""
    keys = source.keys
    count = num_layers(keys)
    has_bias = keys.flag("use_bias")
    mixer = _attention(keys, is_interleaved=True, has_qkv_bias=has_bias, has_out_bias=has_bias)
    first = keys.whole("moe_layer_start_index", low=0, high=MAX_LAYERS)
    last = keys.whole("moe_layer_end_index", low=-1, high=MAX_LAYERS)
    last = count - 1 if last == -1 else last
    interval = keys.whole("moe_layer_interval", high=MAX_LAYERS)
    is_sparse = [(i + 1) % interval == 0 and first <= i <= last for i in range(count)]
    num_shared = keys.whole_or_none("moe_num_shared_experts", low=0, high=MAX_EXPERTS) or 0
    shared = None
    if num_shared:
        width = num_shared * keys.whole("moe_intermediate_size")
        shared = DenseSpec(width=width, activation=read_activation(keys), has_bias=has_bias)
    halves = choose_ffn(
        is_sparse,
        lambda: read_moe(
            keys,
            hidden=keys.whole("hidden_size"),
            gate=GateSpec(
                score="softmax",
                has_selection_bias=True,
                renormalise_floor=keys.number("moe_norm_min", low=0.0),
            ),
            shared=shared,
            experts_key="moe_num_experts",
            chosen_key="moe_k",
        ),
        lambda: read_dense(keys, has_bias=has_bias),
    )
    layers = [LayerSpec(mixer=mixer, ffn=ffn) for ffn in halves]
    return assemble(source, layers, has_head_bias=has_bias)


def read_llama4(source: Source) -> ModelSpec:
    """Text half of Llama 4: chunked attention where there is rope, sigmoid weights on the experts' input.

    `moe_layers` names the sparse layers and comes before `interleave_moe_layer_step`; `no_rope_layers` holds
    1 where rope is used.
    """
    keys = source.keys
    hidden, count = keys.whole("hidden_size"), num_layers(keys)
    uses_rope = _llama4_rope_layers(keys, count)
    chunk = keys.whole_or_none("attention_chunk_size")
    names = keys.names_or_none("layer_types", _CHUNKED, length=count) or tuple(
        "chunked" if rope and chunk is not None else "full" for rope in uses_rope
    )
    has_bias = keys.flag("attention_bias")
    has_norm = keys.flag("use_qk_norm")
    temperature = _llama4_temperature(keys)

    def mixer(*, rope: bool, name: str) -> GqaSpec:
        return _attention(
            keys,
            is_interleaved=True,
            **({} if rope else {"rope": None}),
            has_qkv_bias=has_bias,
            has_out_bias=has_bias,
            qk_norm="l2" if rope and has_norm else "none",
            window=chunk if name == "chunked" else None,
            is_chunked=name == "chunked" and chunk is not None,
            temperature=None if rope else temperature,
        )

    kinds = {
        (rope, name): mixer(rope=rope, name=name) for rope, name in set(zip(uses_rope, names, strict=True))
    }
    listed = keys.indexes("moe_layers", end=count)
    step = keys.whole("interleave_moe_layer_step", high=MAX_LAYERS)
    sparse = set(range(step - 1, count, step) if listed is None else listed)

    def moe() -> MoeSpec:
        return read_moe(
            keys,
            hidden=hidden,
            gate=GateSpec(score="sigmoid", order="topk_then_score", is_renormalised=False),
            shared=read_dense(keys),
            experts_key="num_local_experts",
            width_key="intermediate_size",
            weight_on="input",
        )

    halves = choose_ffn(
        [i in sparse for i in range(count)], moe, lambda: read_dense(keys, "intermediate_size_mlp")
    )
    layers = [
        LayerSpec(mixer=kinds[(rope, name)], ffn=ffn)
        for rope, name, ffn in zip(uses_rope, names, halves, strict=True)
    ]
    has_vision = source.outer.config is not keys.config
    return assemble(source, layers, other_params=(("vision tower", None),) if has_vision else ())


def _llama4_temperature(keys: Keys) -> TemperatureSpec | None:
    """Released configs spell "on" as a number: 4."""
    value = keys.value("attn_temperature_tuning")
    if value is None or value is False or value == 0:
        return None
    if not isinstance(value, bool | int):
        raise keys.fault("attn_temperature_tuning", value, "true, false, or a whole number, 0 for false")
    return TemperatureSpec(scale=keys.number("attn_scale"), interval=keys.whole("floor_scale"))


def _llama4_rope_layers(keys: Keys, count: int) -> tuple[bool, ...]:
    listed = keys.value("no_rope_layers")
    if listed:
        if not isinstance(listed, list) or len(listed) < count or any(item not in (0, 1) for item in listed):
            raise keys.fault("no_rope_layers", listed, f"a list of at least {count} zeros and ones")
        return tuple(bool(item) for item in listed[:count])
    interval = keys.whole("no_rope_layer_interval", high=MAX_LAYERS)
    return tuple((i + 1) % interval != 0 for i in range(count))


def _sigmoid_moe(keys: Keys) -> MoeSpec:
    return read_moe(
        keys,
        hidden=keys.whole("hidden_size"),
        gate=read_sigmoid_gate(keys),
        shared=read_shared(keys),
        experts_key="n_routed_experts",
    )


def _attention(keys: Keys, **facts: Any) -> GqaSpec:
    return read_gqa(
        keys, hidden=keys.whole("hidden_size"), max_position=keys.whole("max_position_embeddings"), **facts
    )
