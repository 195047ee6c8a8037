"""What every deployment reaches at every concurrency, limits aside: the points that a plan's report draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from moesaic.cost.term import FloatArray
from moesaic.planner.compare import Way, way_of
from moesaic.planner.demand import Objective
from moesaic.planner.plan import Plan
from moesaic.planner.search import Answer, Question, deployments

WORTH: Mapping[Objective, str] = {
    "per-gpu": "tokens/s per GPU", "per-price": "tokens/s per price", "per-watt": "tokens/s per watt",
    "latency": "tokens/s per GPU",
}  # fmt: skip
"""What the tokens of a plan are set against under each objective."""


def considered(question: Question, answer: Answer) -> dict[Way, tuple[FloatArray, FloatArray]]:
    """(tokens per second of a request, what it is worth) of all deployments by way, at 1, 2, 4, ... requests.

    As long as something serves so many; the plans of the answer are among them.
    """
    demand = question.demand
    objective: Objective = "per-gpu" if demand.objective == "latency" else demand.objective
    demand = replace(demand, objective=objective, tpot_s=None, ttft_s=None)
    find = deployments(question, is_offloaded=answer.best.decoder.layout["num_offloaded"] > 0)
    found: dict[Way, list[FloatArray]] = {}
    concurrency = 1
    while choices := find(replace(demand, concurrency=concurrency)):
        for one in choices:
            found.setdefault(way_of(one.make(0)), []).append(np.stack([1.0 / one.tpot_s, one.value]))
        concurrency *= 2
    for plan in (answer.best, answer.runner_up, *answer.ways.values()):
        if plan is not None:
            found.setdefault(way_of(plan), []).append(np.array([[one] for one in point(plan, objective)]))
    joined = {way: np.concatenate(parts, axis=1) for way, parts in found.items()}
    return {way: (points[0], points[1]) for way, points in joined.items()}


def point(plan: Plan, objective: Objective) -> tuple[float, float]:
    """(tokens per second of a request, what it is worth) of a plan."""
    cost = {"per-price": plan.price, "per-watt": plan.power_w}.get(objective)
    worth = plan.tokens_per_s_per_gpu if cost is None else plan.tokens_per_s / cost
    return 1.0 / plan.token_s, worth


def pareto(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The points that no other beats in both, by rising x."""
    order = np.lexsort((-y, -x))
    best = np.maximum.accumulate(y[order]) if len(order) else y
    keep = np.append(True, best[1:] > best[:-1]) if len(order) else order > 0
    rows = order[keep][::-1]
    return x[rows], y[rows]


def thinned(x: FloatArray, y: FloatArray, cells: int = 32) -> tuple[FloatArray, FloatArray]:
    """One point of every cell of a grid over the logarithms: what a picture can tell apart."""
    if not len(x):
        return x, y
    places = []
    for one in (np.log(x), np.log(y)):
        span = max(float(np.ptp(one)), 1e-12)
        places.append(np.floor((one - one.min()) / span * cells).astype(np.int64))
    _, rows = np.unique(places[0] * (cells + 1) + places[1], return_index=True)
    return x[rows], y[rows]
