"""Operators of one layer on one rank: their operations, bytes and time. Where ranks are, `layouts` says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesaic.account.memory import WEIGHT_BITS
from moesaic.account.params import dense_params, expert_params, mixer_params, router_params
from moesaic.cost.load import ExpertShares, busiest_distinct, busiest_rows
from moesaic.cost.profile import Launch, Profile
from moesaic.cost.roofline import compute_dtype, joined, operator
from moesaic.cost.term import CostTerm, Number, TermName
from moesaic.spec.hardware import Machine
from moesaic.spec.model import (
    DenseSpec,
    GqaSpec,
    LayerSpec,
    LinearSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    ModelSpec,
    MoeSpec,
)

ACTIVATION_BYTES = 2  # rows between operators are bfloat16
NARROW_PRODUCTS = ("fp8", "nvfp4", "int8")
"""Formats whose products take rows of the same format: the rows are quantised first, by launches of their
own. With mxfp4 and int4 weights the weights are unpacked instead."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Formats:
    """How things are stored and sent. None: as the checkpoint stores them.

    Units:  bits per number; weights with their share of scales.
    """

    dense: str | None = None  # attention, shared experts, dense feed-forward
    experts: str | None = None
    ends_bits: float = 16.0  # embedding and head
    kv_bits: float = 16.0
    dispatch_bits: float = 16.0
    combine_bits: float = 16.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What one attention replica computes in a step.

    Shapes:  floats, or arrays over candidates.
    """

    num_seqs: Number
    new_tokens: Number  # per sequence: 1 in decode
    past: Number  # positions per sequence that are in the cache already

    @property
    def rows(self) -> Number:
        """Tokens that go through the layers."""
        return self.num_seqs * self.new_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What every operator needs to know beside its layer."""

    model: ModelSpec
    machine: Machine
    profile: Profile
    formats: Formats

    def stored(self, is_expert: bool) -> tuple[str, float]:
        """(format, bits) of a matrix."""
        wanted = self.formats.experts if is_expert else self.formats.dense
        if wanted is not None:
            return wanted, WEIGHT_BITS[wanted]
        stored = self.model.stored_format("routed_experts" if is_expert else "attention")
        return stored.format, stored.bits

    def launches(self, *own: Launch, is_expert: bool = False) -> tuple[Launch, ...]:
        """An operator's launches, and the one that quantises its rows where its weights need that."""
        is_narrow = self.stored(is_expert)[0] in NARROW_PRODUCTS
        return (*own, "quantise") if is_narrow else own


def mixer(layer: LayerSpec, work: Work, tp: Number, kvp: Number, ctx: Context) -> tuple[CostTerm, ...]:
    """Projections and attention: two operators, or one whose products and reads overlap."""
    parts = projections(layer, work, tp, kvp, ctx), attention(layer, work, tp, kvp, ctx)
    return (joined(parts, ctx.profile),) if ctx.profile.joins_mixer else parts


def projections(layer: LayerSpec, work: Work, tp: Number, kvp: Number, ctx: Context) -> CostTerm:
    """Query, key, value and output projections of the mixer; its launches are counted with `attention`."""
    mixer = layer.mixer
    assert mixer is not None
    weights = mixer_weights_per_rank(mixer, ctx.model.hidden, tp, kvp)
    return _linear("attention_projections", weights, work.rows, ctx, ())


