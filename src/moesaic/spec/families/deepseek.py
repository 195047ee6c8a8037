"""Families with latent attention: DeepSeek V2, V3, V3.2, Kimi K2, GLM-5 and GLM-4.7-Flash (glm4_moe_lite)."""

from __future__ import annotations

from moesaic.spec.families.keys import Keys
from moesaic.spec.families.parts import (
    Source,
    assemble,
    choose_ffn,
    num_layers,
    read_dense,
    read_heads,
    read_moe,
    read_shared,
    read_sigmoid_gate,
    sparse_after,
)
from moesaic.spec.families.rope import read_rope, softmax_mscale
from moesaic.spec.model import GateSpec, IndexSpec, LayerSpec, MlaSpec, ModelSpec

_INDEX_TYPES = {"full": "full", "shared": "shared"}


def read_deepseek_v2(source: Source) -> ModelSpec:
    """Softmax gate, limited to the best groups when `topk_method` says so; never renormalised.

    The reference code of this family reads no `norm_topk_prob`, and rotates pairs of neighbours.
    """
    keys = source.keys
    mixer = read_mla(keys, is_interleaved=True)
    return _read(source, _softmax_gate(keys), mixer, has_mlp_bias=keys.flag("mlp_bias"))


def read_deepseek_v3(source: Source) -> ModelSpec:
    """Sigmoid gate with a selection bias and groups. Kimi K2 is this family under another name."""
    keys = source.keys
    reasons = []
    if keys.text_or_none("scoring_func", ("sigmoid", "softmax")) == "softmax":
        reasons.append("softmax scores under model_type deepseek_v3 are not run; sigmoid ones are")
    gate = read_sigmoid_gate(keys)
    if reasons:
        gate = GateSpec(score="softmax", is_renormalised=gate.is_renormalised, scale=gate.scale)
    method = keys.text_or_none("topk_method", ("noaux_tc", "greedy", "group_limited_greedy"))
    if method not in (None, "noaux_tc"):
        reasons.append(f"topk_method {method} under model_type deepseek_v3 is not run; noaux_tc is")
    mixer = read_mla(keys, is_interleaved=keys.flag("rope_interleave"))
    return _read(source, gate, mixer, reasons=reasons)


def read_deepseek_v32(source: Source) -> ModelSpec:
    """DeepSeek V3 with an index on every layer that scores which tokens a query attends to."""
    keys = source.keys
    return _read(source, read_sigmoid_gate(keys), read_mla(keys, is_interleaved=True, index=read_index(keys)))


def read_glm_moe_dsa(source: Source) -> ModelSpec:
    """GLM-5: DeepSeek V3.2's layers; in 5.2 some layers reuse the index of the last one that has its own."""
    keys = source.keys
    count = num_layers(keys)
    full = read_mla(keys, is_interleaved=True, index=read_index(keys))
    shared = read_mla(keys, is_interleaved=True, index=None)
    kinds = keys.names_or_none("indexer_types", _INDEX_TYPES, length=count) or _index_types(keys, count)
    mixers: list[MlaSpec] = []
    index_from: list[int | None] = []
    last_full: int | None = None
    for layer_idx, kind in enumerate(kinds):
        if kind == "full":
            last_full = layer_idx
        elif last_full is None:
            raise keys.fault(
                f"indexer_types[{layer_idx}]", kind, "full on the first layer: none comes before it"
            )
        mixers.append(full if kind == "full" else shared)
        index_from.append(None if kind == "full" else last_full)
    return _read(source, read_sigmoid_gate(keys), full, mixers=mixers, index_from=index_from)


def read_glm4_moe_lite(source: Source) -> ModelSpec:
    """DeepSeek V3's layers in GLM's sizes."""
    keys = source.keys
    mixer = read_mla(keys, is_interleaved=keys.flag("rope_interleave"))
    return _read(source, read_sigmoid_gate(keys), mixer)


