"""Micro-batches that go to and fro between attention and experts: closed forms, their conditions, balance.

Source: MegaScale-Infer, arXiv:2504.02263: sec. 4.1 (ping-pong pipeline), 4.2 (deployment plan search).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.cost.term import Cost, CostTerm, Interval, Number, Par, Repeat, Seq, TermName, step_seconds
from moesaic.errors import ConfigError

EQUAL = 0.9  # guess: sides that differ by less than a tenth count as equal


def ping_pong(
    attention: Cost, dispatch: Cost, experts: Cost, combine: Cost, layers: float, many: Number
) -> Cost:
    """`layers` equal layers over `many` micro-batches and four resources: attention, there, experts, and
    back, whether or not they are always busy.

    Source: T = R + (L - 1) max(m a, m d, m e, m c, R) + (m - 1) max(a, d, e, c), R being the round trip of
    one micro-batch; the paper's formula (5) is its case of full overlap. Exact against an event simulation,
    see tests/unit/cost/test_two_sided.py.
    """
    stages = (attention, dispatch, experts, combine)
    round_trip = Seq(stages)
    period = Par((*(Repeat(many, stage) for stage in stages), round_trip))
    drain = Repeat(np.asarray(many, np.float64) - 1, Par(stages))
    return Seq((round_trip, Repeat(layers - 1, period), drain))


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Seconds of one micro-batch in one layer: attention side, expert side, one way between them."""

    attention_s: Number
    expert_s: Number
    transfer_s: Number

    @property
    def forward_s(self) -> Number:
        """The slower side: Tf."""
        return np.maximum(self.attention_s, self.expert_s)

    @property
    def round_trip_s(self) -> Number:
        """Ta + Te + 2 Tc."""
        return self.attention_s + self.expert_s + 2 * self.transfer_s


def pipeline_seconds(one: Stage, num_micro_batches: Number, num_layers: int) -> Number:
    """Seconds of a step of `num_micro_batches` through `num_layers` equal layers, by `ping_pong`."""
    names: tuple[TermName, ...] = ("attention", "dispatch", "experts", "combine")
    times = (one.attention_s, one.transfer_s, one.expert_s, one.transfer_s)
    terms = [
        CostTerm(name=name, resource="compute", seconds=Interval.exactly(np.asarray(seconds, np.float64)))
        for name, seconds in zip(names, times, strict=True)
    ]
    there, back = terms[1], terms[3]
    tree = ping_pong(terms[0], there, terms[2], back, num_layers, np.asarray(num_micro_batches, np.float64))
    return step_seconds(tree).value


def busy_share(one: Stage, num_micro_batches: int, num_layers: int) -> float:
    """Share of a step in which the slower side computes."""
    total = float(pipeline_seconds(one, num_micro_batches, num_layers))
    return num_micro_batches * num_layers * float(one.forward_s) / total


def overlapped_seconds(one: Stage, num_micro_batches: int, num_layers: int) -> float:
    """Formula (5): (Ta + Te + 2 Tc) + Tf (m L - 1), whether or not its conditions hold."""
    return float(one.round_trip_s + one.forward_s * (num_micro_batches * num_layers - 1))


def paper_seconds(one: Stage, num_micro_batches: int, num_layers: int) -> float:
    """Formula (5) where its conditions hold.

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
    if min(attention_s, expert_s) < EQUAL * forward_s:
        raise ConfigError(
            f"formula (5) needs equal sides, got {attention_s:g} and {expert_s:g} s; use pipeline_seconds"
        )
    least = 2 * (1 + transfer_s / forward_s)
    if num_micro_batches < least:
        raise ConfigError(
            f"formula (5) needs at least 2 (1 + Tc / Tf) = {least:.2f} micro-batches, got "
            f"{num_micro_batches}; use pipeline_seconds"
        )
    return overlapped_seconds(one, num_micro_batches, num_layers)


def paper_micro_batches(one: Stage) -> int:
    """The paper's condition: m >= 2 (1 + Tc / Tf). More than needed where the sides differ."""
    return math.ceil(2 * (1 + float(one.transfer_s / one.forward_s)) - 1e-9)


def fewest_micro_batches(one: Stage) -> int:
    """The fewest with which the slowest resource never waits: m max(Ta, Te, Tc) >= Ta + Te + 2 Tc."""
    slowest = float(np.maximum(one.forward_s, one.transfer_s))
    return math.ceil(float(one.round_trip_s) / slowest - 1e-9)


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """seconds = slope * rows + start, fitted by least squares; fit is R squared."""

    slope: float
    start: float
    fit: float


def fit_line(rows: Sequence[float], seconds: Sequence[float]) -> Line:
    """The paper's model of a side from measured or priced times.

    Source: Ta(b) = k1 b + k2, Te(b) = k3 b + k4 (sec. 4.2). A side that reads weights has a floor, which a
    line does not have: `fit` says how well it does.
    """
    x, y = np.asarray(rows, np.float64), np.asarray(seconds, np.float64)
    slope, start = np.polyfit(x, y, 1)
    left, spread = np.square(y - (slope * x + start)).sum(), np.square(y - y.mean()).sum()
    return Line(slope=float(slope), start=float(start), fit=float(1 - left / spread) if spread else 1.0)


def balanced_replicas(attention: Line, experts: Line, num_experts: int, experts_per_token: int) -> float:
    """Attention replicas at which both sides take equally long: n_a = k1 E / (k3 K).

    Source: k1 b = k3 n_a b K / E: of the rows of n_a replicas of b sequences, an expert gets K / E.
    """
    return attention.slope * num_experts / (experts.slope * experts_per_token)


def per_price(
    num_tokens: float, seconds: float, attention_devices: float, expert_devices: float,
    attention_price: float, expert_price: float,
) -> float:  # fmt: skip
    """Tokens per second and price: tpuc = (B / T) / (tp_a n_a Cost_a + tp_e E Cost_e)."""
    return num_tokens / seconds / (attention_devices * attention_price + expert_devices * expert_price)
