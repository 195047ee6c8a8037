"""Plans that change while processes answer: no request is dropped, no bit differs, failures are named."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from starlette.testclient import TestClient
from test_ranks import NUM_LAYERS, OPTIONS, processes_of, uneven_plan, wait_until

from moesaic.engine.llm import LLM
from moesaic.errors import ConfigError, PeerLost
from moesaic.server.app import create_app
from moesaic.server.settings import ServerSettings
from moesaic.spec.codec import to_plain
from moesaic.spec.experts import ExpertPlan, contiguous_plan

NUM_REQUESTS = 20
PATH = "/v1/internal/placement"


def bodies() -> list[dict[str, Any]]:
    return [
        {
            "prompt": "Once upon a time, " * (1 + i % 3),
            "max_tokens": 10,
            "temperature": 0.8,
            "seed": i,
            "logprobs": 2,
            "ignore_eos": True,
        }
        for i in range(NUM_REQUESTS)
    ]


def random_plan(seed: int) -> ExpertPlan:
    rng = np.random.default_rng(seed)
    layers = [np.concatenate((rng.permutation(16), rng.integers(0, 16, 5))) for _ in range(NUM_LAYERS)]
    return ExpertPlan(
        version=0,
        slot_rank=tuple(rng.integers(0, 2, 21) for _ in layers),
        slot_expert=tuple(layers),
        slot_slice=tuple(np.zeros(21, dtype=np.int64) for _ in layers),
        slot_share=tuple(1.0 / np.bincount(ids, minlength=16)[ids] for ids in layers),
    )


def client_of(llm: LLM) -> TestClient:
    assert llm.tokenizer is not None
    return TestClient(create_app(llm.engine, llm.tokenizer, ServerSettings(model_name="demo")))


def choices(client: TestClient, body: dict[str, Any]) -> list[Any]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found: list[Any] = answer.json()["choices"]
    return found


class Alone(NamedTuple):
    """One process, and what it says."""

    llm: LLM
    choices: list[list[Any]]


@pytest.fixture(scope="module")
def alone() -> Iterator[Alone]:
    with LLM("demo", **OPTIONS) as llm, client_of(llm) as client, ThreadPoolExecutor(NUM_REQUESTS) as threads:
        yield Alone(llm, list(threads.map(lambda body: choices(client, body), bodies())))


@pytest.fixture(scope="module")
def two() -> Iterator[LLM]:
    with LLM("demo", num_ranks=2, replica_choice="least-loaded", **OPTIONS) as llm:
        llm.engine._rebalance._stage_bytes = 1  # type: ignore[union-attr]  # a layer at a time
        yield llm


def test_plans_change_under_twenty_requests_and_none_is_dropped(two: LLM, alone: Alone) -> None:
    swaps: list[Any] = []
    is_over = threading.Event()

    def swap() -> None:
        while not is_over.is_set():
            swaps.append(client.post(PATH, json=to_plain(random_plan(len(swaps)))))

    with client_of(two) as client, ThreadPoolExecutor(NUM_REQUESTS) as threads:
        swapper = threading.Thread(target=swap)
        swapper.start()
        found = list(threads.map(lambda body: choices(client, body), bodies()))
        is_over.set()
        swapper.join(60)
        assert found == alone.choices
        assert [answer.status_code for answer in swaps] == [200] * len(swaps)
        assert len(swaps) > 1
        for number, answer in enumerate(swaps, start=1):
            told = answer.json()
            assert told["version"] == number * NUM_LAYERS
            assert told["num_stages"] == NUM_LAYERS
            assert told["moved_bytes"] > 0
        assert client.get(PATH).json() == to_plain(
            replace(random_plan(len(swaps) - 1), version=len(swaps) * NUM_LAYERS)
        )
        assert all(load.plan_version > 0 for load in two.engine.expert_load(None))
        told = client.get("/v1/internal/active").json()["engine"]
        metrics = client.get("/metrics").text
    check_ranks(told, two)
    assert f"moesaic_expert_plan_version {float(told['plan']['version'])}" in metrics
    for rank in told["ranks"]:
        label = f'{{rank="{rank["rank"]}"}} {float(rank["num_jobs"])}'
        assert f"moesaic_rank_jobs_total{label}" in metrics


def check_ranks(told: dict[str, Any], llm: LLM) -> None:
    """Every choice was computed by one rank, what one sent the other received, times are those of steps."""
    ranks = told["ranks"]
    assert [rank["pid"] for rank in ranks] == [process.pid for process in processes_of(llm.engine)]
    num_choices = sum(int(np.stack(load.counts).sum()) for load in llm.engine.expert_load(None))
    assert sum(rank["num_jobs"] for rank in ranks) == num_choices
    assert ranks[0]["sent_bytes"] == ranks[1]["received_bytes"] > 0
    assert ranks[1]["sent_bytes"] == ranks[0]["received_bytes"] > 0
    assert all(rank["seconds"]["compute"] > 0 for rank in ranks)
    assert all(16 * NUM_LAYERS >= rank["experts_held"] > 0 for rank in ranks)
    assert sum(rank["experts_held"] for rank in ranks) >= 16 * NUM_LAYERS
    assert 1.0 <= told["skew"]["compute"] <= 2.0
    assert told["skew"]["communication"] == 1.0, "of two ranks one sends what the other receives"


def test_memory_follows_the_plan(two: LLM) -> None:
    found, runs = [], contiguous_plan((16,) * NUM_LAYERS, 2)
    for plan in (runs, everywhere(), runs):
        two.adopt(plan)
        found.append(two.engine.snapshot().weight_bytes)
    assert found[0] == found[2] < found[1]


def everywhere() -> ExpertPlan:
    """All experts on both ranks."""
    plan = contiguous_plan((32,) * NUM_LAYERS, 2)
    return replace(
        plan,
        slot_expert=(np.tile(np.arange(16), 2),) * NUM_LAYERS,
        slot_share=(np.full(32, 0.5),) * NUM_LAYERS,
    )


def test_one_process_goes_over_to_another_order_of_slots(alone: Alone) -> None:
    order = np.random.default_rng(0).permutation(16)
    plan = replace(contiguous_plan((16,) * NUM_LAYERS, 1), slot_expert=(order,) * NUM_LAYERS)
    told = alone.llm.adopt(plan)
    assert (told.version, told.moved_bytes) == (1, 0)
    with client_of(alone.llm) as client:
        assert choices(client, bodies()[3]) == alone.choices[3]
    with pytest.raises(ConfigError, match="it is for 2 ranks, this engine has 1"):
        alone.llm.adopt(uneven_plan())


@pytest.mark.long
def test_a_rank_that_dies_during_a_swap_ends_the_run_with_its_name() -> None:
    llm = LLM("demo", num_ranks=2, **OPTIONS)
    processes = processes_of(llm.engine)
    os.kill(processes[1].pid, signal.SIGSTOP)
    errors: list[Exception] = []

    def adopt() -> None:
        try:
            llm.adopt(everywhere())
        except PeerLost as lost:
            errors.append(lost)

    thread = threading.Thread(target=adopt)
    thread.start()
    wait_until(lambda: llm.engine._rebalance.is_swapping)  # type: ignore[union-attr]
    os.kill(processes[1].pid, signal.SIGKILL)
    thread.join(60)
    assert "rank 1 did not answer" in str(errors[0])  # over gloo: a connection was cut, and it said no more
    assert "stage move" in str(errors[0])
    assert not llm.engine.snapshot().is_ready
    llm.close()
    assert all(process.poll() is not None for process in processes)
