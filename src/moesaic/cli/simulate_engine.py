"""`moesaic simulate serve` and `fleet`: requests through the real scheduler, ledger and routing policies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.cli.options import with_options
from moesaic.cli.progress import Progress
from moesaic.cli.simulate_engine_view import fleet_text, serve_text
from moesaic.cli.simulate_output import charts, show, write_svg
from moesaic.errors import ConfigError
from moesaic.units import parse_bytes

if TYPE_CHECKING:
    from moesaic.planner.sim.engine import EngineCase
    from moesaic.spec.workload import TraceRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What both verbs take."""

    machine: Annotated[
        str | None, typer.Option(help="Devices of one engine: GPU x per node x nodes, as in h200x8.")
    ] = None
    layout: Annotated[
        str, typer.Option(help="Numbers to hold fixed, as in tp=8,ep=8 [default: the fastest to decode].")
    ] = ""
    weights: Annotated[str, typer.Option(help="Format of the weights.")] = "stored"
    kv: Annotated[str, typer.Option(help="Format of the KV cache: bfloat16, fp8, fp4.")] = "bfloat16"
    dispatch: Annotated[
        str | None, typer.Option(help="Format of rows sent to experts [default: fp8 for fp8 experts].")
    ] = None
    load: Annotated[Path | None, typer.Option(help="Recorded expert load, as `plan` takes it.")] = None
    skew: Annotated[
        float | None, typer.Option(help="Zipf exponent of the experts' popularity [default: as `plan`].")
    ] = None
    profile: Annotated[
        str, typer.Option(help="How much of the datasheet is reached: calibrated or paper.")
    ] = "calibrated"
    hardware: Annotated[
        Path | None, typer.Option(help="A machine file of your own, or a folder of them.")
    ] = None
    max_num_seqs: Annotated[int, typer.Option(help="Requests computed in one step.")] = 256
    max_tokens_per_step: Annotated[int, typer.Option(help="A longer prompt is computed in chunks.")] = 8192
    max_model_len: Annotated[
        int | None, typer.Option(help="Context [default: the model's, up to 131072].")
    ] = None
    kv_bytes: Annotated[
        str | None,
        typer.Option(help="KV pool of a replica, as in 40GiB [default: what the devices have left]."),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Mooncake JSONL or Azure CSV [default: made-up conversations].")
    ] = None
    sort: Annotated[bool, typer.Option("--sort", help="Put a trace's rows in order of time.")] = False
    requests: Annotated[int | None, typer.Option(help="The first ones [default: 500, fleet: all].")] = None
    speed: Annotated[float, typer.Option(help="A trace's arrivals so many times as fast.")] = 1.0
    rate: Annotated[
        float | None, typer.Option(help="Requests per second, Poisson [default: the trace's times, else 1].")
    ] = None
    stress: Annotated[
        float | None, typer.Option(help="Poisson at so many times the rate of the trace's busiest minute.")
    ] = None
    isl: Annotated[int, typer.Option(help="Mean prompt tokens without a trace.")] = 2048
    osl: Annotated[int, typer.Option(help="Mean answer tokens without a trace.")] = 256
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0
    ttft_ms: Annotated[float | None, typer.Option(help="Exit 3 if the P99 is above this.")] = None
    tpot_ms: Annotated[float | None, typer.Option(help="Exit 3 if the P99 is above this.")] = None
    svg: Annotated[Path | None, typer.Option(help="Write a picture (needs matplotlib).")] = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False

    def rows(self, default_requests: int | None) -> tuple[tuple[TraceRow, ...], str]:
        """The requests with their arrivals, and what they are in words."""
        from moesaic.planner.sim.arrivals import conversations
        from moesaic.spec.workload import peak_rate, poisson, read_trace, sped_up

        if self.rate is not None and self.stress is not None:
            raise ConfigError("--rate and --stress both say how fast requests come; give one of them")
        if self.rate is not None and not 0.0 < self.rate < float("inf"):
            raise ConfigError(
                f"--rate must be a finite number above 0 requests per second, got {self.rate:g}"
            )
        if self.trace is None:
            if self.stress is not None or self.sort or self.speed != 1.0:
                raise ConfigError("--stress, --speed and --sort are about a trace: give --trace FILE")
            count = 500 if self.requests is None else self.requests
            made = conversations(count, isl=self.isl, osl=self.osl, seed=self.seed)
            rate = self.rate or 1.0
            return poisson(made, rate, self.seed), f"{count} made-up requests, {rate:g} a second"
        every = read_trace(self.trace, sort=self.sort)
        limit = default_requests if self.requests is None else self.requests
        if limit is not None and limit < 1:
            raise ConfigError(f"--requests must be at least 1, got {limit}")
        found = sped_up(every[:limit], self.speed)
        name = f"{len(found):,} requests of {self.trace.name}"
        if self.stress is not None:
            if not 0.0 < self.stress < float("inf"):
                raise ConfigError(f"--stress must be a finite number above 0, got {self.stress:g}")
            rate = self.stress * peak_rate(every)
            return poisson(found, rate, self.seed), (
                f"{name}, {rate:.3g} a second: {self.stress:g} x the busiest minute"
            )
        if self.rate is not None:
            return poisson(found, self.rate, self.seed), f"{name}, {self.rate:g} a second"
        return found, name + (f", {self.speed:g} x as fast" if self.speed != 1.0 else "")

    def engine(
        self, model: str, *, deployment: Path | None = None, max_waiting: int | None = None,
        has_prefix_cache: bool = True, one_replica: bool = False,
    ) -> EngineCase:  # fmt: skip
        """The engine that was asked for."""
        from moesaic.planner.load_file import grouped, read_load, skewed
        from moesaic.planner.question import format_choices
        from moesaic.planner.sim.setup import EngineParts, deployed, limits_for, split_for
        from moesaic.planner.space import parse_pins
        from moesaic.spec.deployment import from_json
        from moesaic.spec.families import read_config
        from moesaic.spec.hardware import cluster
        from moesaic.spec.locate import locate

        if self.load is not None and self.skew is not None:
            raise ConfigError("--load and --skew both say how uneven the experts are; give one of them")
        spec = read_config(locate(model).config, name=model)
        limits = limits_for(
            spec, max_num_seqs=self.max_num_seqs, max_tokens_per_step=self.max_tokens_per_step,
            max_model_len=self.max_model_len, max_waiting=max_waiting,
        )  # fmt: skip
        shares = skewed(spec, self.skew) if self.load is None else grouped(read_load(self.load, spec))
        if deployment is not None:
            if self.machine is not None or self.layout:
                raise ConfigError("--deployment has machine and layout of its own; give one or the other")
            try:
                text = deployment.read_bytes()
            except OSError as error:
                raise ConfigError(f"{deployment} cannot be read: {error}") from error
            _, machines, split, formats = deployed(from_json(text, name=str(deployment)), spec)
            parts = EngineParts(spec, machines, self.profile, formats, shares)
        else:
            if self.machine is None:
                raise ConfigError("--machine is missing: what one engine runs on, as in --machine h200x8")
            machines = cluster(self.machine, self.hardware)
            formats = format_choices(spec, self.weights, self.kv, self.dispatch)[0].formats
            parts = EngineParts(spec, machines, self.profile, formats, shares)
            split = split_for(spec, machines, parse_pins(self.layout), parts, one_replica=one_replica)
        kv_bytes = None if self.kv_bytes is None else parse_bytes(self.kv_bytes)
        return parts.engine(split, limits, has_prefix_cache=has_prefix_cache, kv_bytes=kv_bytes)

    def targets(self) -> tuple[float | None, float | None]:
        """(TTFT, TPOT) asked for, in seconds.

        Raises: ConfigError for one that is not above 0.
        """
        for name, value in (("ttft-ms", self.ttft_ms), ("tpot-ms", self.tpot_ms)):
            if value is not None and not 0.0 < value < float("inf"):
                raise ConfigError(f"--{name} must be a finite number above 0, got {value:g}")
        ttft_s, tpot_s = (None if one is None else one / 1e3 for one in (self.ttft_ms, self.tpot_ms))
        return ttft_s, tpot_s


