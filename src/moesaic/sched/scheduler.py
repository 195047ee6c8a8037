"""What runs when: requests in, plans out, results back, events to their owners. No clock, tensor or socket.

    add --> waiting --schedule--> running --plan, result, commit--> ... --> finished
               ^                     |
               +----- preemption ----+

A request has a row in at most one uncommitted plan, so a failed or repeated step concerns only its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import ConfigError, KvExhausted, RequestError
from moesaic.sched.admission import AdmissionPolicy
from moesaic.sched.ledger import KvLedger
from moesaic.sched.replica import Placed, Replica
from moesaic.sched.request import Request, RequestEvent
from moesaic.sched.sequence import SequenceState
from moesaic.sched.step import BatchPlan, StepPlan, StepResult

STEP_TIME_WEIGHT = 0.1  # guess: share of the newest step in the running mean of step times


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Bounds of one attention replica (the first two) and of every request."""

    max_num_seqs: int
    max_tokens_per_step: int  # a longer prompt is computed in chunks
    max_model_len: int  # prompt and output together
    max_waiting: int  # over all replicas

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_tokens_per_step", "max_model_len", "max_waiting"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_tokens_per_step < self.max_num_seqs:
            raise ConfigError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request takes a token of every step"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """Counters now; totals count committed steps only, and each request's prompt once."""

    num_running: int
    num_waiting: int
    kv_blocks_used: int  # held by requests; blocks kept for reuse are not in use
    kv_blocks_total: int
    prompt_tokens_total: int
    cached_tokens_total: int  # of these, found in the prefix cache
    computed_tokens_total: int  # inputs computed, recomputed ones included
    output_tokens_total: int
    preemptions_total: int
    steps_total: int
    queue_seconds_total: (
        float  # from arrival to the first step, over the requests that prompt_tokens_total counts
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Flight:
    plan: StepPlan
    placed: tuple[Placed, ...]
    scheduled_s: float


class Scheduler:
    """Continuous batching at step level over one or more attention replicas.

    Replicas have pools of equal size and a prefix cache each; a request stays on the replica that it was
    given on arrival.
    Owns:    the plan of `schedule` until its result is committed; it may be run any number of times before.
    """

    def __init__(
        self,
        ledger: KvLedger,
        limits: Limits,
        *,
        num_replicas: int = 1,
        num_micro_batches: int = 1,
        max_in_flight: int = 1,
    ) -> None:
        counts = {
            "num_replicas": num_replicas,
            "num_micro_batches": num_micro_batches,
            "max_in_flight": max_in_flight,
        }
        for name, value in counts.items():
            if value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        self.limits = limits
        self.epoch = 0  # of the mesh; set by whoever replaces it
        self.plan_version = 0  # of the expert plan; set by whoever replaces it
        self._policy = AdmissionPolicy(max_waiting=limits.max_waiting)
        self._max_in_flight = max_in_flight
        self._num_micro_batches = num_micro_batches
        ledgers = [ledger, *(ledger.twin() for _ in range(num_replicas - 1))]
        self.replicas = tuple(
            Replica(one, max_num_seqs=limits.max_num_seqs, max_tokens_per_step=limits.max_tokens_per_step)
            for one in ledgers
        )
        self._live: dict[str, SequenceState] = {}
        self._flights: dict[int, _Flight] = {}
        self._admitted: list[Request] = []
        self._retired: list[str] = []
        self._num_added = 0
        self._num_planned = 0
        self._step_s: float | None = None
        self._num_prompt = self._num_cached = self._num_computed = self._num_output = self._num_steps = 0
        self._queue_s = 0.0

    # -- requests ----------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> None:
        """Queue a request.

        Raises:  RequestError when its id is in use or it is longer than the context; KvExhausted when it
                 alone needs more blocks than the pool has; Overloaded when the queue is full.
        """
        if request.request_id in self._live:
            raise RequestError(
                f"request id {request.request_id!r} is in use; give another", param="request_id"
            )
        limit = self._token_limit(request)
        self._policy.check(
            num_waiting=self.num_waiting, steps_to_finish=self._steps_to_finish(), step_s=self._step_s
        )
        replica_idx = min(range(len(self.replicas)), key=lambda i: (self.replicas[i].num_sequences, i))
        sequence = SequenceState(
            request=request,
            arrival_idx=self._num_added,
            added_s=now_s,
            replica_idx=replica_idx,
            root=self.replicas[replica_idx].ledger.scope.with_salt(request.salt).root(),
            limit=limit,
        )
        self._num_added += 1
        self._live[request.request_id] = sequence
        self.replicas[replica_idx].enqueue(sequence)

    def cancel(self, request_id: str) -> tuple[RequestEvent, ...]:
        """End a request; its last event comes at once. Unknown and finished ids are ignored.

        What a request in flight holds is freed when its step is committed, and that step's result is dropped.
        """
        sequence = self._live.get(request_id)
        if sequence is None or sequence.is_cancelled:
            return ()
        sequence.is_cancelled = True
        if not sequence.is_in_flight:
            self._forget(sequence)
        return (sequence.ended("cancelled"),)

    def take_retired(self) -> tuple[str, ...]:
        """Requests that the ranks may forget and no plan has named yet; for when no plan follows."""
        retired, self._retired = tuple(self._retired), []
        return retired

    # -- steps -------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step; None while `max_in_flight` plans await results or there is nothing to compute.

        An id may be retired and admitted again by one plan: ranks forget before they learn.
        """
        if len(self._flights) >= self._max_in_flight:
            return None
        filled = [replica.fill() for replica in self.replicas]
        placed = tuple(pair for pairs in filled for pair in pairs)
        if not placed:
            return None
        admitted: list[Request] = []
        for sequence, _ in placed:
            sequence.is_in_flight = True
            if not sequence.is_known:
                sequence.is_known = True
                admitted.append(sequence.request)
        plan = StepPlan(
            step_id=self._num_planned,
            epoch=self.epoch,
            plan_version=self.plan_version,
            batches=tuple(_batch(pairs, self._num_micro_batches) for pairs in filled),
            admitted=tuple(admitted),
            retired=self.take_retired(),
        )
        self._num_planned += 1
        self._flights[plan.step_id] = _Flight(plan=plan, placed=placed, scheduled_s=now_s)
        return plan

    @property
    def in_flight(self) -> tuple[StepPlan, ...]:
        """Plans whose results are due, oldest first: what to run again after a loss."""
        return tuple(flight.plan for flight in self._flights.values())

    def commit(self, result: StepResult, now_s: float) -> tuple[RequestEvent, ...]:
        """Take in what a step did, and tell the owners of its requests.

        After an overflow or a loss nothing changes: the plan stays in flight and is to be run again.
        """
        flight = self._flights.get(result.step_id)
        assert flight is not None, (
            f"step {result.step_id} is not in flight: it was committed, or never planned"
        )
        if result.has_overflowed or result.lost is not None:
            return ()
        del self._flights[result.step_id]
        self._note_step(flight, now_s)
        events: list[RequestEvent] = []
        for sequence, row in flight.placed:
            sequence.is_in_flight = False
            if sequence.is_cancelled:
                self._forget(sequence)
                continue
            error = result.failed.get(row.request_id)
            if error is not None:
                # Not even its earlier blocks are trusted: what they hold led here.
                self._forget(sequence, is_suspect=True)
                events.append(sequence.ended("error", error))
                continue
            event = sequence.absorb(row, result)
            self.replicas[sequence.replica_idx].store(sequence)
            if event is None:
                continue
            self._num_output += len(event.token_ids)
            if event.finish_reason is not None:
                self._forget(sequence)
            events.append(event)
        return tuple(events)

    # -- state -------------------------------------------------------------------------------------

    @property
    def num_waiting(self) -> int:
        """Requests in the queues, preempted ones included."""
        return sum(replica.num_waiting for replica in self.replicas)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any plan awaits its result."""
        return bool(self._live)

    def stats(self) -> Stats:
        """Counters now."""
        return Stats(
            num_running=sum(len(replica.running) for replica in self.replicas),
            num_waiting=self.num_waiting,
            kv_blocks_used=sum(replica.ledger.num_used for replica in self.replicas),
            kv_blocks_total=sum(replica.ledger.num_total for replica in self.replicas),
            prompt_tokens_total=self._num_prompt,
            cached_tokens_total=self._num_cached,
            computed_tokens_total=self._num_computed,
            output_tokens_total=self._num_output,
            preemptions_total=sum(replica.num_preemptions for replica in self.replicas),
            steps_total=self._num_steps,
            queue_seconds_total=self._queue_s,
        )

    def _forget(self, sequence: SequenceState, *, is_suspect: bool = False) -> None:
        """Drop a request that is not in flight, and what it holds."""
        replica = self.replicas[sequence.replica_idx]
        if sequence.grant is None:
            replica.withdraw(sequence)
        else:
            replica.end(sequence, is_suspect=is_suspect)
        request_id = sequence.request.request_id
        del self._live[request_id]
        if sequence.is_known:
            self._retired.append(request_id)

    def _note_step(self, flight: _Flight, now_s: float) -> None:
        step_s = max(now_s - flight.scheduled_s, 0.0)
        old = step_s if self._step_s is None else self._step_s
        self._step_s = old + STEP_TIME_WEIGHT * (step_s - old)
        self._num_steps += 1
        self._num_computed += flight.plan.num_tokens
        for sequence, _ in flight.placed:
            if not sequence.is_counted:
                sequence.is_counted = True
                self._num_prompt += sequence.num_prompt
                self._num_cached += sequence.num_cached or 0
                self._queue_s += flight.scheduled_s - sequence.added_s

    def _steps_to_finish(self) -> int | None:
        left = [s.limit - len(s.token_ids) for replica in self.replicas for s in replica.running]
        return min(left, default=None)

    def _token_limit(self, request: Request) -> int:
        """Total tokens at which a request ends, or the reason why it cannot run at all."""
        num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
        context = self.limits.max_model_len
        num_needed = num_prompt + (1 if max_tokens is None else max_tokens)
        if num_needed > context:
            what = f"prompt of {num_prompt} tokens" + (f" + max_tokens {max_tokens}" if max_tokens else "")
            hint = "shorten the prompt" + (" or lower max_tokens" if max_tokens else "")
            raise RequestError(
                f"{what} exceeds the context of {context} tokens: {hint}",
                param="max_tokens" if max_tokens and num_prompt < context else "prompt",
                code="context_length_exceeded",
            )
        ledger = self.replicas[0].ledger
        capacity = ledger.capacity_tokens
        if capacity is None:
            return num_needed if max_tokens is not None else context
        num_held = max(num_prompt, num_needed - 1)  # the last token is sampled, never computed
        if num_held > capacity:
            block = ledger.kv_block
            raise KvExhausted(
                f"prompt of {num_prompt} tokens with max_tokens {max_tokens} needs {num_held} KV tokens "
                f"({-(-num_held // block)} blocks of {block}), the pool has {capacity} "
                f"({capacity // block} blocks): ask for fewer tokens, or start with a larger KV pool"
            )
        return num_needed if max_tokens is not None else min(context, capacity + 1)


def _batch(placed: Sequence[Placed], num_micro_batches: int) -> BatchPlan:
    """The rows in micro-batches of about as many tokens each; every replica has all, if only empty ones."""
    rows = tuple(row for _, row in placed)
    num_tokens, parts, start, taken = sum(row.num_tokens for row in rows), [], 0, 0
    for i in range(1, num_micro_batches + 1):
        stop = start
        while stop < len(rows) and taken * num_micro_batches < num_tokens * i:
            taken += rows[stop].num_tokens
            stop += 1
        parts.append(slice(start, stop))
        start = stop
    return BatchPlan(rows=rows, micro_batches=tuple(parts), bucket=None)
