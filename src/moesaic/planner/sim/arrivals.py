"""Made-up requests where no trace is at hand: conversations, whose turns repeat what was said before."""

from __future__ import annotations

import numpy as np

from moesaic.errors import ConfigError
from moesaic.spec.workload import TRACE_BLOCK, TraceRow

MAX_REQUESTS = 1_000_000


def conversations(
    num_requests: int, *, isl: int, osl: int, turns: int = 4, system_tokens: int = TRACE_BLOCK, seed: int = 0
) -> tuple[TraceRow, ...]:
    """Requests of conversations of about `turns` turns, all with one system prompt, 0 s apart.

    Prompts have `isl` tokens on average; answers are geometric with a mean of `osl`. Which conversation is
    next is random.

    Raises: ConfigError for lengths or counts below 1.
    """
    for name, value in (("requests", num_requests), ("isl", isl), ("osl", osl), ("turns", turns)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    if num_requests > MAX_REQUESTS:
        raise ConfigError(f"requests must be at most {MAX_REQUESTS:,}, got {num_requests:,}")
    rng = np.random.default_rng(seed)
    # Turn t of n has (t + 1) / n of the last prompt: their mean is (n + 1) / (2 n) of it.
    step = max(round(2 * isl / (turns + 1)), 1)
    live: list[list[int]] = []  # of each conversation: turns so far, then its blocks
    fresh = 0
    rows: list[TraceRow] = []
    shared = [-1] * (system_tokens // TRACE_BLOCK)
    for _ in range(num_requests):
        picked = int(rng.integers(0, max(num_requests // turns // 4, 1)))
        while len(live) <= picked:
            live.append([0])
        talk = live[picked]
        talk[0] += 1
        prompt = max(round(step * talk[0] * float(rng.uniform(0.75, 1.25))), 1)
        need = -(-prompt // TRACE_BLOCK)
        while len(talk) - 1 < need - len(shared):
            fresh += 1
            talk.append(fresh)
        ids = tuple((shared + talk[1:])[:need])
        output = int(min(rng.geometric(1.0 / osl), 8 * osl))
        rows.append(TraceRow(at_s=0.0, prompt_tokens=prompt, output_tokens=output, hash_ids=ids))
        if talk[0] >= turns:
            live[picked] = [0]
    return tuple(rows)
