"""`moesaic simulate pingpong`, `ep` and `capacity`: mechanisms inside a layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesaic.cli.simulate_output import bars, charts, show, write_svg
from moesaic.cli.simulate_view import capacity_text, ep_text, pingpong_text
from moesaic.errors import ConfigError
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import locate

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Svg = Annotated[Path | None, typer.Option("--svg", help="Write a picture (needs matplotlib).")]
Seed = Annotated[int, typer.Option(min=0, help="Of everything random.")]
OptionalModel = Annotated[
    str | None, typer.Argument(help="A model folder, a config.json, or a preset such as deepseek-v3.")
]
ProfileName = Annotated[str, typer.Option(help="How much of the datasheet is reached: calibrated or paper.")]
SHOWN_LAYERS = 2  # of a timeline


def pingpong_command(
    model: OptionalModel = None,
    *,
    attention_ms: Annotated[
        float | None, typer.Option(help="Attention of a micro-batch in a layer, without a model.")
    ] = None,
    expert_ms: Annotated[float | None, typer.Option(help="Experts of a micro-batch in a layer.")] = None,
    transfer_ms: Annotated[float | None, typer.Option(help="One way between the two.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers [default: the model's, else 32].")] = None,
    micro_batches: Annotated[int, typer.Option(help="Of the timeline that is drawn.")] = 3,
    most: Annotated[int, typer.Option(help="Micro-batches that the table goes up to.")] = 4,
    machine: Annotated[str | None, typer.Option(help="Of the attention side, as in a800x8x4.")] = None,
    expert_machine: Annotated[
        str | None, typer.Option(help="Of the expert side [default: the same].")
    ] = None,
    nodes: Annotated[int, typer.Option(help="Attention nodes.")] = 1,
    tp: Annotated[int, typer.Option(help="Devices of an attention node.")] = 4,
    expert_tp: Annotated[int, typer.Option(help="Devices of an expert.")] = 1,
    batch: Annotated[int, typer.Option(help="Sequences of a micro-batch of an attention node.")] = 128,
    context: Annotated[int, typer.Option(help="Positions of a sequence.")] = 650,
    profile: ProfileName = "calibrated",
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Micro-batches between attention and expert ranks: timeline, closed form, formula (5) where it holds."""
    from moesaic.cost.pingpong import Stage
    from moesaic.planner.sim.pingpong import TwoSidedCase, study_ping_pong

    plots = charts(svg)
    times = (attention_ms, expert_ms, transfer_ms)
    if model is None:
        if None in times:
            raise ConfigError(
                "a ping-pong needs times: --attention-ms, --expert-ms and --transfer-ms, or a MODEL with "
                "--machine"
            )
        attention_s, expert_s, transfer_s = (float(one or 0.0) / 1e3 for one in times)
        one = Stage(attention_s=attention_s, expert_s=expert_s, transfer_s=transfer_s)
        name, count = "given times", 32 if layers is None else layers
    else:
        if any(value is not None for value in times):
            raise ConfigError("give a MODEL with --machine, or times in milliseconds, not both")
        if machine is None:
            raise ConfigError(
                "--machine is missing: what a MODEL's attention runs on, as in --machine a800x8x4"
            )
        spec = read_config(locate(model).config, name=model)
        one = TwoSidedCase(
            attention=cluster(machine), experts=cluster(expert_machine or machine), nodes=nodes, tp=tp,
            expert_tp=expert_tp, batch=batch, context=context, profile=profile,
        ).stage(spec)  # fmt: skip
        name = f"{model}, {batch} sequences of {context} on each of {nodes} x {tp} {machine}"
        count = len(spec.layers) if layers is None else layers
    report = study_ping_pong(one, num_layers=count, shown=micro_batches, most=most)
    shown_s = report.chosen.total_s * min(SHOWN_LAYERS / count, 1.0)
    if plots is not None and svg is not None:
        stations = report.chosen.stations
        write_svg(svg, plots.timeline(stations, bars(report.chosen, shown_s), "ms"))
    show(report, pingpong_text(name, report, shown_s), is_json=as_json)


