"""Requests through the real scheduler under a simulated clock: conservation, queues, what is counted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine_cases import engine_case, row
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cost.layouts import Split
from moesaic.cost.ops import Work
from moesaic.cost.term import step_seconds
from moesaic.errors import CapacityError, ConfigError
from moesaic.planner.sim.arrivals import conversations
from moesaic.planner.sim.clock import Clock
from moesaic.planner.sim.engine import SimulatedEngine, request_of
from moesaic.planner.sim.serve import Percentiles, _Run, fitted, simulate_serve
from moesaic.sched.scheduler import Scheduler
from moesaic.spec.workload import poisson

requests = st.lists(
    st.tuples(st.integers(0, 40), st.integers(1, 700), st.integers(1, 30), st.integers(0, 3)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=12, deadline=None)
@given(requests, st.sampled_from([None, 1, 3]), st.booleans())
def test_every_request_ends_once_and_everything_is_given_back(found, concurrency, has_cache) -> None:
    rows = [
        row(at / 10, prompt, output, tuple([head, 9, 10][: -(-prompt // 512)]))
        for at, prompt, output, head in sorted(found)
    ]
    case = engine_case(max_num_seqs=4, kv_tokens=1024, max_model_len=1024, has_prefix_cache=has_cache)
    run = _Run(case, rows, None, lambda plan: 0.01 + 1e-4 * plan.num_tokens)
    run.start(concurrency)
    report = run.report(len(rows), 0, 0)
    assert (report.num_finished, report.num_refused, report.num_too_long) == (len(rows), 0, 0)
    assert [run.seen[str(i)].num_tokens for i in range(len(rows))] == [one.output_tokens for one in rows]
    for replica in run.scheduler.replicas:
        assert replica.ledger.num_used == 0
        replica.ledger.check()
    stats = run.scheduler.stats()
    assert stats.output_tokens_total == sum(one.output_tokens for one in rows)
    assert stats.prompt_tokens_total == sum(one.prompt_tokens for one in rows)
    assert report.kv_peak <= 1.0
    for watch in run.seen.values():
        assert watch.at_s <= watch.start_s < watch.first_s <= watch.last_s


def test_a_queue_of_equal_services_waits_as_long_as_theory_says() -> None:
    """M/D/1: at a load of 0.7 the mean wait is 0.7 / (2 x 0.3) services."""
    rows = poisson([row(0.0, 8, 1)] * 1500, 0.7, seed=5)
    case = engine_case(max_num_seqs=1, has_prefix_cache=False)
    found = simulate_serve(case, rows, step_s=lambda plan: 1.0)
    assert found.queue_s is not None
    assert found.queue_s.mean == pytest.approx(0.7 / (2 * 0.3), rel=0.1)
    assert found.busy == pytest.approx(0.7, rel=0.05)
    assert found.ttft_s is not None
    assert found.ttft_s.mean == pytest.approx(found.queue_s.mean + 1.0)


def test_little_s_law_holds_in_a_closed_loop() -> None:
    """Requests in flight are throughput times latency; three at a time never wait for each other here."""
    rows = [row(0.0, 100 + i, 20) for i in range(40)]
    found = simulate_serve(engine_case(), rows, concurrency=3)
    assert found.latency_s is not None
    assert found.request_rate * found.latency_s.mean == pytest.approx(3.0, rel=0.05)
    assert found.queue_s is not None
    assert found.queue_s.most < found.latency_s.mean
    alone = simulate_serve(engine_case(), rows, concurrency=1)
    assert alone.queue_s is not None
    assert alone.queue_s.most == pytest.approx(0.0, abs=1e-12)
    assert alone.duration_s > found.duration_s


def test_an_uncontended_request_takes_its_own_steps() -> None:
    case = engine_case()
    case = dataclasses.replace(case, first_s=0.25)
    found = simulate_serve(case, [row(0.0, 200, 11)])
    first = step_seconds(case.step.cost(Work(num_seqs=1.0, new_tokens=200.0, past=0.0))).value
    step = step_seconds(case.step.cost(Work(num_seqs=1.0, new_tokens=1.0, past=205.0))).value
    assert found.ttft_s is not None
    assert found.ttft_s.mean == pytest.approx(0.25 + float(first), rel=0.02)
    assert found.tpot_s is not None
    assert found.tpot_s.mean == pytest.approx(float(step), rel=0.02)
    assert found.num_steps == 11


def test_shared_prefixes_are_found_and_others_are_not() -> None:
    same, other = (1, 2, 3), (4, 5, 6)
    rows = [row(float(i), 1200, 2, ids) for i, ids in enumerate((same, same, other, same))]
    found = simulate_serve(engine_case(), rows)
    # Blocks of 16 tokens, and one token is always computed; 1199 // 16 * 16 = 1184 of 1200, twice.
    assert found.prefix_hit == pytest.approx(2 * 1184 / 4800)
    assert simulate_serve(engine_case(has_prefix_cache=False), rows).prefix_hit == 0.0
    unlike = [row(float(i), 1200, 2) for i in range(4)]
    assert simulate_serve(engine_case(), unlike).prefix_hit == 0.0


def test_a_small_pool_preempts_and_still_ends_everything() -> None:
    rows = [row(0.0, 60, 120) for _ in range(6)]
    case = engine_case(kv_tokens=512, max_model_len=512)
    found = simulate_serve(case, rows)
    assert found.num_finished == 6
    assert found.num_preemptions > 0
    assert found.kv_peak > 0.9


def test_lengths_beyond_the_context_are_cut_or_left_out_and_counted() -> None:
    rows = [row(0.0, 100, 10), row(0.1, 2000, 500), row(0.2, 2048, 1), row(0.3, 9000, 1)]
    kept, num_cut, num_too_long = fitted(rows, 2048)
    assert ([one.output_tokens for one in kept], num_cut, num_too_long) == ([10, 48], 1, 2)
    found = simulate_serve(engine_case(kv_tokens=4096), rows)
    assert (found.num_requests, found.num_finished, found.num_cut, found.num_too_long) == (4, 2, 1, 2)
    with pytest.raises(ConfigError, match="no request fits the context of 2048 tokens: 1 prompts"):
        simulate_serve(engine_case(), rows[3:])


def test_a_full_queue_refuses_and_the_report_says_so() -> None:
    rows = [row(0.0, 50, 5) for _ in range(10)]
    found = simulate_serve(engine_case(max_num_seqs=1, max_waiting=2), rows)
    assert found.num_refused > 0
    assert found.num_finished + found.num_refused == 10
    missed = found.missed(None, 1e-9)
    assert [line.split(":")[0] for line in missed] == [
        "TPOT",
        f"{found.num_refused} requests were refused by a full queue",
    ]
    assert found.missed(None, None) == ()


def test_several_replicas_share_the_steps_and_have_caches_of_their_own() -> None:
    case = engine_case(split=Split(dp=2, ep=2), machines="h200x2")
    rows = [row(0.0, 1100, 3, (1, 2, 3)) for _ in range(2)]
    run = _Run(case, rows, None, None)
    run.start(None)
    assert len(run.scheduler.replicas) == 2
    assert run.report(2, 0, 0).prefix_hit == 0.0  # one request on each
    assert run.times is not None
    sent_s, work_s = run.sent_s, run.work_s
    assert 0.0 < sent_s < work_s


def test_the_memory_of_all_requests_is_that_of_the_pool() -> None:
    case = engine_case()
    clock, scheduler = Clock(), Scheduler(case.ledger(), case.limits)
    checked = []

    def look(plan, start_s, end_s) -> None:
        usage = scheduler.replicas[0].ledger.usage()
        own = sum(sum(sizes) for sizes in usage.own_bytes.values())
        assert own + usage.shared_bytes + usage.idle_bytes + usage.free_bytes == usage.total_bytes
        checked.append(len(usage.own_bytes))

    engine = SimulatedEngine(clock, scheduler, lambda plan: 0.01, lambda event, now_s: None, look)
    for idx in range(4):
        engine.submit(request_of(idx, row(0.0, 700, 9, (1, 2)), 0.0))
    clock.run()
    assert max(checked) == 4


def test_a_cancelled_request_frees_what_it_holds() -> None:
    case = engine_case()
    clock, scheduler, ends = Clock(), Scheduler(case.ledger(), case.limits), []
    engine = SimulatedEngine(
        clock, scheduler, lambda plan: 0.01, lambda event, now_s: ends.append(event.finish_reason)
    )
    engine.submit(request_of(0, row(0.0, 300, 50), 0.0))
    clock.after(0.1, lambda: engine.cancel("0"))
    clock.run()
    assert ends[-1] == "cancelled"
    assert scheduler.replicas[0].ledger.num_used == 0


def test_a_scheduler_that_serves_the_newest_first_shows() -> None:
    """Negative control: the same load in the order of arrival has a far shorter tail."""
    rows = poisson([row(0.0, 8, 1)] * 250, 0.9, seed=1)
    case = engine_case(max_num_seqs=1, has_prefix_cache=False)
    fair = simulate_serve(case, rows, step_s=lambda plan: 1.0)
    run = _Run(case, list(rows), None, lambda plan: 1.0)
    replica = run.scheduler.replicas[0]
    enqueue = replica.enqueue

    def newest_first(sequence) -> None:
        sequence.order = (0, -sequence.arrival_idx)
        enqueue(sequence)

    replica.enqueue = newest_first
    replica._preempt_last = lambda first_idx: False
    run.start(None)
    broken = run.report(len(rows), 0, 0)
    assert fair.queue_s is not None
    assert broken.queue_s is not None
    assert broken.queue_s.mean == pytest.approx(fair.queue_s.mean, rel=0.05)  # work is conserved
    assert broken.queue_s.p[99] > 1.5 * fair.queue_s.p[99]


def test_the_table_of_step_times_is_within_two_percent_of_the_trees() -> None:
    case = engine_case(name="deepseek-v3", split=Split(tp=8, expert_tp=8), machines="h200x8", kv_tokens=None,
                       max_num_seqs=256, max_tokens=8192, max_model_len=65_536)  # fmt: skip
    times, rng = case.times(), np.random.default_rng(0)
    for _ in range(20):
        batch, past = float(rng.integers(1, 257)), float(rng.integers(0, 65_000))
        new = float(2 ** rng.uniform(0, 13))
        decode = case.step.cost(Work(num_seqs=batch, new_tokens=1.0, past=past))
        prompt = case.step.cost(Work(num_seqs=1.0, new_tokens=new, past=past))
        assert times.decode_s(batch, past) == pytest.approx(float(step_seconds(decode).value), rel=0.02)
        assert times.alone_s(new, past) == pytest.approx(float(step_seconds(prompt).value), rel=0.02)
        assert times.beside_s(new, past, batch) < times.alone_s(new, past)


def test_pipelines_and_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match="pp 2 is not simulated"):
        engine_case(split=Split(pp=2))
    with pytest.raises(CapacityError, match=r"need .* of each h200"):
        engine_case(name="deepseek-v3", kv_tokens=None).kv_bytes()
    with pytest.raises(ConfigError, match="concurrency must be at least 1"):
        simulate_serve(engine_case(), [row(0.0, 5, 5)], concurrency=0)


def test_percentiles_are_of_what_was_measured() -> None:
    found = Percentiles.of([float(x) for x in range(1, 101)])
    assert found.p == {50: 50.0, 90: 90.0, 95: 95.0, 99: 99.0}
    assert (found.mean, found.most) == (50.5, 100.0)


def test_made_up_conversations_repeat_what_was_said() -> None:
    rows = conversations(200, isl=2048, osl=64, seed=1)
    assert rows == conversations(200, isl=2048, osl=64, seed=1)
    assert np.mean([one.prompt_tokens for one in rows]) == pytest.approx(2048, rel=0.25)
    assert np.mean([one.output_tokens for one in rows]) == pytest.approx(64, rel=0.3)
    assert all(len(one.hash_ids) == -(-one.prompt_tokens // 512) for one in rows)
    seen: set[int] = set()
    repeated = 0
    for one in rows:
        repeated += sum(block in seen for block in one.hash_ids)
        seen.update(one.hash_ids)
    assert 0.3 < repeated / sum(len(one.hash_ids) for one in rows) < 0.95
    with pytest.raises(ConfigError, match="isl must be at least 1"):
        conversations(5, isl=0, osl=1)
