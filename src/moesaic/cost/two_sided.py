"""Attention and experts on ranks of their own: micro-batches go to and fro, so that both sides always have
work.

One walk prices one grid or an array of them. Which grid is worth pricing is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from moesaic.cost import comm, ops
from moesaic.cost.layouts import Split, layer_kinds, memory_per_rank
from moesaic.cost.load import CHANCE, ExpertShares, busiest_rows
from moesaic.cost.ops import ACTIVATION_BYTES, Context, Formats, Work
from moesaic.cost.pingpong import Stage, ping_pong
from moesaic.cost.profile import Profile
from moesaic.cost.term import Cost, CostTerm, Number, Par, Repeat, Seq, TermName, step_seconds
from moesaic.errors import ConfigError
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import DenseSpec, LayerSpec, ModelSpec, MoeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoSides:
    """`num_attention` attention replicas of `tp` ranks beside `ep` x `expert_tp` expert ranks.

    Shapes:  numbers, or arrays over candidates.
    """

    num_attention: Number
    tp: Number
    ep: Number
    expert_tp: Number
    num_redundant: Number
    num_micro_batches: Number

    @property
    def attention_ranks(self) -> Number:
        """Ranks of the attention side."""
        return np.asarray(self.num_attention, np.float64) * self.tp

    @property
    def expert_ranks(self) -> Number:
        """Ranks of the expert side."""
        return np.asarray(self.ep, np.float64) * self.expert_tp


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """The devices of each side; they may be of different kinds, and then the network lies between them."""

    attention: Cluster
    experts: Cluster
    profiles: tuple[Profile, Profile]  # of attention, of experts


def two_sided_step(
    model: ModelSpec,
    sides: Sides,
    grid: TwoSides,
    work: Work,
    *,
    formats: Formats,
    shares: ExpertShares = CHANCE,
) -> Cost:
    """A decode step of all micro-batches. `work` is one micro-batch of one attention replica."""
    walk = _Walk(sides=sides, grid=grid, work=work, shares=shares, model=model, formats=formats)
    many = grid.num_micro_batches
    parts: list[Cost] = []
    for times, moe_idx, layer in layer_kinds(model, shares):
        if isinstance(layer.ffn, MoeSpec):
            stages = walk.attention(layer), *walk.experts(layer.ffn, moe_idx)
            attention, dispatch, experts, combine = stages
            parts.append(ping_pong(attention, dispatch, experts, combine, float(times), many))
        else:
            parts.append(Repeat(np.asarray(many, np.float64) * times, walk.attention(layer)))
    if sides.profiles[0].counts_all:
        parts.append(Repeat(many, ops.head(work.num_seqs, grid.tp, walk.context(0))))
    return Seq(tuple(parts))


def stage(
    model: ModelSpec,
    sides: Sides,
    grid: TwoSides,
    work: Work,
    *,
    formats: Formats,
    shares: ExpertShares = CHANCE,
) -> Stage:
    """Seconds of one micro-batch in the first sparse layer; a transfer is the longer of both ways.

    Raises: ConfigError for a dense model.
    """
    walk = _Walk(sides=sides, grid=grid, work=work, shares=shares, model=model, formats=formats)
    for layer in model.layers:
        if isinstance(layer.ffn, MoeSpec):
            parts = walk.attention(layer), *walk.experts(layer.ffn, 0)
            attention_s, dispatch_s, expert_s, combine_s = (step_seconds(part).value for part in parts)
            return Stage(
                attention_s=attention_s, expert_s=expert_s, transfer_s=np.maximum(dispatch_s, combine_s)
            )
    raise ConfigError("a dense model has no experts to put on ranks of their own")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Walk:
    model: ModelSpec
    sides: Sides
    grid: TwoSides
    work: Work
    formats: Formats
    shares: ExpertShares

    def context(self, side: int) -> Context:
        cluster = (self.sides.attention, self.sides.experts)[side]
        return Context(
            model=self.model, machine=cluster.machine, profile=self.sides.profiles[side], formats=self.formats
        )

    def attention(self, layer: LayerSpec) -> Cost:
        """What the attention side does in a layer: the mixer, shared experts, a dense network."""
        ctx, tp = self.context(0), self.grid.tp
        parts: list[Cost] = []
        if layer.mixer is not None:
            parts += [*ops.mixer(layer, self.work, tp, 1.0, ctx), self._sum("attention_all_reduce", tp)]
        if isinstance(layer.ffn, DenseSpec):
            parts += [
                ops.dense("dense_ffn", layer.ffn, self.work.rows, tp, ctx),
                self._sum("ffn_all_reduce", tp),
            ]
        if isinstance(layer.ffn, MoeSpec) and layer.ffn.shared is not None:
            parts.append(ops.dense("shared_experts", layer.ffn.shared, self.work.rows, tp, ctx))
        return Seq(tuple(parts))

    def experts(self, moe: MoeSpec, moe_idx: int) -> tuple[Cost, Cost, Cost]:
        """(dispatch, experts, combine) of one micro-batch of all attention replicas."""
        grid, tokens = self.grid, np.asarray(self.work.rows, np.float64) * self.grid.num_attention
        computed = ops.experts(
            moe, 0.0 * tokens, tokens, grid.ep, grid.expert_tp, grid.num_redundant,
            self.context(1), self.shares, moe_idx,
        )  # fmt: skip
        choices = tokens * moe.experts_per_token
        busiest = busiest_rows(choices, grid.ep, self.shares, moe_idx, grid.num_redundant)
        size = moe.row_width * ACTIVATION_BYTES
        summed = comm.all_reduce(
            "ffn_all_reduce", num_bytes=busiest * size, ranks=grid.expert_tp, cluster=self.sides.experts,
            profile=self.sides.profiles[1],
        )  # fmt: skip
        row_bytes = moe.row_width * self.formats.dispatch_bits / 8
        dispatch = self._transfer("dispatch", choices * row_bytes, busiest * row_bytes)
        row_bytes = moe.row_width * self.formats.combine_bits / 8
        combine = self._transfer("combine", choices * row_bytes, busiest * row_bytes)
        return dispatch, Seq((computed, summed)), combine

    def _transfer(self, name: TermName, sent: Number, busiest: Number) -> Cost:
        """The slower of the sender and the busiest receiver, each over its own devices' network.

        Source: eq. (6) of MegaScale-Infer, arXiv:2504.02263; sides of one kind in one link domain use the
                link.
        """
        ends = (
            (self.sides.attention, sent / self.grid.attention_ranks),
            (self.sides.experts, busiest / np.asarray(self.grid.expert_tp, np.float64)),
        )
        ranks = self.grid.attention_ranks + self.grid.expert_ranks
        is_far = (ranks > self.sides.attention.link_domain) | (self.sides.attention != self.sides.experts)
        return Par(
            tuple(
                comm.point_to_point(name, num_bytes=size, is_far=is_far, cluster=cluster, profile=profile)
                for (cluster, size), profile in zip(ends, self.sides.profiles, strict=True)
            )
        )

    def _sum(self, name: TermName, ranks: Number) -> CostTerm:
        return comm.all_reduce(
            name, num_bytes=self.work.rows * self.model.hidden * ACTIVATION_BYTES, ranks=ranks,
            cluster=self.sides.attention, profile=self.sides.profiles[0],
        )  # fmt: skip


def two_sided_memory(
    model: ModelSpec, grid: TwoSides, *, num_seqs: Number, context: Number, profile: Profile, formats: Formats
) -> tuple[Mapping[str, Number], Mapping[str, Number]]:
    """Bytes by component of an attention rank and of the fullest expert rank.

    Shapes:  num_seqs are those of one attention replica over all micro-batches.
    """
    rows = np.asarray(num_seqs, np.float64) / grid.num_micro_batches
    replica = Split(tp=grid.tp, expert_tp=grid.tp)
    holder = Split(
        tp=grid.expert_tp, dp=grid.ep, ep=grid.ep, expert_tp=grid.expert_tp, num_redundant=grid.num_redundant
    )
    kept, held = (
        memory_per_rank(
            model, split, num_seqs=seqs, max_rows=batch, context=context, profile=profile, formats=formats
        )
        for split, seqs, batch in ((replica, num_seqs, rows), (holder, 0.0, 0.0))
    )
    attention = dict(kept)
    sent = 0.0 * rows
    moes = [moe for _, moe in model.moe_layers]
    if moes:
        moe = moes[0]
        bits = formats.dispatch_bits + formats.combine_bits
        sent = rows * moe.experts_per_token * moe.row_width * bits / 8 * grid.num_micro_batches
    zero = 0.0 * sent
    attention |= {"experts": zero, "replicas": zero, "dispatch_buffers": sent / grid.tp}
    received = sent * grid.num_attention / grid.expert_ranks
    width = 0.0 if not moes else 3.0 * moes[0].expert_width * moes[0].experts_per_token
    workspace = rows * grid.num_attention * ACTIVATION_BYTES * width / grid.expert_ranks
    experts: dict[str, Number] = {
        "weights": zero, "experts": held["experts"], "replicas": held["replicas"], "kv": zero,
        "dispatch_buffers": received, "workspace": workspace,
    }  # fmt: skip
    return attention, experts
