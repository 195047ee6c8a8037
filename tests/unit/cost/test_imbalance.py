"""Busiest by mean: drawn tokens against the bands of the lecture notes, and against the closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.cost.imbalance import (
    busiest_ratio,
    drawn_choices,
    even,
    placed_ratio,
    realised_shares,
    skews,
    straggler_share,
    with_busiest,
)
from moesaic.cost.load import EVEN, busiest_distinct, busiest_rows, placed_shares, zipf_shares

ZIPF = zipf_shares(256, 0.6).of_layer(0)


def test_every_token_chooses_different_experts_by_popularity() -> None:
    chosen = drawn_choices(ZIPF, 8, 2000, np.random.default_rng(0))
    assert all(len(set(row)) == 8 for row in chosen.tolist())
    counts = np.bincount(chosen.ravel(), minlength=256)
    assert np.corrcoef(counts, ZIPF)[0, 1] > 0.97


@pytest.mark.parametrize(
    ("tokens", "cards", "trials", "expected", "tolerance"),
    [(32, None, 200, 4.74, 0.25), (32768, None, 1, 1.09, 0.02), (32, 32, 200, 1.78, 0.1),
     (32768, 32, 1, 1.022, 0.01)],
)  # fmt: skip
def test_equally_popular_experts(tokens, cards, trials, expected, tolerance) -> None:
    """One token an expert or 1,024, by expert or by card of eight."""
    found = busiest_ratio(even(256), 8, tokens, cards=cards, trials=trials)
    assert found.mean == pytest.approx(expected, abs=tolerance)
    if tokens == 32 and cards is None:
        assert found.deviation == pytest.approx(0.77, abs=0.15)


def test_zipf_popularity_is_flattened_by_choosing_each_expert_once() -> None:
    assert ZIPF.max() * 256 == pytest.approx(12.1677, rel=1e-5)
    assert realised_shares(ZIPF, 8).max() * 256 == pytest.approx(10.5434, rel=0.01)
    found = busiest_ratio(ZIPF, 8, 2000, cards=32, trials=20, is_shuffled=True)
    assert found.mean == pytest.approx(2.19, abs=0.3)
    by_popularity = np.sort(ZIPF)[::-1].reshape(32, 8).sum(axis=1)
    assert by_popularity.max() * 32 > 5  # were the hottest eight on one card


def test_copies_of_hot_experts_leave_what_chance_adds() -> None:
    """128 cards of 3 slots: 1.02 on average, 1.09 in half batches of 11,072 tokens; 5.8 without copies."""
    static, drawn = placed_ratio(ZIPF, 8, 11_072, 128, 128, trials=2)
    assert static == pytest.approx(1.0246, abs=0.006)
    assert drawn.mean == pytest.approx(1.089, abs=0.02)
    contiguous = busiest_ratio(ZIPF, 8, 11_072, cards=128, trials=3, is_shuffled=True)
    assert contiguous.mean == pytest.approx(5.76, abs=1.0)


def test_closed_form_of_pricing_is_near_the_draws() -> None:
    """Popularities themselves, as pricing takes them, are above what choosing once leaves of them."""
    shares = zipf_shares(256, 0.6)
    priced = float(busiest_rows(2000 * 8, 32, shares, 0, 0)) / (2000 * 8 / 32)
    drawn = busiest_ratio(shares.of_layer(0), 8, 2000, cards=32, trials=5)
    assert priced == pytest.approx(drawn.mean, rel=0.15)
    assert drawn.mean <= priced * 1.05


def test_skew_reads_fewer_experts_than_even_routing() -> None:
    """128 experts, 8 of them a token, 64 tokens: 125.94 when even, about 114.6 under Zipf 0.8."""
    shares = zipf_shares(128, 0.8)
    rng = np.random.default_rng(0)
    drawn = [len(np.unique(drawn_choices(shares.of_layer(0), 8, 64, rng))) for _ in range(60)]
    assert np.mean(drawn) == pytest.approx(114.617, rel=0.02)
    assert float(busiest_distinct(64, 8, 128, 1, EVEN, 0)) == pytest.approx(125.942, rel=1e-4)
    assert float(busiest_distinct(64, 8, 128, 1, shares, 0)) == pytest.approx(np.mean(drawn), rel=0.05)


def test_computing_and_receiving_are_two_skews() -> None:
    rank_of = np.arange(8) // 2
    pairs = np.array([[0, 1]] * 6 + [[2, 4], [3, 6]])  # popular pairs on one card: one arrival for two rows
    computing, receiving = skews(pairs, rank_of, 4)
    assert computing == pytest.approx(12 / 4)
    assert receiving == pytest.approx(6 / (10 / 4))
    alone = np.array([[0, 2], [0, 4], [0, 6]])
    assert skews(alone, rank_of, 4) == pytest.approx((2.0, 2.0))


def test_one_busy_card() -> None:
    shares = with_busiest(256, 128, 5.55)
    held = placed_shares(shares.of_layer(0), 128, 0) * 128
    assert held[0] == pytest.approx(5.55)
    assert held[1:] == pytest.approx(np.full(127, held[1]))
    assert held.sum() == pytest.approx(128)


def test_a_synchronous_step_waits_for_its_slowest_rank() -> None:
    assert straggler_share(np.array([1.0, 1.0, 1.0, 1.0])) == 0.0
    assert straggler_share(np.array([1.0, 1.0, 1.0, 3.0])) == pytest.approx(0.5)
