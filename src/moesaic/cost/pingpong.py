"""Attention and experts on different ranks: micro-batches go to and fro between the two sides.

Source: MegaScale-Infer, arXiv:2504.02263: sec. 4.2 (ping-pong pipeline), 4.3 (performance model).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.cost import comm, ops
from moesaic.cost.load import EVEN, ExpertShares
from moesaic.cost.ops import ACTIVATION_BYTES, Context, Formats, Work
from moesaic.cost.profile import Profile
from moesaic.cost.term import CostTerm, Number
from moesaic.errors import ConfigError
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import LayerSpec, ModelSpec, MoeSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Sides:
    """How ranks are shared out. Shapes: numbers, or arrays over candidates."""

    num_attention: Number  # attention nodes of attention_tp ranks
    attention_tp: Number
    num_experts: int  # expert nodes of expert_tp ranks, one expert each
    expert_tp: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Seconds of one micro-batch in one layer: attention side, expert side, one way between them."""

    attention_s: Number
    expert_s: Number
    transfer_s: Number

    @property
    def forward_s(self) -> Number:
        """The slower side."""
        return np.maximum(self.attention_s, self.expert_s)


def stage(
    model: ModelSpec, attention: Cluster, experts: Cluster, sides: Sides, work: Work, *, profile: Profile,
    formats: Formats | None = None, shares: ExpertShares = EVEN,
) -> Stage:  # fmt: skip
    """Times of a micro-batch; `work` is that of one attention node.

    Source: MegaScale-Infer, arXiv:2504.02263, eq. 6: a transfer ends with the slower of sender and receiver.
    Raises: ConfigError for a model whose layers are not all alike and sparse.
    """
    formats = formats or Formats()
    layer, moe = _only_layer(model)
    left = Context(model=model, machine=attention.machine, profile=profile, formats=formats)
    right = Context(model=model, machine=experts.machine, profile=profile, formats=formats)
    row_bytes = model.hidden * ACTIVATION_BYTES
    mixed = ops.mixer(layer, work, sides.attention_tp, 1.0, left)
    summed = comm.all_reduce(
        "attention_all_reduce", num_bytes=work.rows * row_bytes, ranks=sides.attention_tp, cluster=attention,
        profile=profile,
    )  # fmt: skip
    choices = work.rows * sides.num_attention * moe.experts_per_token
    rows = choices / sides.num_experts
    routed = ops.experts(
        moe, 0.0, work.rows * sides.num_attention, sides.num_experts, sides.expert_tp, 0.0, right, shares, 0
    )
    gathered = comm.all_reduce(
        "ffn_all_reduce", num_bytes=rows * row_bytes, ranks=sides.expert_tp, cluster=experts, profile=profile
    )
    sent = work.rows * moe.experts_per_token * row_bytes / sides.attention_tp
    received = rows * row_bytes / sides.expert_tp
    latency = profile.exchange_factor * comm.network_latency(attention)
    transfer_s = latency + np.maximum(
        sent / comm.network_rate(attention, profile), received / comm.network_rate(experts, profile)
    )
    return Stage(
        attention_s=_seconds((*mixed, summed)), expert_s=_seconds((routed, gathered)), transfer_s=transfer_s
    )


def pipeline_seconds(one: Stage, num_micro_batches: Number, num_layers: int) -> Number:
    """Seconds of a step of `num_micro_batches` through `num_layers`, whether or not the pipeline is full.

    Source: a round trip takes R = Ta + Te + 2 Tc; a layer C = max(m Ta, m Te, m Tc, R); the last micro-batch
    ends (m - 1) max(Ta, Te, Tc) after the first. Equal to an event simulation.
    """
    m = np.asarray(num_micro_batches, np.float64)
    round_trip = one.attention_s + one.expert_s + 2 * one.transfer_s
    slowest = np.maximum(one.forward_s, one.transfer_s)
    layer_s = np.maximum(m * slowest, round_trip)
    return round_trip + (num_layers - 1) * layer_s + (m - 1) * slowest


def paper_seconds(one: Stage, num_micro_batches: int, num_layers: int) -> float:
    """The paper's formula (5), where its conditions hold.

    Raises: ConfigError naming the condition that does not hold.
    """
    attention_s, expert_s, transfer_s = (
        float(np.asarray(x)) for x in (one.attention_s, one.expert_s, one.transfer_s)
    )
    forward_s = max(attention_s, expert_s)
    if transfer_s >= forward_s:
        raise ConfigError(
            f"formula (5) needs transfers ({transfer_s:g} s) shorter than the slower side ({forward_s:g} s); "
            "use pipeline_seconds"
        )
    if min(attention_s, expert_s) < 0.9 * forward_s:
        raise ConfigError(
            f"formula (5) needs equal sides, got {attention_s:g} and {expert_s:g} s; use pipeline_seconds"
        )
    least = 2 * (1 + transfer_s / forward_s)
    if num_micro_batches < least:
        raise ConfigError(
            f"formula (5) needs at least 2 (1 + Tc / Tf) = {least:.2f} micro-batches, got "
            f"{num_micro_batches}; use pipeline_seconds"
        )
    return attention_s + expert_s + 2 * transfer_s + forward_s * (num_micro_batches * num_layers - 1)


def fewest_micro_batches(one: Stage) -> int:
    """The fewest with which the slowest resource never waits: m max(Ta, Te, Tc) >= Ta + Te + 2 Tc."""
    slowest = float(np.maximum(one.forward_s, one.transfer_s))
    return math.ceil(float(one.attention_s + one.expert_s + 2 * one.transfer_s) / slowest - 1e-9)


def _seconds(terms: Sequence[CostTerm]) -> Number:
    return sum((term.seconds.value for term in terms), 0.0)


def _only_layer(model: ModelSpec) -> tuple[LayerSpec, MoeSpec]:
    first = model.layers[0]
    if not isinstance(first.ffn, MoeSpec) or any(layer != first for layer in model.layers):
        raise ConfigError(
            "attention and experts on different ranks are priced for models whose layers are all alike and "
            "sparse"
        )
    return first, first.ffn
