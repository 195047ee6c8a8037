"""A model over several processes: the answers of one, every rank's part known, and an end without remains."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, NamedTuple

import numpy as np
import pytest

from moesaic.engine.client import EngineSnapshot
from moesaic.engine.llm import LLM
from moesaic.engine.loop import Engine
from moesaic.engine.ranks import Ranks
from moesaic.errors import ConfigError
from moesaic.sched.request import RequestEvent, SamplingParams

PROMPTS = ("Once upon a time", "The dog", "In the morning they all went to the sea, and", "a", "Tom said")
OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 256, "kv_bytes": 8_000_000}
SAMPLINGS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3),
    SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, seed=5, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=0.0, max_tokens=7),
    SamplingParams(temperature=1.0, max_tokens=9, seed=1),
    SamplingParams(temperature=0.0, max_tokens=12, min_tokens=12),
]


def answers(llm: LLM) -> list[tuple[Any, ...]]:
    return [
        (one.token_ids, one.finish_reason, one.logprobs, one.prompt_logprobs)
        for one in llm.generate(PROMPTS, SAMPLINGS)
    ]


class Alone(NamedTuple):
    """What one process says."""

    answers: list[tuple[Any, ...]]
    snapshot: EngineSnapshot
    choices: dict[str, int]


def choices_of(llm: LLM) -> dict[str, int]:
    return {load.phase: int(np.stack(load.counts).sum()) for load in llm.engine.expert_load(None)}


@pytest.fixture(scope="module")
def alone() -> Alone:
    with LLM("demo", **OPTIONS) as llm:
        return Alone(answers(llm), llm.engine.snapshot(), choices_of(llm))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_answer_as_one_process_does(alone: Alone, num_ranks: int) -> None:
    with LLM("demo", num_ranks=num_ranks, **OPTIONS) as llm:
        assert answers(llm) == alone.answers
        found = llm.engine.snapshot()
        for name in ("model_digest", "numerics_digest", "backend"):
            assert found.active[name] == alone.snapshot.active[name]
        assert found.active["layout"]["num_ranks"] == num_ranks
        assert found.active["layout"]["experts"]["ep"] == num_ranks
        # Every rank has the dense weights, and its own experts alone.
        assert alone.snapshot.weight_bytes < found.weight_bytes < num_ranks * alone.snapshot.weight_bytes
        assert choices_of(llm) == alone.choices


def test_a_rank_that_dies_ends_every_request_with_its_name_and_leaves_no_process() -> None:
    llm = LLM("demo", num_ranks=2, **OPTIONS)
    processes = processes_of(llm.engine)
    ended: dict[str, RequestEvent] = {}
    requests = [transcript.request for transcript in llm._transcripts(list(PROMPTS), endless(), 1)]
    for request in requests:
        llm.engine.submit(request, lambda event: ended.update({event.request_id: event}))
    wait_until(lambda: len(ended) == len(requests))
    os.kill(processes[1].pid, signal.SIGKILL)
    wait_until(lambda: all(event.finish_reason is not None for event in ended.values()))
    for event in ended.values():
        assert event.finish_reason == "error"
        assert "rank 1 did not answer" in str(event.error)
        assert "can be sent again" in str(event.error)
    assert not llm.engine.snapshot().is_ready
    llm.close()
    assert all(process.poll() is not None for process in processes)


def test_ranks_end_with_their_controller() -> None:
    llm = LLM("demo", num_ranks=2, **OPTIONS)
    processes = processes_of(llm.engine)
    assert all(process.poll() is None for process in processes)
    llm.close()
    assert all(process.poll() is not None for process in processes)


def test_numbers_of_ranks_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"17 ranks for 16 experts a layer: .* use at most 16 ranks"):
        LLM("demo", num_ranks=17, **OPTIONS)
    with pytest.raises(ConfigError, match="num_ranks must be a whole number of at least 1, got 0"):
        LLM("demo", num_ranks=0, **OPTIONS)


def endless() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


def processes_of(engine: Engine) -> list[Any]:
    assert isinstance(engine._link, Ranks)
    return [one.process for one in engine._link._ranks]


def wait_until(is_so: Any, timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < end_s, "it never came"
        time.sleep(0.02)