def mixer_weights_per_rank(mixer: Mixer, hidden: int, tp: Number, kvp: Number) -> Number:
    """Parameters of the mixer on one rank: tp splits heads, not latents, and KV heads up to their number.

    Ranks that share a context (kvp) repeat what makes queries and keys, and split the output projection.
    """
    total = mixer_params(mixer, hidden)
    if isinstance(mixer, GqaSpec):
        num_kv = 0 if mixer.kv_from is not None else 1 if mixer.value_is_key else 2
        kv = num_kv * hidden * mixer.num_kv_heads * mixer.head_dim
        out = hidden * mixer.num_heads * mixer.head_dim
        return (total - kv - out) / tp + kv / np.minimum(tp, mixer.num_kv_heads) + out / (tp * kvp)
    if isinstance(mixer, MlaSpec):
        whole = hidden * (mixer.kv_lora_rank + mixer.rope_dim + (mixer.q_lora_rank or 0))
        if mixer.index is not None:
            rows = mixer.q_lora_rank or hidden
            whole += rows * mixer.index.num_heads * mixer.index.head_dim + hidden * mixer.index.head_dim
        out = hidden * mixer.num_heads * mixer.value_dim
        return (total - whole - out) / tp + whole + out / (tp * kvp)
    return total / tp


def attention(layer: LayerSpec, work: Work, tp: Number, kvp: Number, ctx: Context) -> CostTerm:
    """Scores and weighted sums over the cache, or the state update."""
    flops = work.num_seqs * context_operations(layer.mixer, work) / (tp * kvp)
    read = work.num_seqs * cache_bytes_read(layer, work, tp, ctx.formats.kv_bits) / kvp
    return operator(
        "attention", flops=flops, num_bytes=read, dtype=ctx.machine.wide_dtype, machine=ctx.machine,
        profile=ctx.profile, kind="attention", launches=ctx.launches(*_mixer_launches(layer.mixer)),
    )  # fmt: skip


def _mixer_launches(mixer: Mixer | None) -> tuple[Launch, ...]:
    if isinstance(mixer, MlaSpec):
        return ("mla",) if mixer.index is None else ("mla", "index")
    if isinstance(mixer, LinearSpec):
        return ("linear",)
    return ("mamba",) if isinstance(mixer, MambaSpec) else ("gqa",)


def context_operations(mixer: Mixer | None, work: Work) -> Number:
    """Operations of one sequence's new tokens over its context.

    Source: as `account/flops.context_flops`, summed over the new tokens; latent attention is absorbed in
    decode and plain in prefill, where each head has keys and values of its own (DeepSeek-V2,
    arXiv:2405.04434, sec. 2.1).
    """
    new = np.asarray(work.new_tokens, np.float64)
    if isinstance(mixer, GqaSpec):
        return 4.0 * mixer.num_heads * mixer.head_dim * _seen(work, mixer.window)
    if isinstance(mixer, MlaSpec):
        absorbed = 2 * mixer.kv_lora_rank + mixer.rope_dim
        plain = mixer.nope_dim + mixer.rope_dim + mixer.value_dim
        width = np.where(new > 1, plain, absorbed)
        if mixer.index is None:
            return 2.0 * mixer.num_heads * width * _seen(work, None)
        scored = 2.0 * mixer.index.num_heads * mixer.index.head_dim * _seen(work, None)
        return 2.0 * mixer.num_heads * absorbed * _seen(work, mixer.index.top_k) + scored
    if isinstance(mixer, LinearSpec):
        return 7.0 * mixer.num_value_heads * mixer.key_dim * mixer.value_dim * new
    if isinstance(mixer, MambaSpec):
        return 5.0 * mixer.num_heads * mixer.head_dim * mixer.state_dim * new
    return 0.0 * new


def _seen(work: Work, bend: int | None) -> Number:
    """Positions seen, summed over the new tokens: past + 1, past + 2, ..., each at most `bend`."""
    new, past = np.asarray(work.new_tokens, np.float64), np.asarray(work.past, np.float64)
    every = new * past + new * (new + 1) / 2
    if bend is None:
        return every
    free = np.clip(bend - past, 0, new)  # tokens before the bend
    return free * past + free * (free + 1) / 2 + (new - free) * bend