def read_mla(keys: Keys, *, is_interleaved: bool, index: IndexSpec | None = None) -> MlaSpec:
    """Latent attention; its softmax scale includes yarn's factor."""
    hidden = keys.whole("hidden_size")
    nope_dim, rope_dim = keys.whole("qk_nope_head_dim"), keys.whole("qk_rope_head_dim")
    heads = read_heads(
        Keys(
            {**keys.config, "head_dim": rope_dim},
            where=keys.where,
            prefix=keys.prefix,
            defaults=keys.defaults,
        ),
        hidden=hidden,
    )
    rope = read_rope(
        keys,
        head_dim=rope_dim,
        max_position=keys.whole("max_position_embeddings"),
        is_interleaved=is_interleaved,
    )
    return MlaSpec(
        num_heads=heads.num_heads,
        q_lora_rank=keys.whole_or_none("q_lora_rank"),
        kv_lora_rank=keys.whole("kv_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=keys.whole("v_head_dim"),
        rope=rope,
        softmax_scale=(nope_dim + rope_dim) ** -0.5 * softmax_mscale(rope),
        has_bias=keys.flag("attention_bias"),
        index=index,
    )


def read_index(keys: Keys) -> IndexSpec:
    """The sizes of a sparse-attention index."""
    return IndexSpec(
        num_heads=keys.whole("index_n_heads"),
        head_dim=keys.whole("index_head_dim"),
        top_k=keys.whole("index_topk"),
    )


def _softmax_gate(keys: Keys) -> GateSpec:
    method = keys.text_or_none("topk_method", ("greedy", "group_limited_greedy")) or "greedy"
    scale = keys.number_or_none("routed_scaling_factor")
    is_limited = method == "group_limited_greedy"
    num_groups = keys.whole("n_group") if is_limited else 1
    groups_per_token = keys.whole("topk_group") if is_limited else 1
    if groups_per_token > num_groups:
        raise keys.fault("topk_group", groups_per_token, f"at most {keys.path('n_group')} ({num_groups})")
    return GateSpec(
        score="softmax",
        is_renormalised=False,
        scale=1.0 if scale is None else scale,
        num_groups=num_groups,
        groups_per_token=groups_per_token,
        group_score="max",
    )


def _index_types(keys: Keys, count: int) -> tuple[str, ...]:
    """`index_topk_pattern` (F and S), else every `index_topk_freq`-th layer from the offset on."""
    pattern = keys.value("index_topk_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or len(pattern) != count or set(pattern) - {"F", "S"}:
            raise keys.fault("index_topk_pattern", pattern, f"{count} letters, each F or S")
        return tuple("full" if letter == "F" else "shared" for letter in pattern)
    frequency = keys.whole("index_topk_freq", low=0, high=10_000) or 1
    offset = keys.whole("index_skip_topk_offset", low=0, high=10_000)
    return tuple("full" if max(i - offset + 1, 0) % frequency == 0 else "shared" for i in range(count))


def _read(
    source: Source,
    gate: GateSpec,
    mixer: MlaSpec,
    *,
    has_mlp_bias: bool = False,  # of dense layers and shared experts
    reasons: list[str] | None = None,
    mixers: list[MlaSpec] | None = None,
    index_from: list[int | None] | None = None,
) -> ModelSpec:
    keys = source.keys
    hidden, count = keys.whole("hidden_size"), num_layers(keys)
    halves = choose_ffn(
        sparse_after(keys, count),
        lambda: read_moe(
            keys,
            hidden=hidden,
            gate=gate,
            shared=read_shared(keys, has_bias=has_mlp_bias),
            experts_key="n_routed_experts",
        ),
        lambda: read_dense(keys, has_bias=has_mlp_bias),
    )
    layers = [
        LayerSpec(
            mixer=mixers[i] if mixers else mixer, ffn=ffn, index_from=index_from[i] if index_from else None
        )
        for i, ffn in enumerate(halves)
    ]
    num_mtp = keys.whole_or_none("num_nextn_predict_layers", low=0, high=64) or 0
    return assemble(
        source,
        layers,
        reasons=reasons or (),
        mtp_layers=(LayerSpec(mixer=mixer, ffn=halves[-1]),) * num_mtp,
        other_params=(("vision tower", None),) if source.outer.has("vision_config") else (),
    )
