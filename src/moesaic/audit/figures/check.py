"""Figures computed and compared: our value of each, and whether it agrees with the table's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.audit.figures.registry import computations
from moesaic.audit.figures.table import Figure

EXACT = 1e-9  # a tolerance of zero forgives the rounding of floats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Checked:
    """A figure with our value.

    `value` is computed, or where nothing computes it (`is_computed` False) the correction of a wrong figure,
    else None. `ok`: whether it agrees; None where nothing was computed.
    """

    figure: Figure
    value: Any
    is_computed: bool
    ok: bool | None

    def to_json(self) -> dict[str, Any]:
        """Stable keys."""
        row = self.figure
        return {
            "id": row.id, "verdict": row.verdict, "basis": row.basis, "seed_value": row.seed_value,
            "value": self.value, "ok": self.ok, "unit": row.unit, "computed": self.is_computed,
            "claim": row.claim, "note": row.note,
        }  # fmt: skip


def check(rows: Iterable[Figure]) -> tuple[Checked, ...]:
    """Every figure computed that can be."""
    known = computations()
    found = []
    for row in rows:
        if row.id not in known:
            stated = row.note if row.verdict == "wrong" else None
            found.append(Checked(figure=row, value=stated, is_computed=False, ok=None))
            continue
        computation = known[row.id]
        value = tidy(computation.compute(**row.inputs))
        if row.tolerance is None:
            ok = computation.holds is not None and bool(computation.holds(value))
        else:
            ok = is_within(value, row.recomputed_value, row.tolerance)
        found.append(Checked(figure=row, value=value, is_computed=True, ok=ok))
    return tuple(found)


def is_within(value: Any, expected: Any, tolerance: Mapping[str, float]) -> bool:
    """Whether every number of a value is as near to the expected one as the tolerance says."""
    if isinstance(expected, list):
        return (
            isinstance(value, list)
            and len(value) == len(expected)
            and all(is_within(one, other, tolerance) for one, other in zip(value, expected, strict=True))
        )
    if isinstance(expected, bool) or not isinstance(value, int | float):
        return bool(value == expected)
    slack = tolerance["abs"] if "abs" in tolerance else abs(expected) * max(tolerance["rel"], EXACT)
    return bool(math.isclose(value, expected, rel_tol=0.0, abs_tol=slack))


def tidy(value: Any) -> Any:
    """Plain JSON values; floats to 12 digits, so that rounding does not show."""
    if isinstance(value, dict):
        return {key: tidy(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [tidy(one) for one in value]
    if isinstance(value, np.ndarray | np.generic):
        return tidy(value.tolist())
    return float(f"{value:.12g}") if isinstance(value, float) else value
