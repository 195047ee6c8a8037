"""Figures that are a rule about serving: shown by the scheduler's own code on a small case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from moesaic.audit.figures.registry import figure
from moesaic.cost.exchange import hidden_share
from moesaic.sched.key import KvKey, KvKeyScope, block_keys
from moesaic.sched.ledger import CacheGroup, KvLedger
from moesaic.sched.request import Request, SamplingParams
from moesaic.sched.scheduler import Limits, Scheduler
from moesaic.sched.step import StepResult

SCOPE = KvKeyScope(model_digest="m", numerics_digest="n", tokenizer_digest="t", positions="rope")
MANY = 4096  # blocks: more than any case here needs


def serve(requests: Sequence[Request], kv_block: int, *, is_in_turn: bool) -> dict[str, Counter[str]]:
    """Requests through the real scheduler, all at once or one after the other; every answer token is 0.

    Returns per request the steps that it holds KV for (`steps`) and the tokens that it found (`found`).
    """
    group = CacheGroup(kind="tokens", window=None, layer_idxs=(0,), block_bytes=1, sequence_bytes=0)
    ledger = KvLedger([group], [MANY], kv_block=kv_block, scope=SCOPE)
    limits = Limits(max_num_seqs=8, max_tokens_per_step=8192, max_model_len=8192, max_waiting=64)
    scheduler, seen = Scheduler(ledger, limits), {one.request_id: Counter[str]() for one in requests}
    queue, now_s = list(requests), 0.0
    while queue or scheduler.has_work:
        while queue and not (is_in_turn and scheduler.has_work):
            scheduler.add(queue.pop(0), now_s)
        plan = scheduler.schedule(now_s)
        if plan is None:
            break
        rows = [row for batch in plan.batches for row in batch.rows]
        for row in rows:
            seen[row.request_id]["steps"] += 1
        result = StepResult(
            step_id=plan.step_id, tokens={row.request_id: (0,) if row.is_sampled else () for row in rows},
            logprobs={}, prompt_logprobs={}, loads=(), spread={},
        )  # fmt: skip
        now_s += 1.0
        for event in scheduler.commit(result, now_s):
            seen[event.request_id]["found"] = max(seen[event.request_id]["found"], event.num_cached_tokens)
    return seen


def _request(name: str, tokens: Sequence[int], *, outputs: int = 1, temperature: float = 0.0) -> Request:
    sampling = SamplingParams(temperature=temperature, max_tokens=outputs)
    return Request(request_id=name, prompt_ids=tuple(tokens), sampling=sampling, seed=0)


@figure("S000-030", holds=lambda found: found > 0)
def found_at_other_temperature(num_tokens: int, kv_block: int) -> int:
    """Prompt tokens that a request finds cached by one with another temperature."""
    prompt = range(1, num_tokens + 1)
    pair = [_request("first", prompt), _request("second", prompt, temperature=1.0)]
    return serve(pair, kv_block, is_in_turn=True)["second"]["found"]


@figure("S000-031", holds=lambda found: found == 992)
def tokens_found(num_tokens: int, changed: int, kv_block: int) -> int:
    """Prompt tokens that a request finds cached by one that differs in a token."""
    prompt = list(range(1, num_tokens + 1))
    other = [*prompt[:changed], 0, *prompt[changed + 1 :]]
    pair = [_request("first", prompt), _request("second", other)]
    return serve(pair, kv_block, is_in_turn=True)["second"]["found"]


@figure("S000-032", holds=lambda found: found["same"] > 0 and sum(found.values()) == found["same"])
def found_elsewhere(num_tokens: int, kv_block: int) -> dict[str, int]:
    """Leading tokens with the same key under the same scope, and with each part of it changed."""
    tokens = list(range(num_tokens))
    own = block_keys(SCOPE, tokens, kv_block)
    scopes = {"same": SCOPE} | {
        name: replace(SCOPE, **{name: "other"})
        for name in ("model_digest", "numerics_digest", "tokenizer_digest", "positions", "salt")
    }
    return {
        name: kv_block * _shared(own, block_keys(scope, tokens, kv_block)) for name, scope in scopes.items()
    }


def _shared(first: Sequence[KvKey], second: Sequence[KvKey]) -> int:
    """Leading blocks with the same key."""
    is_same = [one == other for one, other in zip(first, second, strict=True)]
    return [*is_same, False].index(False)


@figure("S002-059", holds=lambda steps: steps[0] < steps[1])
def steps_of_requests(outputs: Sequence[int]) -> list[int]:
    """Steps, that is batches, through which the KV of each of several requests is kept."""
    requests = [_request(str(i), range(i + 1, i + 17), outputs=count) for i, count in enumerate(outputs)]
    seen = serve(requests, 16, is_in_turn=False)
    return [seen[one.request_id]["steps"] for one in requests]


@figure("S002-056", holds=lambda factor: factor > 1.3)
def printed_controller(factor: float, utilisation: float, dropped: int, gain: float, penalty: float) -> float:
    """The next capacity factor by the formula as printed."""
    return factor + gain * utilisation - penalty * dropped


@figure("S002-018", holds=lambda hidden: 0 < hidden < 1)
def hidden_part(compute_s: float, transfer_s: float) -> float:
    """Part of a transfer that two micro-batches hide although it is longer than the compute."""
    return hidden_share(transfer_s, compute_s)
