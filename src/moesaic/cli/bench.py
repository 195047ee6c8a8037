"""`moesaic bench`: throughput and latency, of an engine in this process or of a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesaic.audit.bench.measure import Measured, Plan, measure
from moesaic.audit.bench.report import Report, Slo, load_average, make_report
from moesaic.audit.bench.workload import Load, PromptLoad, RandomLoad, TraceLoad
from moesaic.errors import ConfigError, MoesaicError
from moesaic.units import parse_bytes

if TYPE_CHECKING:
    import httpx

app = typer.Typer(no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]})

NumPrompts = Annotated[int, typer.Option(help="Requests in each run.")]
InputLen = Annotated[int, typer.Option(help="Prompt tokens of each request.")]
OutputLen = Annotated[int, typer.Option(help="Output tokens of each request.")]
Concurrency = Annotated[int | None, typer.Option(help="Requests in flight at most [default: no limit].")]
RequestRate = Annotated[float | None, typer.Option(help="Requests per second, Poisson [default: at once].")]
Prompts = Annotated[
    Path | None, typer.Option(help="File of prompts, one a line or .jsonl: realistic routing.")
]
Trace = Annotated[Path | None, typer.Option(help="Trace (.jsonl): arrivals, lengths, shared prefixes.")]
TraceScale = Annotated[float, typer.Option(help="Lengths of the trace times this.")]
TraceSpeed = Annotated[float, typer.Option(help="Arrivals of the trace so many times faster.")]
Runs = Annotated[int, typer.Option(help="Measured runs.")]
Warmup = Annotated[int, typer.Option(help="Runs of a few requests before, not counted.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end token: exact lengths.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option(help="Draw from the most likely tokens of this mass.")]
Seed = Annotated[int, typer.Option(help="Of the random prompts and arrivals.")]
SloTtft = Annotated[float | None, typer.Option(help="Exit 3 if the 99th percentile is above this.")]
SloTpot = Annotated[float | None, typer.Option(help="Exit 3 if the 99th percentile is above this.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Markdown = Annotated[Path | None, typer.Option(help="Also write a Markdown table to this file.")]


@app.command("throughput")
def throughput_command(
    model: Annotated[str, typer.Argument(help="A model folder, or demo for the packaged model.")],
    num_prompts: NumPrompts = 16,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    prompts: Prompts = None,
    trace: Trace = None,
    trace_scale: TraceScale = 1.0,
    trace_speed: TraceSpeed = 1.0,
    runs: Runs = 3,
    warmup: Warmup = 1,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests computed in one step.")] = None,
    kv_bytes: Annotated[str | None, typer.Option(help="Size of the KV pool, as in 512MiB.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16 [default: the model's].")] = None,
    numerics: Annotated[str, typer.Option(help="Numerics preset: portable or fast.")] = "portable",
    threads: Annotated[int | None, typer.Option(help="Threads to compute with [default: all].")] = None,
    as_json: AsJson = False,
    markdown: Markdown = None,
) -> None:
    """Measure an engine in this process."""
    plan = Plan(
        num_runs=runs, num_warmups=warmup, concurrency=concurrency, request_rate=request_rate, seed=seed
    )
    slo = _slo(slo_ttft_ms, slo_tpot_ms)
    from moesaic.audit.bench.client import EngineLoad  # heavy: after the arguments were found good
    from moesaic.engine.llm import LLM

    options: dict[str, Any] = {
        "max_num_seqs": max_num_seqs,
        "kv_bytes": None if kv_bytes is None else parse_bytes(kv_bytes),
        "dtype": dtype,
        "num_threads": threads,
    }
    before = load_average()
    with LLM(model, preset=numerics, **{k: v for k, v in options.items() if v is not None}) as llm:
        engine = llm.engine
        load = _load(
            num_prompts=num_prompts,
            input_len=input_len,
            output_len=output_len,
            prompts=prompts,
            trace=trace,
            trace_scale=trace_scale,
            trace_speed=trace_speed,
            vocab=engine.spec.vocab,
            max_model_len=engine.max_model_len,
            seed=seed,
        )
        client = EngineLoad(
            engine=engine,
            tokenizer=llm.tokenizer,
            ignore_eos=ignore_eos,
            temperature=temperature,
            top_p=top_p,
        )
        measured = asyncio.run(measure(client, load, plan, _progress))
        active = engine.snapshot().active
    report = make_report(
        kind="throughput",
        subject=model,
        measured=measured,
        plan=plan,
        slo=slo,
        active=active,
        load_before=before,
        ignore_eos=ignore_eos,
    )
    _finish(report, as_json=as_json, markdown=markdown)


@app.command("serve")
def serve_command(
    url: Annotated[str, typer.Option(help="Address of the server, as in http://127.0.0.1:8000.")],
    model: Annotated[str | None, typer.Option(help="Name to ask for [default: the first listed].")] = None,
    num_prompts: NumPrompts = 32,
    input_len: InputLen = 128,
    output_len: OutputLen = 64,
    concurrency: Concurrency = None,
    request_rate: RequestRate = None,
    prompts: Prompts = None,
    trace: Trace = None,
    trace_scale: TraceScale = 1.0,
    trace_speed: TraceSpeed = 1.0,
    runs: Runs = 3,
    warmup: Warmup = 1,
    ignore_eos: IgnoreEos = False,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    slo_ttft_ms: SloTtft = None,
    slo_tpot_ms: SloTpot = None,
    vocab: Annotated[
        int | None, typer.Option(help="Random token ids are below this [default: asked of the server].")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Bearer token.")] = None,
    as_json: AsJson = False,
    markdown: Markdown = None,
) -> None:
    """Measure a server over its OpenAI completions API."""
    plan = Plan(
        num_runs=runs, num_warmups=warmup, concurrency=concurrency, request_rate=request_rate, seed=seed
    )
    slo = _slo(slo_ttft_ms, slo_tpot_ms)
    before = load_average()
    from moesaic.audit.bench.http_client import connect

    async def run() -> tuple[Measured, dict[str, Any], str]:
        async with connect(url, api_key) as http:
            name, active, ids_below = await _ask(http, model, vocab, is_random=prompts is None)
            load = _load(
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
                prompts=prompts,
                trace=trace,
                trace_scale=trace_scale,
                trace_speed=trace_speed,
                vocab=ids_below,
                max_model_len=active.get("limits", {}).get("max_model_len"),
                seed=seed,
            )
            from moesaic.audit.bench.http_client import HttpLoad

            client = HttpLoad(
                http=http,
                model=name,
                ignore_eos=ignore_eos,
                temperature=temperature,
                top_p=top_p,
                has_salts=bool(active),
            )
            return await measure(client, load, plan, _progress), active, name

    measured, active, name = asyncio.run(run())
    report = make_report(
        kind="serve",
        subject=f"{name} at {url}",
        measured=measured,
        plan=plan,
        slo=slo,
        active=active,
        load_before=before,
        ignore_eos=ignore_eos,
    )
    _finish(report, as_json=as_json, markdown=markdown)


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


def _load(
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    prompts: Path | None,
    trace: Path | None,
    trace_scale: float,
    trace_speed: float,
    vocab: int,
    max_model_len: int | None,
    seed: int,
) -> Load:
    if prompts is not None and trace is not None:
        raise ConfigError("--prompts and --trace exclude each other: a trace has its own lengths")
    if prompts is not None:
        return PromptLoad.read(prompts, num_prompts=num_prompts, output_len=output_len)
    if trace is not None:
        return TraceLoad.read(
            trace,
            num_prompts=num_prompts,
            vocab=vocab,
            max_model_len=max_model_len,
            length_scale=trace_scale,
            speed=trace_speed,
            seed=seed,
        )
    return RandomLoad(
        num_prompts=num_prompts, input_len=input_len, output_len=output_len, vocab=vocab, seed=seed
    )


def _slo(ttft_ms: float | None, tpot_ms: float | None) -> Slo:
    return Slo(
        ttft_s=None if ttft_ms is None else ttft_ms / 1000, tpot_s=None if tpot_ms is None else tpot_ms / 1000
    )


def _finish(report: Report, *, as_json: bool, markdown: Path | None) -> None:
    """Print and write the result, then say by the exit code whether it is good."""
    typer.echo(json.dumps(report.to_json(), indent=2) if as_json else report.to_text())
    if markdown is not None:
        markdown.write_text(report.to_markdown())
    if not report.figures:
        raise MoesaicError("no request was completed: nothing was measured (see the warnings above)")
    if report.slo_missed:
        raise typer.Exit(3)


def _progress(text: str) -> None:
    typer.echo(text, err=True)
