from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hash_model import (
    HashModel,
    Owner,
    drain,
    make_request,
    make_scheduler,
    run_alone,
    state_group,
    tokens_group,
    window_group,
)
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import ConfigError, KvExhausted, RequestError
from moesaic.sched.request import Request
from moesaic.sched.scheduler import Limits, Scheduler, _batch
from moesaic.sched.step import RowPlan, StepPlan, StepResult

TOKENS = [tokens_group()]


def rows_of(plan: StepPlan | None) -> list[RowPlan]:
    assert plan is not None
    return [row for batch in plan.batches for row in batch.rows]


def shape_of(plan: StepPlan | None) -> list[tuple[str, int, int, bool]]:
    return [(row.request_id, row.start_idx, row.num_tokens, row.is_sampled) for row in rows_of(plan)]


def step(scheduler: Scheduler, model: HashModel, owner: Owner, now_s: float = 0.0) -> StepPlan:
    plan = scheduler.schedule(now_s)
    assert plan is not None
    owner.take(scheduler.commit(model.run(plan), now_s))
    for replica in scheduler.replicas:
        replica.ledger.check()
    return plan


def serve(*requests: Request, scheduler: Scheduler | None = None, model: HashModel | None = None) -> Owner:
    scheduler, model, owner = (
        scheduler or make_scheduler(TOKENS, [64]),
        model or HashModel(TOKENS, 4),
        Owner(),
    )
    for request in requests:
        scheduler.add(request, 0.0)
    drain(scheduler, model, owner)
    return owner


# -- batching ------------------------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_requests() -> None:
    scheduler, model, owner = (
        make_scheduler(TOKENS, [64], max_tokens_per_step=10),
        HashModel(TOKENS, 4),
        Owner(),
    )
    scheduler.add(make_request("short", [1, 2, 3], max_tokens=9, ignore_eos=True), 0.0)
    assert shape_of(step(scheduler, model, owner)) == [("short", 0, 3, True)]
    scheduler.add(make_request("long", range(20), max_tokens=1), 0.0)
    assert shape_of(step(scheduler, model, owner)) == [("short", 3, 1, True), ("long", 0, 9, False)]
    assert shape_of(step(scheduler, model, owner)) == [("short", 4, 1, True), ("long", 9, 9, False)]
    assert shape_of(step(scheduler, model, owner)) == [("short", 5, 1, True), ("long", 18, 2, True)]
    assert owner.ends["long"].finish_reason == "length"
    assert [len(event.token_ids) for event in owner.events["long"]] == [1]


def test_decode_rows_come_first_whatever_the_class() -> None:
    scheduler, model, owner = (
        make_scheduler(TOKENS, [64], max_tokens_per_step=8),
        HashModel(TOKENS, 4),
        Owner(),
    )
    scheduler.add(make_request("later", [1, 2, 3], priority=5, max_tokens=9, ignore_eos=True), 0.0)
    step(scheduler, model, owner)
    scheduler.add(make_request("sooner", range(20), priority=-5), 0.0)
    assert [row[0] for row in shape_of(step(scheduler, model, owner))] == ["later", "sooner"]


def test_the_lower_number_runs_first_then_the_earlier_arrival() -> None:
    scheduler, model, owner = make_scheduler(TOKENS, [64], max_num_seqs=1), HashModel(TOKENS, 4), Owner()
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", 0)):
        scheduler.add(make_request(name, [1, 2], priority=priority, max_tokens=1), 0.0)
    order = [row.request_id for plan in drain(scheduler, model, owner) for row in rows_of(plan)]
    assert order == ["b", "d", "a", "c"]


def test_ranks_hear_of_each_request_once_and_may_forget_it_after_its_end() -> None:
    scheduler, model, owner = (
        make_scheduler(TOKENS, [64], max_tokens_per_step=8),
        HashModel(TOKENS, 4),
        Owner(),
    )
    first, second = make_request("first", range(10), max_tokens=1), make_request("second", [1], max_tokens=9)
    scheduler.add(first, 0.0)
    plan = step(scheduler, model, owner)
    assert plan.admitted == (first,)
    plan = step(scheduler, model, owner)
    assert (plan.admitted, plan.retired) == ((), ())
    scheduler.add(second, 0.0)
    plan = step(scheduler, model, owner)
    assert (plan.admitted, plan.retired) == ((second,), ("first",))
    drain(scheduler, model, owner)
    assert scheduler.take_retired() == ("second",)
    assert scheduler.take_retired() == ()