@with_options(Options)
def serve_command(
    model: Annotated[
        str, typer.Argument(help="A model folder, a config.json, or a preset such as deepseek-v3.")
    ],
    *,
    options: Options,
    deployment: Annotated[
        Path | None, typer.Option(help="A file of `plan -o`: machine and layout from there.")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="Closed loop: so many requests at a time, whatever their times.")
    ] = None,
    max_waiting: Annotated[
        int | None, typer.Option(help="Requests that may wait; more are refused [default: no limit].")
    ] = None,
    no_prefix_cache: Annotated[
        bool, typer.Option("--no-prefix-cache", help="Compute every prompt whole.")
    ] = False,
) -> None:
    """Requests through one engine: the real scheduler and KV ledger, steps timed by the cost model.

    Exit code 3: an objective was missed.
    """
    from moesaic.planner.sim.serve import simulate_serve

    plots = charts(options.svg)
    if concurrency is not None and (options.rate is not None or options.stress is not None):
        raise ConfigError(
            "--concurrency is a closed loop: requests have no rate; leave out --rate and --stress"
        )
    targets = options.targets()
    case = options.engine(
        model, deployment=deployment, max_waiting=max_waiting, has_prefix_cache=not no_prefix_cache
    )
    rows, words = options.rows(500)
    with Progress() as progress:
        report = simulate_serve(case, rows, concurrency=concurrency, progress=progress)
    missed = report.missed(*targets)
    if plots is not None and options.svg is not None:
        at = report.series["at_s"]
        lines = {"running": (at, report.series["running"]), "waiting": (at, report.series["waiting"])}
        write_svg(options.svg, plots.lines(lines, "s", "requests"))
    if concurrency is not None:
        words += f", {concurrency} at a time"
    show(report, serve_text(model, case, words, report, missed), is_json=options.as_json)
    if missed:
        raise typer.Exit(3)


