"""`moesaic balance`: which placement of experts and copies evens out a measured load."""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, get_args

import numpy as np
import typer

from moesaic.cli.balance_view import render, render_check, render_diff
from moesaic.errors import ConfigError, nearest
from moesaic.interop.dump import Dump, match_model
from moesaic.interop.load_file import read_dump
from moesaic.interop.pairs_file import read_pairs
from moesaic.interop.placement_file import Target, check_ending, parse_target, placement_bytes, read_placement
from moesaic.planner.balance import Balance, Case, Shares, balance, compare
from moesaic.planner.balance_answer import as_json, check_json, diff_json
from moesaic.planner.balance_check import check_dump
from moesaic.spec.families import read_config
from moesaic.spec.locate import locate
from moesaic.spec.model import ModelSpec

DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(Case)}
REPORT_ENDINGS = (".html", ".svg")


Loads = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="LOAD...",
        help="Expert counts: a dump of SGLang or TensorRT-LLM, JSON, CSV, routes, or http://HOST:PORT.",
    ),
]
Slots = Annotated[
    int | None,
    typer.Option("--slots", help="Experts and copies over all GPUs [default: the experts, rounded up]."),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Preset, config.json or folder: checks, bytes, memory.")
]
Holdouts = Annotated[
    list[str] | None, typer.Option("--holdout", help="A load to judge by, not to plan for; may be repeated.")
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", help="A policy to run; may be repeated [default: every one that fits]."),
]
Current = Annotated[
    Path | None,
    typer.Option("--current", help="The placement that runs now: ours, SGLang's or TensorRT-LLM's."),
]
MaxMoves = Annotated[
    int | None, typer.Option("--max-moves", help="Most experts to fetch from the current placement.")
]
PairsFile = Annotated[
    Path | None, typer.Option("--pairs", help="JSON of how often experts are chosen together.")
]
Floor = Annotated[
    float, typer.Option("--floor", help="MegaScale's K: least cost of an expert, in mean loads.")
]
NumSlices = Annotated[int, typer.Option("--slices", help="Parts of an expert under the policy slices.")]
Context = Annotated[
    int, typer.Option("--context", min=1, help="Positions of a sequence whose KV copies displace.")
]
SharesName = Annotated[
    str, typer.Option("--shares", help="Parts that copies take in the written plan: even or solved.")
]
Report = Annotated[
    Path | None,
    typer.Option("--report", help="Write a page, .html, or the plots alone, .svg (needs matplotlib)."),
]
Check = Annotated[
    bool, typer.Option("--check", help="Only say whether the loads are sound; exit code 3 if not.")
]
Diff = Annotated[
    tuple[str, str] | None,
    typer.Option("--diff", metavar="A B", help="What changed from load A to load B."),
]


