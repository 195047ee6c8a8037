"""The gate study: its inputs, its golden figures, and what its cases refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.cli.gate_view import render
from moesaic.errors import ConfigError
from moesaic.planner.sim.case import GateCase, GateReport
from moesaic.planner.sim.study import study_gates
from moesaic.planner.sim.topics import Topics


@pytest.fixture(scope="module")
def report() -> GateReport:
    return study_gates(GateCase())


def test_topics_have_their_share_and_their_centre() -> None:
    rng = np.random.default_rng(0)
    topics = Topics.make(rng, num_topics=4, width=32, strength=5.0)
    x_TD = topics.draw(rng, 2000, share=0.7, hot_topic=2)
    nearest = np.linalg.norm(x_TD[:, None] - 5.0 * topics.centres_ZD, axis=-1).argmin(axis=-1)
    shares = np.bincount(nearest, minlength=4) / 2000
    np.testing.assert_allclose(shares, [0.1, 0.1, 0.7, 0.1], atol=0.04)
    even = topics.draw(rng, 2000, share=1 / 4)
    nearest = np.linalg.norm(even[:, None] - 5.0 * topics.centres_ZD, axis=-1).argmin(axis=-1)
    np.testing.assert_allclose(np.bincount(nearest, minlength=4) / 2000, 0.25, atol=0.04)


def test_load_and_drops_by_kind_of_input(report: GateReport) -> None:
    """1.2 x without topics, 2.8 x with one hot topic, 33 to 42 % of pairs dropped: within 5 %."""
    plain, even, topical = report.draws
    assert plain.max_mean == pytest.approx(1.21, rel=0.05)
    assert even.max_mean == pytest.approx(1.8, rel=0.05)
    assert topical.max_mean == pytest.approx(2.8, rel=0.05)
    assert topical.dropped_share["1"] == pytest.approx(0.416, abs=0.02)
    assert topical.dropped_share["1.25"] == pytest.approx(0.339, abs=0.02)
    assert plain.dropped_share["1.25"] < 0.01
    assert topical.max_mean_least < topical.max_mean < topical.max_mean_greatest


def test_golden_figures_of_seed_7(report: GateReport) -> None:
    """Drift here is no error of itself, but it must be seen. Loads are counts, so they move in steps."""
    figures = {(one.name, one.tokens): round(one.max_mean, 2) for one in report.variants}
    assert figures == {
        ("top-k, then softmax", "no topics"): 1.20,
        ("top-k, then softmax", "topical"): 3.02,
        ("softmax, then top-k", "topical"): 3.02,
        ("sigmoid, renormalised", "topical"): 3.02,
        ("sigmoid, renormalised", "topic moved"): 2.81,
        ("sigmoid + learnt bias", "topical"): 1.17,
        ("sigmoid + learnt bias", "topic moved"): 3.09,
        ("trained, noise on", "topical"): pytest.approx(1.25, abs=0.05),
        ("trained, noise off", "topical"): pytest.approx(1.75, abs=0.05),
        ("trained, noise off", "topic moved"): pytest.approx(3.58, abs=0.05),
    }
    assert report.capacity == 80
    assert report.smooth_max_mean == pytest.approx(1.15, abs=0.03)
    assert (report.example_importance, report.example_load) == ((2.0, 2.0, 2.0), (6, 3, 3))


def test_neighbours_change_outputs_under_capacity_and_no_bit_dropless(report: GateReport) -> None:
    watched = [one for one in report.variants if one.neighbours is not None]
    assert len(watched) == 5
    for one in watched:
        assert one.neighbours is not None
        assert one.neighbours.change_dropless == 0.0
        assert one.neighbours.change_capacity > 0.3
        assert one.neighbours.change_capacity_max > 1
    assert report.change_blas < 1e-4


def test_every_row_counts_all_pairs_and_its_drops(report: GateReport) -> None:
    for one in report.variants:
        assert sum(one.load) == 512
        dropped = sum(max(load - report.capacity, 0) for load in one.load)
        assert one.dropped_share == dropped / 512
        assert (one.drop_error > 0) == (dropped > 0)
        assert one.max_mean == max(one.load) / 64
        is_normal = one.name != "softmax, then top-k"
        assert (one.weight_sum == pytest.approx(1)) == is_normal


def test_balancing_holds_while_the_topic_stays_for_another_seed() -> None:
    found = study_gates(GateCase(seed=0, num_tokens=128))
    before = found.variant("sigmoid, renormalised", "topical").max_mean
    after = found.variant("sigmoid + learnt bias", "topical").max_mean
    moved = found.variant("sigmoid + learnt bias", "topic moved").max_mean
    assert after < 1.5 < before
    assert moved > found.variant("sigmoid, renormalised", "topic moved").max_mean
    assert found.variant("trained, noise off", "topical").max_mean < before
    assert found.smooth_max_mean < 1.4


def test_without_topics_nothing_is_hot_and_enough_capacity_drops_nothing() -> None:
    found = study_gates(GateCase(num_tokens=32, strength=0, share=0, num_topics=2, capacity_factor=4))
    assert all(one.dropped_share == 0 for one in found.variants)
    assert all(one.neighbours.change_capacity == 0 for one in found.variants if one.neighbours is not None)
    assert all(draws.max_mean < 2.2 for draws in found.draws)


def test_the_page_shows_what_is_printed(report: GateReport) -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
    shown = page.split("$ moesaic simulate gate\n")[1].split("\n```")[0].splitlines()
    printed = render(report).splitlines()
    # numpy's own product is another one on another machine
    assert [line for line in shown if "own product" not in line] == [
        line for line in printed if "own product" not in line
    ]


NAN = float("nan")
REFUSED = [
    ("num_experts", 1, "--experts"),
    ("experts_per_token", 9, "--top-k"),
    ("experts_per_token", 0, "--top-k"),
    ("num_tokens", 31, "--tokens"),
    ("num_tokens", 10**6, "more than the 65,536"),
    ("num_topics", 1, "--topics"),
    ("strength", -0.1, "--strength"),
    ("strength", NAN, "--strength"),
    ("share", 1.1, "--share"),
    ("share", -0.1, "--share"),
    ("share", NAN, "--share"),
    ("capacity_factor", 0.0, "--capacity-factor"),
    ("capacity_factor", -1.0, "--capacity-factor"),
    ("capacity_factor", float("inf"), "--capacity-factor"),
    ("capacity_factor", NAN, "--capacity-factor"),
    ("importance_weight", -1.0, "--importance-weight"),
    ("load_weight", NAN, "--load-weight"),
    ("seed", -1, "--seed"),
]


@pytest.mark.parametrize(("field", "value", "expected"), REFUSED)
def test_bad_values_are_refused_with_the_option_to_change(field: str, value: float, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        GateCase(**{field: value})
