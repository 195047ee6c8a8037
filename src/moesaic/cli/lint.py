"""`moesaic lint`: what is wrong with a launch line, a file of prompts, or a measured all-to-all."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.errors import ConfigError
from moesaic.interop.inventory import TITLES
from moesaic.interop.lint import LineReport, lint

MAX_TEXT_BYTES = 2**20


def lint_command(
    text: Annotated[
        str | None, typer.Argument(help="A launch line in quotes, a file that holds some, or - for stdin.")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option("--version", help="Release of the engine [default: of the image, else the newest known]."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", help="A preset or folder whose sizes to check against [default: the line's]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain each wrong, renamed, ineffective or invented flag of a launch line, and offer the right one.

    Exit code 3: something is wrong; warnings alone are 0.
    """
    if text is None:
        raise ConfigError('give a launch line, as in moesaic lint "vllm serve ...", a file, or - for stdin')
    reports = lint(read_text(text), version=version, model=model)
    if as_json:
        typer.echo(json.dumps([_plain(one) for one in reports], indent=2))
    else:
        typer.echo("\n".join(render(one) for one in reports))
    if any(one.is_failed for one in reports):
        raise typer.Exit(3)


def read_text(given: str) -> str:
    """The text itself, what a file of that name holds, or stdin for `-`.

    Raises: ConfigError for a file that is too long or no text.
    """
    if given == "-":
        return sys.stdin.read(MAX_TEXT_BYTES)
    path = Path(given)
    try:
        if len(given) > 255 or not path.is_file():
            return given
        if path.stat().st_size > MAX_TEXT_BYTES:
            raise ConfigError(f"{path}: {path.stat().st_size} bytes are no launch line; at most {MAX_TEXT_BYTES}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); give a shell script") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def render(report: LineReport) -> str:
    """The findings of one line as text."""
    name = TITLES.get(report.engine, report.program)
    head = f"{name} {report.version or ''}".strip()
    if report.basis == "documented":
        head += ", documented only: its parser was not read"
    if report.asked is not None and report.asked != report.version:
        head += f", the nearest known release to {report.asked}"
    if report.model is not None:
        head += f", model {report.model}"
    if not report.findings:
        return f"{head}\n  ok          nothing is wrong"
    lines = [head]
    for one in report.findings:
        lines.append(f"  {one.severity:<10}  {one.message} [{one.rule}]")
        if one.suggestion is not None:
            lines.append(f"              instead: {one.suggestion}")
    return "\n".join(lines)


def _plain(report: LineReport) -> dict[str, Any]:
    return asdict(report)
