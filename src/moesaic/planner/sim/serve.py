"""Requests through one simulated engine: what each waits for, at a rate or a constant number at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from moesaic.errors import ConfigError, KvExhausted, Overloaded
from moesaic.planner.sim.clock import Clock
from moesaic.planner.sim.engine import EngineCase, SimulatedEngine, request_of
from moesaic.planner.sim.step_time import StepTimes
from moesaic.sched.request import RequestEvent
from moesaic.sched.scheduler import Scheduler, Stats
from moesaic.sched.step import StepPlan
from moesaic.spec.workload import TraceRow

PERCENTILES = (50, 90, 95, 99)
NUM_SAMPLES = 200  # of the series, at most

Progress = Callable[[float, str], None]  # part done, what is being done


@dataclass(frozen=True, kw_only=True, slots=True)
class Percentiles:
    """A figure over requests.

    Units:  those of the figure; p maps the percent to the least value that so many do not exceed.
    """

    mean: float
    p: Mapping[int, float]
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Percentiles:
        """Those of at least one value."""
        found = np.percentile(values, PERCENTILES, method="inverted_cdf").tolist()
        return Percentiles(
            mean=float(np.mean(values)), p=dict(zip(PERCENTILES, found, strict=True)), most=float(max(values))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeReport:
    """What `moesaic simulate serve` answers.

    Units:  seconds, tokens, shares of 1. queue is from arrival to the first step; ttft has the fixed part
            that every request waits.
    """

    num_requests: int
    num_finished: int
    num_cut: int  # answers cut to the context
    num_too_long: int  # left out: the prompt alone is beyond the context, or beyond the KV pool
    num_refused: int  # by the full queue
    duration_s: float
    request_rate: float  # finished per second
    output_tokens_per_s: float
    prompt_tokens_per_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    latency_s: Percentiles | None
    queue_s: Percentiles | None
    has_prefix_cache: bool  # not where a layer keeps a state: it reuses no prefix
    prefix_hit: float  # part of the prompt tokens found in the cache
    num_preemptions: int
    num_steps: int
    busy: float  # part of the time with a step running
    mean_batch: float  # rows of a step
    exchange_share: float  # part of the work that is transfers between ranks, hidden or not
    kv_blocks: int
    kv_peak: float  # most of them in use
    series: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # at_s, running, waiting, kv

    def missed(self, ttft_s: float | None, tpot_s: float | None) -> tuple[str, ...]:
        """A sentence per objective that the 99th percentile misses; none finished misses all of them."""
        found = missed_objectives((("TTFT", ttft_s, self.ttft_s), ("TPOT", tpot_s, self.tpot_s)))
        if (ttft_s or tpot_s) and self.num_refused:
            found.append(f"{self.num_refused} requests were refused by a full queue")
        return tuple(found)


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """None without a value."""
    return Percentiles.of(values) if values else None


def missed_objectives(asked: Sequence[tuple[str, float | None, Percentiles | None]]) -> list[str]:
    """A sentence per (name, seconds asked for, figure) whose P99 is above, or was not measured."""
    found = []
    for name, target, seen in asked:
        if target is not None and (seen is None or seen.p[99] > target):
            got = "none was measured" if seen is None else f"P99 is {seen.p[99] * 1e3:.0f} ms"
            found.append(f"{name}: {got}, asked for {target * 1e3:.0f} ms")
    return found


@dataclass(slots=True)
class _Watch:
    """What one request has seen so far."""

    at_s: float
    start_s: float | None = None
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    num_cached: int = 0
    reason: str | None = None


def fitted(rows: Sequence[TraceRow], max_model_len: int) -> tuple[list[TraceRow], int, int]:
    """(rows that the context takes, answers cut to it, rows left out as their prompt leaves no token)."""
    kept, num_cut, num_too_long = [], 0, 0
    for row in rows:
        room = max_model_len - row.prompt_tokens
        if room < 1:
            num_too_long += 1
            continue
        num_cut += row.output_tokens > room
        kept.append(replace(row, output_tokens=min(row.output_tokens, room)))
    return kept, num_cut, num_too_long


def simulate_serve(
    case: EngineCase,
    rows: Sequence[TraceRow],
    *,
    concurrency: int | None = None,
    progress: Progress | None = None,
    step_s: Callable[[StepPlan], float] | None = None,
) -> ServeReport:
    """Requests at their arrival times, or `concurrency` of them at a time; until all have ended.

    `step_s` replaces the cost model's time of a step.

    Raises: ConfigError for a concurrency below 1 or no request that fits; CapacityError when the weights
            leave too little memory for one request of the whole context.
    """
    if concurrency is not None and concurrency < 1:
        raise ConfigError(f"a concurrency must be at least 1, got {concurrency}")
    kept, num_cut, num_too_long = fitted(rows, case.limits.max_model_len)
    if not kept:
        raise ConfigError(
            f"no request fits the context of {case.limits.max_model_len} tokens: "
            f"{num_too_long} prompts are longer"
        )
    run = _Run(case, kept, progress, step_s)
    run.start(concurrency)
    return run.report(len(rows), num_cut, num_too_long)


class _Run:
    """One simulation."""

    def __init__(
        self, case: EngineCase, rows: list[TraceRow], progress: Progress | None,
        step_s: Callable[[StepPlan], float] | None,
    ) -> None:  # fmt: skip
        self.case, self.rows, self.progress = case, rows, progress
        self.clock = Clock()
        self.times: StepTimes | None = None
        if step_s is None:
            self.times = case.times()
            step_s = self.times.step_s
        self.scheduler = Scheduler(case.ledger(), case.limits, num_replicas=case.num_replicas)
        self.engine = SimulatedEngine(self.clock, self.scheduler, step_s, self._event, self._step)
        self.seen: dict[str, _Watch] = {}
        self.num_refused = self.num_exhausted = self.num_ended = 0
        self.samples: list[tuple[float, float, float, float]] = []
        self.busy_s = self.sent_s = self.work_s = 0.0
        self.num_rows = 0
        self.waiting: deque[int] = deque()  # closed loop: rows not sent yet

    def start(self, concurrency: int | None) -> None:
        if concurrency is None:
            # One arrival is ahead at a time: prompts are made when they are needed.
            self._arrival(0)
        else:
            self.waiting.extend(range(len(self.rows)))
            for _ in range(min(concurrency, len(self.rows))):
                self._send_next()
        self.clock.run()
        if self.scheduler.has_work:
            raise RuntimeError("requests are waiting, nothing runs, and none of them can be planned")

    def _arrival(self, idx: int) -> None:
        def arrive() -> None:
            self._send(idx)
            if idx + 1 < len(self.rows):
                self._arrival(idx + 1)

        self.clock.at(self.rows[idx].at_s, arrive)

    def _send_next(self) -> None:
        while self.waiting and not self._send(self.waiting.popleft()):
            pass

    def _send(self, idx: int) -> bool:
        now_s = self.clock.now_s
        self.seen[str(idx)] = _Watch(at_s=now_s)
        try:
            self.engine.submit(request_of(idx, self.rows[idx], now_s))
        except Overloaded:
            self.num_refused += 1
        except KvExhausted:
            self.num_exhausted += 1
        else:
            return True
        del self.seen[str(idx)]
        return False

    def _event(self, event: RequestEvent, now_s: float) -> None:
        watch = self.seen[event.request_id]
        if event.token_ids:
            if watch.first_s is None:
                watch.first_s, watch.num_cached = now_s, event.num_cached_tokens
            watch.last_s = now_s
            watch.num_tokens += len(event.token_ids)
        if event.finish_reason is None:
            return
        watch.reason = event.finish_reason
        self.num_ended += 1
        if self.progress is not None:
            self.progress(
                self.num_ended / len(self.rows), f"{self.num_ended:,} of {len(self.rows):,} requests"
            )
        if self.waiting:
            # After the step: the freed place and blocks are then known.
            self.clock.after(0.0, self._send_next)

    def _step(self, plan: StepPlan, start_s: float, end_s: float) -> None:
        for request in plan.admitted:
            self.seen[request.request_id].start_s = start_s
        self.busy_s += end_s - start_s
        self.num_rows += sum(len(batch.rows) for batch in plan.batches)
        if self.times is not None:
            sent_s, work_s = self.times.exchange_s(plan)
            self.sent_s, self.work_s = self.sent_s + sent_s, self.work_s + work_s
        replicas = self.scheduler.replicas
        running = sum(len(replica.running) for replica in replicas)
        used = sum(replica.ledger.num_used for replica in replicas)
        total = sum(replica.ledger.num_total for replica in replicas)
        self.samples.append((end_s, running, self.scheduler.num_waiting, used / total))

    def report(self, num_requests: int, num_cut: int, num_too_long: int) -> ServeReport:
        done = [watch for watch in self.seen.values() if watch.reason == "length"]
        stats: Stats = self.scheduler.stats()
        duration_s = self.clock.now_s or 1e-12
        fixed_s = self.case.first_s
        thinned = self.samples[:: max(len(self.samples) // NUM_SAMPLES, 1)]
        names = ("at_s", "running", "waiting", "kv")
        return ServeReport(
            num_requests=num_requests, num_finished=len(done), num_cut=num_cut,
            num_too_long=num_too_long + self.num_exhausted, num_refused=self.num_refused,
            duration_s=duration_s, request_rate=len(done) / duration_s,
            output_tokens_per_s=stats.output_tokens_total / duration_s,
            prompt_tokens_per_s=stats.prompt_tokens_total / duration_s,
            ttft_s=percentiles([w.first_s - w.at_s + fixed_s for w in done if w.first_s is not None]),
            tpot_s=percentiles(
                [(w.last_s - w.first_s) / (w.num_tokens - 1) for w in done if w.first_s is not None
                 and w.num_tokens > 1]
            ),
            latency_s=percentiles([w.last_s - w.at_s + fixed_s for w in done]),
            queue_s=percentiles([w.start_s - w.at_s for w in done if w.start_s is not None]),
            has_prefix_cache=self.scheduler.replicas[0].ledger.has_prefix_cache,
            prefix_hit=stats.cached_tokens_total / max(stats.prompt_tokens_total, 1),
            num_preemptions=stats.preemptions_total, num_steps=stats.steps_total,
            busy=self.busy_s / duration_s, mean_batch=self.num_rows / max(stats.steps_total, 1),
            exchange_share=self.sent_s / self.work_s if self.work_s else 0.0,
            kv_blocks=stats.kv_blocks_total,
            kv_peak=max((sample[3] for sample in self.samples), default=0.0),
            series={
                name: tuple(sample[i] for sample in thinned) for i, name in enumerate(names)
            },
        )  # fmt: skip
