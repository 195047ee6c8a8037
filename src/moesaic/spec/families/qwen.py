"""Qwen's sparse families: qwen2_moe, qwen3_moe, qwen3_vl_moe (text), qwen3_next, qwen3_5_moe (text)."""

from __future__ import annotations

from typing import Any

from moesaic.spec.families.keys import Keys
from moesaic.spec.families.parts import (
    Source,
    assemble,
    choose_ffn,
    num_layers,
    read_activation,
    read_dense,
    read_gqa,
    read_moe,
    sparse_by_step,
)
from moesaic.spec.model import DenseSpec, GateSpec, GqaSpec, LayerSpec, LinearSpec, Mixer, ModelSpec, MoeSpec

_WINDOWED = {"full_attention": "full", "attention": "full", "sliding_attention": "sliding"}
_LINEAR = {"full_attention": "full", "attention": "full", "linear_attention": "linear"}


def read_qwen2_moe(source: Source) -> ModelSpec:
    """Biased QKV, a shared expert behind a sigmoid gate, windows on layers that `layer_types` names.

    A layer in `mlp_only_layers` is dense whatever `decoder_sparse_step` says, and `layer_types` comes before
    `max_window_layers`.
    """
    keys = source.keys
    hidden, count = keys.whole("hidden_size"), num_layers(keys)
    has_bias = keys.flag("qkv_bias")
    full = _attention(keys, hidden, has_qkv_bias=has_bias)
    window = keys.whole_or_none("sliding_window", low=0) or None
    is_windowed = keys.flag("use_sliding_window") and window is not None
    names = keys.names_or_none("layer_types", _WINDOWED, length=count)
    if names is None:
        last = keys.whole("max_window_layers", low=0)
        names = tuple("sliding" if is_windowed and i % 2 == 0 and i < last else "full" for i in range(count))
    sliding = _attention(keys, hidden, has_qkv_bias=has_bias, window=window) if "sliding" in names else full
    halves = _ffn(source, count, hidden, is_renormalised=keys.flag("norm_topk_prob"), has_shared=True)
    layers = [
        LayerSpec(mixer=sliding if name == "sliding" else full, ffn=ffn)
        for name, ffn in zip(names, halves, strict=True)
    ]
    return assemble(source, layers)


def read_qwen3_moe(source: Source) -> ModelSpec:
    """Per-head norms on Q and K; a window, where one is used, holds on every layer."""
    keys = source.keys
    hidden, count = keys.whole("hidden_size"), num_layers(keys)
    window = (
        (keys.whole_or_none("sliding_window", low=0) or None) if keys.flag("use_sliding_window") else None
    )
    has_bias = keys.flag("attention_bias")
    mixer = _attention(
        keys, hidden, has_qkv_bias=has_bias, has_out_bias=has_bias, qk_norm="head", window=window
    )
    # Qwen3-VL has no norm_topk_prob of its own: its router always renormalises.
    is_renormalised = keys.flag("norm_topk_prob") if source.family == "qwen3_moe" else True
    halves = _ffn(source, count, hidden, is_renormalised=is_renormalised)
    return assemble(
        source,
        [LayerSpec(mixer=mixer, ffn=ffn) for ffn in halves],
        other_params=(("vision tower", None),) if source.outer.has("vision_config") else (),
    )


def read_qwen3_next(source: Source) -> ModelSpec:
    """Three layers of gated delta-rule attention to one of gated full attention; a gated shared expert."""
    keys = source.keys
    hidden, count = keys.whole("hidden_size"), num_layers(keys)
    names = keys.names_or_none("layer_types", _LINEAR, length=count)
    if names is None:
        step = keys.whole("full_attention_interval")
        names = tuple("linear" if (i + 1) % step else "full" for i in range(count))
    has_bias = keys.flag("attention_bias")
    full = _attention(
        keys, hidden, has_qkv_bias=has_bias, has_out_bias=has_bias, qk_norm="head", has_output_gate=True
    )
    linear = _linear(keys, is_fused=source.family == "qwen3_next")
    halves: list[DenseSpec | MoeSpec]
    if source.family == "qwen3_next":
        halves = _ffn(source, count, hidden, is_renormalised=keys.flag("norm_topk_prob"), has_shared=True)
    else:
        halves = [_moe(keys, hidden, is_renormalised=True, has_shared=True)] * count
    mixers: dict[str, Mixer] = {"full": full, "linear": linear}
    layers = [LayerSpec(mixer=mixers[name], ffn=ffn) for name, ffn in zip(names, halves, strict=True)]
    num_mtp = keys.whole_or_none("mtp_num_hidden_layers", low=0, high=64) or 0
    return assemble(
        source,
        layers,
        mtp_layers=(LayerSpec(mixer=full, ffn=halves[-1]),) * num_mtp,
        norm_offset=1.0,
        other_params=(("vision tower", None),) if source.outer.has("vision_config") else (),
    )


def _attention(keys: Keys, hidden: int, **facts: Any) -> GqaSpec:
    return read_gqa(keys, hidden=hidden, max_position=keys.whole("max_position_embeddings"), **facts)


def _linear(keys: Keys, *, is_fused: bool) -> LinearSpec:
    num_key_heads = keys.whole("linear_num_key_heads")
    num_value_heads = keys.whole("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise keys.fault(
            "linear_num_value_heads", num_value_heads, f"a multiple of {num_key_heads} key heads"
        )
    return LinearSpec(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=keys.whole("linear_key_head_dim"),
        value_dim=keys.whole("linear_value_head_dim"),
        conv_width=keys.whole("linear_conv_kernel_dim"),
        activation=read_activation(keys),
        is_fused=is_fused,
    )


def _moe(keys: Keys, hidden: int, *, is_renormalised: bool, has_shared: bool = False) -> MoeSpec:
    gate = GateSpec(score="softmax", is_renormalised=is_renormalised)
    shared = read_dense(keys, "shared_expert_intermediate_size", has_output_gate=True) if has_shared else None
    return read_moe(keys, hidden=hidden, gate=gate, shared=shared, experts_key="num_experts")


def _ffn(
    source: Source, count: int, hidden: int, *, is_renormalised: bool, has_shared: bool = False
) -> list[DenseSpec | MoeSpec]:
    keys = source.keys
    return choose_ffn(
        sparse_by_step(keys, count, "num_experts"),
        lambda: _moe(keys, hidden, is_renormalised=is_renormalised, has_shared=has_shared),
        lambda: read_dense(keys),
    )
