"""The table of figures: what a text claims, of what inputs, and how it was judged. Computes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from moesaic.errors import ConfigError, nearest

TABLE = Path(__file__).parent / "table.json"

Verdict = Literal["right", "wrong", "underspecified", "unverifiable", "paper-reported"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
Basis = Literal["recomputed", "simulated", "reasoned", "looked-up", "recalled", "quoted"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Figure:
    """One figure.

    Units:  the values are in `unit`; inputs are SI or plain counts, `*_ms` are milliseconds.
    """

    id: str
    section: str  # of the text that the id's first part stands for
    claim: str
    inputs: Mapping[str, Any]  # keyword arguments of the function that computes it; empty where none does
    seed_value: Any  # what the text says
    unit: str | None
    recomputed_value: Any  # what it should be, where that is a number
    tolerance: Mapping[str, float] | None  # {"rel": ..} or {"abs": ..} of the recomputed value
    verdict: Verdict
    basis: Basis
    note: str  # why it is wrong, where it is from, what else to know


@cache
def figures() -> tuple[Figure, ...]:
    """All of them, in the order of the texts."""
    return tuple(Figure(**row) for row in json.loads(TABLE.read_text(encoding="utf-8")))


def select(names: Sequence[str], among: Iterable[Figure] | None = None) -> tuple[Figure, ...]:
    """The figures that any of the names stands for: an id, the beginning of ids (S004), or a section.

    Raises: ConfigError for a name that stands for none, with the nearest.
    """
    rows = figures() if among is None else tuple(among)
    if not names:
        return rows
    wanted = [name.strip().lower() for name in names]
    for name, asked in zip(wanted, names, strict=True):
        if not any(_is_named(row, name) for row in rows):
            known = (
                {row.id for row in rows} | {row.section for row in rows} | {"S000", "S002", "S003", "S004"}
            )
            raise ConfigError(
                f"{asked!r} is no figure and no section; {nearest(asked, known)} `moesaic figures` lists all"
            )
    return tuple(row for row in rows if any(_is_named(row, name) for name in wanted))


def _is_named(row: Figure, name: str) -> bool:
    """Whether a lower-case name stands for a figure: its id, its text, its section, its text and section."""
    text, section = row.id.lower(), row.section.lower()
    return name in (text, text.split("-")[0], section, f"{text.split('-')[0]} {section}")
