"""An engine without a model: the real scheduler, ledger and prefix cache under a simulated clock.

The loop is the controller's, schedule -> step -> commit; only the step is a time from the cost model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from moesaic.cost.layouts import Split, cache_bytes_per_sequence, memory_per_rank
from moesaic.errors import CapacityError, ConfigError
from moesaic.hashing import digest
from moesaic.planner.sim.clock import Clock
from moesaic.planner.sim.step_time import StepCase, StepTimes
from moesaic.sched.capacity import pool_sizes
from moesaic.sched.key import KvKeyScope
from moesaic.sched.ledger import KvLedger, cache_groups
from moesaic.sched.request import Request, RequestEvent, SamplingParams
from moesaic.sched.scheduler import Limits, Scheduler
from moesaic.sched.step import StepPlan, StepResult
from moesaic.spec.workload import TRACE_BLOCK, TraceRow

KV_BLOCK = 16  # tokens, as in the engine


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCase:
    """One engine: what a step costs, and its limits.

    Raises: ConfigError for a layout with a pipeline.
    """

    step: StepCase
    limits: Limits
    first_s: float = 0.0  # what every request waits beside queue and steps
    kv_block: int = KV_BLOCK
    has_prefix_cache: bool = True
    kv_pool_bytes: int | None = None  # of each attention replica; None: what weights and buffers leave

    def __post_init__(self) -> None:
        if self.step.split.pp != 1:
            raise ConfigError(
                f"pp {self.step.split.pp} is not simulated: a pipeline's stages work on different steps; "
                "give a layout without it"
            )

    @property
    def num_replicas(self) -> int:
        """Attention replicas, each with a queue and a KV pool of its own."""
        return int(self.step.split.dp)

    def kv_bytes(self) -> int:
        """What one attention replica keeps, over its ranks, beside weights and buffers.

        Raises: CapacityError when the weights leave nothing.
        """
        if self.kv_pool_bytes is not None:
            return self.kv_pool_bytes
        step, limits = self.step, self.limits
        parts = memory_per_rank(
            step.model, step.split, num_seqs=0.0, context=0.0, max_rows=float(limits.max_tokens_per_step),
            formats=step.formats, profile=step.profile,
        )  # fmt: skip
        used = float(sum(parts.values()))
        have = step.profile.usable_memory * step.cluster.machine.memory_bytes
        if used >= have:
            raise CapacityError(
                f"weights and buffers need {used / 1e9:.1f} GB of each {step.cluster.machine.name}, which "
                f"has {have / 1e9:.1f} GB to fill: give more devices, or a layout that splits further"
            )
        context = float(limits.max_model_len)
        whole, part = (
            float(cache_bytes_per_sequence(step.model, split, context, step.formats))
            for split in (Split(), step.split)
        )
        return int((have - used) * whole / part)

    def ledger(self) -> KvLedger:
        """The empty KV ledger of one replica.

        Raises: CapacityError when not one request of the whole context fits.
        """
        groups = cache_groups(self.step.model, "bfloat16", self.kv_block)
        # The groups count 16-bit numbers; a narrower cache is as much more of them.
        kv_bytes = int(self.kv_bytes() * 16 / self.step.formats.kv_bits)
        return KvLedger(
            groups, pool_sizes(groups, kv_bytes, self.limits, self.kv_block), kv_block=self.kv_block,
            scope=KvKeyScope(
                model_digest=digest(self.step.model), numerics_digest="", tokenizer_digest="", positions=""
            ),
            has_prefix_cache=self.has_prefix_cache,
        )  # fmt: skip

    def times(self) -> StepTimes:
        """The table of step times."""
        limits = self.limits
        return StepTimes(
            self.step, max_batch=limits.max_num_seqs, max_new=limits.max_tokens_per_step,
            max_past=limits.max_model_len,
        )  # fmt: skip


OnEvent = Callable[[RequestEvent, float], None]
OnStep = Callable[[StepPlan, float, float], None]


class SimulatedEngine:
    """Runs the scheduler as the controller does; a step is a wait.

    Owns:    the scheduler. `on_event` gets every event and its time, `on_step` every plan, start and end.
    """

    def __init__(
        self, clock: Clock, scheduler: Scheduler, step_s: Callable[[StepPlan], float], on_event: OnEvent,
        on_step: OnStep | None = None,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self._clock = clock
        self._step_s = step_s
        self._on_event = on_event
        self._on_step = on_step
        self._is_busy = False

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises: as `Scheduler.add`.
        """
        self.scheduler.add(request, self._clock.now_s)
        self._turn()

    def cancel(self, request_id: str) -> None:
        """Stop a request."""
        self._tell(self.scheduler.cancel(request_id))

    def _turn(self) -> None:
        if self._is_busy:
            return
        start_s = self._clock.now_s
        plan = self.scheduler.schedule(start_s)
        if plan is None:
            self.scheduler.take_retired()
            return
        self._is_busy = True

        def finish() -> None:
            self._is_busy = False
            if self._on_step is not None:
                self._on_step(plan, start_s, self._clock.now_s)
            self._tell(self.scheduler.commit(result_of(plan), self._clock.now_s))
            self._turn()

        self._clock.after(self._step_s(plan), finish)

    def _tell(self, events: tuple[RequestEvent, ...]) -> None:
        for event in events:
            self._on_event(event, self._clock.now_s)


def result_of(plan: StepPlan) -> StepResult:
    """What a step that computed nothing reports: a token per sampled row, one that is in no prompt."""
    tokens: Mapping[str, tuple[int, ...]] = {
        row.request_id: (_own_token(row.request_id),)
        for batch in plan.batches
        for row in batch.rows
        if row.is_sampled
    }
    return StepResult(
        step_id=plan.step_id, tokens=tokens, logprobs={}, prompt_logprobs={}, loads=(), spread={}
    )


def request_of(idx: int, row: TraceRow, at_s: float) -> Request:
    """A trace's row as a request: its tokens are the ids of the blocks that they are in.

    Prompts share a prefix in the ledger where they share leading ids in the trace, and nowhere else.
    """
    ids = row.hash_ids or tuple(-1 - idx - (1 << 40) for _ in range(-(-row.prompt_tokens // TRACE_BLOCK)))
    prompt: list[int] = []
    for block_id in ids:
        prompt += [block_id] * min(TRACE_BLOCK, row.prompt_tokens - len(prompt))
    return Request(
        request_id=str(idx), prompt_ids=tuple(prompt), seed=0, arrival_s=at_s,
        sampling=SamplingParams(max_tokens=row.output_tokens, ignore_eos=True),
    )  # fmt: skip


def _own_token(request_id: str) -> int:
    return -1 - int(request_id)
