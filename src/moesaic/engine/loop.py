"""The controller: requests from any thread in, plans to the workers, events to the requests' owners.

One thread turns the loop schedule -> run -> commit -> tell. It knows no tensor; its workers, behind a link,
know no queue. Whatever goes wrong in the loop ends every request with `error`, and the engine with it.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moesaic.engine.client import EngineSnapshot
from moesaic.engine.config import ResolvedConfig
from moesaic.engine.grammar import Grammars
from moesaic.engine.link import Link
from moesaic.engine.load_window import LoadWindow
from moesaic.engine.rank_window import RankFigures, RankWindow
from moesaic.engine.rebalance import Rebalance, Swapped
from moesaic.errors import ConfigError, MoesaicError, Overloaded, RequestError
from moesaic.log import get_logger
from moesaic.obs.names import SPANS
from moesaic.sched.request import Request, RequestEvent
from moesaic.sched.scheduler import Scheduler
from moesaic.spec.experts import ExpertLoad, ExpertPlan
from moesaic.spec.model import ModelSpec
from moesaic.units import format_bytes

IDLE_CHECK_S = 1.0  # how soon an idle engine notices that the main thread ended without closing it
RETRY_S = 1.0  # guess: for a client of an engine that drains; another replica may take the request at once

OnEvent = Callable[[RequestEvent], None]
_log = get_logger("engine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What a running engine says of itself that never changes."""

    weight_bytes: int
    kv_bytes: tuple[int, ...]  # of each rank's pool
    active: Mapping[str, Any]
    pids: tuple[int, ...] = ()  # of the ranks


