"""Figures about attention and experts on cards of their own, next to both on the same cards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from moesaic.audit.figures.registry import figure
from moesaic.audit.figures.subjects import decode, decode_seconds, experts_of, fullest
from moesaic.audit.figures.subjects import model as model_of
from moesaic.cost.layouts import Split
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Formats, Work
from moesaic.cost.pingpong import Stage, fit_line, pipeline_seconds
from moesaic.cost.profile import PAPER
from moesaic.cost.term import seconds_by_name
from moesaic.cost.two_sided import Sides, TwoSides, stage
from moesaic.errors import CapacityError
from moesaic.planner.demand import Demand, Objective
from moesaic.planner.disaggregate import grids
from moesaic.planner.pools import Refused
from moesaic.planner.price import Pricer
from moesaic.planner.question import format_choices
from moesaic.planner.space import Knob
from moesaic.spec.hardware import Cluster, Fact
from moesaic.spec.hardware import cluster as cluster_of
from moesaic.spec.hardware import machine as machine_of

Plan = Mapping[str, Any]
"""model, nodes (attention nodes), tp of each, expert_tp, batch (sequences of a node's micro-batch)."""


def plan_stage(plan: Plan, machine: str, context: int) -> Stage:
    """Times of one micro-batch."""
    cards = cluster_of(machine)
    grid = TwoSides(
        num_attention=plan["nodes"], tp=plan["tp"], ep=experts_of(plan["model"]).num_experts,
        expert_tp=plan["expert_tp"], num_redundant=0, num_micro_batches=1,
    )  # fmt: skip
    sides = Sides(attention=cards, experts=cards, profiles=(PAPER, PAPER))
    work = Work(num_seqs=plan["batch"], new_tokens=1, past=context - 1)
    return stage(model_of(plan["model"]), sides, grid, work, formats=Formats(), shares=EVEN)


def _speed(plan: Plan, one: Stage, count: int) -> float:
    """Tokens per second of `count` micro-batches."""
    layers = len(model_of(plan["model"]).layers)
    seqs = float(count * plan["nodes"] * plan["batch"])
    return seqs / float(pipeline_seconds(one, count, layers))


@figure("S004-086")
def gains_of_micro_batches(
    plans: Sequence[Plan], machine: str, context: int, micro_batches: Sequence[int]
) -> list[float]:
    """Throughput with the second number of micro-batches by that with the first."""
    fewer, more = micro_batches
    found = []
    for plan in plans:
        one = plan_stage(plan, machine, context)
        found.append(_speed(plan, one, more) / _speed(plan, one, fewer))
    return found


@figure("S004-087", "S004-090")
def extra_of_micro_batches(
    plans: Sequence[Plan], machine: str, context: int, micro_batches: Sequence[int]
) -> list[float]:
    """Percent that the second number of micro-batches brings over the first."""
    return [100 * (ratio - 1) for ratio in gains_of_micro_batches(plans, machine, context, micro_batches)]


@figure("S004-089", holds=lambda ratios: all(0.8 < ratio < 1.2 for ratio in ratios))
def transfer_by_compute(plans: Sequence[Plan], machine: str, context: int) -> list[float]:
    """A transfer by the slower side."""
    stages = [plan_stage(plan, machine, context) for plan in plans]
    return [float(one.transfer_s / one.forward_s) for one in stages]


@figure("S004-088")
def transfer_by_compute_of(plan: Plan, machine: str, context: int) -> float:
    """The same of one plan."""
    return transfer_by_compute([plan], machine, context)[0]


@figure("S004-094")
def best_nodes(plan: Plan, machine: str, context: int, micro_batches: int, most: int) -> int:
    """Attention nodes with the most tokens per second and card."""
    experts = experts_of(plan["model"]).num_experts * plan["expert_tp"]
    speeds = []
    for nodes in range(1, most + 1):
        one = {**plan, "nodes": nodes}
        total = _speed(one, plan_stage(one, machine, context), micro_batches)
        speeds.append(total / (nodes * plan["tp"] + experts))
    return int(np.argmax(speeds)) + 1


@figure("S004-095", holds=lambda nodes: 2 < nodes < 3)
def equal_sides_at(plan: Plan, machine: str, context: int) -> float:
    """Attention nodes at which both sides take as long, experts bound by compute: n_a = Ta / (k3 x rows)."""
    moe = experts_of(plan["model"])
    counts = 1000, 1500, 2000  # attention nodes: so many rows that experts compute, not wait for weights
    stages = [plan_stage({**plan, "nodes": nodes}, machine, context) for nodes in counts]
    rows = [nodes * plan["batch"] * moe.experts_per_token / moe.num_experts for nodes in counts]
    line = fit_line(rows, [float(one.expert_s) for one in stages])
    attention_s = float(np.asarray(stages[0].attention_s)) - PAPER.launch_s["gqa"]
    return float(attention_s / (line.slope * rows[0] / counts[0]))


class Together(NamedTuple):
    """A model with attention and experts on the same cards, at its largest batch within a time per token."""

    batch: float  # of one pipeline stage's step
    num_cards: int
    seconds: float
    attention_us: float  # per layer, without its launch
    all_reduces_us: float  # per layer, both

    @property
    def tokens_per_s(self) -> float:
        """Over all cards; every stage works on a batch of its own."""
        return self.batch * self.num_cards / CARDS_PER_NODE / self.seconds


CARDS_PER_NODE = 8


def together(
    model: str, pp: int, machine: str, context: int, slo_ms: float, network: float | None = None
) -> Together:
    """Tensor parallel on nodes of eight, one pipeline stage a node.

    Raises: CapacityError when no batch holds the time.
    """
    cards = _cards(f"{machine}x{CARDS_PER_NODE}x{pp}", network)
    split = Split(tp=CARDS_PER_NODE, expert_tp=CARDS_PER_NODE, pp=pp)
    batches = np.arange(pp, fullest(model, cards, split, context) + 1, pp, dtype=np.float64)
    seconds = np.asarray(decode_seconds(model, cards, split, batches, context))
    held = np.flatnonzero(seconds <= slo_ms / 1e3 * (1 + 1e-3))
    if not held.size:
        raise CapacityError(f"{model} on {cards}: no batch has a step of at most {slo_ms} ms")
    idx = int(held[-1])
    parts = seconds_by_name(decode(model, cards, split, float(batches[idx]), context))
    layers = len(model_of(model).layers)
    reduces = float(parts["attention_all_reduce"] + parts["ffn_all_reduce"])
    return Together(
        batch=float(batches[idx]) / pp, num_cards=cards.num_devices, seconds=float(seconds[idx]),
        attention_us=1e6 * (float(parts["attention"]) / layers - PAPER.launch_s["gqa"]),
        all_reduces_us=1e6 * reduces / layers,
    )  # fmt: skip


def _together(models: Sequence[tuple[str, int]], machine: str, context: int, slo_ms: float) -> list[Together]:
    return [together(name, pp, machine, context, slo_ms) for name, pp in models]


@figure("S004-098")
def rows_together(
    models: Sequence[tuple[str, int]], machine: str, context: int, slo_ms: float
) -> list[float]:
    """Tokens per expert, least and most over the models."""
    found = [
        one.batch * experts_of(name).experts_per_token / experts_of(name).num_experts
        for (name, _), one in zip(models, _together(models, machine, context, slo_ms), strict=True)
    ]
    return [min(found), max(found)]


@figure("S004-099")
def attention_together_us(
    models: Sequence[tuple[str, int]], machine: str, context: int, slo_ms: float
) -> list[float]:
    """Attention of a layer, least and most."""
    found = [one.attention_us for one in _together(models, machine, context, slo_ms)]
    return [min(found), max(found)]


@figure("S004-100")
def reduces_together_us(
    models: Sequence[tuple[str, int]], machine: str, context: int, slo_ms: float
) -> list[float]:
    """All-reduces of a layer, least and most."""
    found = [one.all_reduces_us for one in _together(models, machine, context, slo_ms)]
    return [min(found), max(found)]


@figure("S004-097")
def gain_of_separation(plans: Sequence[Plan], machine: str, context: int, slo_ms: float) -> list[float]:
    """Percent more tokens per card than together, least and most."""
    gains = []
    for plan in plans:
        one = plan_stage(plan, f"{machine}x8x4", context)
        experts = experts_of(plan["model"]).num_experts * plan["expert_tp"]
        apart = _speed(plan, one, plan["micro_batches"]) / (plan["nodes"] * plan["tp"] + experts)
        base = together(plan["model"], plan["pp_together"], machine, context, slo_ms)
        gains.append(100 * (apart / (base.tokens_per_s / base.num_cards) - 1))
    return [min(gains), max(gains)]


def _cards(text: str, network_bytes_per_s: float | None) -> Cluster:
    """A cluster, with another network than its machine file's if one is given."""
    cards = cluster_of(text)
    if network_bytes_per_s is None:
        return cards
    fact = Fact(value=network_bytes_per_s, source="the figure's input")
    facts = {**cards.machine.facts, "network_bytes_per_s": fact}
    return replace(cards, machine=replace(cards.machine, facts=facts))


def _priced(name: str, attention: str, experts: str, network: float | None) -> tuple[Pricer, Pricer]:
    both = {
        one: Pricer(model=model_of(name), cluster=_cards(f"{one}x8x6", network), profile=PAPER, shares=EVEN)
        for one in dict.fromkeys((attention, experts))
    }
    return both[attention], both[experts]


def searched(
    name: str,
    attention: str,
    experts: str,
    objective: Objective,
    prompt: int,
    output: int,
    slo_ms: float,
    network: float | None = None,
) -> tuple[float, TwoSides] | None:
    """The best plan with one expert a node: its value and its grid; None where nothing holds the time."""
    pricers = _priced(name, attention, experts, network)
    demand = Demand(isl=prompt, osl=output, tpot_s=slo_ms / 1e3, objective=objective)
    choice = format_choices(model_of(name), "stored", "bfloat16", None)[0]
    pins: dict[Knob, int] = {"ep": experts_of(name).num_experts, "num_redundant": 0}
    found = grids(pricers, choice, demand, pins, Refused({}))
    if found is None or not len(found.rate):
        return None
    weights = [
        machine_of(one).number("price", 1.0) if objective == "per-price" else 1.0
        for one in (attention, experts)
    ]
    value = found.rate * output / (found.usage[0] * weights[0] + found.usage[1] * weights[1])
    idx = int(np.argmax(value))
    return float(value[idx]), found.grid(idx)


@figure("S004-101")
def searched_tp(models: Sequence[str], machine: str, prompt: int, output: int, slo_ms: float) -> list[float]:
    """Least and most tensor parallelism of attention, and the most of experts, in the plans found."""
    plans = [searched(name, machine, machine, "per-gpu", prompt, output, slo_ms) for name in models]
    grids_found = [plan[1] for plan in plans if plan is not None]
    attention = [int(grid.tp) for grid in grids_found]
    return [min(attention), max(attention), max(int(grid.expert_tp) for grid in grids_found)]


@figure("S004-105")
def gain_of_pair_by_price(
    models: Sequence[str],
    machines: Sequence[str],
    prompt: int,
    output: int,
    slo_ms: float,
    network_bytes_per_s: float,
    most_nodes: int,
) -> list[float]:
    """Tokens per price of attention on the first machine and experts on the second, by the best of all with
    both on the same cards of either: least and most over the models."""
    attention, experts = machines
    gains = []
    for name in models:
        apart = searched(
            name, attention, experts, "per-price", prompt, output, slo_ms, network_bytes_per_s
        )  # fmt: skip
        same = max(
            _together_by_price(name, pp, one, prompt + output // 2, slo_ms, network_bytes_per_s)
            for one in machines
            for pp in range(1, most_nodes + 1)
        )
        gains.append(0.0 if apart is None or not same else apart[0] / same)
    return [min(gains), max(gains)]


def _together_by_price(
    name: str, pp: int, machine: str, context: int, slo_ms: float, network: float
) -> float:
    """Tokens per second and price of both on the same cards; 0 where none fits or is fast enough."""
    try:
        one = together(name, pp, machine, context, slo_ms, network)
    except CapacityError:
        return 0.0
    return one.tokens_per_s / one.num_cards / machine_of(machine).number("price", 1.0)


@figure("S004-106", holds=lambda ranks: all(one["best"] and one["reverse_worst"] for one in ranks.values()))
def pairs_by_price(
    models: Sequence[str], machines: Sequence[str], prompt: int, output: int, slo_ms: float
) -> dict[str, dict[str, bool]]:
    """Whether the pair has the most tokens per price of all pairs, and the reverse pair the fewest."""
    first, second = machines
    ranks = {}
    for name in models:
        values = {}
        for attention in machines:
            for experts in machines:
                plan = searched(name, attention, experts, "per-price", prompt, output, slo_ms)
                values[attention, experts] = 0.0 if plan is None else plan[0]
        ranks[name] = {
            "best": max(values, key=values.__getitem__) == (first, second),
            "reverse_worst": min(values, key=values.__getitem__) == (second, first),
        }
    return ranks
