"""`moesaic calibrate`: this machine in about a minute, as a machine file for `fit` and `plan`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from moesaic.audit.calibrate import DEFAULT_SECONDS, CalibrationAsk, Measured, calibrate
from moesaic.audit.machine_facts import Reading, words
from moesaic.units import format_bytes, format_seconds


def calibrate_command(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write a machine file (TOML) for fit and plan.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="What --machine calls it [default: the file's name].")
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Time to measure; starting comes on top.")
    ] = DEFAULT_SECONDS,
    disk: Annotated[
        Path | None,
        typer.Option("--disk", help="Folder on the drive to measure [default: the file's, else this one]."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure this machine, and write its machine file."""
    ask = CalibrationAsk(output=output, name=name, seconds=seconds, disk=disk, is_overwriting=force)
    found = calibrate(ask, _show)
    typer.echo(json.dumps(found.to_json(), indent=2, allow_nan=False) if as_json else render(found))


def _show(phase: str) -> None:
    print(phase, file=sys.stderr, flush=True)


def render(found: Measured) -> str:
    """The measurement as text."""
    lines = [f"{found.machine.name}: {found.machine.description}; {found.versions_text}"]
    lines.append(_row("", "median, and in brackets the quartile range over it"))
    for (part, what), cells in table_lines(found.readings).items():
        lines.append(_row(part, f"{what}: {', '.join(cells)}"))
    lines += [_row("fit", words(fit)) for fit in found.collectives]
    lines += [_row("left out", f"{what}: {why}") for what, why in found.not_measured.items()]
    lines += [_row("warning", warning) for warning in found.warnings]
    if found.output is None:
        lines.append(_row("file", "none was asked for; -o mine.toml writes one for `moesaic fit` and `plan`"))
    else:
        name = found.machine.name
        lines.append(_row("wrote", f"{found.output}; use it with --hardware {found.output} --machine {name}"))
    return "\n".join(lines)


def table_lines(readings: Sequence[Reading]) -> dict[tuple[str, str], list[str]]:
    """Cells of one line of the table, by part and what they share: products by rows, messages by size."""
    lines: dict[tuple[str, str], list[str]] = {}
    for one in readings:
        case, cell = one.case, f"{_amount(one)} ({one.spread_text})"
        what = one.label
        if one.part == "gemm":
            shape = f"[{case['hidden']}, {case['ffn']}] of {case['expert']}"
            what = f"{case['dtype']} {shape} ({case['by']}), GFLOP/s"
            cell = f"{case['rows']} rows {cell}" if case["rows"] > 1 else f"1 row {cell}"
        elif one.part == "collectives":
            what = f"{case['op']}, {case['processes']} processes"
            cell = f"{format_bytes(case['bytes'])} {cell}"
        lines.setdefault((one.part, what), []).append(cell)
    return lines


def _row(label: str, text: str) -> str:
    return fill(
        text, 110, initial_indent=f"  {label:<12}", subsequent_indent=" " * 16, break_on_hyphens=False
    )


def _amount(one: Reading) -> str:
    if one.unit == "s":
        return format_seconds(one.median)
    return f"{one.median / 1e9:.3g}" if one.unit == "flop/s" else f"{format_bytes(one.median)}/s"