def ep_command(
    model: OptionalModel = None,
    *,
    experts: Annotated[int | None, typer.Option(help="Experts, without a model [default: 256].")] = None,
    top_k: Annotated[int | None, typer.Option(help="Experts of a token [default: 8].")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs [default: those of --machine, else 32].")] = None,
    gpus_per_node: Annotated[int, typer.Option(help="Without --machine.")] = 8,
    tokens: Annotated[str, typer.Option(help="Tokens of each GPU in a step, by comma.")] = "1,32,128",
    skew: Annotated[float, typer.Option(help="Zipf exponent of the experts' popularity.")] = 0.6,
    topics: Annotated[int, typer.Option(help="Topics, each with favourites of its own.")] = 1,
    load: Annotated[
        Path | None, typer.Option(help="Recorded expert load in place of --skew, as `plan` takes it.")
    ] = None,
    layer: Annotated[
        int | None, typer.Option(help="Of the load, by sparse layers [default: the middle one in skew].")
    ] = None,
    redundant: Annotated[int | None, typer.Option(help="Further slots [default: one a GPU].")] = None,
    machine: Annotated[
        str | None, typer.Option(help="With a model: price the exchange in chunks, as in h800x8x4.")
    ] = None,
    profile: ProfileName = "calibrated",
    trials: Annotated[int, typer.Option(help="Batches of each size.")] = 20,
    slow: Annotated[
        float, typer.Option(help="A straggler: one GPU takes this many times as long for a row.")
    ] = 1.0,
    seed: Seed = 0,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Drawn or recorded routing over GPUs: imbalance before and after copies, traffic, chunked exchange."""
    from moesaic.planner.sim.ep import EpCase
    from moesaic.planner.sim.ep_question import priced_exchange, routing, sizes_of, study

    plots = charts(svg)
    spec = None if model is None else read_config(locate(model).config, name=model)
    machines = None if machine is None else cluster(machine)
    num_experts, k = sizes_of(spec, experts, top_k)
    count = gpus if gpus is not None else 32 if machines is None else machines.num_devices
    case = EpCase(
        num_experts=num_experts, experts_per_token=k, num_gpus=count,
        gpus_per_node=min(gpus_per_node if machines is None else machines.link_domain, count),
        tokens_per_gpu=_numbers(tokens, "tokens"), num_redundant=count if redundant is None else redundant,
        num_trials=trials, slow=slow, seed=seed,
    )  # fmt: skip
    traffic, source = routing(spec, case, load=load, layer=layer, skew=skew, topics=topics)
    answer = study(case, traffic, source, priced_exchange(spec, machines, case, profile))
    if plots is not None and svg is not None:
        if answer.chunks is None:
            x, rows = list(case.tokens_per_gpu), answer.routing.rows
            lines = {
                name: (x, [row.placements[name].rows.mean for row in rows]) for name in rows[0].placements
            }
            write_svg(svg, plots.lines(lines, "tokens per GPU", "busiest GPU / mean"))
        else:
            line = answer.chunks.timeline
            write_svg(svg, plots.timeline(line.stations, bars(line, line.total_s), "ms"))
    show(answer, ep_text(answer, machine or ""), is_json=as_json)


def capacity_command(
    *,
    experts: Annotated[int, typer.Option(help="Experts of the layer.")] = 64,
    top_k: Annotated[int, typer.Option(help="Experts of a token.")] = 6,
    tokens: Annotated[int, typer.Option(help="Tokens of a step outside the burst.")] = 1024,
    burst: Annotated[float, typer.Option(help="Tokens in the burst, as a multiple.")] = 3.0,
    burst_s: Annotated[float, typer.Option(help="How long it lasts.")] = 10.0,
    hot_skew: Annotated[float, typer.Option(help="Zipf exponent of the burst's topic.")] = 0.25,
    static: Annotated[str, typer.Option(help="Static factors to compare with, by comma.")] = "1.2,1.5,2",
    start: Annotated[float, typer.Option(help="Factor that the controller starts with.")] = 1.3,
    fill_gain: Annotated[float, typer.Option(help="Alpha: how fast it falls.")] = 0.1,
    overflow_gain: Annotated[float, typer.Option(help="Beta: how fast overflows raise it.")] = 0.3,
    window_ms: Annotated[float, typer.Option(help="How often it moves.")] = 500.0,
    seed: Seed = 0,
    svg: Svg = None,
    as_json: Json = False,
) -> None:
    """Static and adaptive capacity factors under a burst: overflows, step times, the step response."""
    from moesaic.planner.sim.burst import BurstCase, study_burst
    from moesaic.sched.buffer import FactorPolicy

    plots = charts(svg)
    case = BurstCase(
        num_experts=experts, experts_per_token=top_k, tokens=tokens, burst=burst, burst_s=burst_s,
        hot_skew=hot_skew, seed=seed,
    )  # fmt: skip
    policy = FactorPolicy(
        window_s=window_ms / 1e3, start=start, fill_gain=fill_gain, overflow_gain=overflow_gain
    )
    report = study_burst(case, policy, _factors(static))
    if plots is not None and svg is not None:
        trail = report.row("adaptive").factors
        lines = {
            "adaptive factor": ([at for at, _ in trail], [factor for _, factor in trail]),
            "no step overflows": (
                [0.0, case.before_s, case.before_s, case.before_s + case.burst_s,
                 case.before_s + case.burst_s, case.duration_s],
                [report.needed[part] for part in ("quiet", "quiet", "burst", "burst", "quiet", "quiet")],
            ),
        }  # fmt: skip
        write_svg(svg, plots.lines(lines, "s", "capacity factor"))
    show(report, capacity_text(report), is_json=as_json)


def _numbers(text: str, option: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise ConfigError(f"--{option} must be whole numbers of at least 1 by comma, got {text!r}")
    return found


def _factors(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        found = ()
    if not found or not all(1.0 <= factor <= 64.0 for factor in found):
        raise ConfigError(f"--static must be factors of 1 to 64 by comma, as in 1.2,1.5; got {text!r}")
    return found
