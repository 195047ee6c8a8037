"""Capacity factors under a burst: the controller's step response, and what flaps."""

from __future__ import annotations

import dataclasses

import pytest

from moesaic.errors import ConfigError
from moesaic.planner.sim.burst import BurstCase, study_burst, swings
from moesaic.sched.buffer import FactorPolicy

CASE = BurstCase(before_s=6.0, burst_s=6.0, after_s=14.0, fixed_s=0.03)


@pytest.fixture(scope="module")
def report():
    return study_burst(CASE, FactorPolicy(), (1.2, 1.5, 2.0))


def test_the_burst_is_met_within_three_windows_and_forgotten_after(report) -> None:
    factors = report.row("adaptive").factors
    before = [factor for at_s, factor in factors if 3.0 <= at_s < 6.0]
    early = max(factor for at_s, factor in factors if 6.0 <= at_s < 6.0 + 1.5 + 0.2)
    end = [factor for at_s, factor in factors if at_s > CASE.duration_s - 1.5]
    assert early >= report.needed["burst"] - 0.05
    assert max(before) < early - 0.2
    assert max(end) < early - 0.3
    assert all(1.0 <= factor <= 2.0 for _, factor in factors)


def test_the_controller_does_not_flap_and_following_every_step_does(report) -> None:
    assert report.row("adaptive").num_swings <= 2
    assert report.row("by the last step").num_swings > 50


def test_it_overflows_less_than_small_buffers_and_takes_less_than_large_ones(report) -> None:
    adaptive = report.row("adaptive")
    assert adaptive.overflow["burst"] < 0.3 < report.row("static 1.5").overflow["burst"] == 1.0
    assert adaptive.overflow["before"] < report.row("static 1.2").overflow["before"]
    assert adaptive.mean_factor < 2.0
    means = {name: report.row(name).step_s.mean for name in ("static 1.2", "static 1.5", "static 2")}
    assert adaptive.step_s.mean < min(means["static 1.2"], means["static 2"])
    assert report.row("static 2").num_overflowed == 0


def test_reversed_signs_are_caught() -> None:
    """The rule as it is sometimes printed: full buffers raise the factor, overflows lower it."""

    class Reversed(FactorPolicy):
        __slots__ = ()

        def after(self, factor, *, fill, overflow):
            seen = 1.0 / factor if fill is None else fill
            return min(max(factor + self.fill_gain * seen - self.overflow_gain * overflow, 1.0), 2.0)

    found = study_burst(CASE, Reversed(), ()).row("adaptive")
    after = [factor for at_s, factor in found.factors if at_s > 8.0]
    assert min(after) == max(after) == 2.0  # nothing brings it down again


def test_the_same_case_gives_the_same_report() -> None:
    small = dataclasses.replace(CASE, tokens=128, before_s=0.6, burst_s=0.6, after_s=0.6)
    assert study_burst(small, FactorPolicy()) == study_burst(small, FactorPolicy())


def test_swings_count_turns_and_not_noise() -> None:
    assert swings([1.0, 1.1, 1.0, 1.1, 1.0]) == 0
    assert swings([1.0, 1.5, 2.0]) == 0
    assert swings([1.0, 1.5, 1.0, 1.5]) == 2
    assert swings([2.0, 1.9, 1.5, 1.2, 1.6]) == 1
    assert swings([]) == 0


@pytest.mark.parametrize("change", [{"burst": 0.5}, {"tokens": 0}, {"row_s": 0.0}, {"after_s": 1e9}])
def test_impossible_bursts_are_refused(change: dict) -> None:
    with pytest.raises(ConfigError):
        BurstCase(**change)
