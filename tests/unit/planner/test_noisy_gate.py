"""Noisy top-k: frequencies against the normal CDF, gradients against finite differences, training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.special import ndtr

from moesaic.planner.sim.gate import cv_squared
from moesaic.planner.sim.noisy import (
    BalanceWeights,
    NoisyGate,
    balance_loss,
    normal_cdf,
    smooth_load,
    train,
)


def make(seed: int, width: int = 5, num_experts: int = 4) -> tuple[NoisyGate, np.random.Generator]:
    rng = np.random.default_rng(seed)
    weight_DE, noise_DE = rng.standard_normal((2, width, num_experts))
    return NoisyGate(weight_DE=weight_DE, noise_DE=noise_DE), rng


def test_noise_off_is_deterministic_and_noise_on_is_not() -> None:
    gate, rng = make(0)
    x_TD = rng.standard_normal((50, 5))
    quiet = [gate.choose(x_TD, 2).experts_TK for _ in range(2)]
    noisy = [gate.choose(x_TD, 2, rng.standard_normal((50, 4))).experts_TK for _ in range(2)]
    np.testing.assert_array_equal(*quiet)
    assert not np.array_equal(*noisy)


def test_selection_frequency_of_two_experts_follows_the_normal_cdf() -> None:
    gate, rng = make(1, num_experts=2)
    x_1D = 0.5 * rng.standard_normal((1, 5))
    num_draws = 20_000
    x_TD = np.repeat(x_1D, num_draws, axis=0)
    chosen = gate.choose(x_TD, 1, rng.standard_normal((num_draws, 2))).experts_TK[:, 0]
    (first, second), scale = gate.logits(x_1D)[0], gate.noise_scale(x_1D)[0]
    expected = ndtr((first - second) / np.hypot(*scale))
    assert 0.1 < expected < 0.9
    deviation = np.sqrt(expected * (1 - expected) / num_draws)
    assert np.mean(chosen == 0) == pytest.approx(expected, abs=4 * deviation)


def test_smooth_load_is_the_expected_load() -> None:
    gate, rng = make(2)
    x_TD = 0.5 * rng.standard_normal((8, 5))
    draws = rng.standard_normal((2000, 8, 4))
    smooth = np.mean([smooth_load(gate, x_TD, draw_TE, 2) for draw_TE in draws[:500]], axis=0)
    counted = np.mean([gate.choose(x_TD, 2, draw_TE).load() for draw_TE in draws], axis=0)
    np.testing.assert_allclose(smooth, counted, atol=0.12)  # 4 standard errors of either mean
    assert counted.max() / counted.min() > 1.2  # and the experts do differ


def test_chance_is_one_where_every_expert_is_chosen() -> None:
    gate, rng = make(3)
    x_TD, draw_TE = rng.standard_normal((8, 5)), rng.standard_normal((8, 4))
    np.testing.assert_array_equal(smooth_load(gate, x_TD, draw_TE, 4), 8)
    loss = balance_loss(gate, x_TD, draw_TE, 4, BalanceWeights(importance=0, load=1))
    assert loss.value == 0
    assert not loss.weight_gradient_DE.any()


def test_normal_cdf_keeps_its_tails() -> None:
    values = np.array([-np.inf, -30.0, -8.0, -1.0, 0.0, 1.0, 8.0, np.inf])
    np.testing.assert_allclose(normal_cdf(values), ndtr(values), rtol=1e-12)


@pytest.mark.parametrize("field", ["weight_DE", "noise_DE"])
@pytest.mark.parametrize(("importance", "load"), [(1.0, 0.0), (0.0, 1.0), (0.1, 1.0)])
def test_gradients_agree_with_finite_differences(field: str, importance: float, load: float) -> None:
    gate, rng = make(4)
    x_TD, draw_TE = rng.standard_normal((30, 5)), rng.standard_normal((30, 4))
    weights = BalanceWeights(importance=importance, load=load)
    loss = balance_loss(gate, x_TD, draw_TE, 2, weights)
    found = loss.weight_gradient_DE if field == "weight_DE" else loss.noise_gradient_DE
    expected = np.zeros_like(found)
    for where in np.ndindex(found.shape):
        values = []
        for step in (1e-6, -1e-6):
            moved = getattr(gate, field).copy()
            moved[where] += step
            values.append(balance_loss(replace(gate, **{field: moved}), x_TD, draw_TE, 2, weights).value)
        expected[where] = (values[0] - values[1]) / 2e-6
    np.testing.assert_allclose(found, expected, atol=1e-8)
    assert np.abs(expected).max() > 1e-4


@pytest.mark.parametrize(("importance", "load"), [(1.0, 1.0), (1.0, 0.1), (0.0, 1.0)])
def test_training_evens_the_load(importance: float, load: float) -> None:
    gate, rng = make(5, width=16, num_experts=8)
    gate = replace(gate, noise_DE=np.zeros_like(gate.noise_DE))
    centre_D = rng.standard_normal(16)
    batches = [rng.standard_normal((128, 16)) + centre_D for _ in range(80)]
    trained = train(
        gate, batches[:-1], 2, weights=BalanceWeights(importance=importance, load=load), rng=rng, rate=0.01
    )
    draw_TE = rng.standard_normal((128, 8))
    before, after = (smooth_load(one, batches[-1], draw_TE, 2) for one in (gate, trained))
    assert before.max() / before.mean() > 2.0
    assert after.max() / after.mean() < 1.35
    assert cv_squared(after) < cv_squared(before) / 10


def test_only_the_ratio_of_the_weights_counts() -> None:
    gate, rng = make(7)
    batches = [rng.standard_normal((16, 5)) for _ in range(3)]
    found = [
        train(
            gate,
            batches,
            2,
            weights=BalanceWeights(importance=weight, load=2 * weight),
            rng=np.random.default_rng(0),
            rate=0.01,
        )
        for weight in (0.1, 1.0)
    ]
    np.testing.assert_allclose(found[0].weight_DE, found[1].weight_DE, rtol=1e-4)


def test_without_weights_nothing_is_learnt() -> None:
    gate, rng = make(6)
    batches = [rng.standard_normal((16, 5)) for _ in range(3)]
    found = train(gate, batches, 2, weights=BalanceWeights(importance=0, load=0), rng=rng, rate=0.01)
    np.testing.assert_array_equal(found.weight_DE, gate.weight_DE)
