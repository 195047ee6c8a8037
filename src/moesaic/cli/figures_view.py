"""Figures and the tables around them as text."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from moesaic.audit.figures.check import Checked, check
from moesaic.audit.figures.sheet import Cell, Sheet
from moesaic.audit.figures.table import VERDICTS, select

WIDTH = 110
LEAST_ROOM = 30  # of a last column


def render(found: Sequence[Checked]) -> str:
    """Figures by text and section, with the counts below."""
    lines: list[str] = []
    for (text, section), rows in groupby(
        found, key=lambda one: (one.figure.id.split("-")[0], one.figure.section)
    ):
        lines += [f"{text}, {section}", *(line for one in rows for line in figure_lines(one)), ""]
    return "\n".join([*lines, *summary(found)]) if found else "no figures"


def figure_lines(one: Checked) -> list[str]:
    """One figure: its claim and value, ours, and what else is to say."""
    row = one.figure
    unit = "" if row.unit in (None, "bool") else row.unit
    head = f"  {row.id:<14} {_mark(one):<15} {row.claim}"
    said = f"says {_short(row.seed_value)} {unit if _is_number(row.seed_value) else ''}".rstrip()
    ours = ""
    if one.is_computed:
        label = "right" if row.verdict == "wrong" else "computed"
        ours = f"; {label}: {_short(one.value)} {unit if _is_number(one.value) else ''}".rstrip()
    lines = textwrap.wrap(head, WIDTH, subsequent_indent=" " * 33)
    lines += textwrap.wrap(said + ours, WIDTH, initial_indent=" " * 33, subsequent_indent=" " * 33)
    if row.note:
        lines += textwrap.wrap(row.note, WIDTH, initial_indent=" " * 33, subsequent_indent=" " * 35)
    return lines


def _mark(one: Checked) -> str:
    """The verdict, or that our own value does not agree."""
    return "DISAGREES" if one.ok is False else one.figure.verdict


def summary(found: Iterable[Checked]) -> list[str]:
    """How many of each verdict there are, and how many of these were computed."""
    rows = list(found)
    all_of = Counter(one.figure.verdict for one in rows)
    computed = Counter(one.figure.verdict for one in rows if one.is_computed)
    lines = [
        f"{len(rows)} {'figure' if len(rows) == 1 else 'figures'}, {sum(computed.values())} computed here; "
        "the others are shown with their source"
    ]
    for verdict in VERDICTS:
        if all_of[verdict]:
            lines.append(f"  {verdict:<15} {all_of[verdict]:>4}, {computed[verdict]:>4} computed")
    wrong = [one.figure.id for one in rows if one.ok is False]
    lines.append(f"  our value disagrees with the table: {', '.join(wrong) or 'none'}")
    return lines


def render_sheets(sheets: Iterable[Sheet]) -> str:
    """Tables, each with its figures and notes."""
    parts = []
    for sheet in sheets:
        lines = [sheet.title, *_table(sheet)]
        if sheet.figures:
            lines += ["", *(line for one in check(select(sheet.figures)) for line in figure_lines(one))]
        for note in sheet.notes:
            lines += textwrap.wrap(note, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _table(sheet: Sheet) -> list[str]:
    """Columns as wide as they need to be; text to the left, numbers to the right; a long last one wraps."""
    cells = [list(sheet.columns), *([_cell(value) for value in row] for row in sheet.rows)]
    is_text = [any(isinstance(row[idx], str) for row in sheet.rows) for idx in range(len(sheet.columns))]
    widths = [max(len(row[idx]) for row in cells) for idx in range(len(sheet.columns))]
    before = sum(width + 2 for width in widths[:-1]) + 2
    room = max(WIDTH - before, LEAST_ROOM)
    lines = []
    for row in cells:
        shown = [
            cell.ljust(width) if text else cell.rjust(width)
            for cell, width, text in zip(row[:-1], widths, is_text, strict=False)
        ]
        last = textwrap.wrap(row[-1], room) or [""] if is_text[-1] else [row[-1].rjust(widths[-1])]
        lines.append("  " + "  ".join([*shown, last[0]]))
        lines += [" " * before + more for more in last[1:]]
    return [line.rstrip() for line in lines]


def _is_number(value: Any) -> bool:
    """Whether a unit goes with a value: numbers, and lists of them."""
    if isinstance(value, list):
        return all(_is_number(one) for one in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Cell) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-" if value is None else _short(value)


def _short(value: Any) -> str:
    """A value with five digits."""
    if isinstance(value, dict):
        return ", ".join(f"{key.replace('_', ' ')} {_short(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(_short(one) for one in value)
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e5 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
