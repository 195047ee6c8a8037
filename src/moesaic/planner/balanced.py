"""MegaScale-Infer's own search for attention and experts apart: linear models of both sides, then balance.

Source: arXiv:2504.02263, algorithm 1. `disaggregate` tries every number of attention replicas instead; this
one says how far the short way leads, and why a number of replicas is the right one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from moesaic.cost.ops import Work
from moesaic.cost.pingpong import Line, Stage, balanced_replicas, fit_line, paper_micro_batches
from moesaic.cost.term import Number
from moesaic.cost.two_sided import Sides, TwoSides, stage
from moesaic.planner.demand import Demand, unit_cost
from moesaic.planner.disaggregate import grids
from moesaic.planner.plan import Plan
from moesaic.planner.pools import Refused
from moesaic.planner.price import Pricer
from moesaic.planner.search import Question
from moesaic.planner.space import FormatChoice, Knob, divisors
from moesaic.units import format_seconds

MICRO_BATCHES = (3, 4)  # fewer never hide the transfers, more never paid
SEQUENCES = (32.0, 64.0, 128.0, 256.0, 512.0)  # guess: of an attention replica, that its line is fitted to
ROWS = (256.0, 512.0, 1024.0, 2048.0)  # guess: of an expert, that its line is fitted to


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """Both sides of one choice of tensor parallelism, as lines, and what balances them.

    Units:  replicas is n_a = k1 E / (k3 K), before rounding.
    """

    attention: Line
    experts: Line
    replicas: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancedPlan:
    """The best grid that the short search finds.

    Units:  batch counts sequences of one attention replica over all micro-batches; value is tokens per second
            and price, watt or device, as the demand asks.
    """

    grid: TwoSides
    batch: float
    tpot_s: float
    value: float
    balance: Balance
    stage: Stage


def balance_of(
    pricers: tuple[Pricer, Pricer], choice: FormatChoice, demand: Demand, tp: int, expert_tp: int
) -> Balance:
    """Lines through the times of both sides, and the attention replicas that make them equal.

    Experts with few rows take as long as reading their weights: the line is fitted to more, where rows count.
    """
    moe = pricers[0].model.moe_layers[0][1]
    batch, rows = np.array(SEQUENCES, np.float64), np.array(ROWS, np.float64)
    replicas = rows * moe.num_experts / (moe.experts_per_token * batch[-1])
    left = stage_of(pricers, choice, demand, _grid(pricers, tp, expert_tp, 1.0), batch).attention_s
    many = np.full(len(rows), batch[-1])
    right = stage_of(pricers, choice, demand, _grid(pricers, tp, expert_tp, replicas), many).expert_s
    attention = fit_line(SEQUENCES, np.broadcast_to(left, batch.shape).tolist())
    experts = fit_line(ROWS, np.broadcast_to(right, rows.shape).tolist())
    found = balanced_replicas(attention, experts, moe.num_experts, moe.experts_per_token)
    return Balance(attention=attention, experts=experts, replicas=found)


def stage_of(
    pricers: tuple[Pricer, Pricer], choice: FormatChoice, demand: Demand, grid: TwoSides, batch: np.ndarray
) -> Stage:
    """Times of one micro-batch of `batch` sequences a replica."""
    sides = Sides(
        attention=pricers[0].cluster, experts=pricers[1].cluster,
        profiles=(pricers[0].profile, pricers[1].profile),
    )  # fmt: skip
    work = Work(num_seqs=batch, new_tokens=1.0, past=demand.mean_context)
    return stage(pricers[0].model, sides, grid, work, formats=choice.formats, shares=pricers[0].shares)


def _grid(pricers: tuple[Pricer, Pricer], tp: int, expert_tp: int, replicas: Number) -> TwoSides:
    return TwoSides(
        num_attention=replicas, tp=tp, ep=pricers[0].model.moe_layers[0][1].num_experts, expert_tp=expert_tp,
        num_redundant=0, num_micro_batches=1,
    )  # fmt: skip


def balanced_search(
    pricers: tuple[Pricer, Pricer], choice: FormatChoice, demand: Demand
) -> BalancedPlan | None:
    """The best grid with one expert a node and balanced sides; None where none holds the objectives.

    Every tensor parallelism of both sides; attention replicas by the balance of two lines; three or four
    micro-batches; the largest batch under the time per token by bisection; the most tokens per cost.
    """
    moe = pricers[0].model.moe_layers[0][1]
    nodes = tuple(pricer.cluster.devices_per_node for pricer in pricers)
    price = tuple(unit_cost(pricer.cluster, demand.objective) for pricer in pricers)
    best: BalancedPlan | None = None
    for tp, expert_tp in product(divisors(nodes[0], nodes[0]), divisors(nodes[1], nodes[1])):
        balance = balance_of(pricers, choice, demand, tp, expert_tp)
        for many in MICRO_BATCHES:
            pins: dict[Knob, int] = {
                "tp": tp, "dp": max(round(balance.replicas), 1), "ep": moe.num_experts,
                "expert_tp": expert_tp, "num_redundant": 0, "num_micro_batches": many,
            }  # fmt: skip
            found = grids(pricers, choice, demand, pins, Refused({}))
            if found is None or not len(found.batch):
                continue
            used = sum(float(side[0]) * cost for side, cost in zip(found.usage, price, strict=True))
            value = float(found.rate[0]) * demand.osl / used
            if best is None or value > best.value:
                grid, batch = found.grid(0), float(found.batch[0])
                one = stage_of(pricers, choice, demand, grid, np.array(batch / many))
                best = BalancedPlan(
                    grid=grid, batch=batch, tpot_s=float(found.tpot_s[0]), value=value, balance=balance,
                    stage=one,
                )  # fmt: skip
    return best


def shown_balance(question: Question, plan: Plan) -> str | None:
    """The conditions of a plan with attention and experts apart, in words; None for another plan.

    Source: micro-batches hide the transfers from 2 (1 + Tc / Tf) on (sec. 4.1), and replicas balance the
    sides at k1 E / (k3 K) (sec. 4.2).
    """
    sides = [pool for pool in plan.pools if pool.role in ("attention", "experts")]
    if len(sides) != 2:
        return None
    ours, theirs = sides[0].layout, sides[1].layout
    pricers = question.pricer(sides[0].cluster), question.pricer(sides[1].cluster)
    many, choice = theirs["num_micro_batches"], sides[0].choice
    grid = TwoSides(
        num_attention=ours["dp"], tp=ours["tp"], ep=theirs["ep"], expert_tp=theirs["expert_tp"],
        num_redundant=theirs["num_redundant"], num_micro_batches=many,
    )  # fmt: skip
    one = stage_of(pricers, choice, question.demand, grid, np.array(sides[0].batch / many))
    balance = balance_of(pricers, choice, question.demand, ours["tp"], theirs["expert_tp"])
    # A rank with several experts takes as many times longer.
    replicas = balance.replicas * theirs["ep"] / question.model.moe_layers[0][1].num_experts
    attention_s, expert_s, transfer_s = (
        format_seconds(float(seconds)) for seconds in (one.attention_s, one.expert_s, one.transfer_s)
    )
    return (
        f"a layer and micro-batch take {attention_s} of attention, {expert_s} of experts, {transfer_s} each "
        f"way between them; transfers hide from {paper_micro_batches(one)} micro-batches on, it has {many}; "
        f"lines through both sides balance at {replicas:.1f} attention replicas for {theirs['ep']} expert "
        f"ranks, it has {ours['dp']}"
    )
