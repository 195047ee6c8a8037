"""Families whose layers are not all of one make: Nemotron-H (mixers and experts alternate) and Gemma 4."""

from __future__ import annotations

from dataclasses import replace

from moesaic.errors import ConfigError
from moesaic.spec.families.keys import Keys, divide
from moesaic.spec.families.parts import (
    MAX_LAYERS,
    Source,
    assemble,
    num_layers,
    read_activation,
    read_gqa,
    read_moe,
    read_sigmoid_gate,
)
from moesaic.spec.families.rope import read_rope
from moesaic.spec.model import DenseSpec, GateSpec, GqaSpec, LayerSpec, MambaSpec, ModelSpec, MoeSpec

_LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
_BLOCKS = {
    "mamba": "mamba", "linear_attention": "mamba", "moe": "moe", "attention": "attention",
    "full_attention": "attention", "mlp": "mlp",
}  # fmt: skip
_WINDOWED = {"full_attention": "full", "sliding_attention": "sliding"}


def read_nemotron_h(source: Source) -> ModelSpec:
    """Each layer is one half: a Mamba-2 mixer, attention without rope, experts, or a dense network.

    `layers_block_type` names the layers and comes before `hybrid_override_pattern`, which spells them in
    letters.
    """
    keys = source.keys
    names = _blocks(keys, "layers_block_type", "hybrid_override_pattern")
    if names is None:
        raise keys.missing("hybrid_override_pattern", "it says what each layer is")
    stated = keys.given("num_hidden_layers")
    if stated is not None and num_layers(keys) != len(names):
        raise ConfigError(
            f"{keys.where}: {keys.path('num_hidden_layers')} is {stated} but the pattern names "
            f"{len(names)} layers"
        )
    kinds = {name: _nemotron_layer(keys, name) for name in set(names)}
    num_mtp = keys.whole_or_none("num_nextn_predict_layers", low=0, high=64) or 0
    mtp: tuple[str, ...] = ()
    if num_mtp:
        mtp = _blocks(keys, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or ("attention", "moe")
    return assemble(
        source,
        [kinds[name] for name in names],
        eps_key="layer_norm_epsilon",
        mtp_layers=tuple(_nemotron_layer(keys, name) for name in mtp) * num_mtp,
    )


def read_gemma4(source: Source) -> ModelSpec:
    """Windowed layers to one full one of wider heads; a dense network beside the experts."""
    keys = source.keys
    hidden, count = keys.whole("hidden_size"), num_layers(keys)
    names = keys.names_or_none("layer_types", _WINDOWED, length=count) or tuple(
        "full" if (i + 1) % 6 == 0 else "sliding" for i in range(count)
    )
    names = (*names[:-1], "full")  # the class forces it
    num_shared = keys.whole("num_kv_shared_layers", low=0, high=count - 1)
    first_shared = count - num_shared
    layers = []
    for layer_idx, name in enumerate(names):
        mixer = _gemma4_mixer(keys, hidden, name, layer_idx)
        is_shared = layer_idx >= first_shared
        if is_shared:
            owners = [i for i in range(first_shared) if names[i] == name]
            if not owners:
                raise keys.fault(
                    "num_kv_shared_layers", num_shared, f"small enough to leave one {name} layer"
                )
            mixer = replace(mixer, kv_from=owners[-1])
        ffn = _gemma4_ffn(keys, hidden, is_shared=is_shared)
        layers.append(LayerSpec(mixer=mixer, ffn=ffn, has_out_norms=True, has_scale=True))
    tied = source.outer if source.outer.has("tie_word_embeddings") else keys
    return assemble(
        source,
        layers,
        reasons=_gemma4_lacks(keys, num_shared),
        has_tied_head=tied.flag("tie_word_embeddings"),
        embedding_scale=hidden**0.5,
        logit_softcap=keys.number_or_none("final_logit_softcapping", low=0.0, is_open=True),
        undescribed_params=_gemma4_extras(keys, hidden, count),
        other_params=tuple(
            (name, None)
            for name, key in (("vision tower", "vision_config"), ("audio tower", "audio_config"))
            if source.outer.has(key)
        ),
    )


def _blocks(keys: Keys, list_key: str, pattern_key: str) -> tuple[str, ...] | None:
    names = keys.names_or_none(list_key, _BLOCKS)
    if names is not None:
        if not 0 < len(names) <= MAX_LAYERS:
            raise keys.fault(list_key, len(names), f"a list of 1 to {MAX_LAYERS} names")
        return names
    pattern = keys.text_or_none(pattern_key)
    if pattern is None:
        return None
    letters = [letter for letter in pattern if letter != "|"]  # bars mark pipeline stages
    unknown = sorted(set(letters) - set(_LETTERS))
    if unknown or not 0 < len(letters) <= MAX_LAYERS:
        raise keys.fault(pattern_key, pattern, f"made of {', '.join(_LETTERS)}, 1 to {MAX_LAYERS} of them")
    return tuple(_LETTERS[letter] for letter in letters)


def _nemotron_layer(keys: Keys, name: str) -> LayerSpec:
    hidden = keys.whole("hidden_size")
    activation = read_activation(keys, "mlp_hidden_act")
    has_bias = keys.flag("mlp_bias")
    if name == "mamba":
        num_heads = keys.whole("mamba_num_heads")
        num_groups = keys.whole("n_groups")
        divide(keys, "mamba_num_heads", num_heads, "n_groups", num_groups)
        mamba = MambaSpec(
            num_heads=num_heads,
            head_dim=keys.whole("mamba_head_dim"),
            state_dim=keys.whole("ssm_state_size"),
            num_groups=num_groups,
            conv_width=keys.whole("conv_kernel"),
            has_proj_bias=keys.flag("use_bias"),
            has_conv_bias=keys.flag("use_conv_bias"),
        )
        return LayerSpec(mixer=mamba, ffn=None)
    if name == "attention":
        mixer = read_gqa(keys, hidden=hidden, max_position=keys.whole("max_position_embeddings"), rope=None)
        return LayerSpec(mixer=mixer, ffn=None)
    if name == "mlp":
        dense = DenseSpec(
            width=keys.whole("intermediate_size"), activation=activation, is_gated=False, has_bias=has_bias
        )
        return LayerSpec(mixer=None, ffn=dense)
    shared = None
    if keys.whole("n_shared_experts", low=0):
        width = keys.whole("moe_shared_expert_intermediate_size")
        shared = DenseSpec(width=width, activation=activation, is_gated=False, has_bias=has_bias)
    moe = read_moe(
        keys,
        hidden=hidden,
        gate=read_sigmoid_gate(keys),
        shared=shared,
        experts_key="n_routed_experts",
        row_width=keys.whole_or_none("moe_latent_size") or hidden,
        activation=activation,
        is_gated=False,
    )
    return LayerSpec(mixer=None, ffn=moe)


def _gemma4_heads(keys: Keys, name: str, layer_idx: int) -> dict[str, object]:
    """The keys that a layer has of its own.

    `per_layer_config`, as transformers 5 writes it, names them by layer and comes first; else full layers
    have their own head width and, where given, KV heads.
    """
    per_layer = keys.below("per_layer_config")
    if per_layer is not None:
        mine = per_layer.below(str(layer_idx))
        found = {} if mine is None else dict(mine.config)
        unknown = sorted(set(found) - {"head_dim", "num_key_value_heads"})
        if unknown:
            raise keys.fault("per_layer_config", unknown[0], "made of head_dim and num_key_value_heads")
        return found
    if name != "full":
        return {}
    found = {"head_dim": keys.whole("global_head_dim")}
    if keys.flag("attention_k_eq_v") and keys.has("num_global_key_value_heads"):
        found["num_key_value_heads"] = keys.whole("num_global_key_value_heads")
    return found


def _gemma4_mixer(keys: Keys, hidden: int, name: str, layer_idx: int) -> GqaSpec:
    """A layer by the usual keys, with what it has of its own in their place."""
    max_position = keys.whole("max_position_embeddings")
    is_full = name == "full"
    config = {**keys.config, **_gemma4_heads(keys, name, layer_idx)}
    mine = Keys(config, where=keys.where, prefix=keys.prefix, defaults=keys.defaults)
    has_bias = keys.flag("attention_bias")
    rope = read_rope(
        mine,
        head_dim=mine.whole("head_dim"),
        max_position=max_position,
        layer_type="full_attention" if is_full else "sliding_attention",
    )
    return read_gqa(
        mine,
        hidden=hidden,
        max_position=max_position,
        rope=rope,
        softmax_scale=1.0,
        has_qkv_bias=has_bias,
        has_out_bias=has_bias,
        qk_norm="head",
        has_value_norm=True,
        window=None if is_full else keys.whole("sliding_window"),
        value_is_key=is_full and keys.flag("attention_k_eq_v"),
    )


def _gemma4_ffn(keys: Keys, hidden: int, *, is_shared: bool) -> DenseSpec | MoeSpec:
    activation = read_activation(keys, "hidden_activation")
    width = keys.whole("intermediate_size")
    if is_shared and keys.flag("use_double_wide_mlp"):
        width *= 2
    dense = DenseSpec(width=width, activation=activation)
    if not keys.flag("enable_moe_block"):
        return dense
    return read_moe(
        keys,
        hidden=hidden,
        gate=GateSpec(score="softmax", has_input_norm=True, has_expert_scale=True),
        shared=dense,
        has_branch_norms=True,
        experts_key="num_experts",
        chosen_key="top_k_experts",
        activation=activation,
    )


def _gemma4_lacks(keys: Keys, num_shared: int) -> tuple[str, ...]:
    """What some members of the family have and the engine lacks."""
    reasons = []
    if keys.whole_or_none("hidden_size_per_layer_input", low=0):
        reasons.append("Gemma 4's per-layer embeddings are not run yet")
    if num_shared:
        reasons.append(f"keys and values of another layer, in {num_shared} layers, are not run yet")
    if keys.text_or_none("use_bidirectional_attention", ("all", "vision")) == "all":
        reasons.append("attention that sees later tokens is not run: the model is no decoder")
    return tuple(reasons)


def _gemma4_extras(keys: Keys, hidden: int, count: int) -> tuple[tuple[str, int], ...]:
    """Weights that no layer's spec describes."""
    width = keys.whole_or_none("hidden_size_per_layer_input", low=0) or 0
    if not width:
        return ()
    rows = keys.whole("vocab_size_per_layer_input")
    inputs = count * (2 * hidden * width + hidden)
    return (("per-layer embeddings", rows * count * width + hidden * count * width + width + inputs),)