def test_nothing_to_do_is_no_step() -> None:
    scheduler = make_scheduler(TOKENS, [8])
    assert scheduler.schedule(0.0) is None
    assert not scheduler.has_work


def test_one_plan_at_a_time_unless_more_are_allowed() -> None:
    scheduler = make_scheduler(TOKENS, [64])
    scheduler.add(make_request("a", [1]), 0.0)
    assert scheduler.schedule(0.0) is not None
    scheduler.add(make_request("b", [1]), 0.0)
    assert scheduler.schedule(0.0) is None


def test_two_plans_in_flight_share_no_request() -> None:
    scheduler, model = make_scheduler(TOKENS, [64], max_in_flight=2), HashModel(TOKENS, 4)
    scheduler.add(make_request("a", [1], ignore_eos=True), 0.0)
    first = scheduler.schedule(0.0)
    scheduler.add(make_request("b", [1], ignore_eos=True), 0.0)
    second = scheduler.schedule(0.0)
    assert [shape_of(plan)[0][0] for plan in (first, second)] == ["a", "b"]
    assert scheduler.in_flight == (first, second)
    assert scheduler.schedule(0.0) is None
    assert first is not None
    scheduler.commit(model.run(first), 0.0)
    assert shape_of(scheduler.schedule(0.0)) == [("a", 1, 1, True)]


def test_replicas_get_requests_evenly_and_every_plan_names_all_of_them() -> None:
    scheduler, model, owner = make_scheduler(TOKENS, [16], num_replicas=3), HashModel(TOKENS, 4, 3), Owner()
    for i in range(4):
        scheduler.add(make_request(f"r{i}", [1, 2, 3], max_tokens=2, ignore_eos=True), 0.0)
    plan = step(scheduler, model, owner)
    assert [[row.request_id for row in batch.rows] for batch in plan.batches] == [
        ["r0", "r3"],
        ["r1"],
        ["r2"],
    ]
    assert [batch.micro_batches for batch in plan.batches] == [(slice(0, 2),), (slice(0, 1),), (slice(0, 1),)]
    drain(scheduler, model, owner)
    scheduler.add(make_request("r5", [1], max_tokens=1), 0.0)
    plan = step(scheduler, model, owner)
    assert [len(batch.rows) for batch in plan.batches] == [1, 0, 0]
    assert plan.batches[1].micro_batches == (slice(0, 0),)  # takes part all the same


# -- how requests end ----------------------------------------------------------------------------------


def test_the_end_of_a_request_names_its_reason() -> None:
    probe = make_request("probe", [1, 2, 3], ignore_eos=True, max_tokens=12)
    tokens, _ = run_alone(TOKENS, probe, 15)
    end_id = tokens[2]
    assert end_id not in tokens[:2]
    cases: list[tuple[dict[str, Any], int, str, int | None]] = [
        ({"eos": end_id, "max_tokens": 12}, 3, "stop", end_id),
        ({"eos": end_id, "max_tokens": 5, "ignore_eos": True}, 5, "length", None),
        ({"stop_token_ids": (end_id,), "max_tokens": 12, "ignore_eos": True}, 3, "stop", end_id),
        ({"eos": end_id, "max_tokens": 3}, 3, "stop", end_id),
        ({"eos": end_id, "max_tokens": 4, "min_tokens": 3}, 4, "length", None),
        ({"eos": end_id, "max_tokens": 4, "min_tokens": 2}, 3, "stop", end_id),
    ]
    owner = serve(*(make_request(f"r{i}", [1, 2, 3], **case[0]) for i, case in enumerate(cases)))
    for i, (_, num_tokens, reason, stop_token_id) in enumerate(cases):
        end = owner.ends[f"r{i}"]
        assert tuple(owner.tokens[f"r{i}"]) == tokens[:num_tokens]
        assert (end.finish_reason, end.stop_token_id) == (reason, stop_token_id)


