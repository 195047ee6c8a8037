"""Runs jobs: sequences into the engine, its events back to the event loop; undone when the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from moesaic.engine.client import EngineClient
from moesaic.errors import MoesaicError
from moesaic.obs.metrics import Metrics
from moesaic.sched.request import Request, RequestEvent
from moesaic.server.choice import ChoiceReader, Delta
from moesaic.server.job import Job
from moesaic.server.problem import ClientLeftError
from moesaic.text.tokenizer import Tokenizer

_T = TypeVar("_T")
Receive = Callable[[], Awaitable[Any]]


class EventBridge:
    """Carries events from the engine's thread to an event loop: one wake-up for all that are waiting."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._pending: deque[tuple[Callable[[RequestEvent], None], RequestEvent]] = deque()
        self._is_scheduled = False

    def post(self, deliver: Callable[[RequestEvent], None], event: RequestEvent) -> None:
        """Call `deliver(event)` on the loop; from any thread."""
        self._pending.append((deliver, event))
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self.loop.call_soon_threadsafe(self._flush)
            except RuntimeError:  # the loop has closed: nobody is left to tell
                self._pending.clear()

    def _flush(self) -> None:
        # Lowered first: an event posted from here on schedules a flush of its own, or is seen by this one.
        self._is_scheduled = False
        while self._pending:
            deliver, event = self._pending.popleft()
            deliver(event)


class Runner:
    """Runs jobs on one engine."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, metrics: Metrics) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._bridge: EventBridge | None = None

    def start(self, job: Job) -> Generation:
        """A generation of this job; nothing is submitted before its deltas are asked for."""
        loop = asyncio.get_running_loop()
        if self._bridge is None or self._bridge.loop is not loop:
            self._bridge = EventBridge(loop)
        readers = [
            ChoiceReader(i, request, self._tokenizer, skip_special_tokens=job.skip_special_tokens)
            for i, request in enumerate(job.requests)
        ]
        return Generation(job, readers, engine=self._engine, bridge=self._bridge, metrics=self._metrics)


class Generation:
    """One job on its way. Whoever stops reading its deltas early ends its requests in the engine.

    Owns:    its requests, from submission until each ends or `deltas` is closed.
    """

    def __init__(
        self,
        job: Job,
        readers: list[ChoiceReader],
        *,
        engine: EngineClient,
        bridge: EventBridge,
        metrics: Metrics,
    ) -> None:
        self.job = job
        self.readers = readers
        self._engine = engine
        self._bridge = bridge
        self._metrics = metrics
        self._events: asyncio.Queue[tuple[int, RequestEvent]] = asyncio.Queue()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """What is new, choice by choice as it comes; every choice ends with a reason, exactly once.

        Raises: Overloaded before the first delta; RequestError, GenerationError at any time.
        """
        idle = [reader for reader in self.readers if not _needs_engine(reader.request)]
        for reader in idle:
            delta = reader.empty_end()
            self._note_end(reader)
            yield delta
        running = [reader for reader in self.readers if _needs_engine(reader.request)]
        if not running:
            return
        # The check of a grammar, or a full engine's lock, may take long: not on the loop.
        submission = asyncio.ensure_future(asyncio.to_thread(self._submit_all, running))
        try:
            await asyncio.shield(submission)
            num_left = len(running)
            while num_left:
                choice_idx, event = await self._events.get()
                reader = self.readers[choice_idx]
                if reader.finish_reason is not None:
                    continue  # after a stop string, the engine's own last event
                try:
                    delta = reader.read(event, time.monotonic())
                except MoesaicError:
                    self._count_end(reader)
                    raise
                if delta.finish_reason is not None:
                    num_left -= 1
                    if event.finish_reason is None:
                        self._engine.cancel(reader.request.request_id)
                    self._note_end(reader)
                if not delta.is_empty:
                    yield delta
        finally:
            submission.add_done_callback(self._cancel_rest)

    def _submit_all(self, readers: list[ChoiceReader]) -> None:
        for reader in readers:
            deliver = partial(self._deliver, reader.choice_idx)
            self._engine.submit(reader.request, partial(self._bridge.post, deliver))

    def _deliver(self, choice_idx: int, event: RequestEvent) -> None:
        self._events.put_nowait((choice_idx, event))

    def _cancel_rest(self, submission: asyncio.Future[None]) -> None:
        """End what still runs; also after a submission that was refused half way."""
        # Seen with this: it was raised to the reader, or the reader has left.
        is_refused = submission.cancelled() or submission.exception() is not None
        for reader in self.readers:
            if reader.finish_reason is None:
                self._engine.cancel(reader.request.request_id)
                if not is_refused:
                    reader.finish_reason = "cancelled"
                    self._count_end(reader)

    def _count_end(self, reader: ChoiceReader) -> None:
        self._metrics.add("moesaic_requests_total", str(reader.finish_reason))

    def _note_end(self, reader: ChoiceReader) -> None:
        now_s, metrics = time.monotonic(), self._metrics
        self._count_end(reader)
        metrics.observe("moesaic_request_duration_seconds", now_s - self.job.arrival_s)
        if reader.first_token_s is not None:
            metrics.observe("moesaic_time_to_first_token_seconds", reader.first_token_s - self.job.arrival_s)
            if reader.num_tokens > 1:
                per_token_s = (now_s - reader.first_token_s) / (reader.num_tokens - 1)
                metrics.observe("moesaic_time_per_output_token_seconds", per_token_s)


def _needs_engine(request: Request) -> bool:
    return request.sampling.max_tokens != 0 or request.sampling.prompt_logprobs is not None


async def until_gone(receive: Receive, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client leaves first.

    Raises: ClientLeftError, and whatever the work raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientLeftError("the client left before its answer was complete")
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
