"""A light engine for fleets: the real KV ledger, steps as a flow instead of one by one.

Simplified against `engine.SimulatedEngine`: prompts are computed one after the other, all answers advance by
a token per step, and a request reserves room for its whole answer, so none is preempted. A request is then a
few events instead of hundreds of steps.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from moesaic.planner.sim.clock import Clock
from moesaic.planner.sim.step_time import StepTimes
from moesaic.sched.key import KvKey
from moesaic.sched.ledger import Grant, KvLedger
from moesaic.sched.scheduler import Limits


@dataclass(slots=True, eq=False)
class FluidRequest:
    """One request on its way; the engine writes the times."""

    request_id: str
    at_s: float
    prompt_tokens: int
    output_tokens: int
    keys: Sequence[KvKey]  # of the prompt's full blocks
    promised: int = 0  # leading tokens that the router expected in the cache
    num_cached: int = 0
    start_s: float = 0.0
    first_s: float = 0.0
    end_s: float | None = None


class FluidEngine:
    """Requests in, times out.

    Owns:    the ledger. `on_change` is called whenever blocks became findable or stopped being so.
    """

    def __init__(
        self, clock: Clock, ledger: KvLedger, times: StepTimes, limits: Limits,
        on_change: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self.ledger = ledger
        self.busy_s = 0.0
        self.computed_tokens = 0
        self._clock, self._times, self._limits = clock, times, limits
        self._on_change = on_change
        self._queue: deque[FluidRequest] = deque()
        self._queued_tokens = 0
        self._prompt: tuple[FluidRequest, Grant] | None = None
        self._left = 0.0  # of that prompt, as a share
        self._steps = 0.0  # steps so far: each gives every answer a token
        self._answers: list[tuple[float, int, FluidRequest, Grant]] = []  # by the step they end at
        self._positions = 0.0  # of their contexts, halfway through
        self._count = 0
        self._since_s = 0.0
        self._rates = (0.0, 0.0)  # per second: share of the prompt, steps
        self._turn = 0

    @property
    def num_running(self) -> int:
        """Requests whose answers are under way."""
        return len(self._answers)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens still to be computed, as far as the router's promises hold."""
        self._advance()
        if self._prompt is None:
            return self._queued_tokens
        prompt, _ = self._prompt
        return self._queued_tokens + round(self._left * (prompt.prompt_tokens - prompt.num_cached))

    def submit(self, request: FluidRequest) -> None:
        """Queue a request that fits the ledger."""
        self._advance()
        self._queue.append(request)
        self._queued_tokens += request.prompt_tokens - request.promised
        self._plan()

    def _advance(self) -> None:
        """Let the time since the last look pass."""
        passed_s = self._clock.now_s - self._since_s
        self._since_s = self._clock.now_s
        if passed_s > 0.0 and (self._prompt is not None or self._answers):
            self.busy_s += passed_s
            self._left = max(self._left - passed_s * self._rates[0], 0.0)
            self._steps += passed_s * self._rates[1]

    def _plan(self) -> None:
        """Take the next prompt if there is room, set the rates, and come back when something ends."""
        if self._prompt is None:
            self._admit()
        self._rates = self._speed()
        prompt_rate, step_rate = self._rates
        waits = [self._left / prompt_rate] if self._prompt is not None else []
        if self._answers:
            waits.append(max(self._answers[0][0] - self._steps, 0.0) / step_rate)
        self._turn += 1
        if waits:
            turn = self._turn
            self._clock.after(min(waits), lambda: self._wake(turn))

    def _wake(self, turn: int) -> None:
        if turn != self._turn:
            return  # something came in between, and planned anew
        self._advance()
        if self._prompt is not None and self._left <= 1e-9:
            self._begin_answer(*self._prompt)
        while self._answers and self._answers[0][0] <= self._steps + 1e-9:
            self._end(*heapq.heappop(self._answers)[2:])
        self._plan()

    def _admit(self) -> None:
        if not self._queue or len(self._answers) >= self._limits.max_num_seqs:
            return
        head = self._queue[0]
        match = self.ledger.match(head.keys, head.prompt_tokens)
        grant = self.ledger.reserve(head.request_id, head.prompt_tokens + head.output_tokens, match)
        if grant is None:
            return
        self._queue.popleft()
        self._queued_tokens -= head.prompt_tokens - head.promised
        head.num_cached, head.start_s = match.num_tokens, self._clock.now_s
        self.computed_tokens += head.prompt_tokens - match.num_tokens
        self._prompt, self._left = (head, grant), 1.0
        self._changed()

    def _speed(self) -> tuple[float, float]:
        """(share of the prompt, steps) per second now."""
        batch = len(self._answers)
        step_s = self._times.decode_s(batch, self._positions / batch) if batch else 0.0
        if self._prompt is None:
            return 0.0, 1.0 / step_s if batch else 0.0
        prompt, _ = self._prompt
        new = prompt.prompt_tokens - prompt.num_cached
        chunk = min(new, self._limits.max_tokens_per_step)
        steps, middle = new / self._limits.max_tokens_per_step, prompt.num_cached + (new - chunk) / 2
        chunks = new / chunk
        if batch:
            seconds = steps * step_s + chunks * self._times.beside_s(chunk, middle, batch)
        else:
            seconds = chunks * self._times.alone_s(chunk, middle)
        return 1.0 / seconds, steps / seconds

    def _begin_answer(self, prompt: FluidRequest, grant: Grant) -> None:
        self._commit(prompt, grant)
        self._prompt = None
        prompt.first_s = self._clock.now_s
        self._changed()
        self._count += 1
        self._positions += prompt.prompt_tokens + prompt.output_tokens / 2
        end = self._steps + prompt.output_tokens - 1  # the first token came with the prompt
        heapq.heappush(self._answers, (end, self._count, prompt, grant))

    def _commit(self, prompt: FluidRequest, grant: Grant) -> None:
        """Note a prompt as computed, in the chunks of a step: windows give back what falls out of them."""
        done = prompt.num_cached
        while done < prompt.prompt_tokens:
            reach = min(self.ledger.reach(grant), done + self._limits.max_tokens_per_step)
            if reach <= done:
                raise RuntimeError(f"request {prompt.request_id}: its window has no free block at {done}")
            done = min(reach, prompt.prompt_tokens)
            self.ledger.extend(grant, done)
            self.ledger.commit(grant, done, prompt.keys)

    def _end(self, request: FluidRequest, grant: Grant) -> None:
        self._positions -= request.prompt_tokens + request.output_tokens / 2
        self.ledger.release(grant)
        request.end_s = self._clock.now_s

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()
