"""What most families share: heads, networks, gates, which layers are sparse, and the final assembly.

Key names that several families use are read here; what only one family has is read in its own file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from moesaic.errors import ConfigError
from moesaic.spec.families.keys import MAX_WHOLE, Keys, divide, shorten
from moesaic.spec.families.quantised import plain_format, read_stored
from moesaic.spec.families.rope import read_rope
from moesaic.spec.model import (
    COMPONENTS,
    STORED_AS,
    Activation,
    DenseSpec,
    GateSpec,
    GqaSpec,
    LayerSpec,
    ModelSpec,
    MoeSpec,
    RopeSpec,
    StoredFormat,
)
from moesaic.spec.numerics import DTYPE_BYTES

MAX_LAYERS = 10_000
MAX_EXPERTS = 1_000_000
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
WEIGHT_SIZES = (
    "hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "kv_lora_rank",
    "q_lora_rank", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim",
)  # fmt: skip
"""Sizes that shapes of weights follow from."""
SIZES = (*WEIGHT_SIZES, "num_experts_per_tok", "max_position_embeddings", "sliding_window")
RATES = ("rope_theta", "partial_rotary_factor", "routed_scaling_factor")
"""Checked wherever they stand, so that a damaged number is found even where its family does not use it."""
RUN_ROPES = ("linear", "yarn", "llama3", "longrope", "proportional")
"""Frequency scalings that the engine runs; dynamic ones follow the length of the sequence."""

RUN_METHODS: Mapping[tuple[str, str], tuple[str, ...]] = {("gpt_oss", "mxfp4"): ("mxfp4",)}
"""Formats that are decoded while a family's checkpoint is read, by the method that wrote them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A config opened for a reader: the text model's keys, the file's outermost keys, and who asks."""

    keys: Keys  # of the text model: text_config where there is one
    outer: Keys
    model_type: str  # as the file's outermost model_type says
    family: str
    reader: Literal["exact", "generic"]


