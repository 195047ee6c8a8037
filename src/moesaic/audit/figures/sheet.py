"""A table made of computed numbers, with the figures that it explains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Cell = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Sheet:
    """What an exercise, a demonstration or a decision table shows."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[Cell, ...], ...] = ()
    figures: tuple[str, ...] = ()  # ids or sections, computed and shown below the table
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Stable keys; rows by column."""
        return {
            "title": self.title,
            "rows": [dict(zip(self.columns, row, strict=True)) for row in self.rows],
            "figures": list(self.figures),
            "notes": list(self.notes),
        }


Make = Callable[[], tuple[Sheet, ...]]
