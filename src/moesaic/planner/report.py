"""One self-contained page about a plan: the answer as text, and plots. Needs matplotlib."""

from __future__ import annotations

import re
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
    parts = [_HEAD.format(title=escape(title)), f"<h1>{escape(title)}</h1>\n<pre>{escape(text)}</pre>\n"]
    for head, words, plot in _sections(plan, question):
        if plot is not None:
            parts.append(f"<h2>{escape(head)}</h2>\n<p>{escape(words)}</p>\n{plot}\n")
    return "".join([*parts, "</body></html>\n"])


def picture(plan: Plan, question: Question) -> str:
    """The plots of the page below each other, as one SVG."""
    plots = [(head, plot) for head, _, plot in _sections(plan, question) if plot is not None]
    parts, top, width = [], 0.0, 0.0
    for head, plot in plots:
        box = re.search(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', plot)
        if box is None:
            continue
        width = max(width, float(box[1]))
        parts.append(
            f'<text x="8" y="{top + 16:.0f}" font-size="12" font-weight="bold">{escape(head)}</text>'
        )
        parts.append(plot.replace("<svg", f'<svg x="0" y="{top + 22:.0f}"', 1).replace('pt"', '"'))
        top += 30 + float(box[2])
    box_of_all = f'viewBox="0 0 {width:.0f} {top:.0f}" font-family="sans-serif"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box_of_all}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


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
