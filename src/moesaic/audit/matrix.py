"""The batch-invariance matrix: the same requests in every way an engine may compute them, bit by bit.

The negative control computes with sums whose order follows the number of rows, as libraries do that promise
nothing; a matrix that does not notice would prove nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from moesaic.engine.config import EngineConfig
from moesaic.engine.launch import assemble
from moesaic.engine.loop import Engine
from moesaic.engine.machine import read_machine
from moesaic.errors import MoesaicError
from moesaic.models.build import LoadedModel
from moesaic.sched.request import Request, RequestEvent, SamplingParams

NUM_TOKENS = 6  # of each answer
MAX_PROMPT = 64  # tokens of each prompt: four full blocks, so that prefixes are found again
MAX_REQUESTS = 4
LONG_PROMPT = 40
CHUNK_TOKENS = 7  # a step of the chunked cell: no divisor of a block
ALONE_AT_ONCE = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One way of computing. `is_equal` None: it could not be brought about, for the reason in `detail`."""

    name: str
    is_equal: bool | None
    detail: str


@dataclass(slots=True, eq=False)
class Answer:
    """What came of one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None
    num_cached: int = 0

    @property
    def bits(self) -> tuple[Any, ...]:
        """What must be equal to the last bit: floats compare exactly."""
        return self.tokens, self.logprobs, self.prompt_logprobs


def run_matrix(
    model: LoadedModel, prompts: Sequence[Sequence[int]], say: Callable[[str], None]
) -> list[Cell]:
    """Every cell against the requests computed alone."""
    prompts = _few(prompts, model.spec.vocab)
    requests = _requests(prompts)
    say("matrix: alone")
    alone = _alone(model, requests)
    cells = []
    for name, cell in (
        ("neighbours", _neighbours),
        ("permuted", _permuted),
        ("chunked", _chunked),
        ("prefix_hit", _prefix_hit),
    ):
        say(f"matrix: {name}")
        cells.append(cell(model, requests, alone))
    say("matrix: preempted")
    cells.append(_preempted(model, prompts))
    return cells


def negative_control(model: LoadedModel, prompts: Sequence[Sequence[int]]) -> bool:
    """Whether the matrix notices sums whose order depends on how many rows are computed together."""
    requests = _requests(_few(prompts, model.spec.vocab)[-2:])
    with row_dependent_sums(model.ops):
        alone = _alone(model, requests)
        return any(
            cell(model, requests, alone).is_equal is False for cell in (_neighbours, _chunked, _permuted)
        )


@contextmanager
def row_dependent_sums(ops: Any) -> Iterator[None]:
    """Within it `ops.linear` adds two partial sums, cut where the number of rows says."""
    right = ops.linear

    def wrong(x_TD: Tensor, weight_FD: Any, bias_F: Tensor | None = None) -> Tensor:
        num_rows, width = x_TD.shape
        at = width * (1 + num_rows % 3) // 4
        low_TD, high_TD = x_TD.clone(), x_TD.clone()
        low_TD[:, at:] = 0
        high_TD[:, :at] = 0
        partial: Tensor = right(low_TD, weight_FD, bias_F) + right(high_TD, weight_FD)
        return partial

    ops.linear = wrong
    try:
        yield
    finally:
        del ops.linear


@contextmanager
def open_engine(
    model: LoadedModel,
    requests: Sequence[Request],
    *,
    max_tokens_per_step: int,
    has_prefix_cache: bool = False,
    num_blocks: int | None = None,
) -> Iterator[Engine]:
    """An engine around the loaded model, large enough for the requests.

    `num_blocks` makes its pools small, though not smaller than one request with a wide window can do with.
    """
    lengths = [len(request.prompt_ids) + (request.sampling.max_tokens or 0) for request in requests]
    config = EngineConfig(
        model="verify",
        max_num_seqs=min(len(requests), max_tokens_per_step),
        max_model_len=min(max(lengths), model.spec.max_position),
        max_tokens_per_step=max_tokens_per_step,
        has_prefix_cache=has_prefix_cache,
        num_threads=None,
    )
    resolved = config.resolve(model.spec, model.numerics, read_machine())
    if num_blocks is not None:
        counts = tuple(
            count if group.kind == "state" else max(num_blocks, group.min_units(model.numerics.kv_block))
            for group, count in zip(resolved.groups, resolved.num_blocks, strict=True)
        )
        resolved = replace(resolved, num_blocks=counts)
    engine = assemble(model, resolved).start()
    try:
        yield engine
    finally:
        engine.close()


def answer(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    """All requests at once, in this order.

    Raises: MoesaicError when one of them fails.
    """
    answers = {request.request_id: Answer() for request in requests}
    missing, changed, failures = set(answers), threading.Condition(), list[str]()

    def take(event: RequestEvent) -> None:
        found = answers[event.request_id]
        found.tokens += event.token_ids
        found.logprobs += event.logprobs
        found.prompt_logprobs = event.prompt_logprobs or found.prompt_logprobs
        found.num_cached = max(found.num_cached, event.num_cached_tokens)
        if event.finish_reason is not None:
            with changed:
                missing.discard(event.request_id)
                if event.error is not None:
                    failures.append(event.error)
                changed.notify_all()

    for request in requests:
        engine.submit(request, take)
    with changed:
        changed.wait_for(lambda: not missing)
    if failures:
        raise MoesaicError(f"the engine failed on a prompt of verify: {failures[0]}")
    return answers


def _few(prompts: Sequence[Sequence[int]], vocab: int) -> list[Sequence[int]]:
    """Two to five prompts, one of them longer than two blocks, so that every cell can be brought about."""
    few = list(prompts[:MAX_REQUESTS])
    if len(few) < 2 or max(len(prompt) for prompt in few) < LONG_PROMPT:
        few.append([i * 31 % vocab for i in range(LONG_PROMPT)])
    return few


def _requests(prompts: Sequence[Sequence[int]], *, num_tokens: int = NUM_TOKENS) -> list[Request]:
    """Greedy and drawn in turn; the first one also scores its prompt."""
    return [
        Request(
            request_id=str(i),
            prompt_ids=tuple(prompt[:MAX_PROMPT]),
            sampling=SamplingParams(
                temperature=float(i % 2),
                max_tokens=num_tokens,
                ignore_eos=True,
                logprobs=5,
                prompt_logprobs=1 if i == 0 else None,
            ),
            seed=i,
        )
        for i, prompt in enumerate(prompts)
    ]


def _alone(model: LoadedModel, requests: Sequence[Request]) -> dict[str, Answer]:
    with open_engine(model, requests, max_tokens_per_step=ALONE_AT_ONCE) as engine:
        return {request.request_id: answer(engine, [request])[request.request_id] for request in requests}


def _neighbours(model: LoadedModel, requests: Sequence[Request], alone: dict[str, Answer]) -> Cell:
    with open_engine(model, requests, max_tokens_per_step=ALONE_AT_ONCE) as engine:
        return _cell("neighbours", answer(engine, requests), alone, f"{len(requests)} requests at once")


def _permuted(model: LoadedModel, requests: Sequence[Request], alone: dict[str, Answer]) -> Cell:
    with open_engine(model, requests, max_tokens_per_step=ALONE_AT_ONCE) as engine:
        return _cell("permuted", answer(engine, requests[::-1]), alone, "the same in another order")


def _chunked(model: LoadedModel, requests: Sequence[Request], alone: dict[str, Answer]) -> Cell:
    with open_engine(model, requests, max_tokens_per_step=CHUNK_TOKENS) as engine:
        return _cell("chunked", answer(engine, requests), alone, f"{CHUNK_TOKENS} tokens a step")


def _prefix_hit(model: LoadedModel, requests: Sequence[Request], alone: dict[str, Answer]) -> Cell:
    with open_engine(model, requests, max_tokens_per_step=ALONE_AT_ONCE, has_prefix_cache=True) as engine:
        answer(engine, requests)
        again = answer(engine, requests)
    num_cached = sum(found.num_cached for found in again.values())
    if not num_cached:
        return Cell(name="prefix_hit", is_equal=None, detail="this model keeps no prefix that could be found")
    return _cell("prefix_hit", again, alone, f"{num_cached} prompt tokens found in the cache")


def _preempted(model: LoadedModel, prompts: Sequence[Sequence[int]]) -> Cell:
    """Three requests that grow into a third block each, over a pool of five."""
    kv_block = model.numerics.kv_block
    longest = max(prompts, key=len)
    cut = [tuple(longest[i : i + kv_block - 1]) for i in range(3)]
    requests = _requests([prompt or (0,) for prompt in cut], num_tokens=kv_block + 4)
    alone = _alone(model, requests)
    with open_engine(model, requests, max_tokens_per_step=ALONE_AT_ONCE, num_blocks=5) as engine:
        found = answer(engine, requests)
        count = engine.snapshot().preemptions_total
    if not count:
        return Cell(name="preempted", is_equal=None, detail="no pool was small enough to preempt a request")
    return _cell("preempted", found, alone, f"{count} preemptions")


def _cell(name: str, found: dict[str, Answer], alone: dict[str, Answer], detail: str) -> Cell:
    wrong = [request_id for request_id, one in found.items() if one.bits != alone[request_id].bits]
    if wrong:
        detail += f"; other bits in {len(wrong)} of {len(found)} requests"
    return Cell(name=name, is_equal=not wrong, detail=detail)
