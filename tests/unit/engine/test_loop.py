"""The engine loop over a fake model: events, cancelling, draining, closing, failures that reach everyone."""

import threading
from collections.abc import Iterable
from dataclasses import replace

import pytest
from fakes import tiny_spec
from hash_model import HashModel, make_request, make_scheduler, run_alone, tokens_group

from moesaic.engine.config import EngineConfig, ResolvedConfig
from moesaic.engine.link import LocalLink
from moesaic.engine.loop import Engine, Facts
from moesaic.engine.machine import Machine
from moesaic.errors import Overloaded, RequestError
from moesaic.sched.request import RequestEvent
from moesaic.sched.step import StepPlan, StepResult
from moesaic.spec.numerics import preset

VOCAB = 40
GROUPS = (tokens_group(),)
CONTEXT = 64


class Executor(HashModel):
    """The fake model, with a gate to hold steps and a step to fail at."""

    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__(GROUPS, 4)
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Event()
        self.fail_at = fail_at
        self.forgotten: list[str] = []

    def run(self, plan: StepPlan, **options: object) -> StepResult:
        self.started.set()
        assert self.gate.wait(10), "nobody opened the gate"
        if plan.step_id == self.fail_at:
            raise ZeroDivisionError("a bug")
        return replace(super().run(plan), spread={"forward": 0.5, "sample": 0.25})

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.forgotten.append(request_id)
            self.known.pop(request_id, None)


class Sink:
    """Owner of requests: keeps events, and can wait for the end of each."""

    def __init__(self) -> None:
        self.events: dict[str, list[RequestEvent]] = {}
        self.changed = threading.Condition()

    def take(self, event: RequestEvent) -> None:
        with self.changed:
            self.events.setdefault(event.request_id, []).append(event)
            self.changed.notify_all()

    def end(self, request_id: str) -> RequestEvent:
        def is_over() -> bool:
            return any(event.finish_reason for event in self.events.get(request_id, []))

        with self.changed:
            assert self.changed.wait_for(is_over, 10), f"{request_id} never ended"
            return self.events[request_id][-1]

    def tokens(self, request_id: str) -> tuple[int, ...]:
        self.end(request_id)
        return tuple(token for event in self.events[request_id] for token in event.token_ids)


def resolved(**limits: int) -> ResolvedConfig:
    machine = Machine(num_cpus=1, cpu_source="", total_bytes=10**9, available_bytes=10**9, memory_source="")
    config = EngineConfig(model="fake", max_model_len=CONTEXT, max_num_seqs=8)
    found = config.resolve(tiny_spec(VOCAB), preset("portable", dtype="float32"), machine)
    return replace(found, limits=replace(found.limits, **limits)) if limits else found


@pytest.fixture
def make_engine():
    engines: list[Engine] = []

    def make(executor: Executor, *, num_blocks: int = 64, max_waiting: int = 1000) -> Engine:
        engine = Engine(
            spec=tiny_spec(VOCAB),
            config=resolved(),
            scheduler=make_scheduler(GROUPS, (num_blocks,), max_model_len=CONTEXT, max_waiting=max_waiting),
            link=LocalLink(executor),
            facts=Facts(weight_bytes=123, kv_bytes=(4096,), active={"backend": "fake"}),
        ).start()
        engines.append(engine)
        executors.append(executor)
        return engine

    executors: list[Executor] = []
    yield make
    for executor in executors:
        executor.gate.set()
    for engine in engines:
        engine.close()


