"""One placement for several loads: what holds when the traffic changes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moesaic.placement.grid import SlotGrid
from moesaic.placement.pack import greedy_copies, pack_apart
from moesaic.placement.search import improve, normalised
from moesaic.placement.slots import Placement
from moesaic.spec.experts import FloatArray, IntArray

BEYOND = 0.7  # guess: how far past each load, seen from the mean of all, traffic may go; 0.5 to 1 do alike
FLATNESS = 0.7  # guess: exponent of the flatter load beside the others; 0.5 to 0.85 do alike
LAYERS_AT_ONCE = 8  # a progress line each


def robust(
    loads_SLE: FloatArray,
    grid: SlotGrid,
    *,
    start: IntArray | None = None,
    budget_L: IntArray | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Placement:
    """The placement whose busiest GPU is least busy over all loads and over what lies a bit beyond them.

    Copies go by the most that any load asks of an expert. Every load is taken past the mean of all by
    `BEYOND`: the next workload differs from these at least as they differ from each other. A flatter load
    beside them keeps copies and cold experts apart, so that solved shares find more to shift.

    Shapes:  loads_SLE [S, L, E], S at least 2.
    """
    stretched = stretch(normalised(loads_SLE, grid.num_gpus))
    most_LE = stretched.max(axis=0)
    flat = normalised(normalised(loads_SLE, 1).mean(axis=0, keepdims=True) ** FLATNESS, grid.num_gpus)
    scenarios = np.concatenate([stretched, flat])
    if start is None:
        start = pack_apart(most_LE, greedy_copies(most_LE, grid.num_slots, most=grid.num_gpus), grid.num_gpus)
    found = start.copy()
    layers = len(most_LE)
    for first in range(0, layers, LAYERS_AT_ONCE):
        part = slice(first, first + LAYERS_AT_ONCE)
        found[part] = improve(
            scenarios[:, part], start[part], num_changes=0 if budget_L is None else 8, num_targets=2,
            budget_L=None if budget_L is None else budget_L[part],
        )  # fmt: skip
        progress(min(first + LAYERS_AT_ONCE, layers), layers)
    return Placement(ids_LGC=found)


def stretch(loads_SLE: FloatArray) -> FloatArray:
    """Every load moved away from the mean of all by `BEYOND` times its distance; none below 0."""
    mean = loads_SLE.mean(axis=0)
    moved = np.maximum(loads_SLE + BEYOND * (loads_SLE - mean), 0.0)
    found: FloatArray = moved * (loads_SLE.sum(axis=2, keepdims=True) / moved.sum(axis=2, keepdims=True))
    return found