@with_options(Options)
def fleet_command(
    model: Annotated[
        str, typer.Argument(help="A model folder, a config.json, or a preset such as deepseek-v3.")
    ],
    *,
    options: Options,
    engines: Annotated[int, typer.Option(help="Equal engines, each on a --machine.")] = 4,
    staleness_s: Annotated[float, typer.Option(help="How late the directory learns of blocks.")] = 1.0,
    prefix_blocks: Annotated[int, typer.Option(help="Blocks of 512 tokens that prefix affinity hashes.")] = 2,
    least_hit: Annotated[
        float, typer.Option(help="Part of a prompt below which KV affinity counts no hit.")
    ] = 0.25,
    hit_weight: Annotated[float | None, typer.Option(help="Of load + affinity.")] = None,
    load_weight: Annotated[float | None, typer.Option(help="Of load + affinity.")] = None,
) -> None:
    """The same requests through a fleet under each routing policy: cache hits, balance, time to first token.

    Exit code 3: an objective was missed by load + affinity.
    """
    from moesaic.planner.sim.fleet import POLICIES, simulate_fleet
    from moesaic.spec.deployment import KvAffinity, LoadAffinity, PrefixAffinity, RoutePolicy

    plots = charts(options.svg)
    targets = options.targets()
    if prefix_blocks < 1 or not 0.0 <= least_hit <= 1.0:
        raise ConfigError(
            "--prefix-blocks must be at least 1 and --least-hit in 0 to 1, got "
            f"{prefix_blocks} and {least_hit:g}"
        )
    weights: dict[str, Any] = {
        name: value
        for name, value in (("hit_weight", hit_weight), ("load_weight", load_weight))
        if value is not None
    }
    if any(not 0.0 <= value < float("inf") for value in weights.values()):
        raise ConfigError("--hit-weight and --load-weight must be finite numbers of at least 0")
    policies: dict[str, RoutePolicy] = {
        **POLICIES, "prefix affinity": PrefixAffinity(num_blocks=prefix_blocks),
        "KV affinity": KvAffinity(least_hit=least_hit),
        "load + affinity": replace(LoadAffinity(), **weights),
    }  # fmt: skip
    case = options.engine(model, one_replica=True)
    rows, words = options.rows(None)
    with Progress() as progress:
        report = simulate_fleet(
            case, rows, num_engines=engines, staleness_s=staleness_s, policies=policies, progress=progress
        )
    if plots is not None and options.svg is not None:
        points = {
            row.policy: ([row.hit_rate], [row.ttft_s.p[99] if row.ttft_s else 0.0]) for row in report.rows
        }
        write_svg(options.svg, plots.lines(points, "part of prompt tokens found cached", "P99 TTFT, s"))
    missed = report.row("load + affinity").missed(*targets)
    show(report, fleet_text(model, case, words, report, missed), is_json=options.as_json)
    if missed:
        raise typer.Exit(3)
