"""`moesaic bench`: throughput and latency, of an engine in this process or of a server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.audit.bench.measure import Measured, Plan, measure
from moesaic.audit.bench.report import Report, Slo, load_average, make_report
from moesaic.audit.bench.workload import Load, PromptLoad, RandomLoad, TraceLoad
from moesaic.cli.options import (
    ENGINE_DEFAULTS,
    DispatchFormatName,
    DtypeName,
    FormatName,
    IgnoreEos,
    KvBytes,
    KvFormatName,
    LayoutOptions,
    MatmulShards,
    MaxNumSeqs,
    Model,
    NumericsName,
    Threads,
    with_options,
)
from moesaic.errors import ConfigError, MoesaicError
from moesaic.units import parse_bytes

if TYPE_CHECKING:
    import httpx

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

SloTarget = Annotated[float | None, typer.Option(help="Exit 3 if the 99th percentile is above this.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What both verbs take."""

    num_prompts: Annotated[int, typer.Option(help="Requests in each run.")] = 16
    input_len: Annotated[int, typer.Option(help="Prompt tokens of each request.")] = 128
    output_len: Annotated[int, typer.Option(help="Output tokens of each request.")] = 64
    concurrency: Annotated[
        int | None, typer.Option(help="Requests in flight at most [default: no limit].")
    ] = None
    request_rate: Annotated[
        float | None, typer.Option(help="Requests per second, Poisson [default: at once].")
    ] = None
    prompts: Annotated[
        Path | None, typer.Option(help="File of prompts, one a line or .jsonl: realistic routing.")
    ] = None
    trace: Annotated[
        Path | None, typer.Option(help="Trace, JSONL or CSV: arrivals, lengths, shared prefixes.")
    ] = None
    trace_scale: Annotated[float, typer.Option(help="Lengths of the trace times this.")] = 1.0
    trace_speed: Annotated[float, typer.Option(help="Arrivals of the trace so many times faster.")] = 1.0
    runs: Annotated[int, typer.Option(help="Measured runs.")] = 3
    warmup: Annotated[int, typer.Option(help="Runs of a few requests before, not counted.")] = 1
    ignore_eos: IgnoreEos = False
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Draw from the most likely tokens of this mass.")] = 1.0
    seed: Annotated[int, typer.Option(help="Of the random prompts and arrivals.")] = 0
    slo_ttft_ms: SloTarget = None
    slo_tpot_ms: SloTarget = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    markdown: Annotated[Path | None, typer.Option(help="Also write a Markdown table to this file.")] = None

    def plan(self) -> Plan:
        """How often, and how many at a time."""
        return Plan(
            num_runs=self.runs,
            num_warmups=self.warmup,
            concurrency=self.concurrency,
            request_rate=self.request_rate,
            seed=self.seed,
        )

    def slo(self) -> Slo:
        """The targets."""
        ttft_ms, tpot_ms = self.slo_ttft_ms, self.slo_tpot_ms
        return Slo(
            ttft_s=None if ttft_ms is None else ttft_ms / 1000,
            tpot_s=None if tpot_ms is None else tpot_ms / 1000,
        )

    def load(self, *, vocab: int, max_model_len: int | None) -> Load:
        """The requests."""
        if self.prompts is not None and self.trace is not None:
            raise ConfigError("--prompts and --trace exclude each other: a trace has its own lengths")
        if self.prompts is not None:
            return PromptLoad.read(self.prompts, num_prompts=self.num_prompts, output_len=self.output_len)
        if self.trace is not None:
            return TraceLoad.read(
                self.trace,
                num_prompts=self.num_prompts,
                vocab=vocab,
                max_model_len=max_model_len,
                length_scale=self.trace_scale,
                speed=self.trace_speed,
                seed=self.seed,
            )
        return RandomLoad(
            num_prompts=self.num_prompts,
            input_len=self.input_len,
            output_len=self.output_len,
            vocab=vocab,
            seed=self.seed,
        )

    def finish(self, report: Report) -> None:
        """Print and write the result, then say by the exit code whether it is good."""
        typer.echo(json.dumps(report.to_json(), indent=2) if self.as_json else report.to_text())
        if self.markdown is not None:
            self.markdown.write_text(report.to_markdown())
        if not report.figures:
            raise MoesaicError("no request was completed: nothing was measured (see the warnings above)")
        if report.slo_missed:
            raise typer.Exit(3)


