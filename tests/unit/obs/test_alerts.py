"""Each rule fires on what it is for, and not on its counter-example."""

from __future__ import annotations

import numpy as np
import pytest

from moesaic.errors import ConfigError
from moesaic.obs import alerts
from moesaic.obs.alerts import LoadSample

TWO_TO_ONE = np.array([1700, 1225, 1225, 850, 850, 1225, 1225, 1700])


def sample(at_s: float, counts) -> LoadSample:
    return LoadSample(until_s=at_s, counts=np.asarray(counts, np.int64))


def test_two_to_one_is_not_a_skew_of_half_the_mean() -> None:
    assert TWO_TO_ONE.std() / TWO_TO_ONE.mean() == pytest.approx(0.24, abs=0.01)
    assert alerts.skew_alert([sample(10, TWO_TO_ONE)], now_s=60) is None


def test_skew_fires_on_five_minutes_and_forgets_older_ones() -> None:
    even, hot = [100] * 8, [900, 100, 100, 100, 100, 100, 100, 100]
    found = alerts.skew_alert([sample(10, hot)], now_s=100, what="GPUs")
    assert found is not None
    assert found.value == pytest.approx(np.std(hot) / np.mean(hot))
    assert "load of GPUs" in found.message
    assert "number 0 has 4.5 times" in found.message
    assert alerts.skew_alert([sample(10, hot), *[sample(20, even)] * 9], now_s=100) is None
    assert alerts.skew_alert([sample(10, hot), sample(400, even)], now_s=400) is None
    assert alerts.skew_alert([], now_s=0) is None
    assert alerts.skew_alert([sample(1, [0] * 8)], now_s=2) is None


def test_hot_card_100_beside_30_leaves_cards_39_percent_busy() -> None:
    found = alerts.hot_card_alert([100] + [30] * 7)
    assert found is not None
    assert found.value == pytest.approx(2.58, abs=0.005)
    assert "39%" in found.message
    assert alerts.hot_card_alert([100] + [60] * 7) is None
    assert alerts.hot_card_alert([]) is None


def test_low_threshold_offloads_experts_that_are_chosen() -> None:
    """The share times the load of an expert: 28 % of 7 ms stalls, four cold ones of 2 % do not."""
    assert alerts.low_threshold_alert([0.28, 0.02], load_s=0.007, step_s=0.004) is not None
    assert alerts.low_threshold_alert([0.02] * 4, load_s=0.007, step_s=0.004) is None
    assert alerts.low_threshold_alert([], load_s=0.007, step_s=0.004) is None


def test_exchange_share_advises_in_both_directions() -> None:
    assert alerts.exchange_alert(0.35, 0.65) is None
    latency_bound = alerts.exchange_alert(0.5, 0.5, larger_batch=(0.6, 1.4))
    byte_bound = alerts.exchange_alert(0.5, 0.5, larger_batch=(1.5, 1.0))
    unknown = alerts.exchange_alert(0.5, 0.5)
    assert latency_bound is not None
    assert "let it grow" in latency_bound.message
    assert byte_bound is not None
    assert "shrink it" in byte_bound.message
    assert unknown is not None
    assert "measure a larger batch" in unknown.message
    assert alerts.exchange_share(0.0, 0.0) == 0.0
    with pytest.raises(ConfigError, match="at least 0"):
        alerts.exchange_alert(-1.0, 1.0)


def test_batch_growth_flips_at_the_knee() -> None:
    throughput = {32: 100.0, 64: 170.0, 128: 200.0}
    found = alerts.batch_growth_alert({32: 0.2, 64: 0.3, 128: 0.5}, throughput)
    assert found is not None
    assert "batch 64 stays within" in found.message
    assert alerts.batch_growth_alert({32: 0.2, 64: 0.25, 128: 0.3}, throughput) is None
    none_left = alerts.batch_growth_alert({32: 0.4, 64: 0.4, 128: 0.5}, throughput)
    assert none_left is not None
    assert "no batch is within" in none_left.message
    with pytest.raises(ConfigError, match="same batches"):
        alerts.batch_growth_alert({32: 0.1}, throughput)


def test_cold_load_above_five_percent_of_requests() -> None:
    assert alerts.cold_miss_alert(6, 100) is not None
    assert alerts.cold_miss_alert(5, 100) is None
    assert alerts.cold_miss_alert(0, 0) is None


def test_random_tokens_make_a_dense_benchmark() -> None:
    rng = np.random.default_rng(0)
    random = rng.multinomial(64_000, np.full(64, 1 / 64))
    real = rng.multinomial(64_000, rng.dirichlet(np.full(64, 4.0)))
    assert alerts.dense_method_alert(random, 8000) is not None
    assert alerts.dense_method_alert(real, 8000) is None
    assert alerts.dense_method_alert(np.zeros(64, np.int64), 0) is None


def test_dropped_tokens_and_bubbles() -> None:
    assert alerts.dropped_alert(1, 10**6) is not None
    assert alerts.dropped_alert(0, 10**6) is None
    assert alerts.bubble_alert(0.06, 1.0) is not None
    assert alerts.bubble_alert(0.05, 1.0) is None
    assert alerts.bubble_alert(0.0, 0.0) is None
