"""`moesaic lint`: what is wrong with a launch line, a file of prompts, or a measured all-to-all."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from moesaic.cli.lint_own import own_inventory
from moesaic.cli.lint_view import render_all_to_all, render_line, render_prompts
from moesaic.errors import ConfigError
from moesaic.interop.lint import lint
from moesaic.interop.nccl_tests import judge, read_results
from moesaic.spec.hardware import cluster
from moesaic.text.stability import Prompt, measure, read_prompt
from moesaic.units import parse_bytes

MAX_LINE_BYTES = 2**20
MAX_PROMPT_BYTES = 2**28


def lint_command(
    text: Annotated[
        str | None, typer.Argument(help="A launch line in quotes, a file that holds some, or - for stdin.")
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version", help="Release of the engine [default: of the image, else the newest known]."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A preset or folder: its sizes are checked, its tokenizer counts prompts [default: the "
            "line's].",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", help="A file of requests, one JSON a line, to find unstable prefixes in."),
    ] = None,
    all_to_all: Annotated[
        Path | None, typer.Option("--all-to-all", help="Output of alltoall_perf, to judge with --machine.")
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option("--machine", help="Of --all-to-all: device x per node x nodes, as in h100x8."),
    ] = None,
    at_least: Annotated[
        str | None,
        typer.Option(
            "--at-least", help="Of --all-to-all: bytes a second and rank, as 300GB [default: 70% of peak]."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain each wrong, renamed, ineffective or invented flag of a launch line, and offer the right one.

    Exit code 3: something is wrong; warnings alone are 0.
    """
    given = [one for one in (text, prompts, all_to_all) if one is not None]
    if len(given) != 1:
        raise ConfigError(
            'lint takes one thing: a launch line, as in moesaic lint "vllm serve ...", a file, - for stdin; '
            f"--prompts FILE; or --all-to-all FILE --machine NAME; got {len(given)} of them"
        )
    if prompts is not None:
        plain, shown, is_failed = _prompts(prompts, model)
    elif all_to_all is not None:
        plain, shown, is_failed = _all_to_all(all_to_all, machine, at_least)
    else:
        plain, shown, is_failed = _lines(str(text), version, model)
    typer.echo(json.dumps(plain, indent=2) if as_json else shown)
    if is_failed:
        raise typer.Exit(3)


def _lines(given: str, version: str | None, model: str | None) -> tuple[Any, str, bool]:
    reports = lint(_line_text(given), version=version, model=model, own=own_inventory)
    shown = "\n".join(render_line(one) for one in reports)
    return [asdict(one) for one in reports], shown, any(one.is_failed for one in reports)


def _line_text(given: str) -> str:
    """The text itself, what a file of that name holds, or stdin for `-`.

    Raises: ConfigError for nothing at all, and for one word that looks like a file and is none.
    """
    if given == "-":
        text, source = sys.stdin.read(MAX_LINE_BYTES), "stdin"
    elif len(given) > 255 or "\n" in given or not given.strip() or not Path(given).exists():
        text, source = given, "the line"
    else:
        text, source = _read(Path(given), MAX_LINE_BYTES), given
    if not text.strip():
        raise ConfigError(
            f'{source} is empty; lint takes a launch line, as in moesaic lint "vllm serve MODEL", or a file'
        )
    if text is given and re.fullmatch(r"\S*(?:/\S*|\.(?:sh|bash|txt|ya?ml|json|service|env))", given.strip()):
        raise ConfigError(
            f"{given}: there is no such file; give one that is there, or a launch line in quotes, as in "
            'moesaic lint "vllm serve MODEL"'
        )
    return text


def _read(path: Path, most: int) -> str:
    """A file's text.

    Raises: ConfigError when it cannot be read, is too long, or is no text.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            raise ConfigError(f"{path}: more than the {most} bytes that are read; give a part of it")
        return data.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _prompts(path: Path, model: str | None) -> tuple[Any, str, bool]:
    found = measure(_requests(path), None if model is None else _encoder(model))
    plain = asdict(found)
    for one, finding in zip(plain["findings"], found.findings, strict=True):
        one["severity"] = finding.severity
    return plain, render_prompts(str(path), found), any(one.severity == "error" for one in found.findings)


def _requests(path: Path) -> list[Prompt]:
    requests = []
    for number, line in enumerate(_read(path, MAX_PROMPT_BYTES).splitlines(), 1):
        if line.strip():
            try:
                data = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(
                    f"{path}, line {number}: not valid JSON: {error}; one request a line"
                ) from error
            requests.append(read_prompt(data, f"{path}, line {number}"))
    return requests


def _encoder(model: str) -> Callable[[str], Sequence[int]]:
    from moesaic.engine.config import read_hub_cache
    from moesaic.spec.locate import locate
    from moesaic.text.tokenizer import Tokenizer

    located = locate(model, hub=read_hub_cache())
    if located.path is None or located.kind != "folder":
        raise ConfigError(
            f"--model {model} has no tokenizer: give a model folder, or leave it out for characters"
        )
    return Tokenizer.load(located.path).encode


def _all_to_all(path: Path, machine: str | None, at_least: str | None) -> tuple[Any, str, bool]:
    if machine is None:
        raise ConfigError("--all-to-all is judged by the links of a --machine, as in h100x8")
    where = cluster(machine)
    num_ranks, rows = read_results(_read(path, MAX_LINE_BYTES), num_ranks=where.num_devices, name=str(path))
    found = judge(num_ranks, rows, where, None if at_least is None else float(parse_bytes(at_least)))
    return asdict(found), render_all_to_all(str(path), str(where), found), found.verdict != "good"