def test_requests_from_many_threads_get_what_each_gets_alone(make_engine):
    engine, sink = make_engine(Executor()), Sink()
    requests = [make_request(f"r{i}", range(1, 4 + i % 5), eos=0, max_tokens=9) for i in range(40)]

    def submit(part: int) -> None:
        for request in requests[part::4]:
            engine.submit(request, sink.take)

    threads = [threading.Thread(target=submit, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request in requests:
        tokens, reason = run_alone(GROUPS, request, len(request.prompt_ids) + 9)
        assert sink.tokens(request.request_id) == tokens
        assert sink.end(request.request_id).finish_reason == reason
    snapshot = engine.snapshot()
    assert snapshot.is_ready
    assert snapshot.kv_blocks_used == snapshot.num_running == snapshot.num_waiting == 0
    assert snapshot.output_tokens_total == sum(len(sink.tokens(r.request_id)) for r in requests)
    assert snapshot.weight_bytes == 123


def test_cancel_frees_and_ends(make_engine):
    executor = Executor()
    engine, sink = make_engine(executor), Sink()
    executor.gate.clear()
    engine.submit(make_request("a", [1, 2], ignore_eos=True), sink.take)
    assert executor.started.wait(10)
    engine.submit(make_request("b", [3], ignore_eos=True), sink.take)
    engine.cancel("a")
    engine.cancel("b")
    engine.cancel("unknown")
    executor.gate.set()
    assert sink.end("a").finish_reason == "cancelled"
    assert sink.end("b").finish_reason == "cancelled"
    assert engine.drain(10)
    assert engine.snapshot().kv_blocks_used == 0
    assert len(sink.events["a"]) == len(sink.events["b"]) == 1


def test_idle_workers_are_told_to_forget(make_engine):
    executor = Executor()
    engine, sink = make_engine(executor), Sink()
    engine.submit(make_request("a", [1, 2], max_tokens=2), sink.take)
    sink.end("a")
    assert engine.drain(10)
    for _ in range(1000):
        if executor.forgotten == ["a"]:
            break
        threading.Event().wait(0.005)
    assert executor.forgotten == ["a"]


def test_drain_refuses_new_requests_and_waits_for_the_old(make_engine):
    executor = Executor()
    engine, sink = make_engine(executor), Sink()
    executor.gate.clear()
    engine.submit(make_request("a", [1, 2], max_tokens=3), sink.take)
    assert not engine.drain(0.05)
    with pytest.raises(Overloaded, match="draining") as refused:
        engine.submit(make_request("b", [1]), sink.take)
    assert refused.value.retry_after_s > 0
    assert engine.snapshot().is_draining
    assert not engine.snapshot().is_ready
    executor.gate.set()
    assert engine.drain(10)
    assert sink.events["a"][-1].finish_reason is not None, "drain returned before the last event was told"


def test_close_ends_everything_with_error(make_engine):
    executor = Executor()
    engine, sink = make_engine(executor), Sink()
    executor.gate.clear()
    engine.submit(make_request("a", [1, 2], ignore_eos=True), sink.take)
    assert executor.started.wait(10)
    closer = threading.Thread(target=engine.close)
    closer.start()
    executor.gate.set()
    closer.join(10)
    assert sink.end("a").finish_reason == "error"
    assert "closed" in (sink.end("a").error or "")
    with pytest.raises(Overloaded, match="closed"):
        engine.submit(make_request("b", [1]), sink.take)
    engine.close()
    engine.cancel("a")


def test_what_a_drain_left_is_told_how_long_it_had(make_engine):
    executor = Executor()
    engine, sink = make_engine(executor), Sink()
    executor.gate.clear()
    engine.submit(make_request("a", [1, 2], ignore_eos=True), sink.take)
    assert executor.started.wait(10)
    assert not engine.drain(0.05)
    closer = threading.Thread(target=engine.close)
    closer.start()
    executor.gate.set()
    closer.join(10)
    assert "within the drain time-out of 0.05 s: send it again" in (sink.end("a").error or "")


def test_a_failing_step_ends_everything_and_is_reported(make_engine, caplog):
    engine, sink = make_engine(Executor(fail_at=3)), Sink()
    for i in range(5):
        engine.submit(make_request(f"r{i}", [1, 2, i], ignore_eos=True), sink.take)
    for i in range(5):
        end = sink.end(f"r{i}")
        assert end.finish_reason == "error"
        assert "ZeroDivisionError: a bug" in (end.error or "")
    assert not engine.snapshot().is_ready
    with pytest.raises(Overloaded, match="a bug"):
        engine.submit(make_request("later", [1]), sink.take)
    assert engine.drain(10)
    assert any("the engine failed" in record.message and record.exc_info for record in caplog.records)


def test_an_owner_that_fails_loses_only_its_request(make_engine, caplog):
    engine, sink = make_engine(Executor()), Sink()

    def broken(event: RequestEvent) -> None:
        raise OSError("the socket is gone")

    engine.submit(make_request("bad", [1, 2], ignore_eos=True), broken)
    engine.submit(make_request("good", [1, 2], max_tokens=5, ignore_eos=True), sink.take)
    assert sink.end("good").finish_reason == "length"
    assert engine.drain(10)
    assert engine.snapshot().kv_blocks_used == 0
    assert any("its owner failed" in record.message for record in caplog.records)


def test_the_queue_is_bounded(make_engine):
    executor = Executor()
    engine, sink = make_engine(executor, max_waiting=2), Sink()
    executor.gate.clear()
    engine.submit(make_request("running", [1, 2], max_tokens=2), sink.take)
    assert executor.started.wait(10)
    for i in range(2):
        engine.submit(make_request(f"waiting{i}", [1, 2], max_tokens=2), sink.take)
    with pytest.raises(Overloaded):
        engine.submit(make_request("late", [1, 2], max_tokens=2), sink.take)
    executor.gate.set()
    assert engine.drain(10)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ([1, VOCAB], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
        ([1], {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
        ([1] * CONTEXT, {}, "prompt"),
        ([1] * (CONTEXT + 1), {"max_tokens": 0}, "prompt"),
    ],
)
def test_requests_that_cannot_run_are_refused(make_engine, prompt, sampling, param):
    engine, sink = make_engine(Executor()), Sink()
    with pytest.raises(RequestError) as refused:
        engine.submit(make_request("a", prompt, **sampling), sink.take)
    assert refused.value.param == param
    assert sink.events == {}
    engine.submit(make_request("b", [1], max_tokens=1), sink.take)
    sink.end("b")


def test_structured_output_needs_grammars(make_engine):
    engine, sink = make_engine(Executor()), Sink()
    request = replace(make_request("a", [1]), grammar="{}")
    with pytest.raises(RequestError, match="without structured output"):
        engine.submit(request, sink.take)


@pytest.mark.parametrize("wrong", [{"min_tokens": 2}, {"ignore_eos": True}])
def test_an_answer_that_must_match_a_grammar_must_be_free_to_end(wrong):
    (name,) = wrong
    with pytest.raises(RequestError, match=f"{name} and response_format exclude each other") as caught:
        replace(make_request("a", [1], **wrong), grammar="{}")
    assert caught.value.param == name


def test_min_tokens_needs_a_token_that_does_not_end_the_answer(make_engine):
    engine, sink = make_engine(Executor()), Sink()
    for ids in (range(VOCAB), range(1, VOCAB)):  # eos is the token 0
        request = make_request("a", [1], eos=0, stop_token_ids=tuple(ids), min_tokens=1)
        with pytest.raises(RequestError, match="min_tokens is 1, but every token ends the answer"):
            engine.submit(request, sink.take)
    engine.submit(
        make_request("a", [1], eos=0, stop_token_ids=tuple(range(2, VOCAB)), min_tokens=1), sink.take
    )
    assert sink.end("a").finish_reason


def test_the_time_of_steps_is_added_up_by_span(make_engine):
    engine, sink = make_engine(Executor()), Sink()
    assert engine.snapshot().span_seconds_total == {"forward": 0.0, "sample": 0.0}
    engine.submit(make_request("a", [1], max_tokens=3, ignore_eos=True), sink.take)
    sink.end("a")
    assert engine.snapshot().span_seconds_total == {"forward": 1.5, "sample": 0.75}


def test_too_many_max_tokens_are_cut_to_the_context(make_engine):
    engine, sink = make_engine(Executor()), Sink()
    engine.submit(make_request("a", [1] * 60, max_tokens=1000, min_tokens=900, ignore_eos=True), sink.take)
    assert len(sink.tokens("a")) == CONTEXT - 60
    assert sink.end("a").finish_reason == "length"


def test_zero_max_tokens(make_engine):
    engine, sink = make_engine(Executor()), Sink()
    for length in (1, CONTEXT):
        engine.submit(make_request(f"p{length}", [1] * length, max_tokens=0), sink.take)
        assert sink.tokens(f"p{length}") == ()
        assert sink.end(f"p{length}").finish_reason == "length"


def test_ids_can_be_used_again_when_their_request_ended(make_engine):
    executor = Executor()
    engine, first, second = make_engine(executor), Sink(), Sink()
    request = make_request("a", [1, 2], max_tokens=2, ignore_eos=True)
    executor.gate.clear()
    engine.submit(request, first.take)
    with pytest.raises(RequestError, match="in use"):
        engine.submit(request, second.take)
    executor.gate.set()
    tokens = first.tokens("a")
    engine.submit(request, second.take)
    assert second.tokens("a") == tokens
