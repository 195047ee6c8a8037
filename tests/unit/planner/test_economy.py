"""Dense beside sparse, how many requests fit, and which advice follows from which numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from moesaic.account.memory import kv_footprint
from moesaic.cost.layouts import Split, step_cost
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Work
from moesaic.cost.profile import PAPER
from moesaic.cost.term import leaves
from moesaic.errors import ConfigError
from moesaic.planner.advice import Advice, batch_within, exchange_share, habits, suitability, worth_saying
from moesaic.planner.balanced import shown_balance
from moesaic.planner.compare import WAYS, way_of
from moesaic.planner.demand import Demand
from moesaic.planner.economy import concurrency, crossovers, decode_curve, economy
from moesaic.planner.load_file import skewed
from moesaic.planner.question import clusters_of, format_choices
from moesaic.planner.search import Question, search
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import preset


def model(name: str):
    return read_config(preset(name).config, name=name)


# -- economy -----------------------------------------------------------------------------------------------


def test_sparse_and_dense_decode_cross_twice() -> None:
    """Mixtral-8x22B against Llama-3-70B on eight H100, contexts of 1,024."""
    batches = [1, 2, 4, 16, 64, 128, 256, 320, 384, 512, 1024]
    sparse, dense = (
        decode_curve(model(name), cluster("h100x8"), batches, context=1024, profile=PAPER)
        for name in ("mixtral-8x22b", "llama-3-70b")
    )
    ratio = dict(zip(batches, sparse / dense - 1, strict=True))
    assert ratio[1] == pytest.approx(-0.373265, abs=6e-3)
    assert [ratio[b] for b in (4, 16, 64, 256)] == pytest.approx([0.0913, 0.397, 0.328, 0.125], abs=7e-3)
    assert 1 + ratio[512] == pytest.approx(0.822876, abs=2e-3)
    first, second = crossovers(batches, sparse, dense)
    assert 1 < first <= 4
    assert 256 < second <= 384
    largest = {"mixtral-8x22b": (1254, 30144.4), "llama-3-70b": (1296, 18624.2)}
    speeds = []
    for name, (batch, speed) in largest.items():
        seconds = decode_curve(model(name), cluster("h100x8"), [batch], context=1024, profile=PAPER)[0]
        assert batch / seconds == pytest.approx(speed, rel=5e-4)
        speeds.append(batch / seconds)
    assert speeds[0] / speeds[1] == pytest.approx(1.61856, rel=1e-3)


def test_expert_reads_of_a_layer_against_a_dense_one() -> None:
    """Eight experts of 604 MB, one eighth a card, at 0.8 of 3.35 TB/s: 225 us; the dense network 66 us."""
    rate = 8 * 0.8 * 3.35e12
    assert 4831838208 / rate * 1e6 == pytest.approx(225.366, rel=1e-5)
    assert 1409286144 / rate * 1e6 == pytest.approx(65.7316, rel=1e-5)
    work = Work(num_seqs=64.0, new_tokens=1.0, past=1023.0)
    for name, term, microseconds in (
        ("mixtral-8x22b", "experts", 225.366),
        ("llama-3-70b", "dense_ffn", 65.7),
    ):
        cost = step_cost(
            model(name), cluster("h100x8"), Split(tp=8, expert_tp=8), work, profile=PAPER, shares=EVEN
        )
        (one,) = [leaf for _, leaf in leaves(cost) if leaf.name == term]
        assert float(one.memory_s) * 1e6 == pytest.approx(microseconds, rel=3e-3)


def test_memory_by_all_parameters_and_operations_by_active_ones() -> None:
    dense, sparse = (
        economy(model(name), cluster("h100x8"), batch=16, context=1024, profile=PAPER)
        for name in ("llama-3-70b", "mixtral-8x7b")
    )
    assert (dense.weight_bytes, sparse.weight_bytes) == pytest.approx((141.1e9, 93.4e9), rel=2e-3)
    assert sparse.active_params == pytest.approx(12.88e9, rel=1e-3)
    assert dense.num_params / sparse.active_params == pytest.approx(5.47781, rel=1e-4)
    assert dense.flops_per_token > 4.5 * sparse.flops_per_token
    assert sparse.step_s < dense.step_s
    assert sparse.kv_bytes_per_token == 131_072


@pytest.mark.parametrize(("devices", "requests"), [(1, 0), (8, 799)])
def test_requests_beside_all_weights(devices: int, requests: int) -> None:
    """Mixtral-8x7B in bfloat16 on H100, 4,096 tokens in and 512 out; the notes' 7,130 are off."""
    spec = model("mixtral-8x7b")
    kv = kv_footprint(spec).sequence_bytes(4608)
    assert kv == pytest.approx(603.98e6, rel=1e-5)
    assert concurrency(80e9, 46.7025e9 * 2, kv, num_devices=devices) == requests