class Heads(NamedTuple):
    """Attention heads of a layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def check_sizes(keys: Keys) -> None:
    """Whether the usual sizes and rates are numbers that can be.

    Raises: ConfigError for the first that is not.
    """
    for key in SIZES:
        if key in keys.config:
            keys.whole_or_none(key, low=0)
    for key in RATES:
        if key in keys.config:
            keys.number_or_none(key, low=0.0, is_open=True)


def read_heads(keys: Keys, *, hidden: int, may_floor: bool = False) -> Heads:
    """Query heads, KV heads and head width; an absent width is hidden / heads, rounded down if `may_floor`.

    Raises: ConfigError when KV heads do not divide heads, or heads do not divide hidden where they must.
    """
    num_heads = keys.whole("num_attention_heads", high=65_536)
    num_kv_heads = keys.whole_or_none("num_key_value_heads", high=65_536) or num_heads
    divide(keys, "num_attention_heads", num_heads, "num_key_value_heads", num_kv_heads)
    head_dim = keys.whole_or_none("head_dim", high=65_536)
    if head_dim is None and may_floor:
        head_dim = max(hidden // num_heads, 1)
    elif head_dim is None:
        head_dim = divide(keys, "hidden_size", hidden, "num_attention_heads", num_heads)
    return Heads(num_heads, num_kv_heads, head_dim)


def read_gqa(
    keys: Keys,
    *,
    hidden: int,
    max_position: int,
    rope: RopeSpec | Literal["read"] | None = "read",
    is_interleaved: bool = False,
    may_floor: bool = False,
    **facts: Any,
) -> GqaSpec:
    """Grouped-query attention by the usual keys; `facts` are fields of `GqaSpec` that the family sets."""
    heads = read_heads(keys, hidden=hidden, may_floor=may_floor)
    if rope == "read":
        rope = read_rope(
            keys, head_dim=heads.head_dim, max_position=max_position, is_interleaved=is_interleaved
        )
    facts.setdefault("softmax_scale", heads.head_dim**-0.5)
    return GqaSpec(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rope=rope,
        **facts,
    )


def read_activation(keys: Keys, key: str = "hidden_act") -> Activation:
    """The activation; absent means silu."""
    name = keys.text_or_none(key)
    if name is not None and name not in ACTIVATIONS:
        # A name that is near is another function, not this one misspelt: none is suggested.
        raise ConfigError(
            f"{keys.where}: {keys.path(key)} is {shorten(name)}, which this version does not compute; it "
            f"computes {', '.join(sorted(ACTIVATIONS))}"
        )
    return "silu" if name is None else ACTIVATIONS[name]


def read_dense(keys: Keys, key: str = "intermediate_size", **facts: Any) -> DenseSpec:
    """A dense feed-forward network of the width under `key`."""
    facts.setdefault("activation", read_activation(keys))
    return DenseSpec(width=keys.whole(key), **facts)


def read_moe(
    keys: Keys,
    *,
    hidden: int,
    gate: GateSpec,
    shared: DenseSpec | None = None,
    experts_key: str,
    chosen_key: str = "num_experts_per_tok",
    width_key: str = "moe_intermediate_size",
    **facts: Any,
) -> MoeSpec:
    """Routed experts of the sizes under three keys.

    Raises: ConfigError when more experts are chosen than there are, or groups do not divide them.
    """
    num_experts = keys.whole(experts_key, high=MAX_EXPERTS)
    experts_per_token = keys.whole(chosen_key, high=MAX_EXPERTS)
    if experts_per_token > num_experts:
        raise keys.fault(chosen_key, experts_per_token, f"at most {keys.path(experts_key)} ({num_experts})")
    if gate.num_groups > 1:
        size = divide(keys, experts_key, num_experts, "n_group", gate.num_groups)
        if gate.group_score == "top2_sum" and size < 2:
            raise keys.fault(
                "n_group", gate.num_groups, f"at most half of {num_experts}: a group's two best count"
            )
        if gate.groups_per_token * size < experts_per_token:
            raise ConfigError(
                f"{keys.where}: {gate.groups_per_token} groups of {size} experts hold fewer than the "
                f"{experts_per_token} that {keys.path(chosen_key)} asks for"
            )
    facts.setdefault("activation", read_activation(keys))
    return MoeSpec(
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        expert_width=keys.whole(width_key),
        gate=gate,
        shared=shared,
        row_width=facts.pop("row_width", hidden),
        **facts,
    )


def read_sigmoid_gate(keys: Keys) -> GateSpec:
    """DeepSeek-V3's gate: sigmoid scores, a bias for the choice only, groups by their two best.

    Source: DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2; the 1e-20 is the reference code's.
    """
    num_groups = keys.whole_or_none("n_group") or 1
    groups_per_token = keys.whole_or_none("topk_group") or num_groups
    if groups_per_token > num_groups:
        raise keys.fault("topk_group", groups_per_token, f"at most {keys.path('n_group')} ({num_groups})")
    scale = keys.number_or_none("routed_scaling_factor")
    return GateSpec(
        score="sigmoid",
        is_renormalised=keys.flag("norm_topk_prob"),
        scale=1.0 if scale is None else scale,
        has_selection_bias=True,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        group_score="top2_sum",
        renormalise_epsilon=1e-20,
    )


def read_shared(keys: Keys, *, width_key: str = "moe_intermediate_size", **facts: Any) -> DenseSpec | None:
    """`n_shared_experts` experts run as one network of their joint width; none when it is 0 or absent."""
    count = keys.whole_or_none("n_shared_experts", low=0, high=MAX_EXPERTS)
    if not count:
        return None
    facts.setdefault("activation", read_activation(keys))
    return DenseSpec(width=count * keys.whole(width_key), **facts)


def num_layers(keys: Keys, key: str = "num_hidden_layers") -> int:
    """How many layers there are."""
    return keys.whole(key, high=MAX_LAYERS)


def sparse_by_step(keys: Keys, count: int, experts_key: str) -> tuple[bool, ...]:
    """Which layers are sparse under Qwen's keys.

    `mlp_only_layers` comes first: a layer it names is dense. Of the others those are sparse whose number,
    counted from 1, is a multiple of `decoder_sparse_step`, when there are experts at all.
    """
    dense = keys.indexes("mlp_only_layers", end=count) or ()
    step = keys.whole("decoder_sparse_step", high=MAX_LAYERS)
    has_experts = keys.whole(experts_key, low=0, high=MAX_EXPERTS) > 0
    return tuple(has_experts and i not in dense and (i + 1) % step == 0 for i in range(count))


def sparse_after(keys: Keys, count: int) -> tuple[bool, ...]:
    """Which layers are sparse under DeepSeek's keys.

    `mlp_layer_types` names each layer and comes first; else the first `first_k_dense_replace` are dense, and
    of the others those whose index is a multiple of `moe_layer_freq` are sparse.

    Raises: ConfigError when both are in the file and disagree.
    """
    first = keys.whole_or_none("first_k_dense_replace", low=0, high=MAX_LAYERS) or 0
    frequency = keys.whole_or_none("moe_layer_freq", high=MAX_LAYERS) or 1
    by_count = tuple(i >= first and i % frequency == 0 for i in range(count))
    names = keys.names_or_none("mlp_layer_types", {"dense": "dense", "sparse": "sparse"}, length=count)
    if names is None:
        return by_count
    by_name = tuple(name == "sparse" for name in names)
    if keys.has("first_k_dense_replace") and by_name != by_count:
        layer_idx = next(i for i in range(count) if by_name[i] != by_count[i])
        raise ConfigError(
            f"{keys.where}: {keys.path('mlp_layer_types')}[{layer_idx}] is {names[layer_idx]}, but "
            f"{keys.path('first_k_dense_replace')} ({first}) makes layer {layer_idx} "
            f"{'sparse' if by_count[layer_idx] else 'dense'}"
        )
    return by_name


def choose_ffn(
    is_sparse: Sequence[bool], moe: Callable[[], MoeSpec], dense: Callable[[], DenseSpec]
) -> list[DenseSpec | MoeSpec]:
    """The feed-forward half of every layer; a kind that no layer has is never read."""
    moe_spec = moe() if any(is_sparse) else None
    dense_spec = None if all(is_sparse) and is_sparse else dense()
    halves = (moe_spec if sparse else dense_spec for sparse in is_sparse)
    return [half for half in halves if half is not None]


def read_token_ids(source: Source, key: str) -> tuple[int, ...]:
    """Token ids under a key that holds one, a list, or null; the text model's own before the outer file's."""
    keys = source.keys if source.keys.has(key) or not source.outer.has(key) else source.outer
    value = keys.value(key)
    items = value if isinstance(value, list) else [] if value is None else [value]
    for item in items:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_WHOLE:
            raise keys.fault(key, item, "a token id (a whole number, 0 or above), a list of them, or null")
    return tuple(items)


def assemble(
    source: Source,
    layers: Sequence[LayerSpec],
    *,
    reasons: Sequence[str] = (),
    eps_key: str = "rms_norm_eps",
    position_key: str = "max_position_embeddings",
    hidden_key: str = "hidden_size",
    **facts: Any,
) -> ModelSpec:
    """The whole model from its layers; adds what the engine lacks for it to `reasons`."""
    keys, layers = source.keys, tuple(layers)
    names = (keys,) if keys.config is source.outer.config else (keys, source.outer)
    plain = plain_format(keys, names)
    blocks = (one.below("quantization_config") for one in reversed(names))
    quant = next((block for block in blocks if block is not None and block.config), None)
    stored = read_stored(keys, quant, layers, plain)
    if plain.format not in DTYPE_BYTES:
        covered = {one.component for one in stored}
        rest = (c for c in COMPONENTS if c not in covered)
        stored += tuple(StoredFormat(component=c, format=plain.format, bits=plain.bits) for c in rest)
    formats: dict[str, str] = {one.component: one.format for one in stored}
    main = "routed_experts" if any(isinstance(layer.ffn, MoeSpec) for layer in layers) else "dense_ffn"
    tied = source.outer if source.outer.has("tie_word_embeddings") else keys
    bos = read_token_ids(source, "bos_token_id")
    spec = ModelSpec(
        model_type=source.model_type,
        family=source.family,
        reader=source.reader,
        hidden=keys.whole(hidden_key),
        vocab=keys.whole("vocab_size"),
        layers=layers,
        norm_eps=keys.number(eps_key, low=0.0, high=1.0),
        max_position=keys.whole(position_key),
        dtype="bfloat16" if plain.format == "bfloat16" else "float32",
        has_tied_head=facts.pop("has_tied_head", tied.flag("tie_word_embeddings")),
        weight_format=formats.get(main, plain.format),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=read_token_ids(source, "eos_token_id"),
        stored=stored,
        **facts,
    )
    method = None if quant is None else quant.text_or_none("quant_method")
    return replace(spec, runnable_reasons=(*reasons, *_lacking(spec, method)))


def _lacking(spec: ModelSpec, quant_method: str | None) -> tuple[str, ...]:
    """Features of a spec, whatever its family, that the engine does not run."""
    reasons = []
    decoded = RUN_METHODS.get((spec.family, quant_method or ""), ())
    formats = sorted({one.format for one in spec.stored} - {"float16", *decoded})
    if formats:
        reasons.append(
            f"{STORED_AS} {', '.join(formats)} are not run yet; float32, bfloat16 and float16 ones "
            "are, and gpt-oss' mxfp4 experts"
        )
    ropes = [getattr(layer.mixer, "rope", None) for layer in spec.layers]
    kinds = {rope.scaling.kind for rope in ropes if rope is not None and rope.scaling is not None}
    reasons += [f"rope scaling {kind} is not run yet" for kind in sorted(kinds - set(RUN_ROPES))]
    return tuple(reasons)
