import numpy as np
import pytest

from moesaic.cost.load import EVEN
from moesaic.cost.ops import Formats, Work
from moesaic.cost.pingpong import ping_pong
from moesaic.cost.profile import PAPER
from moesaic.cost.term import CostTerm, Interval, step_seconds
from moesaic.cost.two_sided import Sides, TwoSides, two_sided_memory, two_sided_step
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import locate


def term(name, seconds):
    return CostTerm(name=name, resource="compute", seconds=Interval.exactly(seconds))


def simulated(layers, many, times):
    """The end of an event simulation: four resources, each takes its micro-batches in order, layer by
    layer."""
    free = [0.0] * 4
    ready = [0.0] * many
    for _ in range(layers):
        for stage in range(4):
            for batch in range(many):
                start = max(free[stage], ready[batch])
                free[stage] = ready[batch] = start + times[stage]
    return max(ready)


def closed(layers, many, times):
    names = ("attention", "dispatch", "experts", "combine")
    parts = [term(name, seconds) for name, seconds in zip(names, times, strict=True)]
    return float(step_seconds(ping_pong(*parts, layers, many)).value)


def test_closed_form_equals_simulation():
    rng = np.random.default_rng(0)
    for _ in range(2000):
        a, c, e = rng.uniform(0.1, 3.0, 3)
        layers, many = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        times = (a, c, e, c)
        assert closed(layers, many, times) == pytest.approx(simulated(layers, many, times), rel=1e-12)


def test_known_timelines():
    """L = 3, one slot each: alone half the time is travel; four micro-batches hide it."""
    assert closed(1, 1, (1.0, 0.5, 1.0, 0.5)) == 3.0
    assert closed(2, 1, (1.0, 0.5, 1.0, 0.5)) == 6.0
    assert closed(2, 4, (1.0, 0.5, 1.0, 0.5)) == 10.0


def test_arrays_equal_single_grids():
    model = read_config(locate("mixtral-8x22b").config, name="x")
    sides = Sides(attention=cluster("h20x8x2"), experts=cluster("l40sx8x2"), profiles=(PAPER, PAPER))
    many = {"num_attention": [1.0, 3.0], "tp": [2.0, 4.0], "ep": [8.0, 4.0], "expert_tp": [1.0, 2.0],
            "num_redundant": [0.0, 4.0], "num_micro_batches": [3.0, 2.0]}  # fmt: skip

    def both(grid, seqs):
        step = two_sided_step(
            model,
            sides,
            grid,
            Work(num_seqs=seqs, new_tokens=1, past=600),
            formats=Formats(),
            shares=EVEN,
        )
        memory = two_sided_memory(model, grid, num_seqs=seqs, context=700, profile=PAPER, formats=Formats())
        return step_seconds(step).value, *(sum(side.values()) for side in memory)

    arrays = both(TwoSides(**{k: np.array(v) for k, v in many.items()}), np.array([64.0, 32.0]))
    for idx, seqs in enumerate((64.0, 32.0)):
        single = both(TwoSides(**{k: v[idx] for k, v in many.items()}), seqs)
        for array, value in zip(arrays, single, strict=True):
            assert array[idx] == pytest.approx(float(value), rel=1e-12)


def test_weights_of_both_sides_are_those_of_the_model():
    model = read_config(locate("mixtral-8x22b").config, name="x")
    grid = TwoSides(num_attention=1, tp=1, ep=1, expert_tp=1, num_redundant=0, num_micro_batches=1)
    attention, experts = two_sided_memory(
        model, grid, num_seqs=0.0, context=1, profile=PAPER, formats=Formats()
    )
    total = float(attention["weights"]) + float(experts["experts"])
    assert total == pytest.approx(140.63e9 * 2, rel=1e-3)
