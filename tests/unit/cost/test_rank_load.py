"""The closed forms of uneven routing, against drawn tokens."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.cost.load import EVEN, busiest_distinct, busiest_rows, placed_shares, with_busiest, zipf_shares
from moesaic.planner.sim.traffic import TopicTraffic, max_mean


def test_closed_form_of_pricing_is_near_the_draws() -> None:
    """Popularities themselves, as pricing takes them, are above what choosing once leaves of them."""
    shares = zipf_shares(256, 0.6)
    priced = float(busiest_rows(2000 * 8, 32, shares, 0, 0)) / (2000 * 8 / 32)
    traffic, rng = TopicTraffic.zipf(256, 0.6), np.random.default_rng(0)
    loads = [traffic.counts(rng, np.zeros(2000, np.int64), 8) for _ in range(5)]
    drawn = float(np.mean([max_mean(load.reshape(32, -1).sum(axis=1)) for load in loads]))
    assert priced == pytest.approx(drawn, rel=0.15)
    assert drawn <= priced * 1.05


def test_skew_reads_fewer_experts_than_even_routing() -> None:
    """128 experts, 8 of them a token, 64 tokens: 125.94 when even, about 114.6 under Zipf 0.8."""
    shares, rng = zipf_shares(128, 0.8), np.random.default_rng(0)
    traffic = TopicTraffic.recorded(shares)
    drawn = [np.count_nonzero(traffic.counts(rng, np.zeros(64, np.int64), 8)) for _ in range(60)]
    assert float(busiest_distinct(64, 8, 128, 1, EVEN, 0)) == pytest.approx(125.942, rel=1e-4)
    assert float(busiest_distinct(64, 8, 128, 1, shares, 0)) == pytest.approx(np.mean(drawn), rel=0.05)


def test_one_busy_card() -> None:
    shares = with_busiest(256, 128, 5.55)
    held = placed_shares(shares.of_layer(0), 128, 0) * 128
    assert held[0] == pytest.approx(5.55)
    assert held[1:] == pytest.approx(np.full(127, held[1]))
    assert held.sum() == pytest.approx(128)
