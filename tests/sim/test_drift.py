"""Placements under a change of topic: the step response of copies by rule, and what flaps."""

from __future__ import annotations

import dataclasses

import pytest

from moesaic.errors import ConfigError
from moesaic.placement.trigger import ReplicaRule
from moesaic.planner.sim.drift import DriftCase, study_drift

CASE = DriftCase(
    num_experts=32, experts_per_token=4, num_redundant=8, tokens_per_s=2048, before_s=70, drift_s=20,
    after_s=110, replan_s=50,
)  # fmt: skip


@pytest.fixture(scope="module")
def report():
    return study_drift(CASE, ReplicaRule())


def test_a_fixed_placement_stays_behind_and_copies_by_rule_catch_up(report) -> None:
    fixed, ruled = report.row("planned once"), report.row("copies by rule")
    assert fixed.before > 0.9
    assert fixed.after < fixed.before - 0.1
    assert ruled.after > fixed.after + 0.1
    assert ruled.series[-1] > fixed.before - 0.06
    assert ruled.recovered_s <= 3 * ReplicaRule().window_s
    assert report.row("contiguous").before < fixed.before


def test_the_rule_does_not_flap_and_narrow_thresholds_do(report) -> None:
    calm = report.row("copies by rule")
    assert calm.num_returns <= 1
    assert calm.num_changes <= 8
    narrow = study_drift(CASE, ReplicaRule(window_s=2.0, add_above=1.02, drop_below=1.0)).row(
        "copies by rule"
    )
    assert narrow.num_returns > 5 * max(calm.num_returns, 1)
    assert narrow.num_moves > 3 * calm.num_moves


def test_nothing_moves_without_a_drift() -> None:
    still = dataclasses.replace(CASE, before_s=200, drift_s=0, after_s=1)
    row = study_drift(still, ReplicaRule()).row("copies by rule")
    assert row.num_changes == 0
    assert row.drift is None


def test_the_same_case_gives_the_same_report() -> None:
    small = dataclasses.replace(CASE, before_s=10, drift_s=5, after_s=10, tokens_per_s=256)
    assert study_drift(small, ReplicaRule(window_s=5.0)) == study_drift(small, ReplicaRule(window_s=5.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_redundant": 5}, "do not divide over 8 GPUs; 8 copies do"),
        ({"num_topics": 1}, "two topics or more"),
        ({"after_s": 10**6}, "at most 3600 s"),
        ({"fetch_s": float("nan")}, "fetch_s must be"),
        ({"check_s": 0}, "check_s must be at least 1"),
    ],
)
def test_impossible_drifts_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(CASE, **change)
