"""What the verbs of `moesaic simulate` print and write: reports as JSON, plots as SVG, timelines as text."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moesaic.errors import ConfigError
from moesaic.planner.sim.line import Timeline

if TYPE_CHECKING:
    from types import ModuleType

MARKS = "0123456789abcdefghijklmnopqrstuvwxyz"
COLUMNS = 84  # of a timeline, beside its labels


def charts(svg: Path | None) -> ModuleType | None:
    """The plots, when one is asked for: before a simulation, as matplotlib may be missing.

    Raises: ConfigError when the file is not called .svg.
    """
    if svg is None:
        return None
    if svg.suffix != ".svg":
        raise ConfigError(f"{svg}: the picture is an SVG; call it so, as in {svg.with_suffix('.svg')}")
    return import_module("moesaic.planner.charts")


def show(report: Any, text: str, *, is_json: bool) -> None:
    """The report: as JSON whose keys are its fields, or as text."""
    if is_json:
        typer.echo(json.dumps(dataclasses.asdict(report), indent=2, allow_nan=False))
    else:
        typer.echo(text)


def write_svg(path: Path, text: str) -> None:
    """A picture as a file of its own.

    Raises: ConfigError when it cannot be written.
    """
    try:
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def gantt(timeline: Timeline, *, until_s: float | None = None, unit: str = "ms") -> list[str]:
    """A row per station, a character per stretch of time: which job is there, 1 being the first; `.` none.

    `until_s` cuts a long timeline.
    """
    total = timeline.total_s
    shown = min(until_s or total, total)
    step = shown / COLUMNS
    width = max(map(len, timeline.stations))
    rows = {name: ["."] * COLUMNS for name in timeline.stations}
    for span in timeline.spans:
        first, last = span.start_s / step, span.end_s / step
        for column in range(min(int(first + 0.5), COLUMNS), min(int(last + 0.5), COLUMNS)):
            rows[span.station][column] = MARKS[(span.job + 1) % len(MARKS)]
    scale = 1e3 if unit == "ms" else 1.0
    end = f"{shown * scale:.4g} {unit}" + (f" of {total * scale:.4g}" if shown < total else "")
    lines = [f"  {name:<{width}} {''.join(cells)}" for name, cells in rows.items()]
    return [*lines, f"  {'':<{width}} 0{end:>{COLUMNS - 1}}"]


def bars(timeline: Timeline, until_s: float) -> list[tuple[str, int, float, float]]:
    """The visits that begin before `until_s`, in milliseconds, for a plot."""
    return [
        (span.station, span.job, span.start_s * 1e3, (span.end_s - span.start_s) * 1e3)
        for span in timeline.spans
        if span.start_s < until_s
    ]
