"""The plots of a plan's report as inline SVG. Needs matplotlib; knows numbers and labels, no search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from moesaic.cost.term import FloatArray

_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moesaic",
    "font.size": 9,
    "axes.grid": True,
    "grid.alpha": 0.3,
}
MAX_NAMED = 96  # bars of a timeline that have room for a number
COLOURS = ("#3465a4", "#cc8400", "#4e9a06", "#a40000", "#75507b", "#888a85")


def frontier(
    cloud: tuple[FloatArray, FloatArray],
    groups: Mapping[str, tuple[FloatArray, FloatArray]],
    front: tuple[FloatArray, FloatArray],
    points: Mapping[str, tuple[float, float]],
    y_label: str,
) -> str:
    """What a deployment's tokens are worth over tokens per second of a request.

    A cloud of all, a curve for each group, the front of all, and single points, the first of them a star.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes("tokens/s of a request", y_label)
        axes.plot(*cloud, marker=".", markersize=2, linestyle="", color=COLOURS[5], alpha=0.5)
        axes.plot(*front, color="black", linewidth=3.0, alpha=0.3, label="frontier")
        for (name, (x, y)), colour in zip(groups.items(), COLOURS, strict=False):
            axes.plot(x, y, marker=".", markersize=4, linewidth=0.8, label=name, color=colour)
        for (name, spot), (marker, size) in zip(points.items(), (("*", 14), ("s", 7)), strict=False):
            axes.plot(*spot, marker=marker, markersize=size, linestyle="", color=COLOURS[3], label=name)
        axes.set_xscale("log")
        axes.legend()
        return _svg(figure)


def bars(labels: Sequence[str], values: Sequence[float], unit: str) -> str:
    """One horizontal bar per label, the first on top."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(unit, "", height=0.6 + 0.28 * len(labels))
        axes.barh(range(len(labels)), values, color=COLOURS[0])
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        return _svg(figure)


def stacked(rows: Mapping[str, Mapping[str, float]], limits: Sequence[float], unit: str) -> str:
    """One horizontal bar per row, made of its parts, and a mark at each row's limit."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(unit, "", height=1.2 + 0.4 * len(rows))
        names = list(next(iter(rows.values())))
        start = [0.0] * len(rows)
        for name, colour in zip(names, COLOURS, strict=False):
            sizes = [parts[name] for parts in rows.values()]
            axes.barh(list(rows), sizes, left=start, label=name.replace("_", " "), color=colour)
            start = [a + b for a, b in zip(start, sizes, strict=True)]
        axes.plot(limits, list(rows), marker="|", markersize=18, linestyle="", color="black", label="usable")
        axes.invert_yaxis()
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4)
        return _svg(figure)


def columns(values: FloatArray, x_label: str, y_label: str) -> str:
    """One narrow column per value and a line at 1."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(x_label, y_label, height=2.4)
        axes.bar(range(len(values)), values, width=0.9, color=COLOURS[0])
        axes.axhline(1.0, color="black", linewidth=0.8)
        return _svg(figure)


def lines(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], x_label: str, y_label: str) -> str:
    """One line per series over a scale from 0, so that a change looks as large as it is."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(x_label, y_label, height=2.6)
        for (name, (x, y)), colour in zip(series.items(), COLOURS, strict=False):
            axes.plot(x, y, marker=".", label=name, color=colour)
        axes.set_ylim(0.0, 1.15 * max(max(y) for _, y in series.values()))
        axes.legend()
        return _svg(figure)


def timeline(stations: Sequence[str], spans: Sequence[tuple[str, int, float, float]], x_label: str) -> str:
    """One row per station, the first on top; a bar per visit, coloured and named by its job.

    Shapes:  spans are (station, job, start, length).
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(x_label, "", height=0.8 + 0.4 * len(stations))
        place = {name: idx for idx, name in enumerate(stations)}
        for station, job, start, length in spans:
            colour = COLOURS[job % len(COLOURS)]
            axes.barh(place[station], length, left=start, color=colour, edgecolor="white", linewidth=0.6)
            if len(spans) <= MAX_NAMED:
                axes.text(
                    start + length / 2, place[station], str(job + 1), ha="center", va="center", color="white"
                )
        axes.set_yticks(range(len(stations)), stations)
        axes.invert_yaxis()
        axes.grid(visible=False, axis="y")
        return _svg(figure)


def _axes(x_label: str, y_label: str, height: float = 3.2) -> tuple[Figure, Any]:
    figure = Figure(figsize=(7.0, height), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    return figure, axes


def _svg(figure: Figure) -> str:
    buffer = StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