def balance_command(
    loads: Loads = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs that share the experts.")] = None,
    slots: Slots = None,
    nodes: Annotated[int, typer.Option("--nodes", help="Nodes that the GPUs are on.")] = 1,
    groups: Annotated[
        int | None, typer.Option("--groups", help="Groups of experts [default: the model's].")
    ] = None,
    is_rounded: Annotated[
        bool, typer.Option("--round", help="Round slots up to the next number that goes.")
    ] = False,
    model: ModelName = None,
    holdout: Holdouts = None,
    policy: Policies = None,
    current: Current = None,
    max_moves: MaxMoves = None,
    pairs: PairsFile = None,
    floor: Floor = DEFAULTS["floor"],
    num_slices: NumSlices = DEFAULTS["num_slices"],
    context: Context = DEFAULTS["context"],
    shares: SharesName = "even",
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the best placement.")] = None,
    target: Annotated[
        str, typer.Option("--for", help="Format of it: moesaic, sglang, trtllm or kt.")
    ] = "moesaic",
    report: Report = None,
    num_layers: Annotated[int, typer.Option("--layers", min=0, help="Layers to show.")] = 6,
    is_check: Check = False,
    diff: Diff = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Place experts and copies so that GPUs are evenly busy, and say how that holds on other loads.

    Exit code 3: --check found a load that is not sound.
    """
    spec = None if model is None else read_config(locate(model).config, name=model)
    if shares not in get_args(Shares):
        raise ConfigError(f"unknown shares {shares!r}; {nearest(shares, get_args(Shares))}")
    wanted = _check_outputs(parse_target(target), output, shares, report)
    if diff is not None and (loads or is_check):
        raise ConfigError("--diff names its two loads itself; give no others, and no --check")
    if (is_check or diff is not None) and (output is not None or report is not None):
        verb, option = "--check" if is_check else "--diff", "-o" if output else "--report"
        raise ConfigError(f"{verb} writes no file; leave {option} out")
    names = list(diff or loads or ())
    if not names:
        raise ConfigError(
            "no load: give a dump, a folder of a recorder, or http://HOST:PORT of a moesaic server"
        )
    dumps = tuple(_read(name, spec) for name in names)
    if is_check:
        _check(dumps, spec, as_json_)
        return
    placement = None
    if current is not None:
        placement, _ = read_placement(current, gpus, dumps[0].sparse_layers)
        gpus = gpus or placement.ids_LGC.shape[1]
    if gpus is None:
        raise ConfigError("give --gpus, the number of GPUs that share the experts, or a --current plan")
    if report is not None:
        import_module("moesaic.planner.charts")  # before the search: it may be missing
    case = Case(
        dumps=dumps, holdouts=tuple(_read(name, spec) for name in holdout or ()), model=spec,
        num_gpus=gpus, num_slots=slots, num_nodes=nodes, num_groups=groups, is_rounded=is_rounded,
        policies=None if policy is None else tuple(policy), current=placement, max_moves=max_moves,
        floor=floor, num_slices=num_slices, pairs={} if pairs is None else read_pairs(pairs, dumps[0]),
        context=context,
    )  # fmt: skip
    if diff is not None:
        changed = compare(case)
        _print(diff_json(changed), render_diff(names, case, changed), as_json_)
        return
    found = balance(case, progress=lambda line: typer.echo(line, err=True))
    text = render(found, num_layers)
    if output is not None:
        _write_placement(output, wanted, found, "solved" if shares == "solved" else "even")
    if report is not None:
        _report(report, found, text)
    _print(as_json(found), text, as_json_)


def _check_outputs(target: Target, output: Path | None, shares: str, report: Path | None) -> Target:
    """The target, if the names of what is to be written go with what would be in it."""
    if output is not None:
        check_ending(target, output)
    elif target != "moesaic" or shares != "even":
        option = "--for" if target != "moesaic" else "--shares"
        raise ConfigError(f"{option} is about the placement that -o FILE writes; give -o, or leave it out")
    if report is not None and report.suffix.lower() not in REPORT_ENDINGS:
        raise ConfigError(
            f"{report}: a report ends in {' or '.join(REPORT_ENDINGS)}, this name in "
            f"{report.suffix or 'nothing'!r}"
        )
    return target


def _print(values: dict[str, Any], text: str, is_json: bool) -> None:
    typer.echo(json.dumps(values, indent=2, allow_nan=False) if is_json else text)


def _write_placement(path: Path, target: Target, found: Balance, shares: Shares) -> None:
    dumps = found.case.dumps
    rows = max(len(dumps[0].counts_LE), found.layer_idxs[-1] + 1)
    load = np.sum([dump.counts_LE[list(dump.sparse_rows)] for dump in dumps], axis=0)
    _write(path, placement_bytes(target, found.plan(shares), load, found.layer_idxs, rows, path.suffix))


def _read(name: str, spec: ModelSpec | None) -> Dump:
    dump = read_dump(name)
    return dump if spec is None else match_model(dump, spec)


def _check(dumps: tuple[Dump, ...], spec: ModelSpec | None, is_json: bool) -> None:
    found = [(dump, check_dump(dump, spec)) for dump in dumps]
    if is_json:
        typer.echo(json.dumps([check_json(dump.source, findings) for dump, findings in found], indent=2))
    else:
        typer.echo("\n".join(render_check(dump, findings) for dump, findings in found))
    if any(one.level == "fault" for _, findings in found for one in findings):
        raise typer.Exit(3)


def _report(path: Path, found: Balance, text: str) -> None:
    made = import_module("moesaic.planner.balance_report")
    if path.suffix.lower() == ".svg":
        _write(path, made.picture(found).encode())
    else:
        _write(path, made.page(f"Expert load on {found.case.num_gpus} GPUs", text, found).encode())


def _write(path: Path, data: bytes) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    print(f"wrote {path}", file=sys.stderr)
