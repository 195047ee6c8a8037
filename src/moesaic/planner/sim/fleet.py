"""The same requests through a fleet under each routing policy: cache hits, balance, time to first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from moesaic.errors import ConfigError
from moesaic.planner.sim.clock import Clock
from moesaic.planner.sim.engine import EngineCase
from moesaic.planner.sim.fluid import FluidEngine, FluidRequest
from moesaic.planner.sim.serve import Percentiles, Progress, fitted, missed_objectives, percentiles
from moesaic.planner.sim.step_time import StepTimes
from moesaic.planner.sim.traffic import max_mean
from moesaic.sched.key import KvKey, extend_keys
from moesaic.sched.ledger import KvLedger
from moesaic.sched.route import EngineView, KvDirectory, choose
from moesaic.spec.deployment import KvAffinity, LoadAffinity, PrefixAffinity, RoundRobin, RoutePolicy
from moesaic.spec.workload import TRACE_BLOCK, TraceRow

MAX_ENGINES = 1024
POLICIES: Mapping[str, RoutePolicy] = {
    "round robin": RoundRobin(),
    "prefix affinity": PrefixAffinity(num_blocks=2),  # the first block of many traces is one system prompt
    "KV affinity": KvAffinity(),
    "load + affinity": LoadAffinity(),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyRow:
    """What one policy does to the requests.

    Units:  seconds, shares of 1. balance is the busiest engine by the mean, of prompt tokens computed and of
            requests; stale_share is the part of the cached tokens that the directory promised and that were
            gone, missed_share the part found without a promise, both of all prompt tokens.
    """

    policy: str
    num_finished: int
    hit_rate: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    balance_tokens: float
    balance_requests: float
    busy: tuple[float, ...]  # of each engine
    stale_share: float
    missed_share: float
    on_front: bool  # no other policy has both more hits and a lower P99 of the time to the first token

    def missed(self, ttft_s: float | None, tpot_s: float | None) -> tuple[str, ...]:
        """A sentence per objective that this policy misses."""
        return tuple(missed_objectives((("TTFT", ttft_s, self.ttft_s), ("TPOT", tpot_s, self.tpot_s))))


@dataclass(frozen=True, kw_only=True, slots=True)
class FleetReport:
    """What `moesaic simulate fleet` answers."""

    num_engines: int
    num_requests: int
    num_cut: int
    num_too_long: int
    staleness_s: float
    kv_tokens: int  # of one engine
    has_prefix_cache: bool  # not where a layer keeps a state: it reuses no prefix
    best_hit_rate: float  # with one endless cache for all
    rows: tuple[PolicyRow, ...]

    def row(self, policy: str) -> PolicyRow:
        """The row of one policy."""
        return next(row for row in self.rows if row.policy == policy)


def simulate_fleet(
    case: EngineCase,
    rows: Sequence[TraceRow],
    *,
    num_engines: int,
    staleness_s: float = 1.0,
    policies: Mapping[str, RoutePolicy] = POLICIES,
    progress: Progress | None = None,
) -> FleetReport:
    """Every policy on the same arrivals; the cache is counted in the trace's blocks of 512 tokens.

    Raises: ConfigError for fewer than one engine, several attention replicas in one, a staleness below 0, and
            no request that fits.
    """
    if not 1 <= num_engines <= MAX_ENGINES:
        raise ConfigError(f"engines must be 1 to {MAX_ENGINES}, got {num_engines}")
    if not 0.0 <= staleness_s < 1e9:
        raise ConfigError(f"staleness must be a number of seconds of at least 0, got {staleness_s:g}")
    if case.num_replicas > 1:
        raise ConfigError(
            f"an engine of a fleet has one attention replica here, the layout has {case.num_replicas}: give "
            "dp=1, and as many more engines"
        )
    case = replace(case, kv_block=TRACE_BLOCK)
    kept, num_cut, num_too_long = fitted(rows, case.limits.max_model_len)
    ledger, times = case.ledger(), case.times()
    room = ledger.capacity_tokens
    fits = [row for row in kept if room is None or row.prompt_tokens + row.output_tokens <= room]
    if not fits:
        raise ConfigError(
            f"no request fits: {num_too_long} prompts are beyond the context, the rest the KV pool"
        )
    keys = [_keys(ledger, idx, row) for idx, row in enumerate(fits)]
    found = []
    for number, (name, policy) in enumerate(policies.items()):

        def tell(part: float, text: str, done: int = number, name: str = name) -> None:
            if progress is not None:
                progress((done + part) / len(policies), f"{name}: {text}")

        run = _FleetRun(case, ledger, times, num_engines, staleness_s, policy)
        found.append(run.run(name, fits, keys, tell))
    return FleetReport(
        num_engines=num_engines, num_requests=len(rows), num_cut=num_cut,
        num_too_long=num_too_long + len(kept) - len(fits), staleness_s=staleness_s, kv_tokens=room or 0,
        has_prefix_cache=ledger.has_prefix_cache,
        best_hit_rate=best_hit_rate(fits, keys), rows=_with_front(found),
    )  # fmt: skip


def best_hit_rate(rows: Sequence[TraceRow], keys: Sequence[Sequence[KvKey]]) -> float:
    """Part of the prompt tokens that one endless cache would have had."""
    seen: set[KvKey] = set()
    hit = 0
    for row, own in zip(rows, keys, strict=True):
        run = 0
        for key in own[: (row.prompt_tokens - 1) // TRACE_BLOCK]:
            if key not in seen:
                break
            run += 1
        hit += run * TRACE_BLOCK
        seen.update(own)
    return hit / max(sum(row.prompt_tokens for row in rows), 1)


def _keys(ledger: KvLedger, idx: int, row: TraceRow) -> list[KvKey]:
    """The keys of a prompt's full blocks: chained over the trace's ids, a token standing for its block."""
    count = row.prompt_tokens // TRACE_BLOCK
    ids = row.hash_ids[:count] or (-1 - idx,) * count
    keys: list[KvKey] = []
    extend_keys(keys, ledger.scope.root(), ids, 1)
    return keys


class _FleetRun:
    """One policy."""

    def __init__(
        self, case: EngineCase, ledger: KvLedger, times: StepTimes, num_engines: int, staleness_s: float,
        policy: RoutePolicy,
    ) -> None:  # fmt: skip
        self.case, self.policy, self.staleness_s = case, policy, staleness_s
        self.clock = Clock()
        self.directory = KvDirectory(num_engines)
        self.requests: list[FluidRequest] = []
        self.sent = [0] * num_engines
        self.engines = [self._engine(idx, ledger, times) for idx in range(num_engines)]

    def _engine(self, idx: int, ledger: KvLedger, times: StepTimes) -> FluidEngine:
        own = ledger.twin()
        own.watch()

        def report() -> None:
            changes = own.take_changes()
            if changes:
                self.clock.after(self.staleness_s, lambda: self.directory.report(idx, changes))

        return FluidEngine(self.clock, own, times, self.case.limits, report)

    def run(
        self, name: str, rows: Sequence[TraceRow], keys: Sequence[list[KvKey]], progress: Progress
    ) -> PolicyRow:
        def arrive(idx: int) -> None:
            self._send(idx, rows[idx], keys[idx])
            if idx % 64 == 0:
                progress(idx / len(rows), f"{idx:,} of {len(rows):,} requests")
            if idx + 1 < len(rows):
                self.clock.at(rows[idx + 1].at_s, lambda: arrive(idx + 1))

        self.clock.at(rows[0].at_s, lambda: arrive(0))
        self.clock.run()
        left = sum(request.end_s is None for request in self.requests)
        if left:
            raise RuntimeError(f"{name}: {left} requests never ended, and nothing is left to happen")
        return self._row(name)

    def _send(self, idx: int, row: TraceRow, keys: list[KvKey]) -> None:
        # The ledger leaves at least one token to compute.
        most = (row.prompt_tokens - 1) // TRACE_BLOCK
        hits = self.directory.hits(keys[:most])
        views = [
            EngineView(
                pending_tokens=engine.pending_tokens, num_running=engine.num_running,
                hit_tokens=hit * TRACE_BLOCK,
            )
            for engine, hit in zip(self.engines, hits, strict=True)
        ]  # fmt: skip
        chosen = choose(self.policy, views, turn=idx, keys=keys, prompt_tokens=row.prompt_tokens)
        request = FluidRequest(
            request_id=str(idx), at_s=self.clock.now_s, prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens, keys=keys, promised=views[chosen].hit_tokens,
        )  # fmt: skip
        self.requests.append(request)
        self.sent[chosen] += 1
        self.engines[chosen].submit(request)

    def _row(self, name: str) -> PolicyRow:
        done = [one for one in self.requests if one.end_s is not None]
        prompts = max(sum(one.prompt_tokens for one in done), 1)
        duration_s = self.clock.now_s or 1.0
        return PolicyRow(
            policy=name, num_finished=len(done),
            hit_rate=sum(one.num_cached for one in done) / prompts,
            ttft_s=percentiles([one.first_s - one.at_s + self.case.first_s for one in done]),
            tpot_s=percentiles(
                [
                    (one.end_s - one.first_s) / (one.output_tokens - 1)
                    for one in done
                    if one.end_s is not None and one.output_tokens > 1
                ]
            ),
            balance_tokens=max_mean([engine.computed_tokens for engine in self.engines]),
            balance_requests=max_mean(self.sent),
            busy=tuple(engine.busy_s / duration_s for engine in self.engines),
            stale_share=sum(max(one.promised - one.num_cached, 0) for one in done) / prompts,
            missed_share=sum(max(one.num_cached - one.promised, 0) for one in done) / prompts,
            on_front=False,
        )  # fmt: skip


def _with_front(rows: Sequence[PolicyRow]) -> tuple[PolicyRow, ...]:
    def point(row: PolicyRow) -> tuple[float, float]:
        return row.hit_rate, -(row.ttft_s.p[99] if row.ttft_s else float("inf"))

    def is_beaten(row: PolicyRow) -> bool:
        own = point(row)
        return any(
            all(a >= b for a, b in zip(point(other), own, strict=True)) and point(other) != own
            for other in rows
        )

    return tuple(replace(row, on_front=not is_beaten(row)) for row in rows)
