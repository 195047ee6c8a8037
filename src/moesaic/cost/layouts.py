"""The step of a layout: every operator and transfer of the slowest rank, and the memory of a rank.

One walk prices one layout or an array of them. Which layouts are worth pricing is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from moesaic.account.memory import WEIGHT_BITS, expert_bytes
from moesaic.account.params import dense_params, norm_params, router_params
from moesaic.cost import comm, ops
from moesaic.cost.load import ExpertShares, assumed_shares, busiest_rows
from moesaic.cost.offload import Offload
from moesaic.cost.ops import ACTIVATION_BYTES, Context, Formats, Work
from moesaic.cost.profile import Profile
from moesaic.cost.roofline import host
from moesaic.cost.term import Cost, CostTerm, Number, Par, Repeat, Seq, TermName
from moesaic.errors import ConfigError
from moesaic.spec.deployment import Layout
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import DenseSpec, GqaSpec, LayerSpec, Mixer, MlaSpec, ModelSpec, MoeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Over how many ranks what is split; dp * kvp * tp = ep * expert_tp ranks a pipeline stage.

    dp attention replicas of kvp * tp ranks each have their own sequences; the experts are spread over all of
    them.

    Shapes:  numbers, or arrays over candidates; `num_micro_batches` is one number for all of them.
    """

    tp: Number = 1
    dp: Number = 1
    kvp: Number = 1
    ep: Number = 1
    expert_tp: Number = 1
    pp: Number = 1
    num_redundant: Number = 0  # further expert slots, over all ranks
    num_offloaded: Number = 0  # experts of each sparse layer outside the devices: the coldest
    num_micro_batches: int = 1
    overlaps_requests: bool = (
        False  # the exchange of one request hides behind the attention of the next (HOP-B)
    )

    def __post_init__(self) -> None:
        attention = np.asarray(self.dp) * np.asarray(self.kvp) * np.asarray(self.tp)
        experts = np.asarray(self.ep) * np.asarray(self.expert_tp)
        if np.any(attention != experts):
            raise ConfigError(
                f"attention has dp x kvp x tp = {attention} ranks, experts have ep x tp = {experts}; "
                "both must be the same ranks"
            )
        if self.num_micro_batches not in (1, 2):
            raise ConfigError(f"one or two micro-batches share the ranks, not {self.num_micro_batches}")

    @property
    def ranks(self) -> Number:
        """Ranks of a stage."""
        return np.asarray(self.ep, np.float64) * self.expert_tp


def split_of(layout: Layout, num_redundant: int = 0) -> Split:
    """The numbers of a colocated layout of a deployment.

    Raises: ConfigError for experts on ranks of their own, which `two_sided` prices.
    """
    if layout.is_split:
        raise ConfigError(
            "attention and experts on different ranks are not one step; see moesaic.cost.two_sided"
        )
    size = layout.attention.size
    return Split(
        tp=size("tp"), dp=size("dp"), kvp=size("kvp"), ep=layout.experts.size("ep"),
        expert_tp=layout.experts.size("tp"), pp=layout.pipeline, num_redundant=num_redundant,
        num_micro_batches=layout.num_micro_batches,
    )  # fmt: skip


def step_cost(
    model: ModelSpec,
    cluster: Cluster,
    split: Split,
    work: Work,
    *,
    profile: Profile,
    formats: Formats | None = None,
    shares: ExpertShares | None = None,
) -> Cost:
    """What one step of `work` per attention replica costs on the slowest rank.

    Decode is `Work(num_seqs=batch per replica, new_tokens=1, past=context)`, prefill
    `Work(num_seqs=1, new_tokens=prompt, past=0)`. Without `shares` experts are as popular as the profile
    assumes. With a pipeline the step is a token's way through all stages, each of which works on
    num_seqs / pp sequences.

    Raises: ConfigError when the machine's file lacks a number that the layout needs.
    """
    formats, shares = formats or Formats(), shares or assumed_shares(model, profile.skew)
    ctx = Context(model=model, machine=cluster.machine, profile=profile, formats=formats)
    half = replace(work, num_seqs=np.asarray(work.num_seqs, np.float64) / split.pp / split.num_micro_batches)
    walk = _Walk(cluster=cluster, split=split, work=half, ctx=ctx, shares=shares)
    parts: list[Cost] = []
    for times, moe_idx, layer in layer_kinds(model, shares):
        parts.append(Repeat(float(times), walk.layer(layer, moe_idx)))
    if profile.counts_all:
        parts.append(Repeat(float(split.num_micro_batches), walk.head()))
    parts.append(Repeat(np.asarray(split.pp, np.float64) - 1, walk.stage()))
    if profile.step_s:
        parts.append(host(profile.step_s, profile))
    return Seq(tuple(parts))


