"""The paper profile reproduces the step times, batch sizes and pipeline figures that it was made from."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moesaic.cost.layouts import Split, cache_bytes_per_sequence, largest_batch, step_cost
from moesaic.cost.load import EVEN, with_busiest
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import PAPER
from moesaic.cost.term import seconds_by_name, step_seconds
from moesaic.cost.wide_ep import PUBLISHED, WideEp, slots_per_device, wide_ep
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster, machine
from moesaic.spec.locate import preset
from moesaic.spec.model import ModelSpec

V3_FORMATS = Formats(ends_bits=8, dispatch_bits=8, combine_bits=16)


def model(name: str) -> ModelSpec:
    return read_config(preset(name).config, name=name)


def wide(num_cards: int, **options: Any) -> WideEp:
    """DeepSeek-V3 with experts spread over all of some H800, contexts of 4,096."""
    return wide_ep(
        model("deepseek-v3"), cluster(f"h800x8x{num_cards // 8}"), context=4096, formats=V3_FORMATS,
        profile=PAPER, **options,
    )  # fmt: skip


def test_efficiencies_are_the_ones_that_give_258_rows() -> None:
    h100 = machine("h100")
    rows = PAPER.compute_share["experts"] * h100.flops_per_s("bfloat16")
    rows /= PAPER.memory_share["experts"] * h100.memory_bytes_per_s
    assert rows == pytest.approx(258.3, rel=2e-3)


@pytest.mark.parametrize(
    ("cards", "gigabytes", "batch", "rows", "exchange_ms", "speed"),
    [
        (16, 40.8693, 49, 24.5, None, 1252.98),
        (32, None, 120, 120.0, None, None),
        (64, None, 155, 310.0, 0.666208, 2333),
        (128, 5.10866, 173, 692.0, 0.748226, 2349),
        (256, None, 182, 1456.0, 0.789688, 2354.41),
    ],
)
def test_wide_expert_parallelism(cards, gigabytes, batch, rows, exchange_ms, speed) -> None:
    found = wide(cards)
    assert (found.batch, found.rows_per_expert) == (batch, rows)
    if gigabytes is not None:
        assert found.expert_bytes / 1e9 == pytest.approx(gigabytes, rel=1e-3)
    if exchange_ms is not None:
        assert found.exchange_s * 1e3 == pytest.approx(exchange_ms, rel=1e-4)
    if speed is not None:
        assert found.tokens_per_s == pytest.approx(speed, rel=5e-4)


@pytest.mark.parametrize(
    ("cards", "gain"), [(16, -0.19983), (32, 0.373288), (64, 0.60462), (128, 0.59), (256, 0.587)]
)
def test_dual_micro_batches_pay_from_32_cards(cards: int, gain: float) -> None:
    speedup = wide(cards, num_micro_batches=2).tokens_per_s / wide(cards).tokens_per_s
    assert speedup - 1 == pytest.approx(gain, abs=7e-3)


@pytest.mark.parametrize(
    ("factor", "speed"), [(1.0, 3740), (5.55, 717), (5.756862, 692.188), (1.08938, 3454.18)]
)
def test_a_hot_card_takes_dual_micro_batches_away(factor: float, speed: float) -> None:
    """128 cards: contiguous experts of Zipf 0.6 make one card 5.6 to 5.8 times as busy, copies leave 1.09."""
    found = wide(128, num_micro_batches=2, shares=with_busiest(256, 128, factor))
    assert found.tokens_per_s == pytest.approx(speed, rel=1e-3)


def test_a_hot_card_among_few_hides_behind_weights() -> None:
    """16 cards, 1.55 times the mean: nothing in dual micro-batches, which read experts all the time."""
    shares = with_busiest(256, 16, 1.55)
    lost = [
        1 - wide(16, num_micro_batches=many, shares=shares).tokens_per_s
        / wide(16, num_micro_batches=many).tokens_per_s
        for many in (1, 2)
    ]  # fmt: skip
    assert lost[0] == pytest.approx(0.15, abs=0.02)
    assert lost[1] == pytest.approx(0.0, abs=1e-4)


def test_copies_cost_memory() -> None:
    """One more slot a card: nothing at 128 cards beside what they cure, 9 of 49 sequences at 16."""
    balanced = wide(128, num_micro_batches=2).tokens_per_s
    cured = wide(128, num_micro_batches=2, shares=with_busiest(256, 128, 1.08938))
    assert cured.tokens_per_s / balanced == pytest.approx(0.923587, abs=2e-4)
    few = wide(16, num_micro_batches=2, num_redundant=16)
    assert few.batch == 40
    assert few.tokens_per_s / wide(16, num_micro_batches=2).tokens_per_s == pytest.approx(0.800928, abs=3e-4)
    assert few.expert_bytes - wide(16).expert_bytes == pytest.approx(2.55e9, rel=2e-3)


def test_published_deployments() -> None:
    slots = {name: slots_per_device(split, 256) for name, (split, _) in PUBLISHED.items()}
    assert slots == {
        "DeepSeek-V3 prefill": 9, "DeepSeek-V3 decode": 2, "DeepSeek-V3 decode, technical report": 1
    }  # fmt: skip
    for split, nodes in PUBLISHED.values():
        assert float(split.ranks) == 8 * nodes


def test_both_exchanges_of_a_layer() -> None:
    v3, cards = model("deepseek-v3"), cluster("h800x8x8")
    work = Work(num_seqs=128, new_tokens=1, past=4095)
    cost = step_cost(v3, cards, Split(dp=64, ep=64), work, profile=PAPER, formats=V3_FORMATS, shares=EVEN)
    found = seconds_by_name(cost)
    assert float(found["dispatch"]) / 58 == pytest.approx(186e-6, rel=5e-3)
    assert float(found["combine"]) / 58 == pytest.approx(366e-6, rel=5e-3)
    assert float(found["dispatch"] + found["combine"]) == pytest.approx(32e-3, rel=0.02)


def tensor_parallel(name: str, batch: np.ndarray) -> np.ndarray:
    work = Work(num_seqs=batch, new_tokens=1, past=1023)
    split = Split(tp=8, expert_tp=8)
    cost = step_cost(model(name), cluster("h100x8"), split, work, profile=PAPER, shares=EVEN)
    return np.asarray(step_seconds(cost).value)


def test_sparse_against_dense_on_eight_cards() -> None:
    batch = np.array([1.0, 4, 16, 64, 256, 512])
    ratio = tensor_parallel("mixtral-8x22b", batch) / tensor_parallel("llama-3-70b", batch) - 1
    assert ratio[0] == pytest.approx(-0.373, abs=6e-3)
    assert (ratio[1:5].min(), ratio[1:5].max()) == pytest.approx((0.091, 0.397), abs=7e-3)
    assert ratio[5] == pytest.approx(-0.177, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "batch", "speed"), [("mixtral-8x22b", 1254, 30144), ("llama-3-70b", 1296, 18624)]
)
def test_largest_batch_on_eight_cards(name: str, batch: int, speed: float) -> None:
    split = Split(tp=8, expert_tp=8)
    found = largest_batch(model(name), cluster("h100x8"), split, context=1024, profile=PAPER)
    assert found == batch
    assert batch / tensor_parallel(name, np.array([float(batch)]))[0] == pytest.approx(speed, rel=5e-4)


def test_price_performance() -> None:
    """Memory and bandwidth by price: H20 for attention, L40S for experts."""
    h20, l40s, h800 = (machine(name) for name in ("h20", "l40s", "h800"))
    per_price = {m.name: m.memory_bytes_per_s / m.number("price", 1.0) for m in (h20, l40s, h800)}
    assert per_price["h20"] / per_price["h800"] == pytest.approx(3.49, rel=0.01)
    compute = {m.name: m.flops_per_s("bfloat16") / m.number("price", 1.0) for m in (h20, l40s, h800)}
    assert compute["l40s"] / compute["h20"] == pytest.approx(4.2, rel=0.01)
    assert per_price["h20"] / per_price["l40s"] == pytest.approx(2.8, rel=0.02)


def test_what_prefill_hands_over_once_a_request() -> None:
    qwen = model("qwen3-235b-a22b")
    size = float(cache_bytes_per_sequence(qwen, Split(), 4096.0, Formats()))
    assert size == pytest.approx(0.788529e9, rel=1e-5)


def test_narrow_kv_doubles_the_batch() -> None:
    split = Split(tp=8, expert_tp=8)
    wide, narrow = (
        float(largest_batch(
            model("mixtral-8x22b"), cluster("h100x8"), split, context=1024, profile=PAPER,
            formats=Formats(kv_bits=bits),
        ))
        for bits in (16.0, 8.0)
    )  # fmt: skip
    assert narrow == pytest.approx(2 * wide, abs=1)