def test_without_max_tokens_the_context_is_the_limit() -> None:
    owner = serve(
        make_request("a", range(10), ignore_eos=True),
        scheduler=make_scheduler(TOKENS, [64], max_model_len=30),
    )
    assert (len(owner.tokens["a"]), owner.ends["a"].finish_reason) == (20, "length")


def test_without_max_tokens_a_smaller_pool_is_the_limit() -> None:
    owner = serve(make_request("a", range(10), ignore_eos=True), scheduler=make_scheduler(TOKENS, [4]))
    # 16 places: the last token is sampled and never stored.
    assert (len(owner.tokens["a"]), owner.ends["a"].finish_reason) == (7, "length")


def test_no_tokens_wanted_computes_the_prompt_and_its_logprobs() -> None:
    owner = serve(make_request("a", range(30), max_tokens=0, prompt_logprobs=1))
    (end,) = owner.events["a"]
    assert (end.token_ids, end.finish_reason) == ((), "length")
    assert end.prompt_logprobs is not None
    assert end.prompt_logprobs[0] is None
    assert [x.token_id for x in end.prompt_logprobs[1:] if x is not None] == list(range(1, 30))


def test_a_prompt_may_fill_the_context_when_no_tokens_are_wanted() -> None:
    scheduler = make_scheduler(TOKENS, [8], max_model_len=32)
    owner = serve(make_request("a", range(32), max_tokens=0), scheduler=scheduler)
    assert owner.ends["a"].finish_reason == "length"


def test_prompt_logprobs_come_once_whole_and_without_the_prefix_cache() -> None:
    scheduler, model = make_scheduler(TOKENS, [64], max_tokens_per_step=8), HashModel(TOKENS, 4)
    serve(make_request("before", range(20), max_tokens=1), scheduler=scheduler, model=model)
    owner = serve(
        make_request("asks", range(20), max_tokens=3, ignore_eos=True, prompt_logprobs=0, logprobs=0),
        make_request("reuses", range(20), max_tokens=3, ignore_eos=True),
        scheduler=scheduler,
        model=model,
    )
    first, *others = owner.events["asks"]
    assert first.prompt_logprobs is not None
    assert [x and x.logprob for x in first.prompt_logprobs] == [None, *(-float(p) for p in range(1, 20))]
    assert all(event.prompt_logprobs is None for event in others)
    assert all(event.logprobs[0].token_id == event.token_ids[0] for event in owner.events["asks"])
    assert (owner.ends["asks"].num_cached_tokens, owner.ends["reuses"].num_cached_tokens) == (0, 16)
    assert owner.tokens["asks"] == owner.tokens["reuses"]


def test_routes_are_passed_through_even_without_a_token() -> None:
    scheduler, model = make_scheduler(TOKENS, [64], max_tokens_per_step=8), HashModel(TOKENS, 4)
    scheduler.add(make_request("a", range(10)), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    routes = np.zeros((8, 1, 2), dtype=np.int64)
    (event,) = scheduler.commit(replace(model.run(plan), routes={"a": routes}), 0.0)
    assert event.routes is routes
    assert event.token_ids == ()


# -- what is refused -----------------------------------------------------------------------------------


def test_a_request_that_can_never_run_is_refused_with_what_it_needs() -> None:
    scheduler = make_scheduler(TOKENS, [8], max_model_len=64)
    with pytest.raises(
        KvExhausted, match=r"needs 33 KV tokens \(9 blocks of 4\), the pool has 32 \(8 blocks\)"
    ):
        scheduler.add(make_request("a", range(30), max_tokens=4), 0.0)
    with pytest.raises(KvExhausted):
        scheduler.add(make_request("a", range(33)), 0.0)
    scheduler.add(make_request("fits", range(30), max_tokens=3), 0.0)
    with pytest.raises(RequestError, match="'fits' is in use"):
        scheduler.add(make_request("fits", [1]), 0.0)


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "param"),
    [(64, None, "prompt"), (65, 0, "prompt"), (60, 5, "max_tokens"), (70, 5, "prompt")],
)
def test_a_request_longer_than_the_context_is_refused(
    num_prompt: int, max_tokens: int | None, param: str
) -> None:
    scheduler = make_scheduler(TOKENS, [64], max_model_len=64)
    with pytest.raises(RequestError, match="context of 64 tokens") as error:
        scheduler.add(make_request("a", range(num_prompt), max_tokens=max_tokens), 0.0)
    assert (error.value.param, error.value.code) == (param, "context_length_exceeded")
    assert not scheduler.has_work


