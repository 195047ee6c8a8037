"""Contexts of a million tokens on a rack of GB200, as the lecture notes and Helix give them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from moesaic.account.memory import WEIGHT_BITS
from moesaic.cost import layouts, ops
from moesaic.cost.helix import LongContext, appended, kv_read_s, one_after_another, with_ring
from moesaic.cost.layouts import Split, cache_bytes_per_sequence, step_cost
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import PAPER
from moesaic.cost.term import seconds_by_name, step_seconds
from moesaic.errors import ConfigError
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster, machine
from moesaic.spec.locate import preset

LONG = replace(PAPER, launch_s=dict.fromkeys(PAPER.launch_s, 0.0))
FP4 = Formats(dense="int4", experts="int4", kv_bits=4, ends_bits=4)
RACK = cluster("gb200x4x18")


@cache
def model(name: str):
    return read_config(preset(name).config, name=name)


@pytest.fixture(autouse=True)
def four_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 4 bits without scales, as the figures count them."""
    for place in (ops, layouts):
        monkeypatch.setattr(place, "WEIGHT_BITS", {**WEIGHT_BITS, "int4": 4.0})


@pytest.fixture
def llama() -> LongContext:
    return LongContext(
        model=model("llama-3.1-405b"), cluster=RACK, context=1_000_000, formats=FP4, profile=LONG
    )


def test_lowest_latency_of_each_way(llama: LongContext) -> None:
    found = [llama.step_s(way, tp, kvp, 1) * 1e3 for way, tp, kvp in (
        ("helix", 8, 8), ("tensor", 64, 1), ("medha", 8, 8)
    )]  # fmt: skip
    assert found == pytest.approx([2.28764, 3.825, 5.39642], rel=2e-3)
    assert found[1] / found[0] == pytest.approx(1.67, rel=5e-3)


def test_largest_batches(llama: LongContext) -> None:
    assert llama.largest_batch("helix", 8, 8) == 80
    assert llama.largest_batch("medha", 8, 8) == 70
    assert llama.largest_batch("tensor", 64, 1) == 10
    one = cache_bytes_per_sequence(llama.model, Split(), 1e6, FP4)
    assert float(one) == pytest.approx(129.024e9)
    for tp, kvp, size in ((16, 1, 16.128e9), (8, 2, 8.064e9)):
        split = Split(tp=tp, kvp=kvp, expert_tp=16)
        assert float(cache_bytes_per_sequence(llama.model, split, 1e6, FP4)) == pytest.approx(size)


@pytest.mark.parametrize(("limit_ms", "gain"), [(6, 2.86456), (8, 2.11767), (20, 1.14098), (30, 1.109434)])
def test_more_tokens_a_device_at_every_latency(llama: LongContext, limit_ms: float, gain: float) -> None:
    helix = llama.best("helix", limit_ms * 1e-3, overlaps=True)
    tensor = llama.best("tensor", limit_ms * 1e-3)
    assert helix.per_device / tensor.per_device == pytest.approx(gain, rel=2e-2)


def test_exchange_by_batch(llama: LongContext) -> None:
    def share(batch: float) -> float:
        work = Work(num_seqs=batch, new_tokens=1, past=1e6 - 1)
        split = Split(tp=8, kvp=8, expert_tp=64)
        cost = step_cost(llama.model, RACK, split, work, profile=LONG, formats=FP4, shares=EVEN)
        return float(seconds_by_name(cost)["kv_exchange"]) / float(step_seconds(cost).value)

    assert share(1) == pytest.approx(0.16551, abs=1e-3)
    assert share(32) == pytest.approx(0.0311673, abs=3e-3)
    gain = llama.step_s("helix", 8, 8, 8) / llama.step_s("helix", 8, 8, 8, overlaps=True) - 1
    assert gain == pytest.approx(0.0775798, abs=1e-3)
    assert llama.step_s("helix", 8, 8, 1, overlaps=True) == llama.step_s("helix", 8, 8, 1)