@app.command("throughput")
@with_options(LayoutOptions, "layout")
@with_options(Options)
def throughput_command(
    model: Model,
    *,
    options: Options,
    layout: LayoutOptions,
    max_num_seqs: MaxNumSeqs = ENGINE_DEFAULTS["max_num_seqs"],
    kv_bytes: KvBytes = None,
    dtype: DtypeName = None,
    weight_format: FormatName = None,
    kv_format: KvFormatName = None,
    dispatch_format: DispatchFormatName = None,
    numerics: NumericsName = ENGINE_DEFAULTS["preset"],
    matmul_shards: MatmulShards = None,
    threads: Threads = None,
) -> None:
    """Measure an engine in this process."""
    plan, slo = options.plan(), options.slo()
    kv_size = None if kv_bytes is None else parse_bytes(kv_bytes)
    from moesaic.audit.bench.client import EngineLoad  # heavy: after the arguments were found good
    from moesaic.engine.llm import LLM

    before = load_average()
    with LLM(
        model,
        preset=numerics,
        max_num_seqs=max_num_seqs,
        kv_bytes=kv_size,
        dtype=dtype,
        format=weight_format,
        kv_format=kv_format,
        dispatch_format=dispatch_format,
        matmul_shards=matmul_shards,
        num_threads=threads,
        **layout.options(),
    ) as llm:
        engine = llm.engine
        load = options.load(vocab=engine.spec.vocab, max_model_len=engine.max_model_len)
        client = EngineLoad(
            engine=engine,
            tokenizer=llm.tokenizer,
            ignore_eos=options.ignore_eos,
            temperature=options.temperature,
            top_p=options.top_p,
        )
        measured = asyncio.run(measure(client, load, plan, _progress))
        active = engine.snapshot().active
    options.finish(
        make_report(
            kind="throughput",
            subject=model,
            measured=measured,
            plan=plan,
            slo=slo,
            active=active,
            load_before=before,
            ignore_eos=options.ignore_eos,
        )
    )


@app.command("serve")
@with_options(Options)
def serve_command(
    *,
    url: Annotated[str, typer.Option(help="Address of the server, as in http://127.0.0.1:8000.")],
    options: Options,
    model: Annotated[str | None, typer.Option(help="Name to ask for [default: the first listed].")] = None,
    vocab: Annotated[
        int | None,
        typer.Option(min=1, help="Random token ids are below this [default: the server's]."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token.")] = None,
) -> None:
    """Measure a server over its OpenAI completions API."""
    plan, slo = options.plan(), options.slo()
    before = load_average()
    from moesaic.audit.bench.http_client import HttpLoad, connect

    async def run() -> tuple[Measured, dict[str, Any], str]:
        async with connect(url, api_key) as http:
            name, active, ids_below = await _ask(http, model, vocab, is_random=options.prompts is None)
            load = options.load(vocab=ids_below, max_model_len=active.get("limits", {}).get("max_model_len"))
            client = HttpLoad(
                http=http,
                model=name,
                ignore_eos=options.ignore_eos,
                temperature=options.temperature,
                top_p=options.top_p,
                has_salts=bool(active),
            )
            return await measure(client, load, plan, _progress), active, name

    measured, active, name = asyncio.run(run())
    options.finish(
        make_report(
            kind="serve",
            subject=f"{name} at {url}",
            measured=measured,
            plan=plan,
            slo=slo,
            active=active,
            load_before=before,
            ignore_eos=options.ignore_eos,
        )
    )


async def _ask(
    http: httpx.AsyncClient, model: str | None, vocab: int | None, *, is_random: bool
) -> tuple[str, dict[str, Any], int]:
    """The model's name, what the server says of itself, and the number of token ids."""
    from moesaic.audit.bench.http_client import active, first_model

    name = model or await first_model(http)
    facts = await active(http)
    found = vocab or facts.get("vocab")
    if found is None and is_random:
        raise ConfigError(
            f"{http.base_url} does not say how many token ids there are: give --vocab, or --prompts FILE"
        )
    return name, facts, int(found or 1)


def _progress(text: str) -> None:
    typer.echo(text, err=True)
