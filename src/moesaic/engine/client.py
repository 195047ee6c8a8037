"""What the server and the CLI see of an engine, running in this process or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from moesaic.engine.rank_window import RankFigures
from moesaic.engine.rebalance import Swapped
from moesaic.sched.request import Request, RequestEvent
from moesaic.spec.experts import ExpertLoad, ExpertPlan
from moesaic.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSnapshot:
    """The engine at one instant, for /metrics, /ready and /v1/internal/active."""

    is_ready: bool
    is_draining: bool
    num_running: int
    num_waiting: int
    kv_blocks_total: int
    kv_blocks_used: int
    kv_block_tokens: int
    kv_bytes: int
    weight_bytes: int
    max_num_seqs: int
    max_model_len: int
    prompt_tokens_total: int
    cached_tokens_total: int
    output_tokens_total: int
    preemptions_total: int
    steps_total: int
    span_seconds_total: Mapping[str, float]  # by the names of obs/names.py's spans, over the steps committed
    active: Mapping[
        str, Any
    ]  # numerics digest, backend, effects, self-test, layout: what runs and what was refused
    ranks: RankFigures = field(default_factory=RankFigures)
    plan_version: int = 0
    moved_bytes_total: int = 0


class EngineClient(Protocol):
    """A running engine. Thread-safe; events arrive on the engine's own thread."""

    spec: ModelSpec
    max_model_len: int

    def submit(self, request: Request, on_event: Callable[[RequestEvent], None]) -> None:
        """Queue a request; `on_event` gets every event, the last one with a finish_reason.

        Raises: RequestError when it can never run (token id out of range, longer than the context);
                KvExhausted when it needs more than the whole KV pool; Overloaded when the queue is full or
                the engine drains.
        """
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a request and free what it holds; unknown or finished ids are ignored."""
        ...

    def snapshot(self) -> EngineSnapshot:
        """Counters and settings now."""
        ...

    def expert_load(self, window_s: float | None) -> tuple[ExpertLoad, ...]:
        """One load per phase, since start (None) or over the last `window_s` seconds."""
        ...

    def placement(self) -> ExpertPlan:
        """The expert plan in force.

        Raises: ConfigError for a model without routed experts.
        """
        ...

    def adopt(self, plan: ExpertPlan) -> Swapped:
        """Go over to another expert plan while requests run; returns when it is in force.

        Raises: ConfigError for a plan that does not fit; SwapRunning; HostMemoryShort.
        """
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False when some were left at the time-out."""
        ...

    def close(self) -> None:
        """Stop at once; unfinished requests end with finish_reason 'error'."""
        ...
