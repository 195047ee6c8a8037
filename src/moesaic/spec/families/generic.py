"""Best effort for a model_type nobody wrote a reader for: the keys that most configs use.

Whatever it cannot tell apart it counts in the plainest way; `read_config` adds the reason that says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moesaic.spec.families.keys import Keys
from moesaic.spec.families.parts import (
    ACTIVATIONS,
    MAX_EXPERTS,
    MAX_LAYERS,
    Source,
    assemble,
    choose_ffn,
    num_layers,
    read_gqa,
    read_moe,
)
from moesaic.spec.families.rope import read_rope, softmax_mscale
from moesaic.spec.model import (
    Activation,
    DenseSpec,
    GateSpec,
    LayerSpec,
    Mixer,
    MlaSpec,
    ModelSpec,
    MoeSpec,
)

ALIASES: Mapping[str, tuple[str, ...]] = {
    "hidden_size": ("d_model", "n_embd", "dim", "model_dim"),
    "num_hidden_layers": ("n_layers", "n_layer", "num_layers"),
    "num_attention_heads": ("n_heads", "n_head", "num_heads"),
    "num_key_value_heads": ("n_kv_heads", "num_kv_heads", "kv_n_heads", "num_attention_groups"),
    "head_dim": ("attention_head_dim", "kv_channels"),
    "vocab_size": ("padded_vocab_size", "n_vocab"),
    "max_position_embeddings": ("max_seq_len", "max_sequence_length", "seq_length", "n_positions"),
    "intermediate_size": ("ffn_hidden_size", "n_inner", "dense_intermediate_size"),
    "rms_norm_eps": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "layernorm_epsilon"),
    "num_experts": (
        "n_routed_experts", "num_local_experts", "moe_num_experts", "n_experts", "num_moe_experts",
    ),
    "num_experts_per_tok": (
        "experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token",
        "num_selected_experts", "moe_router_topk",
    ),
    "moe_intermediate_size": ("expert_ffn_hidden_size", "moe_ffn_hidden_size", "expert_intermediate_size"),
    "n_shared_experts": ("num_shared_experts", "num_shared_expert", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": (
        "share_expert_dim", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
    ),
    "routed_scaling_factor": ("moe_router_scaling_factor", "router_scaling_factor", "route_scale"),
    "num_nextn_predict_layers": ("num_mtp_layers", "mtp_num_hidden_layers"),
    "hidden_act": ("hidden_activation", "activation_function"),
}  # fmt: skip


def read_generic(source: Source) -> ModelSpec:
    """A model by the usual keys.

    Raises: ConfigError naming the first size that is missing, or a value that breaks a rule.
    """
    keys = source.keys
    hidden, count = keys.whole("hidden_size"), num_layers(keys)
    keys.whole("vocab_size")
    max_position = keys.whole_or_none("max_position_embeddings") or 2048
    is_sparse = _sparse_layers(keys, count)
    halves = choose_ffn(is_sparse, lambda: _moe(keys, hidden), lambda: _dense(keys, hidden))
    mixers = _mixers(keys, hidden, count, max_position)
    layers = [LayerSpec(mixer=mixer, ffn=ffn) for mixer, ffn in zip(mixers, halves, strict=True)]
    num_mtp = keys.whole_or_none("num_nextn_predict_layers", low=0, high=64) or 0
    defaults = {"max_position_embeddings": max_position, "rms_norm_eps": 1e-5}
    filled = Keys(keys.config, where=keys.where, prefix=keys.prefix, defaults=defaults, aliases=keys.aliases)
    outer = filled if source.outer is keys else source.outer
    return assemble(
        replace(source, keys=filled, outer=outer),
        layers,
        mtp_layers=(layers[-1],) * num_mtp,
        other_params=tuple(
            (key.removesuffix("_config") + " tower", None)
            for key in ("vision_config", "audio_config")
            if source.outer.has(key)
        ),
    )


def _activation(keys: Keys) -> Activation:
    name = keys.text_or_none("hidden_act")
    return ACTIVATIONS.get(name or "silu", "silu")


def _dense(keys: Keys, hidden: int) -> DenseSpec:
    width = keys.whole_or_none("intermediate_size")
    if width is None:
        width = keys.whole_or_none("moe_intermediate_size") or 4 * hidden
    return DenseSpec(width=width, activation=_activation(keys))


def _moe(keys: Keys, hidden: int) -> MoeSpec:
    if not keys.has("num_experts_per_tok"):
        raise keys.missing("num_experts_per_tok", f"{keys.path('num_experts')} says that there are experts")
    width_key = "moe_intermediate_size" if keys.has("moe_intermediate_size") else "intermediate_size"
    expert_width = keys.whole(width_key)
    shared_width = keys.whole_or_none("shared_expert_intermediate_size", low=0)
    if shared_width is None:
        count = keys.whole_or_none("n_shared_experts", low=0, high=MAX_EXPERTS) or 0
        shared_width = count * expert_width
    score = keys.text_or_none("scoring_func")
    scale = keys.number_or_none("routed_scaling_factor")
    is_sigmoid = score == "sigmoid"
    gate = GateSpec(
        score="sigmoid" if is_sigmoid else "softmax",
        is_renormalised=keys.value("norm_topk_prob") is not False,
        scale=1.0 if scale is None else scale,
        has_selection_bias=is_sigmoid,
    )
    return read_moe(
        keys,
        hidden=hidden,
        gate=gate,
        shared=DenseSpec(width=shared_width, activation=_activation(keys)) if shared_width else None,
        experts_key="num_experts",
        width_key=width_key,
        row_width=keys.whole_or_none("moe_latent_size") or hidden,
        activation=_activation(keys),
    )


def _sparse_layers(keys: Keys, count: int) -> tuple[bool, ...]:
    """Which layers are sparse, by the first key of the known ones that is there."""
    if not keys.whole_or_none("num_experts", low=0, high=MAX_EXPERTS):
        return (False,) * count
    names = keys.value("mlp_layer_types")
    if isinstance(names, list) and len(names) == count:
        return tuple(name in ("sparse", "moe") for name in names)
    frequency = keys.value("moe_layer_freq")
    if isinstance(frequency, list):
        if len(frequency) != count:
            raise keys.fault("moe_layer_freq", frequency, f"a number, or a list of {count}")
        return tuple(bool(entry) for entry in frequency)
    listed = keys.indexes("moe_layers", end=count)
    if listed is not None:
        return tuple(i in listed for i in range(count))
    dense = keys.indexes("mlp_only_layers", end=count) or ()
    first = keys.whole_or_none("first_k_dense_replace", low=0, high=MAX_LAYERS) or 0
    step = keys.whole_or_none("decoder_sparse_step", high=MAX_LAYERS) or 1
    every = keys.whole_or_none("moe_layer_freq", high=MAX_LAYERS) or 1
    every = every if step == 1 else step
    offset = 1 if step > 1 else 0
    return tuple(i >= first and i not in dense and (i + offset) % every == 0 for i in range(count))


def _mixers(keys: Keys, hidden: int, count: int, max_position: int) -> list[Mixer]:
    if keys.has("kv_lora_rank"):
        return [_mla(keys, max_position)] * count
    has_bias = keys.value("attention_bias") is True or keys.value("qkv_bias") is True
    full = read_gqa(keys, hidden=hidden, max_position=max_position, has_qkv_bias=has_bias)
    window = keys.whole_or_none("sliding_window", low=-1)
    names = keys.value("layer_types")
    if window is None or window < 1 or not isinstance(names, list) or len(names) < count:
        return [full] * count
    sliding = replace(full, window=window)
    return [sliding if names[i] == "sliding_attention" else full for i in range(count)]


def _mla(keys: Keys, max_position: int) -> MlaSpec:
    nope_dim, rope_dim = keys.whole("qk_nope_head_dim"), keys.whole("qk_rope_head_dim")
    rope = read_rope(keys, head_dim=rope_dim, max_position=max_position, is_interleaved=True)
    return MlaSpec(
        num_heads=keys.whole("num_attention_heads"),
        q_lora_rank=keys.whole_or_none("q_lora_rank"),
        kv_lora_rank=keys.whole("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=keys.whole("v_head_dim"),
        rope=rope,
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * softmax_mscale(rope),
    )
