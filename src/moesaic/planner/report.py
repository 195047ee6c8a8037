"""One self-contained page about a plan: the answer as text, and plots. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from moesaic.cost.term import FloatArray
from moesaic.planner import charts
from moesaic.planner.plan import Plan
from moesaic.planner.search import Question, frontier_points
from moesaic.planner.sensitivity import load_per_rank, sensitivities

_HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}}
pre{{background:#f6f6f6;padding:1rem;overflow-x:auto;font-size:12.5px}} svg{{max-width:100%;height:auto}}
h1{{font-size:1.5rem}} h2{{font-size:1.1rem;margin-top:2rem}} p{{max-width:45rem}}
</style></head><body>
"""


def page(title: str, text: str, plan: Plan, question: Question) -> str:
    """The page as HTML. `text` is the answer as the terminal shows it."""
    sections = [
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
    parts = [_HEAD.format(title=escape(title)), f"<h1>{escape(title)}</h1>\n<pre>{escape(text)}</pre>\n"]
    for head, words, plot in sections:
        if plot is not None:
            parts.append(f"<h2>{escape(head)}</h2>\n<p>{escape(words)}</p>\n{plot}\n")
    return "".join([*parts, "</body></html>\n"])


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
