"""The plots of a balance report as inline SVG. Needs matplotlib; knows numbers and labels, no policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
from matplotlib.figure import Figure

from moesaic.cost.term import FloatArray
from moesaic.planner.charts import _STYLE, COLOURS, _axes, _svg


def before_after(before: FloatArray, after: FloatArray, x_label: str, y_label: str) -> str:
    """Two outlines of columns over each other, and a line at 1."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(x_label, y_label, height=2.4)
        for name, values, colour in (("before", before, COLOURS[3]), ("after", after, COLOURS[0])):
            axes.stairs(values, label=name, color=colour, fill=name == "after", alpha=0.8)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.legend()
        return _svg(figure)


def grouped_bars(rows: Mapping[str, tuple[float, float | None]], names: tuple[str, str], unit: str) -> str:
    """Two horizontal bars per row, the first row on top; None has no bar."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _axes(unit, "", height=1.0 + 0.35 * len(rows))
        for part, (name, colour) in enumerate(zip(names, COLOURS, strict=False)):
            values = [pair[part] for pair in rows.values()]
            if any(value is not None for value in values):
                places = [row + 0.38 * part - 0.19 for row in range(len(rows))]
                axes.barh(places, [value or 0.0 for value in values], height=0.36, label=name, color=colour)
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_xlim(0.0, 1.0)
        axes.invert_yaxis()
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        return _svg(figure)


def heat_maps(maps: Mapping[str, FloatArray], row_names: Sequence[int], x_label: str, y_label: str) -> str:
    """Maps side by side in the colours of one scale, 0 to the largest value."""
    with matplotlib.rc_context({**_STYLE, "axes.grid": False}):
        figure = Figure(figsize=(7.0, 1.2 + 0.05 * len(row_names)), layout="constrained")
        parts = figure.subplots(1, len(maps), sharey=True, squeeze=False)[0]
        most = max(float(values.max()) for values in maps.values())
        for axes, (name, values) in zip(parts, maps.items(), strict=True):
            drawn = axes.pcolormesh(values, vmin=0.0, vmax=most, cmap="inferno", rasterized=True)
            axes.set_title(f"{name}, largest {values.max():.2f}", fontsize=9)
            axes.set_xlabel(x_label)
        step = max(1, len(row_names) // 8)
        parts[0].set_yticks([i + 0.5 for i in range(0, len(row_names), step)], list(row_names[::step]))
        parts[0].set_ylabel(y_label)
        parts[0].invert_yaxis()
        figure.colorbar(drawn, ax=list(parts), label="load / mean")
        return _svg(figure)