def cache_bytes_read(layer: LayerSpec, work: Work, tp: Number, kv_bits: float) -> Number:
    """Bytes of one sequence's cache that a step reads on one of `tp` ranks: a latent is on each of them."""
    mixer = layer.mixer
    context = np.asarray(work.past, np.float64) + work.new_tokens
    total: Number = 0.0 * context
    for cache in () if mixer is None else mixer.caches("bfloat16"):
        seen = context if cache.window is None else np.minimum(context, cache.window)
        if isinstance(mixer, MlaSpec) and mixer.index is not None:
            index = mixer.index.head_dim * 2
            picked = np.minimum(context, mixer.index.top_k * np.asarray(work.new_tokens, np.float64))
            total = total + index * context + (cache.bytes_per_token - index) * picked
            continue
        total = (
            total + cache.bytes_per_token * seen + 2 * cache.bytes_per_sequence
        )  # a state is read and written
    return total * kv_bits / 16 / cache_split(mixer, tp)


def cache_split(mixer: Mixer | None, tp: Number) -> Number:
    """Ranks that the cache of a sequence is divided over: KV heads at most, a latent never."""
    if isinstance(mixer, GqaSpec):
        return np.minimum(tp, mixer.num_kv_heads)
    return 1.0 if isinstance(mixer, MlaSpec) else tp


def experts(
    moe: MoeSpec, own_rows: Number, tokens: Number, ep: Number, expert_tp: Number, num_redundant: Number, ctx:
    Context, shares: ExpertShares, moe_idx: int, ) -> CostTerm:  # fmt: skip
    """The gate, and the routed experts of the busiest rank: its rows, each distinct expert that it reads.

    Units:  own_rows are the tokens that the rank has, tokens those of the whole expert group.
    """
    name, bits = ctx.stored(is_expert=True)
    one = expert_params(moe) / expert_tp
    rows = busiest_rows(tokens * moe.experts_per_token, ep, shares, moe_idx, num_redundant)
    distinct = busiest_distinct(tokens, moe.experts_per_token, moe.num_experts, ep, shares, moe_idx)
    distinct = distinct * (1.0 + np.asarray(num_redundant, np.float64) / moe.num_experts)
    gate = router_params(moe, ctx.model.hidden)
    moved = rows * ACTIVATION_BYTES * (2 * moe.row_width + 3 * moe.expert_width / expert_tp)
    return operator(
        "experts", flops=2.0 * (rows * one + own_rows * gate),
        num_bytes=distinct * one * bits / 8 + (moved + 2.0 * gate) * ctx.profile.counts_all,
        dtype=compute_dtype(name, ctx.machine), machine=ctx.machine, profile=ctx.profile,
        kind="experts", launches=ctx.launches("experts", is_expert=True),
        rows=rows / np.maximum(distinct, 1e-9),
    )  # fmt: skip


def dense(
    name: Literal["shared_experts", "dense_ffn"], ffn: DenseSpec, rows: Number, split: Number, ctx: Context
) -> CostTerm:
    """A dense network, or the shared experts, on one of `split` ranks."""
    weights = dense_params(ffn, ctx.model.hidden) / split
    return _linear(name, weights, rows, ctx, ctx.launches(name))


def head(rows: Number, split: Number, ctx: Context) -> CostTerm:
    """Logits of the last row of each sequence."""
    weights = ctx.model.vocab * ctx.model.hidden / split
    return operator(
        "head", flops=2.0 * rows * weights, num_bytes=2.0 * weights + 4.0 * rows * ctx.model.vocab / split,
        dtype=ctx.machine.wide_dtype, machine=ctx.machine, profile=ctx.profile, launches=("head",),
    )  # fmt: skip


def _linear(
    name: TermName, weights: Number, rows: Number, ctx: Context, launches: Sequence[Launch]
) -> CostTerm:
    stored, bits = ctx.stored(is_expert=False)
    moved = rows * 2 * ctx.model.hidden * ACTIVATION_BYTES * ctx.profile.counts_all
    return operator(
        name, flops=2.0 * rows * weights, num_bytes=weights * bits / 8 + moved,
        dtype=compute_dtype(stored, ctx.machine),
        machine=ctx.machine, profile=ctx.profile, launches=launches,
    )  # fmt: skip
