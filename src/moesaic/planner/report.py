"""One self-contained page about a plan: the answer as text, and plots. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np

from moesaic.planner import charts
from moesaic.planner.compare import CLOSE
from moesaic.planner.frontier import WORTH, considered, pareto, point, thinned
from moesaic.planner.page import PAGE_END, page_head, stacked_plots
from moesaic.planner.plan import Plan
from moesaic.planner.search import Answer, Question
from moesaic.planner.sensitivity import load_per_rank, sensitivities


def page(title: str, text: str, answer: Answer, question: Question) -> str:
    """The page as HTML. `text` is the answer as the terminal shows it."""
    parts = [page_head(title), f"<pre>{escape(text)}</pre>\n"]
    for head, words, plot in _sections(answer, question):
        parts.append(f"<h2>{escape(head)}</h2>\n<p>{escape(words)}</p>\n{plot or ''}\n")
    return "".join([*parts, PAGE_END])


def picture(answer: Answer, question: Question) -> str:
    """The plots of the page below each other, as one SVG."""
    return stacked_plots([(head, plot) for head, _, plot in _sections(answer, question) if plot is not None])


def _sections(answer: Answer, question: Question) -> list[tuple[str, str, str | None]]:
    """(heading, explanation, plot); where a plot does not apply it is None and the explanation says why."""
    plan = answer.best
    sections: list[tuple[str, str, str | None]] = [
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
        ("Load of each expert rank", *_load(plan, question)),
    ]
    if plan.tpot is None:  # nothing to draw over a time per token
        return sections
    return [_frontier(answer, question), *sections, *_sensitivity(plan, question)]


def _frontier(answer: Answer, question: Question) -> tuple[str, str, str]:
    objective = question.demand.objective
    found = considered(question, answer)
    speed, worth = (np.concatenate([points[axis] for points in found.values()]) for axis in (0, 1))
    points = {"the answer": point(answer.best, objective)}
    if answer.runner_up is not None:
        points["runner-up"] = point(answer.runner_up, objective)
    words = (
        "Grey: every deployment at 1, 2, 4, ... requests, limits aside. Curves: what no other of its way "
        f"beats; the line over all is the frontier. What is within {CLOSE:.0%} of the best counts as "
        "equal, so the answer lies on it or as near. Up and to the right is better."
    )
    return "Throughput and speed", words, charts.frontier(
        thinned(speed, worth), {way: pareto(*one) for way, one in found.items()}, pareto(speed, worth),
        points, WORTH[objective],
    )  # fmt: skip


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


def _load(plan: Plan, question: Question) -> tuple[str, str | None]:
    """(explanation, plot)."""
    if not question.model.moe_layers:
        return "The model is dense: it has no experts, and all ranks have the same rows.", None
    words = "Rows over the mean, in the layer in the middle of the load; the step ends with the tallest."
    if plan.pools[-1].layout["ep"] == 1:
        words = "Every rank holds a slice of every expert, so all have the same rows, whatever is popular."
    elif question.shares.shares is None:
        words = "The experts are taken as equally popular, so all ranks have the same rows."
    load = load_per_rank(plan, question.shares)
    return words, charts.columns(load, "expert rank of an instance", "rows / mean")


def _sensitivity(plan: Plan, question: Question) -> Sequence[tuple[str, str, str | None]]:
    found = sensitivities(plan, question)
    series = {one.name: (one.at, [seconds * 1e3 for seconds in one.tpot_s]) for one in found}
    skew = {name: line for name, line in series.items() if name == "skew"}
    rates = {name: line for name, line in series.items() if name != "skew"}
    return [
        (
            "If experts are more uneven",
            "The same layout and batch under another Zipf exponent of the experts' popularity."
            if skew
            else "No popularity of experts to vary: a dense model, or layers that differ in their number.",
            charts.lines(skew, "exponent", "TPOT, ms") if skew else None,
        ),
        (
            "If bandwidth is other than the file says",
            "The same layout and batch with each rate at a factor of it."
            if rates
            else "The machine's file names no rate to vary.",
            charts.lines(rates, "factor", "TPOT, ms") if rates else None,
        ),
    ]
