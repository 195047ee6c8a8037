"""What a benchmark prints with --json, as scripts/performance.py reads it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and range of samples."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def describe(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], notes: Sequence[str]
) -> dict[str, Any]:
    """A table with how, when and where it was made; a cell is a text, a number or a spread."""
    from moesaic.audit.bench.report import describe_machine, describe_versions

    return {
        "title": title,
        "kind": "rows",
        "command": shlex.join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": describe_machine(),
        "versions": describe_versions(),
        "notes": list(notes),
        "columns": list(columns),
        "rows": list(rows),
    }
