"""`moesaic figures`: figures that texts on MoE inference state, recomputed. No model, no torch."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from moesaic.errors import ConfigError


def figures_command(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Ids (S004-036), texts (S004) or sections ('exercise 1') [default: all]."),
    ] = None,
    is_wrong: Annotated[bool, typer.Option("--wrong", help="Only wrong ones, with the right value.")] = False,
    demo: Annotated[
        str | None,
        typer.Option(
            "--demo",
            help="layer, cost, decode, pingpong or helix; selftest, misconceptions or decisions.",
        ),
    ] = None,
    exercise: Annotated[int | None, typer.Option("--exercise", help="A worked exercise, 1 to 9.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Recompute figures that texts on MoE inference state, and say which are wrong and why.

    Exit code 3: a figure that is computed does not agree with the table.
    """
    from moesaic.audit.figures.answers import demo as demo_of
    from moesaic.audit.figures.answers import exercise as exercise_of
    from moesaic.audit.figures.check import check
    from moesaic.audit.figures.table import select
    from moesaic.cli.figures_view import render, render_sheets

    if (demo is not None) + (exercise is not None) + bool(names or is_wrong) > 1:
        raise ConfigError("give figures, or --demo, or --exercise: one of them")
    if demo is not None or exercise is not None:
        sheets = demo_of(demo) if demo is not None else exercise_of(exercise or 0)
        if as_json:
            typer.echo(json.dumps([sheet.to_json() for sheet in sheets], indent=2, allow_nan=False))
        else:
            typer.echo(render_sheets(sheets))
        return
    rows = [row for row in select(names or []) if row.verdict == "wrong" or not is_wrong]
    found = check(rows)
    if as_json:
        typer.echo(json.dumps([one.to_json() for one in found], indent=2, allow_nan=False))
    else:
        typer.echo(render(found))
    if any(one.ok is False for one in found):
        raise typer.Exit(3)
