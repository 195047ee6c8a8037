"""Figures of uneven load, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moesaic.errors import ConfigError
from moesaic.obs.load import skew, total_counts
from moesaic.spec.experts import ExpertLoad

LOAD = ExpertLoad(
    counts=(np.array([3, 1, 0, 4]), np.array([2, 2])),
    phase="decode",
    num_tokens=4,
    num_steps=1,
    since_s=0.0,
    until_s=1.0,
    plan_version=0,
    source="engine",
)


def test_figures_of_a_known_layer() -> None:
    found = skew(LOAD.counts[0])
    assert found is not None
    assert found.max_mean == 2.0
    assert found.variation == pytest.approx(np.sqrt(2.5) / 2)
    assert (found.hottest_id, found.hottest_share, found.num_unused) == (3, 0.5, 1)


def test_two_to_one_has_a_third_of_variation_and_ties_go_to_the_lowest() -> None:
    found = skew(np.array([100, 200, 200, 100]))
    assert found is not None
    assert found.variation == pytest.approx(1 / 3)
    assert found.hottest_id == 1


@given(counts=st.lists(st.integers(0, 1000), min_size=1, max_size=16), factor=st.integers(1, 9))
def test_ratios_do_not_depend_on_the_amount_of_traffic(counts: list[int], factor: int) -> None:
    one, many = skew(np.array(counts)), skew(np.array(counts) * factor)
    if sum(counts) == 0:
        assert one is None
        return
    assert one is not None
    assert many is not None
    assert one.max_mean == pytest.approx(many.max_mean)
    assert one.variation == pytest.approx(many.variation, abs=1e-12)
    assert 1.0 <= one.max_mean <= len(counts)


def test_loads_add_up_per_layer() -> None:
    total = total_counts([LOAD, replace(LOAD, phase="prefill")])
    assert [counts.tolist() for counts in total] == [[6, 2, 0, 8], [4, 4]]
    assert LOAD.counts[0].tolist() == [3, 1, 0, 4]
    assert total_counts([]) == ()
    with pytest.raises(ConfigError, match="different models"):
        total_counts([LOAD, replace(LOAD, counts=(np.array([1]),))])
