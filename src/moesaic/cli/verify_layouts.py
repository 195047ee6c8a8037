"""`moesaic verify --layouts`: does the answer depend on how many ranks compute it, and how?"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING

import typer

from moesaic.cli.options import CHECK_FAILED
from moesaic.engine.config import EngineConfig

if TYPE_CHECKING:
    from moesaic.audit.layouts import LayoutVerification

SHOWN = 10  # layouts named on the screen; --json has all


def verify_layouts_command(
    wishes: EngineConfig, name: str, *, is_long: bool, as_json: bool, show: Callable[[str], None]
) -> None:
    """Compare, print, and leave with 3 when a layout differs or the comparison proves nothing."""
    from moesaic.audit.layouts import dump_json, verify_layouts  # needs torch, which the caller looked for

    found = verify_layouts(wishes, is_long=is_long, name=name, say=show)
    typer.echo(dump_json(found) if as_json else render_layouts(found))
    if found.failures:
        raise typer.Exit(CHECK_FAILED)


def render_layouts(found: LayoutVerification) -> str:
    """The verification as text."""
    lines = [
        f"{found.model}: {found.expected} layouts = {len(found.layouts)} run + {len(found.refused)} refused; "
        f"{found.num_rows} rows each, every hidden state and logit bit by bit"
    ]
    for (dtype, backend), some in groupby(found.layouts, lambda one: (one.dtype, one.backend)):
        cells = list(some)
        same = sum(one.bit_identical for one in cells)
        lines.append(_row(dtype, f"{backend}: {same} of {len(cells)} layouts with the bits of one rank"))
    lines += [_row("refused", f"{one.name}: {one.reason}") for one in found.refused]
    if found.negative_control_caught is not None:
        missed = ", ".join(found.missed_controls)
        lines.append(_row("control", f"{missed} NOT caught" if missed else "sums in other orders are caught"))
    lines += [_row("note", note) for note in found.notes]
    lines += [_row("FAILED", failure) for failure in found.failures[:SHOWN]]
    more = len(found.failures) - SHOWN
    lines += [_row("FAILED", f"{more} more")] if more > 0 else []
    if not found.failures:
        lines.append(_row("ok", f"the same bits in every layout that runs, after {found.seconds:.0f} s"))
    return "\n".join(lines)


def _row(label: str, text: str) -> str:
    return f"  {label:<10}{text}"
