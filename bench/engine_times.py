"""When an engine's tokens come, by its own events: scheduler, sampling and the way to ranks are counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Of one batch of requests, in seconds of one clock."""

    start_s: float
    first_s: float  # every request has its first token
    last_s: float


def run_batch(llm: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> Times:
    """Greedy, without stopping, all requests at once through `moesaic.LLM`."""
    from moesaic.sched.request import Request, SamplingParams  # heavy

    arrivals: dict[str, list[float]] = {f"r{i}": [] for i in range(len(prompts))}
    left, done = set(arrivals), threading.Event()

    def on_event(event: Any) -> None:
        if event.token_ids:
            arrivals[event.request_id].append(time.perf_counter())
        if event.finish_reason is not None:
            left.discard(event.request_id)
            if not left:
                done.set()

    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    start_s = time.perf_counter()
    for i, prompt in enumerate(prompts):
        request = Request(request_id=f"r{i}", prompt_ids=tuple(prompt), sampling=sampling, seed=0)
        llm.engine.submit(request, on_event)
    done.wait()
    return Times(
        start_s=start_s,
        first_s=max(times[0] for times in arrivals.values()),
        last_s=max(times[-1] for times in arrivals.values()),
    )