@pytest.mark.parametrize("name", ["max_num_seqs", "max_tokens_per_step", "max_model_len", "max_waiting"])
def test_limits_are_checked(name: str) -> None:
    good = Limits(max_num_seqs=2, max_tokens_per_step=8, max_model_len=8, max_waiting=2)
    with pytest.raises(ConfigError, match=name):
        replace(good, **{name: 0})


def test_a_step_holds_a_token_of_every_running_request() -> None:
    with pytest.raises(ConfigError, match=r"max_tokens_per_step \(7\) must be at least max_num_seqs \(8\)"):
        Limits(max_num_seqs=8, max_tokens_per_step=7, max_model_len=8, max_waiting=2)


@pytest.mark.parametrize("name", ["num_replicas", "max_in_flight"])
def test_counts_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        make_scheduler(TOKENS, [8], **{name: 0})  # type: ignore[arg-type]


# -- prefix reuse --------------------------------------------------------------------------------------


def test_another_temperature_hits_another_salt_misses() -> None:
    scheduler, model = make_scheduler(TOKENS, [64]), HashModel(TOKENS, 4)
    serve(make_request("first", range(20), max_tokens=1), scheduler=scheduler, model=model)
    owner = serve(
        make_request("hotter", range(20), max_tokens=1, temperature=2.0, seed=9, top_p=0.5),
        make_request("tenant", range(20), max_tokens=1, salt="other"),
        scheduler=scheduler,
        model=model,
    )
    assert owner.ends["hotter"].num_cached_tokens == 16
    assert owner.ends["tenant"].num_cached_tokens == 0


def test_a_conversation_reuses_its_own_answer() -> None:
    scheduler, model = make_scheduler(TOKENS, [64]), HashModel(TOKENS, 4)
    owner = serve(
        make_request("turn1", range(10), max_tokens=9, ignore_eos=True), scheduler=scheduler, model=model
    )
    history = [*range(10), *owner.tokens["turn1"], 1, 2, 3]
    owner = serve(make_request("turn2", history, max_tokens=1), scheduler=scheduler, model=model)
    assert owner.ends["turn2"].num_cached_tokens == 16  # of 18 stored: full blocks only


def test_requests_in_flight_together_find_nothing_of_each_other() -> None:
    owner = serve(*(make_request(f"r{i}", range(8), max_tokens=1) for i in range(2)))
    assert [owner.ends[f"r{i}"].num_cached_tokens for i in range(2)] == [0, 0]


# -- preemption ----------------------------------------------------------------------------------------


def test_the_last_arrival_gives_way_and_is_not_told_apart_afterwards() -> None:
    scheduler, model, owner = make_scheduler(TOKENS, [6]), HashModel(TOKENS, 4), Owner()
    requests = [make_request(f"r{i}", [i, 2, 3, 4, 5], max_tokens=12, ignore_eos=True) for i in range(2)]
    for request in requests:
        scheduler.add(request, 0.0)
    plans = drain(scheduler, model, owner)
    stats = scheduler.stats()
    assert stats.preemptions_total == 1
    for request in requests:
        assert tuple(owner.tokens[request.request_id]) == run_alone(TOKENS, request, 17)[0]
    # What it had generated is part of what is computed again, or found.
    again = [row for plan in plans for row in rows_of(plan) if row.request_id == "r1" and row.num_tokens > 1]
    assert len(again) == 2
    assert again[1].start_idx + again[1].num_tokens > 5
    assert owner.ends["r1"].num_cached_tokens == 0  # at its first admission
    assert stats.output_tokens_total == 24
    assert stats.prompt_tokens_total == 10


