"""The capacity-factor rule: overflows raise it, idling lowers it, bounds hold, captured sizes are enough."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import ConfigError
from moesaic.sched.buffer import FactorPolicy, captured

POLICY = FactorPolicy()


def test_overflows_raise_the_factor_within_one_window() -> None:
    assert POLICY.after(1.3, fill=1 / 1.3, overflow=1.0) == pytest.approx(1.3 + 0.3 - 0.1 * (1 / 1.3 - 0.4))
    assert POLICY.after(1.3, fill=1 / 1.3, overflow=1.0) > 1.5


@pytest.mark.parametrize("fill", [None, 1 / 1.6])
def test_windows_without_an_overflow_lower_it_to_the_bound(fill: float | None) -> None:
    factor = 2.0
    for _ in range(60):
        lower = POLICY.after(factor, fill=fill, overflow=0.0)
        assert lower < factor or lower == POLICY.least
        factor = lower
    assert factor == POLICY.least


def test_the_signs_of_the_formula_that_is_quoted_are_the_wrong_way_round() -> None:
    """CF + a E - b D, as it is sometimes printed: it would rise without drops and fall with them."""
    quoted = 1.3 + 0.1 * 0.9 - 0.3 * 0.0
    assert quoted == pytest.approx(1.39)
    assert POLICY.after(1.3, fill=0.9, overflow=0.0) < 1.3 < quoted


@settings(max_examples=30, deadline=None)
@given(st.floats(1, 2), st.floats(0, 1), st.floats(0, 1))
def test_the_factor_stays_within_its_bounds(factor: float, fill: float, overflow: float) -> None:
    assert 1.0 <= POLICY.after(factor, fill=fill, overflow=overflow) <= 2.0


def test_a_target_that_lets_an_idle_factor_run_away_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"target 0.5 must be below 1 / most = 0.5"):
        FactorPolicy(target=0.5)
    with pytest.raises(ConfigError, match=r"starts at 2\.5, outside 1 to 2"):
        FactorPolicy(start=2.5)
    for name in ("window_s", "fill_gain", "overflow_gain", "target"):
        for value in (0.0, -1.0, math.inf, math.nan):
            with pytest.raises(ConfigError, match=name):
                FactorPolicy(**{name: value})


def test_the_captured_size_is_the_smallest_that_is_enough() -> None:
    sizes = (1.0, 1.25, 1.5, 2.0)
    assert [captured(factor, sizes) for factor in (0.5, 1.0, 1.1, 1.25, 1.6, 2.0)] == [1, 1, 1.25, 1.25, 2, 2]
    assert captured(2.1, sizes) is None