def test_exchange_does_not_grow_with_the_context(llama: LongContext) -> None:
    def moved(context: float) -> float:
        work = Work(num_seqs=4.0, new_tokens=1, past=context - 1)
        cost = step_cost(
            llama.model, RACK, Split(tp=8, kvp=8, expert_tp=64), work, profile=LONG, formats=FP4, shares=EVEN
        )
        return float(seconds_by_name(cost)["kv_exchange"])

    assert moved(256) == moved(1024) == moved(4096) == moved(1e6)
    # 16 sequences over 8 x 2 ranks: 16 heads a rank of width 128, half of them sent.
    assert pytest.approx(32.768e3) == 16 * 16 * 128 * 0.5 * 2
    assert pytest.approx(3.04551e-6, rel=1e-5) == 3e-6 + 32.768e3 / 720e9


def test_rings_push_the_optimum_back_to_eight_devices(llama: LongContext) -> None:
    ring = replace(llama, cluster=with_ring(cluster("gb200x4x16")))
    slow, quick = (one.step_s("helix", 8, 8, 1) for one in (ring, llama))
    assert slow > 5 * quick  # 2 (n - 1) hops a sum instead of one pass
    fastest = min(ring.grids("helix", 64), key=lambda grid: ring.step_s("helix", *grid, 1))
    assert fastest[0] * fastest[1] == 8
    assert min(llama.grids("helix", 64), key=lambda grid: llama.step_s("helix", *grid, 1)) == (8, 8)


def test_short_contexts_are_not_split(llama: LongContext) -> None:
    assert replace(llama, context=4_000).best("helix", 8e-3).kvp == 1
    assert llama.best("helix", 8e-3).kvp > 1


def test_reading_kv_stops_falling_beyond_the_kv_heads() -> None:
    """Eight sequences of a million tokens at 8 TB/s: 128 us a layer and rank from eight ranks on."""
    rate = machine("gb200").memory_bytes_per_s
    llama = model("llama-3.1-405b")

    def layer_us(tp: int) -> float:
        read = kv_read_s(llama, batch=8, context=1_000_000, tp=tp, kv_bits=4, bytes_per_s=rate)
        return read / len(llama.layers) * 1e6

    assert [layer_us(tp) for tp in (1, 4, 8, 16, 64)] == pytest.approx([1024, 256, 128, 128, 128])
    # Weights of a layer of width 16384 and 65536 on one of eight ranks take a fourth of that.
    weights = (16384 * 16384 * 2 + 2 * 16384 * 1024 + 3 * 16384 * 65536) * 0.5 / 8
    assert layer_us(8) * 1e-6 * rate / weights == pytest.approx(4.32107, rel=1e-4)
    latent = [
        kv_read_s(model("deepseek-v3"), batch=8, context=1_000_000, tp=tp, kv_bits=4, bytes_per_s=rate)
        for tp in (1, 8, 64)
    ]
    assert latent == pytest.approx([17.568e-3] * 3)


def test_blocks_go_round_the_ranks() -> None:
    assert appended(1000, 4) == (256, 256, 248, 240)
    for tokens in (0, 1, 15, 16, 63, 64, 12345):
        held = [0] * 4
        for token in range(tokens):
            held[token // 16 % 4] += 1
        assert appended(tokens, 4) == tuple(held)


def test_requests_one_after_another() -> None:
    assert one_after_another(8, 2.0, 1.2) == pytest.approx((25.6, 17.2))
    assert one_after_another(1, 2.0, 1.2) == pytest.approx((3.2, 3.2))


def test_a_sparse_model_has_no_medha() -> None:
    sparse = LongContext(
        model=model("mixtral-8x7b"), cluster=RACK, context=10_000, formats=Formats(), profile=LONG
    )
    with pytest.raises(ConfigError, match="priced for dense models"):
        sparse.step_s("medha", 8, 1, 1)
