"""Figures about attention and experts on different cards: the pipeline by formula and by simulation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesaic.audit.figures.registry import figure
from moesaic.cost.pingpong import (
    Stage,
    balanced_replicas,
    fewest_micro_batches,
    fit_line,
    overlapped_seconds,
    paper_micro_batches,
    paper_seconds,
    per_price,
    pipeline_seconds,
)
from moesaic.planner.sim.pingpong import timeline
from moesaic.spec.hardware import machine as machine_of


def stage_of(attention_s: float, expert_s: float, transfer_s: float) -> Stage:
    """A stage of given times."""
    return Stage(attention_s=attention_s, expert_s=expert_s, transfer_s=transfer_s)


@figure("S004-078", "S004-079")
def time_and_use(
    attention_s: float, expert_s: float, transfer_s: float, layers: int, micro_batches: int
) -> list[float]:
    """Simulated time, and percent of it that the experts work."""
    found = timeline(stage_of(attention_s, expert_s, transfer_s), micro_batches, layers)
    return [found.total_s, 100 * found.busy["experts"]]


@figure("S004-080")
def micro_batches_for(ratios: Sequence[float]) -> list[int]:
    """The paper's rule for transfers of so much of the compute."""
    return [paper_micro_batches(stage_of(1.0, 1.0, ratio)) for ratio in ratios]


@figure("S004-081")
def formula_five(
    attention_s: float, expert_s: float, transfer_s: float, layers: int, micro_batches: int
) -> float:
    """Formula (5), which refuses where its conditions do not hold."""
    return paper_seconds(stage_of(attention_s, expert_s, transfer_s), micro_batches, layers)


@figure("S004-161")
def formula_five_anyway(
    attention_s: float, expert_s: float, transfer_s: float, layers: int, micro_batches: int
) -> float:
    """Formula (5) without its conditions."""
    return overlapped_seconds(stage_of(attention_s, expert_s, transfer_s), micro_batches, layers)


@figure("S004-082")
def formula_and_simulation(
    attention_s: float, expert_s: float, transfer_s: float, layers: int, micro_batches: int
) -> list[float]:
    """Formula (5) without its conditions, and the simulated time."""
    one = stage_of(attention_s, expert_s, transfer_s)
    return [
        overlapped_seconds(one, micro_batches, layers),
        timeline(one, micro_batches, layers).total_s,
    ]


@figure("S004-083", holds=lambda worst: worst[0] < 1e-12 and worst[1] < 1e-9)
def closed_form_error(cases: int, seed: int) -> list[float]:
    """Largest relative and absolute difference of closed form and simulation over random cases."""
    rng = np.random.default_rng(seed)
    relative, absolute = 0.0, 0.0
    for _ in range(cases):
        one = stage_of(*(float(x) for x in rng.uniform(0.05, 2.0, 3)))
        layers, many = int(rng.integers(1, 61)), int(rng.integers(1, 9))
        simulated = timeline(one, many, layers).total_s
        error = abs(float(pipeline_seconds(one, many, layers)) - simulated)
        relative, absolute = max(relative, error / simulated), max(absolute, error)
    return [relative, absolute]


@figure("S004-084", holds=lambda error: error < 1e-12)
def formula_error_inside(cases: int, seed: int) -> float:
    """Largest relative difference of closed form and formula (5) where its conditions hold."""
    rng = np.random.default_rng(seed)
    worst = 0.0
    for _ in range(cases):
        forward_s, part = float(rng.uniform(0.05, 2.0)), float(rng.uniform(0.05, 0.95))
        one = stage_of(forward_s, forward_s, part * forward_s)
        many, layers = paper_micro_batches(one), int(rng.integers(1, 61))
        formula = paper_seconds(one, many, layers)
        worst = max(worst, abs(float(pipeline_seconds(one, many, layers)) / formula - 1))
    return worst


@figure("S004-085", holds=lambda needed: needed["exact"] < needed["paper"])
def micro_batches_needed(attention_s: float, expert_s: float, transfer_s: float) -> dict[str, int]:
    """By the paper's rule, and by the exact one."""
    one = stage_of(attention_s, expert_s, transfer_s)
    return {"paper": paper_micro_batches(one), "exact": fewest_micro_batches(one)}


@figure("S004-159")
def rule_and_rounded(attention_s: float, expert_s: float, transfer_s: float) -> list[float]:
    """The paper's rule before and after rounding up."""
    one = stage_of(attention_s, expert_s, transfer_s)
    return [2 * (1 + transfer_s / float(one.forward_s)), paper_micro_batches(one)]


@figure("S004-160")
def times_by_count(
    attention_s: float, expert_s: float, transfer_s: float, layers: int, micro_batches: Sequence[int]
) -> list[float]:
    """Simulated time of each number of micro-batches."""
    one = stage_of(attention_s, expert_s, transfer_s)
    return [timeline(one, count, layers).total_s for count in micro_batches]


@figure("S004-162")
def times_each(
    attention_s: float, expert_s: float, transfer_s: float, layers: int, micro_batches: Sequence[int]
) -> list[float]:
    """The same by the number of micro-batches."""
    times = times_by_count(attention_s, expert_s, transfer_s, layers, micro_batches)
    return [total / count for total, count in zip(times, micro_batches, strict=True)]


@figure("S004-163")
def full_at(attention_s: float, expert_s: float, transfer_s: float) -> float:
    """Work of the slowest side with the fewest micro-batches that keep it busy."""
    one = stage_of(attention_s, expert_s, transfer_s)
    return fewest_micro_batches(one) * float(one.forward_s)


@figure("S004-091", holds=lambda sides: abs(sides[0] - sides[1]) < 1e-9 * sides[1])
def balanced_sides(k1: float, k3: float, num_experts: int, chosen: int) -> list[float]:
    """Time per sequence of both sides at the attention nodes that balance their lines."""
    attention, experts = (fit_line([1.0, 2.0], [slope, 2 * slope]) for slope in (k1, k3))
    nodes = balanced_replicas(attention, experts, num_experts, chosen)
    return [k1 / nodes, k3 * chosen / num_experts]


@figure("S004-093")
def mean_context(prompt: int, output: int) -> float:
    """Half-way through the output."""
    return prompt + output / 2


@figure("S004-103")
def bandwidth_by_price(machines: Sequence[str]) -> float:
    """The first machine's over the second's."""
    first, second = (machine_of(name) for name in machines)
    return (first.memory_bytes_per_s / first.number("price", 1.0)) / (
        second.memory_bytes_per_s / second.number("price", 1.0)
    )


@figure("S004-104", holds=lambda ratio: ratio > 4)
def compute_by_price(machines: Sequence[str]) -> float:
    """The first machine's over the second's."""
    first, second = (machine_of(name) for name in machines)
    return (first.flops_per_s("bfloat16") / first.number("price", 1.0)) / (
        second.flops_per_s("bfloat16") / second.number("price", 1.0)
    )


@figure("S004-092", holds=lambda rates: rates[0] > rates[1] > 0)
def rates_by_price(
    num_tokens: float, seconds: float, devices: Sequence[int], prices: Sequence[float]
) -> list[float]:
    """Tokens per second and price of two sides, and when their prices change places."""
    first, second = (per_price(num_tokens, seconds, *devices, *order) for order in (prices, prices[::-1]))
    return [first, second]
