"""Loads add up over all time and over seconds, by phase."""

import numpy as np

from moesaic.engine.load_window import KEPT_S, LoadWindow
from moesaic.spec.experts import ExpertLoad, Phase


def load(until_s: float, first: int, phase: Phase = "decode") -> ExpertLoad:
    return ExpertLoad(
        counts=(np.array([first, 1]), np.array([0, first])),
        phase=phase,
        num_tokens=first,
        num_steps=1,
        since_s=until_s - 0.125,
        until_s=until_s,
        plan_version=0,
        source="engine",
    )


def test_sums_by_phase():
    window = LoadWindow()
    assert window.since_start() == ()
    window.add([load(100.25, 3), load(100.25, 5, "prefill")])
    window.add([load(100.9, 4)])
    by_phase = {found.phase: found for found in window.since_start()}
    assert [counts.tolist() for counts in by_phase["decode"].counts] == [[7, 2], [0, 7]]
    assert (by_phase["decode"].num_tokens, by_phase["decode"].num_steps) == (7, 2)
    assert (by_phase["decode"].since_s, by_phase["decode"].until_s) == (100.125, 100.9)
    assert by_phase["prefill"].num_tokens == 5


def test_a_window_takes_whole_seconds():
    window = LoadWindow()
    for second in range(100, 110):
        window.add([load(second + 0.5, second)])
    (found,) = window.since(107.4)
    assert found.num_tokens == 107 + 108 + 109
    assert window.since(110.0) == ()
    (everything,) = window.since(0.0)
    assert everything.num_tokens == sum(range(100, 110))


def test_old_seconds_are_dropped_but_not_from_the_total():
    window = LoadWindow()
    window.add([load(10.0, 1)])
    window.add([load(10.0 + KEPT_S + 1, 2)])
    (found,) = window.since(0.0)
    assert found.num_tokens == 2
    (total,) = window.since_start()
    assert total.num_tokens == 3


def test_results_are_copies():
    window = LoadWindow()
    window.add([load(10.0, 1)])
    (found,) = window.since_start()
    found.counts[0][0] = 99
    (again,) = window.since_start()
    assert again.counts[0][0] == 1