# -- advice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "asked", "against"),
    [
        ("h100x8", {"concurrency": 512, "osl": 1024}, set()),
        ("h100", {"concurrency": 512, "osl": 1024}, {"memory"}),
        ("h100x8", {"concurrency": 8, "osl": 1024}, {"requests at a time"}),
        ("h100x8", {"concurrency": 512, "osl": 16}, {"length of answers"}),
        ("h100x8", {"concurrency": 512, "osl": 512, "tpot_s": 1e-4}, {"latency"}),
    ],
)
def test_where_a_sparse_model_suits(machine: str, asked: dict, against: set[str]) -> None:
    found = suitability(model("qwen3-235b-a22b"), cluster(machine), Demand(isl=1024, **asked))
    assert {one.topic for one in found if not one.holds} == against
    assert all(any(char.isdigit() for char in one.reason) for one in found)
    assert suitability(model("llama-3-70b"), cluster(machine), Demand(isl=1024, **asked)) == ()


def test_habits_follow_the_numbers() -> None:
    def topics(name: str, machine: str, **options) -> set[str]:
        options = {"has_load": False, "batch": 64, **options}
        found = habits(model(name), cluster(machine), PAPER, **options)
        return {one.topic for one in found if one.holds}

    assert "statistics" in topics("mixtral-8x7b", "h100x8")
    assert "statistics" not in topics("mixtral-8x7b", "h100x8", has_load=True)
    assert "formats" in topics("mixtral-8x7b", "h100x8")  # bfloat16 on a device with fp8
    assert "formats" not in topics("deepseek-v3", "h100x8")  # fp8 already
    assert "formats" not in topics("mixtral-8x7b", "a100x8")  # no such rate
    assert "expert parallelism" in topics("mixtral-8x7b", "h100x8")
    assert "expert parallelism" not in topics("deepseek-v3", "h100x8")  # k = n
    assert "expert parallelism" not in topics("mixtral-8x7b", "h100x8x2")  # over the network
    assert "batch" in topics("deepseek-v3", "h100x8", batch=16)
    assert "batch" not in topics("deepseek-v3", "h100x8", batch=64)
    assert habits(model("llama-3-70b"), cluster("h100x8"), PAPER, has_load=False, batch=1) == ()


def test_what_is_said_of_it() -> None:
    def one(topic: str, holds: bool) -> Advice:
        return Advice(topic=topic, holds=holds, reason="because")

    assert worth_saying([one("memory", False), one("statistics", True)]) == [
        "memory: because", "statistics: because"
    ]  # fmt: skip
    assert worth_saying([one("memory", True), one("statistics", False), one("batch", True)]) == []


def test_batch_by_the_share_of_exchanges() -> None:
    """Latency-bound exchanges shrink with the batch, bandwidth-bound ones grow: advice turns at the knee."""
    v3, cards = model("deepseek-v3"), cluster("h800x8x8")
    batches = [8, 32, 128, 256]

    def shares(split: Split) -> list[float]:
        return [
            exchange_share(step_cost(
                v3, cards, split, Work(num_seqs=float(batch), new_tokens=1.0, past=4095.0), profile=PAPER
            ))
            for batch in batches
        ]  # fmt: skip

    wide = shares(Split(dp=64, ep=64))
    assert wide == sorted(wide)
    knee = (wide[1] + wide[2]) / 2
    assert batch_within(batches, wide, knee)[0] == 32
    assert batch_within(batches, wide, knee + 1)[0] == 256
    small, why = batch_within(batches, wide, 0.01)
    assert (small, "a smaller batch" in why) == (8, True)
    large, why = batch_within(batches, [0.9, 0.8, 0.7, 0.6], 0.35)
    assert (large, "a larger batch" in why) == (256, True)
    with pytest.raises(ConfigError, match="one share for each batch"):
        batch_within([1, 2], [0.5])


# -- ways --------------------------------------------------------------------------------------------------


def test_ways_to_deploy_beside_each_other() -> None:
    spec = model("qwen3-30b-a3b")
    asked = Question(
        model=spec, clusters=clusters_of(["h100x2x2"], ()), demand=Demand(isl=1000, osl=500, tpot_s=0.03),
        profile="paper", shares=skewed(spec), choices=format_choices(spec, "stored", "bfloat16", None),
    )  # fmt: skip
    answer = search(asked)
    assert tuple(answer.ways) == WAYS
    for way, plan in answer.ways.items():
        assert way_of(plan) == way
        assert plan.value <= answer.best.value / 0.98
        assert float(plan.tpot.value) <= 0.03
    assert max(plan.value for plan in answer.ways.values()) >= answer.best.value
    apart = answer.ways["attention and experts apart"]
    text = shown_balance(asked, apart)
    ranks = apart.pools[-1].layout["ep"]
    assert f"attention replicas for {ranks} expert ranks, it has {apart.pools[-2].layout['dp']}" in text
    assert shown_balance(asked, answer.ways["in one node"]) is None
    one = search(replace(asked, clusters=clusters_of(["h100"], ())))
    assert tuple(one.ways) == ("in one node",)
    assert np.isfinite(one.best.value)