def test_the_last_in_order_gives_way_first() -> None:
    scheduler = make_scheduler(TOKENS, [9], max_tokens_per_step=32)
    model, owner = HashModel(TOKENS, 4), Owner()
    for i, priority in enumerate((0, 0, -1)):
        request = make_request(f"r{i}", [i] * 6, priority=priority, max_tokens=9, ignore_eos=True)
        scheduler.add(request, 0.0)
    names = [[row[0] for row in shape_of(step(scheduler, model, owner))] for _ in range(8)]
    # Three blocks each until the place of position 12 is needed: r2 runs first, r1 arrived last.
    assert names[6:] == [["r2", "r0", "r1"], ["r2", "r0"]]
    assert scheduler.stats().preemptions_total == 1


def test_a_newcomer_leaves_a_block_to_each_that_could_take_it() -> None:
    scheduler, model, owner = make_scheduler(TOKENS, [4]), HashModel(TOKENS, 4), Owner()
    scheduler.add(make_request("first", range(7), max_tokens=3, ignore_eos=True), 0.0)
    step(scheduler, model, owner)
    scheduler.add(make_request("second", range(20, 28), max_tokens=1), 0.0)
    assert [row[0] for row in shape_of(step(scheduler, model, owner))] == ["first"]  # two blocks are free
    drain(scheduler, model, owner)
    assert scheduler.stats().preemptions_total == 0


def test_an_older_request_does_not_wait_for_a_later_one() -> None:
    scheduler, model = make_scheduler(TOKENS, [9], max_in_flight=2), HashModel(TOKENS, 4)
    for name, num_prompt in (("first", 8), ("older", 7)):
        scheduler.add(make_request(name, range(num_prompt), ignore_eos=True, salt=name), 0.0)
    plans = [scheduler.schedule(0.0)]
    scheduler.add(make_request("later", range(5), ignore_eos=True), 0.0)
    plans.append(scheduler.schedule(0.0))
    while scheduler.stats().preemptions_total == 0:
        plan = plans.pop(0)
        assert plan is not None
        scheduler.commit(model.run(plan), 0.0)
        plans.append(scheduler.schedule(0.0))
    # The later one was in flight when the first took blocks from the older one; now it has to give way.
    assert [row.request_id for row in rows_of(plans[0])] == ["later"]
    assert [row.request_id for row in rows_of(plans[1])] == ["first"]
    assert plans[0] is not None
    scheduler.commit(model.run(plans[0]), 0.0)
    assert [row.request_id for row in rows_of(scheduler.schedule(0.0))] == ["older"]
    assert scheduler.stats().preemptions_total == 2


def test_a_class_that_runs_earlier_takes_blocks_and_places_from_a_later_one() -> None:
    for scheduler in (make_scheduler(TOKENS, [5]), make_scheduler(TOKENS, [64], max_num_seqs=1)):
        model, owner = HashModel(TOKENS, 4), Owner()
        scheduler.add(make_request("later", range(12), priority=1, max_tokens=4, ignore_eos=True), 0.0)
        step(scheduler, model, owner)
        scheduler.add(make_request("same", range(20, 32), priority=1, max_tokens=4, ignore_eos=True), 0.0)
        assert shape_of(step(scheduler, model, owner)) == [("later", 12, 1, True)]
        scheduler.add(
            make_request("sooner", range(12), priority=0, max_tokens=4, salt="x", ignore_eos=True), 0.0
        )
        assert shape_of(step(scheduler, model, owner)) == [("sooner", 0, 12, True)]
        assert scheduler.stats().preemptions_total == 1
        drain(scheduler, model, owner)
        assert list(owner.ends) == ["sooner", "later", "same"]


def test_a_preempted_request_with_prompt_logprobs_still_gets_each_once() -> None:
    scheduler, model, owner = (
        make_scheduler(TOKENS, [12], max_tokens_per_step=8),
        HashModel(TOKENS, 4),
        Owner(),
    )
    scheduler.add(
        make_request("asks", range(20), priority=1, max_tokens=2, ignore_eos=True, prompt_logprobs=0), 0.0
    )
    step(scheduler, model, owner)
    scheduler.add(make_request("sooner", range(5, 45), priority=0, max_tokens=2, ignore_eos=True), 0.0)
    step(scheduler, model, owner)
    assert scheduler.stats().preemptions_total == 1
    drain(scheduler, model, owner)
    assert owner.events["asks"][0].prompt_logprobs is not None
    assert len(owner.events["asks"][0].prompt_logprobs) == 20


