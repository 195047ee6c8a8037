"""Whole engines over tiny random checkpoints, and what their requests came to."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import checkpoints
import numpy as np
import torch

from moesaic.engine.config import EngineConfig
from moesaic.engine.grammar import Grammars
from moesaic.engine.launch import assemble
from moesaic.engine.loop import Engine
from moesaic.engine.machine import read_machine
from moesaic.models.build import LoadedModel, load
from moesaic.sched.request import Logprobs, Request, RequestEvent, SamplingParams
from moesaic.spec.experts import IntArray
from moesaic.spec.numerics import DType

WAIT_S = 120.0


@cache
def tiny_model(family: str, dtype: DType = "float32") -> LoadedModel:
    """A loaded random model, made once per test run. Nobody may write to it."""
    return fresh_model(family, dtype)


def fresh_model(family: str, dtype: DType = "float32") -> LoadedModel:
    """One of your own."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        path = checkpoints.write_checkpoint(Path(folder) / family, checkpoints.CONFIGS[family]())
        return load(path, num_threads=1, dtype=dtype)


def make_engine(model: LoadedModel, *, grammars: Grammars | None = None, **options: Any) -> Engine:
    """A started engine; `num_blocks` sets the pools of blocks, and leaves state slots as they are."""
    num_blocks = options.pop("num_blocks", None)
    config = EngineConfig.parse("tiny", {"num_threads": 1, **options})
    resolved = config.resolve(model.spec, model.numerics, read_machine())
    if num_blocks is not None:
        pairs = zip(resolved.groups, resolved.num_blocks, strict=True)
        resolved = replace(
            resolved,
            num_blocks=tuple(have if group.kind == "state" else num_blocks for group, have in pairs),
        )
    return assemble(model, resolved, grammars=grammars).start()


@dataclass(eq=False)
class Answer:
    """Everything that the events of one request said."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    routes: list[IntArray] = field(default_factory=list)
    num_cached: int = 0
    finish_reason: str | None = None
    error: str | None = None

    @property
    def bits(self) -> tuple[object, ...]:
        """What must be equal, to the last bit, however the request was computed."""
        return tuple(self.tokens), tuple(self.logprobs), self.prompt_logprobs, self.finish_reason


class Inbox:
    """Collects the events of many requests."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer] = {}
        self._changed = threading.Condition()

    def take(self, event: RequestEvent) -> None:
        with self._changed:
            answer = self.answers.setdefault(event.request_id, Answer())
            answer.tokens += event.token_ids
            answer.logprobs += event.logprobs
            answer.prompt_logprobs = event.prompt_logprobs or answer.prompt_logprobs
            answer.num_cached = max(answer.num_cached, event.num_cached_tokens)
            answer.finish_reason, answer.error = event.finish_reason, event.error
            if event.routes is not None:
                answer.routes.append(event.routes)
            self._changed.notify_all()

    def wait(self, request_id: str, *, num_tokens: int | None = None) -> Answer:
        """Until the request ended, or has so many tokens."""

        def is_there() -> bool:
            answer = self.answers.get(request_id)
            if answer is None:
                return False
            return answer.finish_reason is not None or (
                num_tokens is not None and len(answer.tokens) >= num_tokens
            )

        with self._changed:
            assert self._changed.wait_for(is_there, WAIT_S), f"{request_id} did not come"
            return self.answers[request_id]


def run(engine: Engine, requests: Sequence[Request]) -> dict[str, Answer]:
    """All requests at once."""
    inbox = Inbox()
    for request in requests:
        engine.submit(request, inbox.take)
    return {request.request_id: inbox.wait(request.request_id) for request in requests}


def run_alone(model: LoadedModel, requests: Sequence[Request]) -> dict[str, Answer]:
    """One after the other, each with the engine for itself and nothing cached."""
    engine = make_engine(model, has_prefix_cache=False)
    try:
        return {request.request_id: run(engine, [request])[request.request_id] for request in requests}
    finally:
        engine.close()


def make_request(request_id: str, prompt_ids: Sequence[int], *, seed: int = 0, **sampling: Any) -> Request:
    """With the end token of the tiny checkpoints."""
    grammar = sampling.pop("grammar", None)
    return Request(
        request_id=request_id,
        prompt_ids=tuple(int(i) for i in prompt_ids),
        sampling=SamplingParams(**sampling),
        seed=seed,
        eos_token_ids=(checkpoints.EOS_ID,),
        grammar=grammar,
    )


def random_prompt(length: int, seed: int) -> list[int]:
    """Byte tokens."""
    return np.random.default_rng(seed).integers(0, 256, size=length).tolist()
