"""When to place anew: step response without flapping, the trigger rules, and whether a move pays."""

import numpy as np
import pytest

from moesaic.errors import ConfigError
from moesaic.placement.trigger import (
    LoadWindow,
    ReplicaRule,
    best_interval_s,
    net_gain_s,
    replication_reasons,
)


def run(rule, loads, seconds=1.0):
    """Copies by step, the rule asked whenever its window is full."""
    window, copies, history = LoadWindow(window_s=rule.window_s), np.ones(8, np.int64), []
    for step, load in enumerate(loads):
        window.add(step * seconds, load)
        if window.is_full:
            copies = copies + rule.wanted(window.total().astype(float), copies)
        history.append(copies.copy())
    return np.array(history)


def test_a_shift_of_load_is_answered_within_a_window_and_does_not_flap():
    quiet = np.full(8, 100)
    hot = quiet.copy()
    hot[3] = 900
    history = run(ReplicaRule(), [quiet] * 60 + [hot] * 120 + [quiet] * 120)
    assert history[59].tolist() == [1] * 8
    assert history[60 + 30, 3] >= 2
    assert history[-1].tolist() == [1] * 8
    turns = np.diff(np.sign(np.diff(history[:, 3])[np.diff(history[:, 3]) != 0])) != 0
    assert turns.sum() == 1  # up once, down once


def test_noise_around_a_threshold_changes_nothing_twice():
    rng = np.random.default_rng(0)
    base = np.full(8, 100.0)
    base[0] = 216.0
    loads = [rng.poisson(base) for _ in range(400)]
    changes = np.diff(run(ReplicaRule(window_s=2), loads)[:, 0])
    assert np.abs(changes).sum() <= 2
    flapping = ReplicaRule(window_s=2, add_above=2.0, drop_below=1.99)
    assert np.abs(np.diff(run(flapping, loads)[:, 0])).sum() > 10  # without hysteresis it would


def test_a_rule_without_hysteresis_is_refused():
    with pytest.raises(ConfigError, match="a copy would come and go"):
        ReplicaRule(add_above=1.0, drop_below=1.0)
    with pytest.raises(ConfigError, match="window_s must be above 0"):
        ReplicaRule(window_s=0)


def test_a_window_forgets_and_refuses_time_that_goes_back():
    window = LoadWindow(window_s=30)
    for second in range(100):
        window.add(second, np.array([second, 1]))
    assert window.total().tolist() == [sum(range(70, 100)), 30]
    with pytest.raises(ConfigError, match="times must not go back: 5 after 99"):
        window.add(5, np.array([0, 0]))
    with pytest.raises(ConfigError, match="no step yet"):
        LoadWindow(window_s=1).total()


def test_trigger_rules_fire_on_two_to_one_where_the_deviation_alert_does_not():
    shares = np.array([17, 17, 8.5, 8.5, 12.25, 12.25, 12.25, 12.25])
    counts = (shares * 200).astype(int)
    assert replication_reasons(counts) == ("skew",)
    assert shares.std() / shares.mean() == pytest.approx(0.24, abs=0.005)  # below the 0.5 of that alert
    assert replication_reasons(counts // 4) == ()  # too few samples
    assert replication_reasons(np.full(8, 2000)) == ()
    assert replication_reasons(np.full(8, 2000), np.array([0.55, 0.99])) == ("idle_gpu",)
    assert replication_reasons(np.full(8, 2000), np.array([0.55, 0.8])) == ()


def test_a_move_pays_when_it_is_rare_enough():
    facts = {"now": 0.7, "after": 0.95, "expert_s_per_s": 0.3, "move_bytes": 20e9, "bytes_per_s": 40e9}
    assert net_gain_s(interval_s=600, **facts) > 40
    assert net_gain_s(interval_s=1, **facts) < 0
    assert net_gain_s(interval_s=600, **{**facts, "after": 0.7}) == pytest.approx(-0.5)
    decode, prefill = (
        best_interval_s(loss_per_s=1e-6, move_s=0.5),
        best_interval_s(loss_per_s=1e-3, move_s=0.5),
    )
    assert decode == pytest.approx(1000)
    assert prefill < decode / 30
    with pytest.raises(ConfigError, match="balancedness is in"):
        net_gain_s(interval_s=1, **{**facts, "now": 0.0})
    with pytest.raises(ConfigError, match="must be above 0"):
        best_interval_s(loss_per_s=0, move_s=1)