def layer_kinds(model: ModelSpec, shares: ExpertShares) -> list[tuple[int, int, LayerSpec]]:
    """(how many, index among sparse layers, layer) of layers that cost the same."""
    kinds: dict[tuple[object, object, int], tuple[int, int, LayerSpec]] = {}
    moe_idx = -1
    has_own = shares.shares is not None and len(shares.shares) > 1
    for layer in model.layers:
        moe_idx += isinstance(layer.ffn, MoeSpec)
        own = id(shares.of_layer(moe_idx)) if has_own and isinstance(layer.ffn, MoeSpec) else 0
        key = (layer.mixer, layer.ffn, own)
        times, first_idx, first = kinds.get(key, (0, max(moe_idx, 0), layer))
        kinds[key] = times + 1, first_idx, first
    return list(kinds.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Walk:
    cluster: Cluster
    split: Split
    work: Work
    ctx: Context
    shares: ExpertShares

    def layer(self, layer: LayerSpec, moe_idx: int) -> Cost:
        """One layer; with two micro-batches the transfers of one hide behind the other's operators."""
        mixer, split = layer.mixer, self.split
        compute: list[Cost] = []
        before: list[CostTerm] = []
        exchange: list[CostTerm] = []
        if mixer is not None:
            compute += ops.mixer(layer, self.work, split.tp, split.kvp, self.ctx)
            before.append(self._kv_exchange(mixer))
            before.append(self._all_reduce("attention_all_reduce", self._attention_ranks()))
        if isinstance(layer.ffn, DenseSpec):
            compute.append(
                ops.dense("dense_ffn", layer.ffn, self.work.rows, self._attention_ranks(), self.ctx)
            )
            before.append(self._all_reduce("ffn_all_reduce", self._attention_ranks()))
        if isinstance(layer.ffn, MoeSpec):
            moe = layer.ffn
            compute += self._experts(moe, moe_idx)
            exchange += self._exchange(moe, moe_idx)
        if split.num_micro_batches == 1:
            return Seq((*compute, *before, *exchange))
        if exchange:
            return Par((Repeat(2.0, Seq((*compute, *before))), Repeat(2.0, Seq(tuple(exchange)))))
        return Repeat(2.0, Seq((*compute, *before)))

    def _experts(self, moe: MoeSpec, moe_idx: int) -> tuple[Cost, ...]:
        """Routed and shared experts; those outside the devices work beside the others."""
        split, rows = self.split, self.work.rows
        routed = ops.experts(
            moe, rows, rows * split.dp, split.ep, split.expert_tp, split.num_redundant, self.ctx, self.shares,
            moe_idx,
        )  # fmt: skip
        shared: tuple[Cost, ...] = ()
        if moe.shared is not None:
            shared = (ops.dense("shared_experts", moe.shared, rows, self._attention_ranks(), self.ctx),)
        if not np.any(split.num_offloaded):
            return routed, *shared
        elsewhere = Offload(
            model=self.ctx.model, cluster=self.cluster, expert_format=self.ctx.formats.experts,
            profile=self.ctx.profile, shares=self.shares, num_offloaded=split.num_offloaded,
            devices=split.ranks * split.pp,
        )  # fmt: skip
        return (elsewhere.layer(routed, shared, moe, moe_idx, rows * split.dp),)

    def head(self) -> Cost:
        """Logits of the sequences of a replica, split over its ranks, and the rows of the embedding."""
        rows = self.work.num_seqs
        term = ops.head(rows, self._attention_ranks(), self.ctx)
        gather = comm.all_gather(
            "head", num_bytes=rows * self.ctx.model.vocab * ACTIVATION_BYTES, ranks=self._attention_ranks(),
            cluster=self.cluster, profile=self.ctx.profile,
        )  # fmt: skip
        return Seq((term, gather))

    def stage(self) -> CostTerm:
        """Rows of one micro-batch to the next pipeline stage."""
        return comm.point_to_point(
            "pipeline_send", num_bytes=self.work.rows * self._row_bytes() * (np.asarray(self.split.pp) > 1),
            is_far=np.asarray(self.split.pp) * self.split.ranks > self.cluster.link_domain,
            cluster=self.cluster, profile=self.ctx.profile,
        )  # fmt: skip

    def _attention_ranks(self) -> Number:
        return np.asarray(self.split.tp, np.float64) * self.split.kvp

    def _row_bytes(self) -> float:
        return float(self.ctx.model.hidden * ACTIVATION_BYTES)

    def _all_reduce(self, name: TermName, ranks: Number) -> CostTerm:
        return comm.all_reduce(
            name, num_bytes=self.work.rows * self._row_bytes(), ranks=ranks, cluster=self.cluster,
            profile=self.ctx.profile,
        )  # fmt: skip

    def _kv_exchange(self, mixer: Mixer) -> CostTerm:
        """Partial outputs and their log-sum-exp between ranks that share a context; not with its length."""
        kvp = np.asarray(self.split.kvp, np.float64)
        width, heads = (
            (
                mixer.num_heads * (mixer.kv_lora_rank if isinstance(mixer, MlaSpec) else mixer.head_dim),
                mixer.num_heads,
            )
            if isinstance(mixer, GqaSpec | MlaSpec)
            else (0, 0)
        )
        sent = self.work.rows * (width * ACTIVATION_BYTES + heads * 4) / self.split.tp * (kvp - 1) / kvp
        is_far = self._attention_ranks() > self.cluster.link_domain
        term = comm.all_to_all(
            "kv_exchange", near_bytes=sent * ~is_far, far_bytes=sent * is_far,
            ranks=np.where(kvp > 1, self._attention_ranks(), 1.0), cluster=self.cluster,
            profile=self.ctx.profile,
        )  # fmt: skip
        hidden = 1.0 / np.maximum(self.work.rows, 1.0) if self.split.overlaps_requests else 1.0
        return replace(term, seconds=term.seconds.times(hidden))

    def _exchange(self, moe: MoeSpec, moe_idx: int) -> list[CostTerm]:
        """How rows reach the experts and come back.

        One replica: every rank has every row, and one all-reduce adds the parts. Several replicas and experts
        spread by expert: an all-to-all each way. Several replicas and experts only sliced: gather all rows,
        scatter the sums.
        """
        split, formats = self.split, self.ctx.formats
        tp, dp, ep = (np.asarray(one, np.float64) for one in (self._attention_ranks(), split.dp, split.ep))
        is_one, is_sliced = dp <= 1, ep <= 1
        summed = self._all_reduce("ffn_all_reduce", np.where(is_one, split.ranks, np.where(ep > 1, tp, 1.0)))
        own_rows = self.work.rows / tp  # each rank of a replica sends its part of the rows
        factor = self._receive_factor(moe, moe_idx, own_rows)
        gather = self.work.rows * dp * moe.row_width
        terms = [summed]
        ways: tuple[tuple[TermName, float], ...] = (
            ("dispatch", formats.dispatch_bits),
            ("combine", formats.combine_bits),
        )
        for name, bits in ways:
            copies = own_rows * self._copies(moe) * split.expert_tp * factor
            near, far = self._near_and_far(copies * moe.row_width * bits / 8)
            sent = comm.all_to_all(
                name, near_bytes=near, far_bytes=far, ranks=np.where(is_one | is_sliced, 1.0, split.ranks),
                cluster=self.cluster, profile=self.ctx.profile,
            )  # fmt: skip
            gathered = comm.all_gather(
                name, num_bytes=gather * bits / 8, ranks=np.where(is_sliced & ~is_one, dp, 1.0),
                cluster=self.cluster, profile=self.ctx.profile,
            )  # fmt: skip
            terms += [sent, gathered]
        return [term for term in terms if np.any(term.seconds.value > 0)]

    def _copies(self, moe: MoeSpec) -> Number:
        """Rows that a token sends to other ranks.

        Decode over several nodes sends every choice by itself, whatever the profile: the kernels made for few
        rows do. Source: DeepEP's low-latency kernels, whose published bytes are tokens * k * width.
        """
        profile = self.ctx.profile
        once = copies_per_token(moe, self.split.ep, profile)
        is_alone = (np.asarray(self.work.new_tokens) <= 1) & (self.split.ranks > self.cluster.link_domain)
        each = copies_per_token(moe, self.split.ep, replace(profile, sends_once=False))
        return np.where(is_alone, each, once)

    def _receive_factor(self, moe: MoeSpec, moe_idx: int, own_rows: Number) -> Number:
        """How much more the busiest rank receives than the mean: transfers end with it."""
        choices = np.asarray(own_rows * self.split.ranks * moe.experts_per_token, np.float64)
        busiest = busiest_rows(choices, self.split.ep, self.shares, moe_idx, self.split.num_redundant)
        return np.maximum(busiest * self.split.ep / np.maximum(choices, 1e-9), 1.0)

    def _near_and_far(self, num_bytes: Number) -> tuple[Number, Number]:
        """Bytes that stay in the node or rack and bytes that leave it."""
        ranks, domain = np.asarray(self.split.ranks, np.float64), float(self.cluster.link_domain)
        if not self.ctx.profile.has_two_levels:
            is_far = ranks > domain
            return num_bytes * ~is_far, num_bytes * is_far
        near = np.minimum(domain, ranks) - 1
        others = np.maximum(ranks - 1, 1)
        return num_bytes * near / others, num_bytes * (ranks - 1 - near) / others


def copies_per_token(moe: MoeSpec, ep: Number, profile: Profile) -> Number:
    """Rows that one token sends to other ranks.

    Source: k (W - 1) / W when each choice is sent, or one row per rank that holds any of the k experts:
    (W - 1) (1 - C(E - E / W, k) / C(E, k)), below 967 / 128 for DeepSeek-V3 on 64 ranks.
    """
    ep = np.asarray(ep, np.float64)
    k = moe.experts_per_token
    if not profile.sends_once:
        return k * (ep - 1) / ep
    absent = np.ones_like(ep)
    for idx in range(k):
        absent = (
            absent * np.maximum(moe.num_experts - moe.num_experts / ep - idx, 0.0) / (moe.num_experts - idx)
        )
    return (ep - 1) * (1.0 - absent)


def memory_per_rank(
    model: ModelSpec,
    split: Split,
    *,
    num_seqs: Number,
    context: Number,
    max_rows: Number,
    formats: Formats | None = None,
    profile: Profile,
) -> Mapping[str, Number]:
    """Bytes of one rank by component, on the rank that has most.

    Shapes:  num_seqs per attention replica, context positions kept of each, max_rows tokens of a replica's
    step.
    """
    formats = formats or Formats()
    pp = np.asarray(split.pp, np.float64)
    ranks = np.asarray(split.tp, np.float64) * split.kvp
    weights: Number = 0.0 * ranks
    routed: Number = 0.0 * ranks
    replicas: Number = 0.0 * ranks
    passing: Number = 0.0 * ranks  # places that experts from outside go through: one read, one in use
    widest: MoeSpec | None = None
    dense_bits, expert_format = _bits(model, formats)
    for layer in model.layers:
        if layer.mixer is not None:
            split_by = ops.mixer_weights_per_rank(layer.mixer, model.hidden, split.tp, split.kvp)
            weights = weights + split_by * dense_bits / 8
        if isinstance(layer.ffn, DenseSpec):
            weights = weights + dense_params(layer.ffn, model.hidden) * dense_bits / 8 / ranks
        if isinstance(layer.ffn, MoeSpec):
            moe = widest = layer.ffn
            if moe.shared is not None:
                weights = weights + dense_params(moe.shared, model.hidden) * dense_bits / 8 / ranks
            if profile.counts_all:
                weights = weights + router_params(moe, model.hidden) * 2.0
            one = expert_bytes(model, moe, expert_format) / np.asarray(split.expert_tp, np.float64)
            # The rank with most slots decides: 256 experts over 144 ranks are 2 on some, 1 on others.
            off = np.asarray(split.num_offloaded, np.float64)
            slots = (moe.num_experts - off) / np.asarray(split.ep, np.float64)
            passing = np.maximum(passing, np.minimum(off, 2.0) * one)
            routed = routed + one * (np.ceil(slots - 1e-9) if profile.counts_all else slots)
            replicas = replicas + one * np.asarray(split.num_redundant, np.float64) / split.ep
    weights = (weights + len(model.layers) * 2 * norm_params(model) * 2.0) / pp
    ends = model.vocab * model.hidden * formats.ends_bits / 8 / ranks * (1 if model.has_tied_head else 2)
    kv = num_seqs * cache_bytes_per_sequence(model, split, context, formats) / pp
    k = 0 if widest is None else widest.experts_per_token
    width = model.hidden if widest is None else widest.row_width
    rows = np.asarray(max_rows, np.float64)
    has_exchange = (np.asarray(split.dp) > 1) & (np.asarray(split.ep) > 1)
    buffers = has_exchange * rows / ranks * k * width * (formats.dispatch_bits + formats.combine_bits) / 8
    inner = 0.0 if widest is None else 3.0 * widest.expert_width * k
    workspace = rows * ACTIVATION_BYTES * (6.0 * model.hidden + inner / ranks)
    return {
        "weights": weights + ends, "experts": routed / pp, "replicas": replicas / pp, "kv": kv,
        "dispatch_buffers": buffers * split.num_micro_batches, "workspace": workspace + passing,
    }  # fmt: skip


def cache_bytes_per_sequence(model: ModelSpec, split: Split, context: Number, formats: Formats) -> Number:
    """KV and state of one sequence on one rank of its replica."""
    total: Number = 0.0
    length = np.asarray(context, np.float64)
    for layer in model.layers:
        for cache in layer.caches("bfloat16"):
            seen = length if cache.window is None else np.minimum(length, cache.window)
            size = cache.bytes_per_token * seen * formats.kv_bits / 16 + cache.bytes_per_sequence
            total = total + size / ops.cache_split(layer.mixer, split.tp) / split.kvp
    return total


def largest_batch(
    model: ModelSpec, cluster: Cluster, split: Split, *, context: Number, profile: Profile,
    formats: Formats | None = None,
) -> Number:  # fmt: skip
    """Sequences per attention replica whose KV fits beside the weights; 0 when those do not fit."""
    formats = formats or Formats()
    found = memory_per_rank(
        model, split, num_seqs=0.0, context=context, max_rows=0.0, formats=formats, profile=profile
    )
    free = profile.usable_memory * cluster.machine.memory_bytes - sum(found.values())
    each = cache_bytes_per_sequence(model, split, context, formats) / np.asarray(split.pp, np.float64)
    return np.maximum(np.floor(free / each), 0.0)


def _bits(model: ModelSpec, formats: Formats) -> tuple[float, str | None]:
    stored = model.stored_format("attention").bits
    return (stored if formats.dense is None else WEIGHT_BITS[formats.dense]), formats.experts
