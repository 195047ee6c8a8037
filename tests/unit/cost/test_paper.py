"""The paper profile reproduces the step times, batch sizes and pipeline figures that it was made from."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.cost.layouts import Split, largest_batch, memory_per_rank, step_cost
from moesaic.cost.load import EVEN, ExpertShares
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import PAPER
from moesaic.cost.term import seconds_by_name, step_seconds
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster, machine
from moesaic.spec.locate import preset
from moesaic.spec.model import ModelSpec

V3_FORMATS = Formats(ends_bits=8, dispatch_bits=8, combine_bits=16)


def model(name: str) -> ModelSpec:
    return read_config(preset(name).config, name=name)


def wide_ep(num_cards: int, *, micro_batches: int = 1, shares: ExpertShares = EVEN) -> tuple[float, float]:
    """(sequences per card, tokens/s per card) of DeepSeek-V3 with experts spread over all cards."""
    v3, cards = model("deepseek-v3"), cluster(f"h800x8x{num_cards // 8}")
    split = Split(dp=num_cards, ep=num_cards, num_micro_batches=micro_batches)
    batch = float(largest_batch(v3, cards, split, context=4096, profile=PAPER, formats=V3_FORMATS))
    work = Work(num_seqs=batch, new_tokens=1, past=4095)
    cost = step_cost(v3, cards, split, work, profile=PAPER, formats=V3_FORMATS, shares=shares)
    return batch, batch / float(step_seconds(cost).value)


def test_efficiencies_are_the_ones_that_give_258_rows() -> None:
    h100 = machine("h100")
    rows = PAPER.compute_share["experts"] * h100.flops_per_s("bfloat16")
    rows /= PAPER.memory_share["experts"] * h100.memory_bytes_per_s
    assert rows == pytest.approx(258.3, rel=2e-3)


@pytest.mark.parametrize(
    ("cards", "batch", "speed"), [(16, 49, 1253), (64, 155, 2333), (128, 173, 2349), (256, 182, 2354)]
)
def test_wide_expert_parallelism(cards: int, batch: int, speed: float) -> None:
    found = wide_ep(cards)
    assert found[0] == batch
    assert found[1] == pytest.approx(speed, rel=5e-4)


@pytest.mark.parametrize(("cards", "gain"), [(16, -0.200), (32, 0.373), (64, 0.605), (128, 0.59)])
def test_dual_micro_batches_pay_from_32_cards(cards: int, gain: float) -> None:
    assert wide_ep(cards, micro_batches=2)[1] / wide_ep(cards)[1] - 1 == pytest.approx(gain, abs=7e-3)


def test_dual_micro_batches_reach_3700_and_a_hot_card_takes_it_away() -> None:
    assert wide_ep(128, micro_batches=2)[1] == pytest.approx(3740, rel=1e-3)
    hot = np.full(256, (1 - 5.55 / 128) / 254)
    hot[:2] = 5.55 / 256  # one card with 5.55 times the mean
    skewed = ExpertShares(shares=(hot,), has_chance=False)
    assert wide_ep(128, micro_batches=2, shares=skewed)[1] == pytest.approx(717, rel=0.05)


def test_both_exchanges_of_a_layer() -> None:
    v3, cards = model("deepseek-v3"), cluster("h800x8x8")
    work = Work(num_seqs=128, new_tokens=1, past=4095)
    cost = step_cost(v3, cards, Split(dp=64, ep=64), work, profile=PAPER, formats=V3_FORMATS, shares=EVEN)
    found = seconds_by_name(cost)
    assert float(found["dispatch"]) / 58 == pytest.approx(186e-6, rel=5e-3)
    assert float(found["combine"]) / 58 == pytest.approx(366e-6, rel=5e-3)
    assert float(found["dispatch"] + found["combine"]) == pytest.approx(32e-3, rel=0.02)


def test_expert_weights_per_card() -> None:
    for cards, size in ((16, 41e9), (128, 5.1e9)):
        found = memory_per_rank(
            model("deepseek-v3"), Split(dp=cards, ep=cards), num_seqs=0, context=0, max_rows=0, profile=PAPER
        )
        assert float(found["experts"]) == pytest.approx(size, rel=0.01)


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
