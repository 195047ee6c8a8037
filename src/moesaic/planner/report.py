"""One self-contained page about a plan: the answer as text, and plots. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from moesaic.cost.term import FloatArray
from moesaic.planner import charts
from moesaic.planner.page import PAGE_END, page_head, stacked_plots
from moesaic.planner.plan import Plan
from moesaic.planner.search import Question, frontier_points
from moesaic.planner.sensitivity import load_per_rank, sensitivities


def page(title: str, text: str, plan: Plan, question: Question) -> str:
    """The page as HTML. `text` is the answer as the terminal shows it."""
    parts = [page_head(title), f"<pre>{escape(text)}</pre>\n"]
    for head, words, plot in _sections(plan, question):
        if plot is not None:
            parts.append(f"<h2>{escape(head)}</h2>\n<p>{escape(words)}</p>\n{plot}\n")
    return "".join([*parts, PAGE_END])


def picture(plan: Plan, question: Question) -> str:
    """The plots of the page below each other, as one SVG."""
    return stacked_plots([(head, plot) for head, _, plot in _sections(plan, question) if plot is not None])


def _sections(plan: Plan, question: Question) -> list[tuple[str, str, str | None]]:
    """(heading, explanation, plot); a plot that does not apply is None."""
    return [
        (
            "Throughput and speed",
            "Instances that serve both phases, at every concurrency; up and to the right is better.",
            _frontier(plan, question),
        ),
        (
            "Time of a token",
            "What the slowest rank waits for; work hidden behind other work is left out.",
            _breakdown(plan),
        ),
        (
            "Memory of the fullest rank",
            "The mark is what weights, KV and buffers may fill.",
            _memory(plan),
        ),
        (
            "Load of each expert rank",
            "Rows over the mean, in the layer in the middle of the load; the step ends with the tallest.",
            _load(plan, question),
        ),
        *_sensitivity(plan, question),
    ]


def _frontier(plan: Plan, question: Question) -> str | None:
    groups: dict[str, tuple[FloatArray, FloatArray]] = {}
    for name, (speed, tokens) in frontier_points(question).items():
        x, y = pareto(speed, tokens)
        if len(x):
            groups[name] = x, y
    chosen = 1.0 / float(plan.tpot.value), plan.tokens_per_s_per_gpu
    return charts.frontier(groups, chosen) if groups else None


def pareto(x: FloatArray, y: FloatArray) -> tuple[FloatArray, FloatArray]:
    """The points that no other beats in both, by rising x."""
    order = np.lexsort((-y, -x))
    best = np.maximum.accumulate(y[order]) if len(order) else y
    keep = np.append(True, best[1:] > best[:-1]) if len(order) else order > 0
    rows = order[keep][::-1]
    return x[rows], y[rows]


def _breakdown(plan: Plan) -> str:
    parts = [part for part in plan.breakdown() if part[2] > 0]
    labels = [f"{name.replace('_', ' ')} ({resource})" for name, resource, _ in parts]
    return charts.bars(labels, [seconds * 1e3 for _, _, seconds in parts], "ms")


def _memory(plan: Plan) -> str:
    rows = {
        f"{pool.role} ({pool.cluster.machine.name})": {name: size / 1e9 for name, size in pool.memory.items()}
        for pool in plan.pools
    }
    return charts.stacked(rows, [pool.usable_bytes / 1e9 for pool in plan.pools], "GB")


def _load(plan: Plan, question: Question) -> str | None:
    load = load_per_rank(plan, question.shares)
    return None if load is None else charts.columns(load, "expert rank", "rows / mean")


def _sensitivity(plan: Plan, question: Question) -> Sequence[tuple[str, str, str | None]]:
    found = sensitivities(plan, question)
    series = {one.name: (one.at, [seconds * 1e3 for seconds in one.tpot_s]) for one in found}
    skew = {name: line for name, line in series.items() if name == "skew"}
    rates = {name: line for name, line in series.items() if name != "skew"}
    return [
        (
            "If experts are more uneven",
            "The same layout and batch under another Zipf exponent of the experts' popularity.",
            charts.lines(skew, "exponent", "TPOT, ms") if skew else None,
        ),
        (
            "If bandwidth is other than the file says",
            "The same layout and batch with each rate at a factor of it.",
            charts.lines(rates, "factor", "TPOT, ms") if rates else None,
        ),
    ]
