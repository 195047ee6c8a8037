"""Figures by their definitions, over runs; warnings that name a flag; and clients against a fake engine."""

import asyncio
import json
from dataclasses import replace

import httpx
import pytest
from fakes import FakeEngine

from moesaic.audit.bench.client import EngineLoad
from moesaic.audit.bench.http_client import HttpLoad, active, connect, first_model
from moesaic.audit.bench.measure import Measured, Plan, drive, measure
from moesaic.audit.bench.report import Report, Slo, make_report
from moesaic.audit.bench.timing import FIGURES, Timing, over_runs, summarise
from moesaic.audit.bench.workload import Item, RandomLoad
from moesaic.errors import ConfigError

LOAD = RandomLoad(num_prompts=6, input_len=4, output_len=5, vocab=300)


def timing(sent: float, *token_s: float, wanted: int | None = None) -> Timing:
    return Timing(
        sent_s=sent,
        token_s=token_s,
        end_s=token_s[-1] if token_s else sent,
        num_prompt=10,
        num_output=len(token_s),
        num_wanted=len(token_s) if wanted is None else wanted,
    )


def failed(*, is_rejected: bool) -> Timing:
    return replace(timing(0.0), error="no", is_rejected=is_rejected)


def test_figures_by_their_definitions():
    run = summarise([timing(10.0, 11.0, 12.0, 14.0), timing(10.5, 12.5), timing(11.0, 12.0, 12.5, wanted=9)])
    figures = run.figures
    assert figures["ttft_s_p50"] == 1.0
    assert figures["tpot_s_p50"] == pytest.approx((1.5 + 0.5) / 2)
    assert figures["inter_token_s_p50"] == 1.0
    assert figures["latency_s_p50"] == 2.0
    assert figures["duration_s"] == 4.0
    assert figures["output_tokens_per_s"] == 6 / 4
    assert figures["total_tokens_per_s"] == 36 / 4
    assert figures["requests_per_s"] == 3 / 4
    assert set(figures) == set(FIGURES)
    assert (run.num_complete, run.num_short) == (3, 1)


def test_failures_are_counted_and_not_timed():
    run = summarise([timing(0.0, 1.0), failed(is_rejected=True), failed(is_rejected=False)])
    assert (run.num_complete, run.num_rejected, run.num_failed) == (1, 1, 1)
    assert run.errors == ("no",)
    assert "tpot_s_p50" not in run.figures
    assert summarise([failed(is_rejected=True)]).figures == {}


def test_over_runs_takes_median_and_range():
    runs = [summarise([timing(0.0, float(ttft))]) for ttft in (3, 1, 2)]
    spread = over_runs(runs)["ttft_s_p50"]
    assert (spread.median, spread.min, spread.max, spread.relative) == (2.0, 1.0, 3.0, 1.0)
    assert "tpot_s_p50" not in over_runs(runs)


def report(runs, *, slo: Slo = Slo(), plan: Plan = Plan(), load_before: float = 0.0, **facts) -> Report:  # noqa: B008
    return make_report(
        kind="throughput",
        subject="m",
        measured=Measured(workload=LOAD.workload(0), runs=tuple(runs)),
        plan=plan,
        slo=slo,
        active=facts,
        load_before=load_before,
        ignore_eos=False,
    )


def test_warnings_name_the_flag_to_try():
    steady = [summarise([timing(0.0, 1.0, 2.0)])] * 3
    assert report(steady).warnings == ()
    assert "--runs 3" in report(steady[:1]).warnings[0]
    assert "--warmup 1" in report(steady, plan=Plan(num_warmups=0)).warnings[0]
    assert "--num-prompts" in report(steady, plan=Plan(concurrency=50)).warnings[0]
    assert "busy" in report(steady, load_before=999.0).warnings[0]
    assert "not active: x" in report(steady, not_active=["x"]).warnings
    varied = [summarise([timing(0.0, 1.0 * i, 2.0 * i)]) for i in (1, 2, 3)]
    assert "range over" in report(varied).warnings[0]
    short = [summarise([timing(0.0, 1.0, wanted=9)])] * 3
    assert "--ignore-eos" in report(short).warnings[0]
    full = [summarise([timing(0.0, 1.0), failed(is_rejected=True)])] * 3
    assert "3 requests were rejected: try a lower --concurrency" in report(full).warnings[0]
    broken = [summarise([timing(0.0, 1.0), failed(is_rejected=False)])] * 3
    assert report(broken).warnings[0] == "3 requests failed: no"


def test_slo():
    runs = [summarise([timing(0.0, 1.0, 3.0)])] * 3
    assert report(runs, slo=Slo(ttft_s=1.0, tpot_s=2.0)).slo_missed == ()
    missed = report(runs, slo=Slo(ttft_s=0.5, tpot_s=1.9)).slo_missed
    assert [text.split(":")[0] for text in missed] == ["ttft_s_p99", "tpot_s_p99"]
    nothing = report([summarise([failed(is_rejected=True)])] * 3, slo=Slo(ttft_s=0.5))
    assert "no request was completed" in nothing.slo_missed[0]


