"""Any order of arrivals, steps, losses and cancels gives each request what it would have got alone."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

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
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moesaic.errors import KvExhausted, Overloaded
from moesaic.sched.ledger import CacheGroup
from moesaic.sched.request import Request
from moesaic.sched.scheduler import Scheduler
from moesaic.sched.step import StepPlan

KV_BLOCK = 4
MAX_LEN = 40
SHAPES: dict[str, tuple[list[CacheGroup], list[int]]] = {
    "tokens": ([tokens_group()], [12]),
    "tiny": ([tokens_group()], [6]),
    "window and tokens": ([window_group(6), tokens_group()], [5, 14]),
    "two windows": ([window_group(3), window_group(9)], [4, 6]),
    "tokens and states": ([tokens_group(), state_group()], [14, 6]),
    "states": ([state_group()], [8]),
}


class Driver:
    """A scheduler under test, its ranks and its owner; checks what must hold after every action."""

    def __init__(
        self, shape: str, *, num_replicas: int, max_in_flight: int, max_num_seqs: int, has_prefix_cache: bool
    ) -> None:
        self.groups, num_blocks = SHAPES[shape]
        self.scheduler = make_scheduler(
            self.groups,
            num_blocks,
            max_num_seqs=max_num_seqs,
            max_tokens_per_step=8,
            max_model_len=MAX_LEN,
            max_waiting=9,
            num_replicas=num_replicas,
            max_in_flight=max_in_flight,
            has_prefix_cache=has_prefix_cache,
        )
        self.model = HashModel(self.groups, KV_BLOCK, num_replicas)
        self.owner = Owner()
        self.requests: dict[str, Request] = {}
        self.plans: list[StepPlan] = []
        self.now_s = 0.0

    def add(self, prompt: list[int], **options: Any) -> None:
        request = make_request(f"r{len(self.requests)}", prompt, **options)
        try:
            self.scheduler.add(request, self.now_s)
        except KvExhausted:
            capacity = self.scheduler.replicas[0].ledger.capacity_tokens
            assert capacity is not None
            assert len(prompt) + (options["max_tokens"] or 0) > capacity
        except Overloaded:
            assert self.scheduler.num_waiting >= 9
        else:
            self.requests[request.request_id] = request

    def cancel(self, name: str) -> None:
        was_over = name in self.owner.ends
        events = self.scheduler.cancel(name)
        assert len(events) == (0 if was_over else 1)
        self.owner.take(events)

    def schedule(self) -> None:
        self.now_s += 1.0
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            return
        assert len(plan.batches) == len(self.scheduler.replicas)
        for batch in plan.batches:
            assert sum(row.num_tokens for row in batch.rows) <= 8
            assert len(batch.rows) <= self.scheduler.limits.max_num_seqs
        names = [
            row.request_id for other in [*self.plans, plan] for batch in other.batches for row in batch.rows
        ]
        assert len(set(names)) == len(names), "a request is in two uncommitted rows"
        self.plans.append(plan)

    def commit(self, plan: StepPlan, outcome: str, failing: Collection[str] = ()) -> None:
        self.now_s += 1.0
        if outcome in ("lost", "overflow"):
            result = self.model.run(plan, is_lost=True)
            if outcome == "overflow":
                result = replace(result, has_overflowed=True, lost=None)
            assert self.scheduler.commit(result, self.now_s) == ()
            return
        self.plans.remove(plan)
        result = self.model.run(plan, failing=failing)
        assert self.model.run(plan, failing=failing).tokens == result.tokens
        self.owner.take(self.scheduler.commit(result, self.now_s))

    def check(self) -> None:
        for replica in self.scheduler.replicas:
            replica.ledger.check()
            usage = replica.ledger.usage()
            own = sum(map(sum, usage.own_bytes.values()))
            assert own + usage.shared_bytes + usage.idle_bytes + usage.free_bytes == usage.total_bytes
            assert set(usage.own_bytes) == {s.request.request_id for s in replica.running}

    def finish(self) -> None:
        """Commit what is in flight, run what is left, and compare every request with what it gives alone."""
        for plan in tuple(self.plans):
            self.commit(plan, "done")
        drain(self.scheduler, self.model, self.owner)
        assert set(self.owner.ends) == set(self.requests), "a request did not end"
        stats = self.scheduler.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert stats.output_tokens_total == sum(map(len, self.owner.tokens.values()))
        for name, request in self.requests.items():
            self._check_output(name, request)

    def _check_output(self, name: str, request: Request) -> None:
        capacity = self.scheduler.replicas[0].ledger.capacity_tokens
        limit = MAX_LEN if capacity is None else min(MAX_LEN, capacity + 1)
        if request.sampling.max_tokens is not None:
            limit = len(request.prompt_ids) + request.sampling.max_tokens
        tokens, reason = run_alone(self.groups, request, limit)
        got, end = tuple(self.owner.tokens[name]), self.owner.ends[name]
        assert got == tokens[: len(got)]
        if end.finish_reason not in ("stop", "length"):
            return
        assert (got, end.finish_reason) == (tokens, reason)
        found = [e.prompt_logprobs for e in self.owner.events[name] if e.prompt_logprobs is not None]
        assert len(found) == (0 if request.sampling.prompt_logprobs is None else 1)
        for prompt_logprobs in found:
            tail = [x.token_id for x in prompt_logprobs if x is not None]
            assert (len(prompt_logprobs), tail) == (len(request.prompt_ids), list(request.prompt_ids[1:]))


# Prompts often share a beginning, so that the prefix cache has something to find.
STEMS = ([], [1] * 9, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [5] * 4)
OUTCOMES = ("done", "done", "done", "done", "failed", "lost", "overflow")


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("max_in_flight", [1, 3])
def test_long_random_histories(shape: str, max_in_flight: int) -> None:
    for seed in range(6):
        draw = random.Random(seed)
        driver = Driver(
            shape,
            num_replicas=draw.choice([1, 1, 2]),
            max_in_flight=max_in_flight,
            max_num_seqs=draw.randint(1, 5),
            has_prefix_cache=draw.random() < 0.8,
        )
        for _ in range(150):
            act(driver, draw)
            driver.check()
        driver.finish()


def act(driver: Driver, draw: random.Random) -> None:
    """One random action: half of the time a step forward."""
    kind = draw.choices(["add", "cancel", "schedule", "commit"], [3, 1, 5, 5])[0]
    if kind == "add":
        max_tokens = draw.choice([None, 0, 1, 5, 12])
        driver.add(
            draw.choice(STEMS) + [draw.randint(1, 3) for _ in range(draw.randint(1, 12))],
            max_tokens=max_tokens,
            min_tokens=draw.choice([0, 0, 1]) if max_tokens != 0 else 0,
            priority=draw.randint(-1, 1),
            salt=draw.choice(["", "", "", "other"]),
            prompt_logprobs=draw.choice([None, None, None, 0]),
            ignore_eos=draw.random() < 0.5,
        )
    elif kind == "cancel" and driver.requests:
        driver.cancel(draw.choice(list(driver.requests)[-8:]))
    elif kind == "schedule":
        driver.schedule()
    elif kind == "commit" and driver.plans:
        plan = draw.choice(driver.plans)
        outcome = draw.choice(OUTCOMES)
        names = [row.request_id for batch in plan.batches for row in batch.rows]
        driver.commit(plan, outcome, {draw.choice(names)} if outcome == "failed" else ())


class ScheduleMachine(RuleBasedStateMachine):
    """The same under hypothesis, which shrinks a failing history to its essence."""

    driver: Driver | None = None

    @initialize(
        shape=st.sampled_from(sorted(SHAPES)),
        num_replicas=st.integers(1, 2),
        max_in_flight=st.integers(1, 3),
        max_num_seqs=st.integers(1, 5),
        has_prefix_cache=st.sampled_from([True, True, True, False]),
    )
    def start(self, shape: str, **options: Any) -> None:
        self.driver = Driver(shape, **options)

    @rule(
        prompt=st.builds(
            lambda stem, tail: stem + tail,
            st.sampled_from(STEMS),
            st.lists(st.integers(1, 3), min_size=1, max_size=12),
        ),
        max_tokens=st.sampled_from([None, 0, 1, 5, 12]),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt: list[int], **options: Any) -> None:
        self.driver.add(prompt, **options)

    @precondition(lambda self: self.driver and self.driver.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.driver.cancel(data.draw(st.sampled_from(list(self.driver.requests))))

    @rule(num_steps=st.integers(0, 6))
    def advance(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.driver.schedule()
            if self.driver.plans:
                self.driver.commit(self.driver.plans[0], "done")
        self.driver.schedule()

    @precondition(lambda self: self.driver and self.driver.plans)
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES))
    def commit(self, data: st.DataObject, outcome: str) -> None:
        plan = data.draw(st.sampled_from(self.driver.plans))
        names = [row.request_id for batch in plan.batches for row in batch.rows]
        self.driver.commit(plan, outcome, {data.draw(st.sampled_from(names))} if outcome == "failed" else ())

    @invariant()
    def pools_are_whole(self) -> None:
        if self.driver is not None:
            self.driver.check()

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.finish()


TestScheduleMachine = ScheduleMachine.TestCase
TestScheduleMachine.settings = settings(max_examples=30, stateful_step_count=25)


# -- load ----------------------------------------------------------------------------------------------


def crowd(num_requests: int, num_classes: int = 1) -> list[Request]:
    draw = random.Random(7)
    return [
        make_request(
            f"r{i}",
            [draw.randrange(5) for _ in range(draw.randint(1, 24))],
            priority=draw.randrange(num_classes),
            max_tokens=draw.randint(1, 16),
            ignore_eos=draw.random() < 0.5,
        )
        for i in range(num_requests)
    ]


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_200_requests_in_the_kv_of_three(shape: str) -> None:
    groups, _ = SHAPES[shape]
    sizes = {"tokens": 3 * MAX_LEN // KV_BLOCK, "state": 6}
    num_blocks = [sizes.get(g.kind, 3 * g.min_units(KV_BLOCK)) for g in groups]
    scheduler = make_scheduler(
        groups, num_blocks, max_num_seqs=16, max_tokens_per_step=32, max_model_len=MAX_LEN
    )
    model, owner = HashModel(groups, KV_BLOCK), Owner()
    requests = crowd(200)
    for request in requests:
        scheduler.add(request, 0.0)
    plans = drain(scheduler, model, owner)
    for request in requests:
        limit = len(request.prompt_ids) + (request.sampling.max_tokens or 0)
        assert (
            tuple(owner.tokens[request.request_id]),
            owner.ends[request.request_id].finish_reason,
        ) == run_alone(groups, request, limit)
    stats = scheduler.stats()
    assert stats.prompt_tokens_total == sum(len(request.prompt_ids) for request in requests)
    assert stats.output_tokens_total == sum(len(tokens) for tokens in owner.tokens.values())
    assert stats.computed_tokens_total == sum(plan.num_tokens for plan in plans)
    assert stats.steps_total == len(plans)
    assert stats.kv_blocks_used == 0
    scheduler.replicas[0].ledger.check()


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_arrivals_start_in_order_within_a_class_and_nobody_starves(num_replicas: int) -> None:
    groups = [tokens_group()]
    scheduler = make_scheduler(groups, [14], max_num_seqs=4, num_replicas=num_replicas, max_model_len=MAX_LEN)
    model, owner = HashModel(groups, KV_BLOCK, num_replicas), Owner()
    requests = crowd(60, num_classes=3)
    for request in requests:
        scheduler.add(request, 0.0)
    starts = [[request.request_id for request in plan.admitted] for plan in drain(scheduler, model, owner)]
    for replica_idx in range(num_replicas):
        mine = {request.request_id for request in requests[replica_idx::num_replicas]}
        order = [name for names in starts for name in names if name in mine]
        by_class = sorted((r for r in requests if r.request_id in mine), key=lambda r: r.priority)
        assert order == [request.request_id for request in by_class]


def test_a_stream_of_short_requests_does_not_hold_up_a_long_one() -> None:
    groups = [tokens_group()]
    scheduler = make_scheduler(groups, [12], max_num_seqs=4, max_model_len=MAX_LEN)
    model, owner = HashModel(groups, KV_BLOCK), Owner()
    scheduler.add(make_request("long", range(30), max_tokens=10, ignore_eos=True), 0.0)
    num_steps = 0
    while "long" not in owner.ends:
        while scheduler.num_waiting < 4:
            scheduler.add(
                make_request(
                    f"s{len(owner.ends)}.{num_steps}.{scheduler.num_waiting}", [1, 2, 3], max_tokens=8
                ),
                0.0,
            )
        plan = scheduler.schedule(0.0)
        assert plan is not None
        owner.take(scheduler.commit(model.run(plan), 0.0))
        num_steps += 1
        # 16 tokens a step: two steps for its prompt if it were alone, then one for each further token.
        assert num_steps <= 2 + 9
    assert len(owner.tokens["long"]) == 10


def test_the_oldest_advances_in_every_step() -> None:
    groups = [tokens_group()]
    scheduler = make_scheduler(groups, [10], max_num_seqs=6, max_model_len=MAX_LEN)
    model, owner = HashModel(groups, KV_BLOCK), Owner()
    for i in range(12):
        scheduler.add(make_request(f"r{i}", [i] * 12, max_tokens=20, ignore_eos=True), 0.0)
    while (plan := scheduler.schedule(0.0)) is not None:
        oldest = min(
            (name for name in (f"r{i}" for i in range(12)) if name not in owner.ends),
            key=lambda n: int(n[1:]),
        )
        assert oldest in {row.request_id for row in plan.batches[0].rows}
        owner.take(scheduler.commit(model.run(plan), 0.0))
    assert len(owner.ends) == 12
    assert scheduler.stats().preemptions_total > 0


def test_the_same_arrivals_give_the_same_plans() -> None:
    def plans() -> list[StepPlan]:
        scheduler = make_scheduler([tokens_group()], [14], max_model_len=MAX_LEN)
        for request in crowd(30, num_classes=2):
            scheduler.add(request, 0.0)
        return drain(scheduler, HashModel([tokens_group()], KV_BLOCK), Owner())

    assert plans() == plans()


# -- cost ----------------------------------------------------------------------------------------------


def decode_step_us(scheduler: Scheduler, num_steps: int) -> float:
    """Mean CPU microseconds of schedule and commit together."""
    spent_s = 0.0
    for _ in range(num_steps):
        start_s = time.process_time()
        plan = scheduler.schedule(0.0)
        spent_s += time.process_time() - start_s
        assert plan is not None
        tokens = {row.request_id: (3,) for row in plan.batches[0].rows}
        result = HashModel([], 16).run(replace(plan, batches=()))
        result = replace(result, tokens=tokens)
        start_s = time.process_time()
        scheduler.commit(result, 0.0)
        spent_s += time.process_time() - start_s
    return 1e6 * spent_s / num_steps


@pytest.mark.parametrize("num_prompt", [100, 4000])
def test_scheduling_16_requests_costs_little(num_prompt: int) -> None:
    scheduler = make_scheduler(
        [tokens_group()], [5000], kv_block=16, max_num_seqs=16, max_tokens_per_step=4096, max_model_len=5000
    )
    for i in range(16):
        scheduler.add(make_request(f"r{i}", [i] * num_prompt, ignore_eos=True), 0.0)
    decode_step_us(scheduler, 20)
    mean_us = decode_step_us(scheduler, 300)
    print(f"schedule + commit, 16 requests of {num_prompt} tokens: {mean_us:.0f} us a step")
    assert scheduler.stats().num_running == 16
    assert mean_us < 2000  # a loose bound: it catches work that grows with the context
