"""A fleet under its routing policies: conservation, the light engine beside the real one, the front."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from engine_cases import engine_case, row

from moesaic.cost.layouts import Split
from moesaic.errors import ConfigError
from moesaic.planner.sim.arrivals import conversations
from moesaic.planner.sim.clock import Clock
from moesaic.planner.sim.fleet import POLICIES, _FleetRun, _keys, simulate_fleet
from moesaic.planner.sim.fluid import FluidEngine, FluidRequest
from moesaic.planner.sim.serve import simulate_serve
from moesaic.spec.deployment import KvAffinity, LoadAffinity, PrefixAffinity, RoundRobin
from moesaic.spec.workload import poisson, read_trace

CASE = engine_case(max_num_seqs=32, max_tokens=2048, max_model_len=16_384, kv_tokens=65_536)
ROWS = poisson(conversations(300, isl=2000, osl=60, seed=2), 150.0, seed=2)


@pytest.fixture(scope="module")
def report():
    return simulate_fleet(CASE, ROWS, num_engines=3, staleness_s=0.01)


def test_every_policy_ends_every_request(report) -> None:
    assert [one.policy for one in report.rows] == list(POLICIES)
    assert {one.num_finished for one in report.rows} == {300}
    assert (report.num_requests, report.num_cut, report.num_too_long) == (300, 0, 0)
    for one in report.rows:
        assert 0.0 <= one.hit_rate <= report.best_hit_rate
        assert all(0.0 <= busy <= 1.0 for busy in one.busy)
        assert one.balance_requests >= 1.0


def test_affinity_finds_more_than_turns_and_load_keeps_the_balance(report) -> None:
    turns, prefix, kv, load = (report.row(name) for name in POLICIES)
    assert turns.hit_rate < 0.75 * min(prefix.hit_rate, kv.hit_rate, load.hit_rate)
    assert turns.balance_requests == pytest.approx(1.0)
    assert prefix.balance_requests > load.balance_requests
    assert load.ttft_s.p[99] < 0.5 * prefix.ttft_s.p[99]
    assert any(one.on_front for one in report.rows)
    for one in report.rows:
        beaten = [x for x in report.rows if x.hit_rate > one.hit_rate and x.ttft_s.p[99] < one.ttft_s.p[99]]
        assert one.on_front == (not beaten)


def test_a_system_prompt_sends_naive_kv_affinity_to_one_engine() -> None:
    """Negative control of the balance: whoever has the first block once has it for ever."""
    naive = {"naive": KvAffinity(least_hit=0.0), "turns": RoundRobin(), "one": PrefixAffinity(num_blocks=1)}
    slow = poisson(ROWS[:120], 0.5, seed=0)
    found = simulate_fleet(CASE, slow, num_engines=3, policies=naive)
    assert found.row("naive").balance_requests > 2.5
    assert found.row("one").balance_requests == pytest.approx(3.0, abs=0.1)
    assert found.row("turns").balance_requests == pytest.approx(1.0)


def test_a_late_directory_promises_what_is_gone_and_misses_what_is_there() -> None:
    small = engine_case(max_num_seqs=32, max_tokens=2048, max_model_len=8192, kv_tokens=8192)
    policies = {"kv": KvAffinity()}
    fresh, late = (
        simulate_fleet(small, ROWS, num_engines=3, staleness_s=staleness, policies=policies).rows[0]
        for staleness in (0.0, 1.0)
    )
    assert fresh.stale_share + fresh.missed_share < late.stale_share + late.missed_share
    assert fresh.hit_rate > late.hit_rate + 0.02
    assert late.num_finished == fresh.num_finished


def test_blocks_and_directory_agree_when_everything_has_ended() -> None:
    case = engine_case(max_num_seqs=32, max_tokens=2048, max_model_len=16_384, kv_tokens=16_384)
    case = replace(case, kv_block=512)
    ledger, times = case.ledger(), case.times()
    keys = [_keys(ledger, idx, one) for idx, one in enumerate(ROWS)]
    run = _FleetRun(case, ledger, times, 2, 0.5, LoadAffinity())
    run.run("x", ROWS, keys, lambda part, text: None)
    for idx, engine in enumerate(run.engines):
        engine.ledger.check()
        assert engine.ledger.num_used == 0
        assert engine.pending_tokens == engine.num_running == 0
        for own in keys[::7]:
            found = engine.ledger.match(own, len(own) * 512 + 1).num_tokens // 512
            assert run.directory.hits(own)[idx] == found
    for request in run.requests:
        assert request.end_s is not None
        assert request.at_s <= request.start_s < request.first_s <= request.end_s


def test_the_light_engine_is_near_the_real_scheduler() -> None:
    """What is simplified costs at most some percent of the times, at low load and at high."""
    for rate in (1.0, 6.0):
        rows = poisson([row(0.0, 700 + 97 * (i % 9), 40 + 7 * (i % 5)) for i in range(60)], rate, seed=4)
        real = simulate_serve(CASE, rows)
        light = simulate_fleet(CASE, rows, num_engines=1, policies={"one": RoundRobin()}).rows[0]
        assert real.tpot_s is not None
        assert light.tpot_s is not None
        assert light.tpot_s.mean == pytest.approx(real.tpot_s.mean, rel=0.1)
        assert real.ttft_s is not None
        assert light.ttft_s is not None
        assert light.ttft_s.mean == pytest.approx(real.ttft_s.mean, rel=0.25)


def test_an_engine_that_forgets_a_release_shows() -> None:
    """Negative control of the conservation: the queue then never moves on."""
    clock, case = Clock(), engine_case(kv_tokens=2048, max_model_len=2048, has_prefix_cache=False)
    engine = FluidEngine(clock, case.ledger(), case.times(), case.limits)
    engine.ledger.release = lambda grant: None
    requests = [
        FluidRequest(request_id=str(i), at_s=0.0, prompt_tokens=1500, output_tokens=5, keys=())
        for i in range(2)
    ]
    for one in requests:
        engine.submit(one)
    clock.run()
    assert requests[0].end_s is not None
    assert requests[1].end_s is None


@pytest.mark.parametrize("name", ["gpt-oss-20b", "qwen3-next-80b-a3b"])
def test_windows_and_states_are_given_back_and_states_reuse_nothing(name: str) -> None:
    case = engine_case(name=name, machines="h200x2", split=Split(tp=2, expert_tp=2), kv_tokens=None,
                       max_num_seqs=8, max_tokens=2048, max_model_len=16_384)  # fmt: skip
    found = simulate_fleet(case, ROWS[:40], num_engines=2, policies={"one": LoadAffinity()})
    assert found.rows[0].num_finished == 40
    assert found.has_prefix_cache == (found.rows[0].hit_rate > 0) == (name == "gpt-oss-20b")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_engines": 0}, "engines must be 1 to 1024, got 0"),
        ({"num_engines": 3, "staleness_s": -1.0}, "staleness must be"),
    ],
)
def test_impossible_fleets_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate_fleet(CASE, ROWS[:3], **options)
    both = engine_case(split=Split(dp=2, ep=2), machines="h200x2")
    with pytest.raises(ConfigError, match="one attention replica"):
        simulate_fleet(both, ROWS[:3], num_engines=2)
    with pytest.raises(ConfigError, match="no request fits"):
        simulate_fleet(engine_case(max_model_len=64), ROWS[:3], num_engines=2)


@pytest.mark.long
def test_load_and_affinity_is_on_the_front_of_the_recorded_trace(shared_data: Path) -> None:
    path = shared_data / "traces" / "mooncake_conversation_trace.jsonl"
    case = engine_case(
        name="deepseek-v3", split=Split(tp=8, expert_tp=8), machines="h200x8", kv_tokens=None,
        max_num_seqs=256, max_tokens=8192, max_model_len=131_072,
    )  # fmt: skip
    found = simulate_fleet(case, read_trace(path), num_engines=8)
    assert found.row("load + affinity").on_front
    assert found.row("load + affinity").num_finished == 12_031