def test_forms():
    found = report([summarise([timing(0.0, 1.0, 3.0)])] * 3, numerics_digest="abc")
    value = json.loads(json.dumps(found.to_json()))
    assert value["figures"]["ttft_s_p50"] == {"median": 1.0, "min": 1.0, "max": 1.0}
    assert value["numerics_digest"] == "abc"
    assert len(value["runs"]) == 3
    assert value["machine"]["num_cpus"] >= 1
    assert value["versions"]["moesaic"]
    for text in (found.to_text(), found.to_markdown()):
        assert "routing is not realistic" in text
        assert "time to first token, median" in text
        assert "numerics abc" in text


@pytest.fixture
def engine():
    engine = FakeEngine(vocab=300, step_s=0.001)
    yield engine
    engine.close()


def test_engine_client_measures_a_workload(engine):
    client = EngineLoad(engine=engine, tokenizer=None, ignore_eos=True)
    told: list[str] = []
    measured = asyncio.run(measure(client, LOAD, Plan(concurrency=2, num_warmups=1), told.append))
    assert len(measured.runs) == 3
    assert {run.num_complete for run in measured.runs} == {6}
    assert {run.num_output_tokens for run in measured.runs} == {30}
    assert told == ["warm-up 1 of 1", "run 1 of 3", "run 2 of 3", "run 3 of 3"]
    assert len(engine.submitted) == 2 + 18
    assert len({request.salt for request in engine.submitted}) == 4
    assert len({request.request_id for request in engine.submitted}) == 20


def test_engine_client_counts_rejections():
    engine = FakeEngine(vocab=300, max_waiting=1)
    engine.gate.clear()
    client = EngineLoad(engine=engine, tokenizer=None, ignore_eos=True)

    async def run() -> list[Timing]:
        task = asyncio.ensure_future(drive(client, LOAD.workload(0).items, None, ""))
        await asyncio.sleep(0.05)
        engine.gate.set()
        return await task

    try:
        timings = asyncio.run(run())
    finally:
        engine.close()
    assert sum(timing.is_rejected for timing in timings) == 5
    assert sum(timing.is_complete for timing in timings) == 1


def test_a_workload_that_cannot_run_is_refused(engine):
    client = EngineLoad(engine=engine, tokenizer=None, ignore_eos=True)
    with pytest.raises(ConfigError, match="refuses this workload"):
        asyncio.run(drive(client, (Item(prompt=(999,), output_len=1),), None, ""))
    with pytest.raises(ConfigError, match=r"need a tokenizer\.json"):
        asyncio.run(drive(client, (Item(prompt="text", output_len=1),), None, ""))


def test_concurrency_is_kept(engine):
    client = EngineLoad(engine=engine, tokenizer=None, ignore_eos=True)
    most = 0

    class Counting:
        async def send(self, item: Item, salt: str) -> Timing:
            nonlocal most
            most = max(most, engine.snapshot().num_running + 1)
            return await client.send(item, salt)

    asyncio.run(drive(Counting(), LOAD.workload(0).items, 3, ""))
    assert most <= 3


STREAM = (
    'data: {"choices": [{"text": "a"}]}\n\n: comment\n\ndata: {"choices": [{"text": ""}]}\n\n'
    'data: {"choices": [{"text": "bc"}]}\n\ndata: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    'data: {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3, '
    '"prompt_tokens_details": {"cached_tokens": 2}}}\n\ndata: [DONE]\n\n'
)


def answer(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/v1/models":
        return httpx.Response(200, json={"data": [{"id": "tiny"}]})
    if request.url.path == "/v1/internal/active":
        return httpx.Response(200, json={"engine": {"numerics_digest": "abc", "vocab": 300}})
    body = json.loads(request.content)
    if body["prompt"] == "full":
        return httpx.Response(429, json={"error": {"message": "try later"}})
    if body["prompt"] == "bad":
        return httpx.Response(200, text='data: {"error": {"message": "NaN"}}\n\ndata: [DONE]\n\n')
    assert body["stream"]
    assert body["ignore_eos"]
    assert body["cache_salt"] == "s"
    assert body["max_tokens"] == 3
    return httpx.Response(200, text=STREAM)


def test_http_client_reads_a_stream():
    async def run() -> list[Timing]:
        transport = httpx.MockTransport(answer)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            assert await first_model(http) == "tiny"
            assert (await active(http))["vocab"] == 300
            client = HttpLoad(http=http, model="tiny", ignore_eos=True, has_salts=True)
            return [
                await client.send(Item(prompt=text, output_len=3), "s") for text in ("fine", "full", "bad")
            ]

    fine, full, bad = asyncio.run(run())
    assert fine.is_complete
    assert (fine.num_prompt, fine.num_output, fine.num_cached, len(fine.token_s)) == (4, 3, 2, 3)
    assert full.is_rejected
    assert "429" in (full.error or "")
    assert not bad.is_rejected
    assert "NaN" in (bad.error or "")


def test_nothing_listens():
    async def run() -> None:
        async with connect("http://127.0.0.1:9", None) as http:
            await first_model(http)

    with pytest.raises(ConfigError, match="check --url"):
        asyncio.run(run())
