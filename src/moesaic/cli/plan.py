"""`moesaic plan`: which layout of which devices serves a model best."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesaic.errors import ConfigError, nearest

if TYPE_CHECKING:  # the planner's modules are heavy: each function imports what it needs, --help nothing
    from moesaic.cost.load import ExpertShares
    from moesaic.planner.advice import Advice
    from moesaic.planner.search import Question
    from moesaic.spec.model import ModelSpec


def plan_command(
    model: Annotated[
        str, typer.Argument(help="A model folder, a config.json, or a preset such as deepseek-v3.")
    ],
    machines: Annotated[
        list[str],
        typer.Option(
            "--machine", help="GPU x per node x nodes, as in h200x8x4; may be repeated to mix kinds."
        ),
    ],
    isl: Annotated[int, typer.Option("--isl", help="Tokens of a prompt.")] = 4096,
    osl: Annotated[int, typer.Option("--osl", help="Tokens of an answer.")] = 1024,
    tpot_ms: Annotated[float | None, typer.Option("--tpot-ms", help="Longest time per token.")] = None,
    ttft_ms: Annotated[
        float | None, typer.Option("--ttft-ms", help="Longest time to the first token.")
    ] = None,
    prefix_hit: Annotated[
        float, typer.Option("--prefix-hit", help="Share of a prompt whose KV is cached already.")
    ] = 0.0,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", help="Requests in flight over all devices.")
    ] = None,
    objective: Annotated[
        str,
        typer.Option("--objective", help="What to make most of: per-gpu, per-price, per-watt or latency."),
    ] = "per-gpu",
    price: Annotated[
        list[str] | None,
        typer.Option(
            "--price",
            help="Price of a device, as in h200=5.5; may be repeated [default: the file's, where L20 = 1].",
        ),
    ] = None,
    load: Annotated[
        Path | None, typer.Option("--load", help="Recorded expert load, as `moesaic balance` reads it.")
    ] = None,
    skew: Annotated[
        float | None,
        typer.Option(
            "--skew",
            help="Zipf exponent of the experts' popularity [default: 0.17 up to 16 experts, else 0.48].",
        ),
    ] = None,
    weights: Annotated[
        str, typer.Option("--weights", help="Weight formats to consider, by comma; all but stored are lossy.")
    ] = "stored",
    kv: Annotated[
        str, typer.Option("--kv", help="KV formats to consider, by comma: bfloat16, fp8, fp4.")
    ] = "bfloat16",
    dispatch: Annotated[
        str | None,
        typer.Option("--dispatch", help="Formats of rows sent to experts [default: fp8 for fp8 experts]."),
    ] = None,
    layout: Annotated[str, typer.Option("--layout", help="Numbers to hold fixed, as in tp=8,ep=32.")] = "",
    profile: Annotated[
        str, typer.Option("--profile", help="How much of the datasheet is reached: calibrated or paper.")
    ] = "calibrated",
    hardware: Annotated[
        Path | None, typer.Option("--hardware", help="A machine file of your own, or a folder of them.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write the deployment file.")] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report", help="Write a page with plots, .html, or the plots alone, .svg (needs matplotlib)."
        ),
    ] = None,
    as_json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the layout that serves a model best: tokens per second, latencies, memory, and why not another.

    Exit code 3: no layout meets the objectives; the best without them is shown, and what it would take.
    """
    from moesaic.planner.demand import OBJECTIVES, Demand, stretched
    from moesaic.planner.question import clusters_of, format_choices
    from moesaic.planner.search import Question
    from moesaic.planner.space import parse_pins
    from moesaic.spec.families import read_config
    from moesaic.spec.locate import locate

    if objective not in OBJECTIVES:
        raise ConfigError(f"unknown objective {objective!r}; {nearest(objective, OBJECTIVES)}")
    spec = read_config(locate(model).config, name=model)
    demand = Demand(
        isl=isl, osl=osl, tpot_s=_seconds(tpot_ms), ttft_s=_seconds(ttft_ms), concurrency=concurrency,
        prefix_hit=prefix_hit, objective=objective,
    )  # fmt: skip
    stretched(demand.length, spec.max_position)  # before the search: it may be refused
    if report is not None:
        if report.suffix not in (".html", ".svg"):
            raise ConfigError(f"--report {report}: a report is .html, a page, or .svg, its plots alone")
        import_module("moesaic.planner.charts")  # before the search: it may be missing
    recorded, shares, name = _load(spec, load, skew)
    question = Question(
        model=spec, clusters=clusters_of(machines, price or [], hardware), demand=demand,
        profile=profile, shares=shares, choices=format_choices(spec, weights, kv, dispatch),
        pins=parse_pins(layout), load=name,
    )  # fmt: skip
    _show(model, question, recorded, output, report, as_json_)


def _show(
    model: str,
    question: Question,
    recorded: ExpertShares | None,
    output: Path | None,
    report: Path | None,
    is_json: bool,
) -> None:
    """Search, write the files that were asked for, print.

    Raises: Exit with code 3 when an objective was missed.
    """
    from moesaic.cli.plan_view import render
    from moesaic.planner.answer import as_json
    from moesaic.planner.deployment import deployment_of
    from moesaic.planner.search import ep_bands, search

    answer = search(question)
    bands = ep_bands(question, answer)
    advice = advice_on(question, answer.best.num_sequences, recorded is not None)
    if output is not None:
        write_text(output, deployment_of(answer.best, question.model, recorded).to_json())
    if report is not None:
        made = import_module("moesaic.planner.report")
        if report.suffix == ".svg":
            write_text(report, made.picture(answer, question))
        else:
            text = render(model, question, answer, bands, advice)
            write_text(report, made.page(f"A plan for {model}", text, answer, question))
    if is_json:
        typer.echo(json.dumps(as_json(model, question, answer, bands, advice), indent=2, allow_nan=False))
    else:
        typer.echo(render(model, question, answer, bands, advice))
    if answer.missed:
        raise typer.Exit(3)


def advice_on(question: Question, num_sequences: int, has_load: bool) -> tuple[Advice, ...]:
    """Rules of thumb for the first of the machines."""
    from moesaic.planner.advice import habits, suitability

    cluster = question.clusters[0]
    profile = question.pricer(cluster).profile
    return (
        *suitability(question.model, cluster, question.demand),
        *habits(question.model, cluster, profile, has_load=has_load, batch=num_sequences),
    )


def _load(
    spec: ModelSpec, load: Path | None, skew: float | None
) -> tuple[ExpertShares | None, ExpertShares, str]:
    """(recorded load or None, what is charged, that in words)."""
    from moesaic.planner.load_file import default_skew, grouped, read_load, skewed

    if load is not None and skew is not None:
        raise ConfigError("--load and --skew both say how uneven the experts are; give one of them")
    if load is not None:
        recorded = read_load(load, spec)
        return recorded, grouped(recorded), f"experts as uneven as recorded in {load}"
    shares = skewed(spec, skew)
    if not spec.moe_layers:
        return None, shares, "dense model"
    name = f"experts as uneven as Zipf {default_skew(spec) if skew is None else skew:g}"
    return None, shares, name + (", assumed" if skew is None else "")


def write_text(path: Path, text: str) -> None:
    """Write a file.

    Raises: ConfigError when it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
