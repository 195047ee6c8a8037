"""Which parameters a spec has and of what shape, under our names. Facts only: no keys, no tensors."""

from __future__ import annotations

from typing import Literal

from moesaic.errors import UnsupportedModelError
from moesaic.spec.model import DenseSpec, GqaSpec, LayerSpec, LinearSpec, MlaSpec, MoeSpec

Shape = tuple[int, ...]
Half = Literal["norm", "mixer", "dense", "router", "shared"]


def layer_parameters(
    layer: LayerSpec, hidden: int, *, has_norm_bias: bool = False
) -> dict[Half, dict[str, Shape]]:
    """Every parameter of a layer but its routed experts.

    Raises: UnsupportedModelError for a mixer that is not built.
    """
    found: dict[Half, dict[str, Shape]] = {"norm": {}}
    if layer.mixer is not None:
        found["norm"] |= norm_parameters("mixer", hidden, has_bias=has_norm_bias)
        found["mixer"] = mixer_parameters(layer.mixer, hidden)
    if layer.ffn is not None:
        found["norm"] |= norm_parameters("ffn", hidden, has_bias=has_norm_bias)
    if layer.has_out_norms:
        found["norm"] |= {f"{name}_out": shape for name, shape in found["norm"].items()}
    if layer.has_scale:
        found["norm"]["scale"] = (1,)
    if isinstance(layer.ffn, DenseSpec):
        found["dense"] = dense_parameters(layer.ffn, hidden)
    if isinstance(layer.ffn, MoeSpec):
        if layer.ffn.has_branch_norms:
            found["norm"] |= dict.fromkeys(("routed_in", "routed_out", "shared_out"), (hidden,))
        found["router"] = router_parameters(layer.ffn, hidden)
        if layer.ffn.shared is not None:
            found["shared"] = dense_parameters(layer.ffn.shared, hidden)
    return found


def norm_parameters(name: str, hidden: int, *, has_bias: bool) -> dict[str, Shape]:
    """The parameters of `RmsNorm` or `LayerNorm`."""
    names = (name, f"{name}_bias") if has_bias else (name,)
    return dict.fromkeys(names, (hidden,))


def mixer_parameters(mixer: object, hidden: int) -> dict[str, Shape]:
    """The parameters of `GqaAttention`, `MlaAttention` or `GatedDelta`.

    Raises: UnsupportedModelError for another mixer.
    """
    if isinstance(mixer, GqaSpec):
        return _gqa_parameters(mixer, hidden)
    if isinstance(mixer, MlaSpec):
        return _mla_parameters(mixer, hidden)
    if isinstance(mixer, LinearSpec):
        return _linear_parameters(mixer, hidden)
    raise UnsupportedModelError(
        f"mixer {type(mixer).__name__} is not built; known: GqaSpec, MlaSpec, LinearSpec"
    )


def _gqa_parameters(spec: GqaSpec, hidden: int) -> dict[str, Shape]:
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    q_rows = 2 * query if spec.has_output_gate else query
    found: dict[str, Shape] = {
        "q": (q_rows, hidden),
        "k": (key, hidden),
        "v": (key, hidden),
        "o": (hidden, query),
    }
    if spec.has_qkv_bias:
        found |= {"q_bias": (q_rows,), "k_bias": (key,), "v_bias": (key,)}
    if spec.has_out_bias:
        found["o_bias"] = (hidden,)
    if spec.qk_norm == "head":
        found |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    if spec.qk_norm == "full":
        found |= {"q_norm": (query,), "k_norm": (key,)}
    if spec.has_sinks:
        found["sinks"] = (spec.num_heads,)
    if spec.value_is_key:
        found = {name: shape for name, shape in found.items() if name not in ("v", "v_bias")}
    return found


def _mla_parameters(spec: MlaSpec, hidden: int) -> dict[str, Shape]:
    heads, latent = spec.num_heads, spec.kv_lora_rank
    query = heads * (spec.nope_dim + spec.rope_dim)
    found: dict[str, Shape] = {
        "kv_a": (latent + spec.rope_dim, hidden),
        "kv_a_norm": (latent,),
        "kv_b": (heads * (spec.nope_dim + spec.value_dim), latent),
        "o": (hidden, heads * spec.value_dim),
    }
    if spec.has_bias:
        found |= {"kv_a_bias": (latent + spec.rope_dim,), "o_bias": (hidden,)}
    if spec.q_lora_rank is None:
        return found | {"q": (query, hidden)}
    rank = spec.q_lora_rank
    if spec.has_bias:
        found["q_a_bias"] = (rank,)
    return found | {"q_a": (rank, hidden), "q_a_norm": (rank,), "q_b": (query, rank)}


def _linear_parameters(spec: LinearSpec, hidden: int) -> dict[str, Shape]:
    heads, value = spec.num_value_heads, spec.num_value_heads * spec.value_dim
    found: dict[str, Shape] = {
        "conv": (spec.conv_channels, 1, spec.conv_width),
        "decay_log": (heads,),
        "decay_bias": (heads,),
        "out_norm": (spec.value_dim,),
        "out": (hidden, value),
    }
    if spec.is_fused:
        return found | {"qkvz": (spec.conv_channels + value, hidden), "ba": (2 * heads, hidden)}
    rows = {"qkv": spec.conv_channels, "z": value, "b": heads, "a": heads}
    return found | {name: (count, hidden) for name, count in rows.items()}


def dense_parameters(spec: DenseSpec, hidden: int) -> dict[str, Shape]:
    """The parameters of `DenseBlock`."""
    inner = ("gate", "up") if spec.is_gated else ("up",)
    found: dict[str, Shape] = dict.fromkeys(inner, (spec.width, hidden))
    found["down"] = (hidden, spec.width)
    if spec.has_bias:
        found |= dict.fromkeys([f"{name}_bias" for name in inner], (spec.width,))
        found["down_bias"] = (hidden,)
    if spec.has_output_gate:
        found["output_gate"] = (1, hidden)
    return found


def router_parameters(spec: MoeSpec, hidden: int) -> dict[str, Shape]:
    """The parameters of `Router`."""
    found: dict[str, Shape] = {"weight": (spec.num_experts, hidden)}
    if spec.gate.has_selection_bias:
        found["selection_bias"] = (spec.num_experts,)
    if spec.gate.has_logit_bias:
        found["logit_bias"] = (spec.num_experts,)
    if spec.gate.has_input_norm:
        found["input_scale"] = (hidden,)
    if spec.gate.has_expert_scale:
        found["expert_scale"] = (spec.num_experts,)
    return found