class Engine:
    """An `EngineClient` in this process.

    Owns:    its thread, from `start` until `close`; the scheduler and everything that reaches the link.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        config: ResolvedConfig,
        scheduler: Scheduler,
        link: Link,
        facts: Facts,
        rebalance: Rebalance | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Without `rebalance` the model has no routed experts."""
        self.spec = spec
        self.config = config
        self.max_model_len = config.limits.max_model_len
        self._scheduler = scheduler
        self._link = link
        self._facts = facts
        self._grammars = grammars
        self._rebalance = rebalance
        if rebalance is not None:
            scheduler.plan_version = rebalance.plan.version
        # Guards all below and the scheduler. Held while planning and committing, never while computing.
        self._lock = threading.Condition()
        self._owners: dict[str, OnEvent] = {}
        self._outbox: list[RequestEvent] = []  # events that no step brought
        self._is_telling = False  # events left the scheduler and have not reached their owners
        self._loads = LoadWindow()
        self._ranks = RankWindow(max(1, len(facts.pids)))
        self._span_s = {span.name: 0.0 for span in SPANS}
        self._is_draining = False
        self._is_closing = False
        self._missed_s: float | None = None  # the time-out of a drain that left requests
        self._end: str | None = None  # why the loop ended
        self._thread = threading.Thread(target=self._run, name="moesaic-engine", daemon=False)

    def start(self) -> Engine:
        """Turn the loop from now on."""
        self._thread.start()
        return self

    # -- EngineClient, any thread ----------------------------------------------------------------------------

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queue a request; `on_event` gets every event, the last one with a finish_reason.

        A max_tokens that reaches beyond the context is cut to it, and the request then ends with "length":
        only a prompt that leaves no room for a token is refused.

        Raises: RequestError when it can never run; Overloaded when the queue is full, and when the engine
                drains or has ended.
        """
        self._check(request)
        request = _fit_to_context(request, self.max_model_len)
        with self._lock:
            if self._end is not None or self._is_closing or self._is_draining:
                why = self._end or ("the engine is closing" if self._is_closing else "the engine is draining")
                raise Overloaded(f"{why}: another engine must take the request", retry_after_s=RETRY_S)
            self._scheduler.add(request, time.monotonic())
            self._owners[request.request_id] = on_event
            self._lock.notify_all()

    def cancel(self, request_id: str) -> None:
        """Stop a request and free what it holds; unknown or finished ids are ignored."""
        with self._lock:
            if self._end is None:
                self._outbox.extend(self._scheduler.cancel(request_id))
                self._lock.notify_all()

    def snapshot(self) -> EngineSnapshot:
        """Counters and settings now."""
        with self._lock:
            stats = self._scheduler.stats()
            limits = self.config.limits
            figures = self._ranks.figures()
            return EngineSnapshot(
                is_ready=self._end is None and not self._is_closing and not self._is_draining,
                is_draining=self._is_draining and self._end is None,
                num_running=stats.num_running,
                num_waiting=stats.num_waiting,
                kv_blocks_total=stats.kv_blocks_total,
                kv_blocks_used=stats.kv_blocks_used,
                kv_block_tokens=self.config.kv_block,
                kv_bytes=sum(self._facts.kv_bytes),
                weight_bytes=self._facts.weight_bytes
                + (0 if self._rebalance is None else self._rebalance.grown_bytes),
                max_num_seqs=limits.max_num_seqs,
                max_model_len=limits.max_model_len,
                prompt_tokens_total=stats.prompt_tokens_total,
                cached_tokens_total=stats.cached_tokens_total,
                output_tokens_total=stats.output_tokens_total,
                preemptions_total=stats.preemptions_total,
                steps_total=stats.steps_total,
                span_seconds_total=dict(self._span_s),
                active=self._active(figures),
                ranks=figures,
                plan_version=self._scheduler.plan_version,
                moved_bytes_total=0 if self._rebalance is None else self._rebalance.moved_bytes_total,
            )

    def _active(self, figures: RankFigures) -> dict[str, Any]:
        """What runs: what never changes, then the plan and what each rank did so far."""
        rebalance = self._rebalance
        ranks = [
            {
                "rank": rank,
                "pid": pid,
                "num_jobs": int(figures.num_jobs[str(rank)]),
                "sent_bytes": int(figures.sent_bytes[str(rank)]),
                "received_bytes": int(figures.received_bytes[str(rank)]),
                "seconds": {
                    "compute": figures.compute_s[str(rank)],
                    "transfer": figures.transfer_s[str(rank)],
                    "wait": figures.wait_s[str(rank)],
                },
                "experts_held": 0 if rebalance is None else rebalance.num_held(rank),
                "kv_bytes": self._facts.kv_bytes[rank],
            }
            for rank, pid in enumerate(self._facts.pids)
        ]
        return {
            **self._facts.active,
            "plan": {
                "version": self._scheduler.plan_version,
                "is_swapping": rebalance is not None and rebalance.is_swapping,
            },
            "ranks": ranks,
            "skew": {"compute": figures.compute_skew, "communication": figures.communication_skew},
        }

    def expert_load(self, window_s: float | None) -> tuple[ExpertLoad, ...]:
        """One load per phase, since start (None) or over the last `window_s` seconds, up to five minutes."""
        with self._lock:
            if window_s is None:
                return self._loads.since_start()
            return self._loads.since(time.time() - window_s)

    def placement(self) -> ExpertPlan:
        """The expert plan that the last step followed, or the next one will.

        Raises: ConfigError for a model without routed experts.
        """
        with self._lock:
            return self._get_rebalance().plan

    def adopt(self, plan: ExpertPlan) -> Swapped:
        """Go over to another expert plan, some layers between any two steps; returns when it is in force.

        Requests run on meanwhile, and no bit of theirs changes.

        Raises: as `Rebalance.ask`; Overloaded when the engine closes or has ended; PeerLost when a rank is
                lost, and the engine with it.
        """
        with self._lock:
            if self._end is not None or self._is_closing:
                raise Overloaded("the engine has ended: it follows no other plan", retry_after_s=RETRY_S)
            answer = self._get_rebalance().ask(plan, time.monotonic())
            self._lock.notify_all()
        return answer.result()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests and wait for the running ones; False when some were left at the time-out."""
        with self._lock:
            self._is_draining = True
            has_drained = self._lock.wait_for(lambda: not self._owners and not self._is_telling, timeout_s)
            self._missed_s = None if has_drained else timeout_s
            return has_drained

    def close(self) -> None:
        """Stop after the step that is running; unfinished requests end with finish_reason 'error'."""
        with self._lock:
            self._is_closing = True
            self._lock.notify_all()
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join()
        gc.unfreeze()  # what `start_engine` kept from the collector may be garbage from now on

    # -- the loop, its own thread --------------------------------------------------------------------------

    def _run(self) -> None:
        end, is_retriable = (
            "the engine was closed before the request ended: send it again to one that runs",
            False,
        )
        failure: Exception = Overloaded(
            "the engine was closed before its plan changed", retry_after_s=RETRY_S
        )
        try:
            while self._turn():
                pass
        except Exception as error:  # noqa: BLE001 - the loop's last resort: nobody may wait for ever
            is_known = isinstance(error, MoesaicError)
            failure, end = (
                error,
                f"the engine failed: {'' if is_known else f'{type(error).__name__}: '}{error}",
            )
            _log.error("%s; every request ends, and so does the engine", end, exc_info=not is_known)
            is_retriable = isinstance(error, MoesaicError) and error.is_retriable
        with self._lock:
            if self._is_closing and self._missed_s is not None:
                allowed = f"{self._missed_s:g} s"
                end = f"the request did not end within the drain time-out of {allowed}: send it again"
            self._end = end
            if self._rebalance is not None:
                self._rebalance.fail(failure)
            left = [
                RequestEvent(request_id=i, finish_reason="error", error=end, is_retriable=is_retriable)
                for i in self._owners
            ]
            events = [*self._take_outbox(), *left]
        self._tell(events)
        self._link.close()

    def _turn(self) -> bool:
        """One step, or a rest until there is something to do. False: the engine ends."""
        with self._lock:
            if self._is_closing or not threading.main_thread().is_alive():
                return False
            stage = None if self._rebalance is None else self._rebalance.next_stage()
        if stage is not None:
            self._swap(stage)
        with self._lock:
            plan = self._scheduler.schedule(time.monotonic())
            retired = self._rest() if plan is None else ()
        if plan is None:
            self._link.forget(retired)
            events: tuple[RequestEvent, ...] = ()
        else:
            self._link.send(plan)
            result = self._link.receive()
            if result.lost is not None:
                raise result.lost
            with self._lock:
                events = self._scheduler.commit(result, time.monotonic())
                self._loads.add(result.loads)
                self._ranks.add(result.ranks, time.monotonic())
                loads = None if self._rebalance is None else self._rebalance.take_loads(result.loads)
                for name, seconds in result.spread.items():
                    self._span_s[name] += seconds
            if loads is not None:
                self._link.observe(loads)
        with self._lock:
            events = (*events, *self._take_outbox())
        self._tell(events)
        return True

    def _swap(self, stage: ExpertPlan) -> None:
        """Bring the next stage of another plan into force."""
        moved_bytes = self._link.adopt(stage)
        with self._lock:
            rebalance = self._get_rebalance()
            self._scheduler.plan_version = stage.version
            rebalance.done(stage, moved_bytes, time.monotonic())
        _log.info("expert plan version %d: %s moved", stage.version, format_bytes(moved_bytes))

    def _get_rebalance(self) -> Rebalance:
        if self._rebalance is None:
            raise ConfigError("the model has no routed experts: there is nothing to place")
        return self._rebalance

    def _rest(self) -> tuple[str, ...]:
        """Nothing can be planned: sleep unless events wait; returns what the workers may forget."""
        if self._scheduler.has_work:
            raise RuntimeError("requests are waiting, nothing runs, and none of them can be planned")
        retired = self._scheduler.take_retired()
        is_swapping = self._rebalance is not None and self._rebalance.is_swapping
        if not retired and not self._outbox and not is_swapping:
            self._lock.wait(IDLE_CHECK_S)
        return retired

    def _take_outbox(self) -> tuple[RequestEvent, ...]:
        self._is_telling = True  # so that `drain` outlasts what was taken
        events, self._outbox = tuple(self._outbox), []
        return events

    def _tell(self, events: Iterable[RequestEvent]) -> None:
        """Hand events to the requests' owners. An owner that fails loses its request, not the engine."""
        for event in events:
            with self._lock:
                is_last = event.finish_reason is not None
                take = self._owners.pop if is_last else self._owners.get
                on_event = take(event.request_id, None)
            if on_event is None:
                continue
            try:
                on_event(event)
            except Exception:  # noqa: BLE001 - foreign code on the engine's thread
                _log.exception("request %s: its owner failed on an event; cancelled", event.request_id)
                self.cancel(event.request_id)
        with self._lock:
            self._is_telling = False
            self._lock.notify_all()

    # -- checks ----------------------------------------------------------------------------------------------

    def _check(self, request: Request) -> None:
        """What can be known to be wrong without the scheduler.

        Raises: RequestError naming the field.
        """
        vocab, sampling = self.spec.vocab, request.sampling
        for param, ids in (
            ("prompt", request.prompt_ids),
            ("logit_bias", tuple(sampling.logit_bias)),
            ("stop_token_ids", sampling.stop_token_ids),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < vocab):
                wrong = next(i for i in ids if not 0 <= i < vocab)
                raise RequestError(
                    f"token id {wrong} in {param} is not one of the model's {vocab} (0 to {vocab - 1})"
                    + ("; if it came from a text, tokenizer.json is another model's" * (param == "prompt")),
                    param=param,
                )
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(request.eos_token_ids))
        if sampling.min_tokens and len(ends) >= vocab and ends.issuperset(range(vocab)):
            raise RequestError(
                f"min_tokens is {sampling.min_tokens}, but every token ends the answer: leave some out of "
                "stop_token_ids",
                param="min_tokens",
            )
        if request.grammar is None:
            return
        if self._grammars is None:
            raise RequestError("this engine was started without structured output", param="response_format")
        self._grammars.check(request.grammar)


def _fit_to_context(request: Request, max_model_len: int) -> Request:
    """The request with max_tokens cut to what the context leaves; left alone when not even one token fits."""
    room = max_model_len - len(request.prompt_ids)
    max_tokens = request.sampling.max_tokens
    if max_tokens is None or max_tokens <= room or room < 1:
        return request
    sampling = replace(request.sampling, max_tokens=room, min_tokens=min(request.sampling.min_tokens, room))
    return replace(request, sampling=sampling)