# -- cancelling ----------------------------------------------------------------------------------------


def test_cancelling_works_in_every_state_and_is_told_once() -> None:
    scheduler, model = make_scheduler(TOKENS, [64], max_num_seqs=2), HashModel(TOKENS, 4)
    ledger = scheduler.replicas[0].ledger
    for name in ("running", "flying", "waiting"):
        scheduler.add(make_request(name, [1, 2, 3], ignore_eos=True), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.commit(model.run(plan), 0.0)
    held = ledger.num_used

    (event,) = scheduler.cancel("waiting")
    assert (event.request_id, event.finish_reason) == ("waiting", "cancelled")
    (event,) = scheduler.cancel("running")
    assert event.finish_reason == "cancelled"
    assert ledger.num_used == held // 2

    plan = scheduler.schedule(0.0)
    assert [row.request_id for row in rows_of(plan)] == ["flying"]
    assert plan is not None
    assert plan.retired == ("running",)  # the ranks never saw the one that waited
    (event,) = scheduler.cancel("flying")
    assert event.finish_reason == "cancelled"
    assert scheduler.cancel("flying") == ()
    assert ledger.num_used == held // 2  # the step still writes to its blocks
    assert scheduler.has_work
    assert scheduler.commit(model.run(plan), 0.0) == ()
    assert (ledger.num_used, scheduler.has_work) == (0, False)
    assert scheduler.take_retired() == ("flying",)
    assert scheduler.cancel("flying") == scheduler.cancel("never") == ()
    ledger.check()


def test_an_id_is_free_again_after_its_end() -> None:
    scheduler = make_scheduler(TOKENS, [64])
    for _ in range(2):
        owner = serve(make_request("a", [1, 2], max_tokens=2, ignore_eos=True), scheduler=scheduler)
        assert owner.ends["a"].finish_reason == "length"


# -- steps that went wrong -----------------------------------------------------------------------------


def test_one_failed_request_ends_alone_and_leaves_nothing_to_reuse() -> None:
    scheduler, model, owner = make_scheduler(TOKENS, [64]), HashModel(TOKENS, 4), Owner()
    good, bad = (make_request(name, range(10), max_tokens=3, ignore_eos=True) for name in ("good", "bad"))
    for request in (bad, good):
        scheduler.add(request, 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    owner.take(scheduler.commit(model.run(plan, failing={"bad"}), 0.0))
    assert (owner.ends["bad"].finish_reason, owner.ends["bad"].error) == ("error", "non-finite logits")
    drain(scheduler, model, owner)
    assert tuple(owner.tokens["good"]) == run_alone(TOKENS, good, 13)[0]
    scheduler.add(replace(bad, request_id="again"), 0.0)
    drain(scheduler, model, owner)
    assert owner.tokens["again"] == owner.tokens["good"]


def test_what_a_failed_request_computed_before_is_not_trusted_either() -> None:
    scheduler, model = make_scheduler(TOKENS, [64], max_tokens_per_step=8), HashModel(TOKENS, 4)
    scheduler.add(make_request("bad", range(16), max_tokens=3, ignore_eos=True), 0.0)
    for failing in ((), ("bad",)):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        scheduler.commit(model.run(plan, failing=failing), 0.0)
    assert scheduler.replicas[0].ledger.usage().idle_bytes == 0
    owner = serve(make_request("again", range(16), max_tokens=1), scheduler=scheduler, model=model)
    assert owner.ends["again"].num_cached_tokens == 0


@pytest.mark.parametrize(
    "groups", [[tokens_group()], [window_group(6), tokens_group()], [tokens_group(), state_group()]]
)
def test_a_lost_step_is_run_again_to_the_same_end(groups: list) -> None:
    scheduler, model, owner = make_scheduler(groups, [32] * len(groups)), HashModel(groups, 4), Owner()
    requests = [make_request(f"r{i}", range(i, 10 + i), max_tokens=8, ignore_eos=True) for i in range(3)]
    for request in requests:
        scheduler.add(request, 0.0)
    while (plan := scheduler.schedule(0.0)) is not None:
        before = scheduler.stats()
        assert scheduler.commit(model.run(plan, is_lost=True), 0.0) == ()
        overflow = replace(model.run(plan, failing={"r0"}), has_overflowed=True, failed={})
        assert scheduler.commit(overflow, 0.0) == ()
        assert scheduler.stats() == before
        assert scheduler.schedule(0.0) is None
        assert scheduler.in_flight == (plan,)
        first, second = model.run(plan), model.run(plan)
        assert first.tokens == second.tokens
        owner.take(scheduler.commit(second, 0.0))
    for request in requests:
        assert tuple(owner.tokens[request.request_id]) == run_alone(groups, request, 18)[0]


def test_a_result_of_no_step_in_flight_is_an_internal_error() -> None:
    scheduler = make_scheduler(TOKENS, [8])
    result = StepResult(step_id=7, tokens={}, logprobs={}, prompt_logprobs={}, loads=(), spread={})
    with pytest.raises(AssertionError, match="step 7 is not in flight"):
        scheduler.commit(result, 0.0)


# -- counters ------------------------------------------------------------------------------------------


def test_counters_count_committed_steps() -> None:
    scheduler, model, owner = make_scheduler(TOKENS, [64], max_num_seqs=1), HashModel(TOKENS, 4), Owner()
    for i in range(2):
        scheduler.add(make_request(f"r{i}", range(10), max_tokens=3, ignore_eos=True), float(i))
    plan = scheduler.schedule(4.0)
    assert plan is not None
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used, stats.kv_blocks_total) == (
        1,
        1,
        3,
        64,
    )
    assert (stats.steps_total, stats.prompt_tokens_total) == (0, 0)
    owner.take(scheduler.commit(model.run(plan), 5.0))
    stats = scheduler.stats()
    assert (stats.steps_total, stats.prompt_tokens_total, stats.output_tokens_total) == (1, 10, 1)
    assert stats.queue_seconds_total == 4.0
    drain(scheduler, model, owner)
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert (stats.prompt_tokens_total, stats.cached_tokens_total) == (20, 8)
    assert stats.output_tokens_total == sum(map(len, owner.tokens.values())) == 6
    assert stats.computed_tokens_total == 10 + 2 + 2 + 2


def test_what_a_request_holds_does_not_depend_on_its_routes() -> None:
    held = []
    for expert in (0, 5):
        scheduler, model = make_scheduler(TOKENS, [64]), HashModel(TOKENS, 4)
        scheduler.add(make_request("a", range(10), ignore_eos=True), 0.0)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        routes = {"a": np.full((10, 1, 2), expert, dtype=np.int64)}
        scheduler.commit(replace(model.run(plan), routes=routes), 0.0)
        held.append(scheduler.replicas[0].ledger.usage())
    assert held[0] == held[1]
    assert held[0].held_bytes == {"a": (3 * 64,)}


@given(st.lists(st.integers(1, 40), max_size=9), st.integers(1, 4))
def test_micro_batches_cover_the_rows_in_order_and_share_the_tokens(sizes: list[int], count: int) -> None:
    placed = [(None, row_of(size)) for size in sizes]
    batch = _batch(placed, count)  # type: ignore[arg-type]
    parts = batch.micro_batches
    assert len(parts) == count
    assert [row for part in parts for row in batch.rows[part]] == list(batch.rows)
    tokens = [sum(row.num_tokens for row in batch.rows[part]) for part in parts]
    assert max(tokens) <= sum(sizes) / count + max(sizes, default=0)


def row_of(num_tokens: int) -> RowPlan:
    return RowPlan(
        request_id="r",
        start_idx=0,
        num_tokens=num_tokens,
        is_sampled=True,
        token_ids=(1,) * num_tokens,
        blocks=(),
        state_from=None,
        state_to=None,
    )
