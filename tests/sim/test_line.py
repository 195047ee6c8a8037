"""Jobs through stations: the timeline equals its closed forms, and a station serves one job at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.cost.pingpong import Stage, overlapped_seconds, pipeline_seconds
from moesaic.errors import ConfigError
from moesaic.planner.sim.clock import Clock
from moesaic.planner.sim.line import run_line
from moesaic.planner.sim.pingpong import study_ping_pong, timeline

times = st.floats(0.05, 2.0)


def stage(attention: float, experts: float, transfer: float) -> Stage:
    return Stage(attention_s=attention, expert_s=experts, transfer_s=transfer)


def test_equal_times_happen_in_the_order_they_were_asked_for() -> None:
    clock, seen = Clock(), []
    clock.at(2.0, lambda: seen.append("late"))
    for name in "abc":
        clock.at(1.0, lambda name=name: seen.append(name))
    clock.at(1.0, lambda: clock.after(0.0, lambda: seen.append("added")))
    clock.run(until_s=1.5)
    assert seen == ["a", "b", "c", "added"]
    clock.run()
    assert (seen[-1], clock.now_s) == ("late", 2.0)
    with pytest.raises(ValueError, match="has passed"):
        clock.at(1.0, clock.run)
    with pytest.raises(ValueError, match="has passed"):
        clock.at(float("nan"), clock.run)


@settings(max_examples=40, deadline=None)
@given(times, times, times, st.integers(1, 8), st.integers(1, 8))
def test_ping_pong_equals_its_closed_form(a: float, e: float, c: float, many: int, layers: int) -> None:
    one = stage(a, e, c)
    closed = float(pipeline_seconds(one, many, layers))
    assert timeline(one, many, layers).total_s == pytest.approx(closed, rel=1e-12)


@settings(max_examples=25, deadline=None)
@given(st.lists(times, min_size=1, max_size=4), st.integers(1, 9))
def test_equal_jobs_through_a_flow_shop_end_when_the_slowest_station_lets_them(steps, jobs: int) -> None:
    names = [str(idx) for idx in range(len(steps))]
    found = run_line(names, [list(zip(names, steps, strict=True))] * jobs)
    assert found.total_s == pytest.approx(sum(steps) + (jobs - 1) * max(steps), rel=1e-12)


def test_a_station_serves_one_job_at_a_time_and_none_is_lost() -> None:
    rng = np.random.default_rng(0)
    ways = [[(str(rng.integers(3)), float(rng.uniform(0, 1))) for _ in range(6)] for _ in range(7)]
    found = run_line(["0", "1", "2"], ways)
    assert len(found.spans) == 42
    for station in found.stations:
        own = sorted((s.start_s, s.end_s) for s in found.spans if s.station == station)
        assert all(first[1] <= second[0] + 1e-12 for first, second in pairwise(own))
    for job, way in enumerate(ways):
        own = sorted((s for s in found.spans if s.job == job), key=lambda span: span.visit_idx)
        assert [(s.station, pytest.approx(s.end_s - s.start_s)) for s in own] == way
        assert all(first.end_s <= second.start_s + 1e-12 for first, second in pairwise(own))


@pytest.mark.parametrize(
    ("sides", "layers", "many", "total", "busy"),
    [
        ((1, 1, 0.5), 2, 1, 6.0, 1 / 3),
        ((1, 1, 0.5), 2, 4, 10.0, 0.8),
        ((1, 1, 0.3), 56, 1, 145.6, 56 / 145.6),
    ],
)
def test_known_timelines(sides, layers: int, many: int, total: float, busy: float) -> None:
    found = timeline(stage(*sides), many, layers)
    assert found.total_s == pytest.approx(total, rel=1e-9)
    assert found.busy["attention"] == pytest.approx(busy, rel=1e-9)


def test_a_study_says_where_the_papers_formula_holds_and_how_many_are_enough() -> None:
    study = study_ping_pong(stage(0.4, 0.5, 0.3), num_layers=40, shown=3, most=4)
    assert [row.simulated_s for row in study.rows[1:]] == pytest.approx([60.5, 61.0, 81.0])
    assert [row.closed_form_s for row in study.rows] == pytest.approx([row.simulated_s for row in study.rows])
    assert (study.fewest, study.paper_fewest) == (3, 4)
    assert all(row.paper_s is None and "equal sides" in str(row.paper_refusal) for row in study.rows)
    even = study_ping_pong(stage(1, 1, 0.3), num_layers=56, shown=1, most=3)
    assert even.rows[0].paper_s is None
    assert even.rows[2].paper_s == pytest.approx(even.rows[2].simulated_s)
    assert overlapped_seconds(stage(1, 1, 0.3), 1, 56) == pytest.approx(57.6)  # simulated: 145.6


@pytest.mark.parametrize(
    ("one", "many", "layers", "message"),
    [
        (stage(0, 1, 1), 1, 1, "attention must be a finite number above 0"),
        (stage(1, float("nan"), 1), 1, 1, "experts must be a finite number above 0"),
        (stage(1, 1, -1), 1, 1, "transfer must be a finite number at least 0"),
        (stage(1, 1, 1), 0, 1, "micro-batches must be at least 1"),
        (stage(1, 1, 1), 1, 0, "layers must be at least 1"),
        (stage(1, 1, 1), 1000, 1000, "more than the 400,000 visits"),
    ],
)
def test_what_cannot_be_simulated_is_refused(one: Stage, many: int, layers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        timeline(one, many, layers)
