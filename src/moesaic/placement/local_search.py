"""Our own policy for one load: copies and places searched together, from scratch or from the current plan."""

from __future__ import annotations

import numpy as np

from moesaic.placement.counts import MOST_SLOTS, search_counts
from moesaic.placement.grid import SlotGrid
from moesaic.placement.lpt import lpt
from moesaic.placement.pack import greedy_copies, pack_apart
from moesaic.placement.search import GOOD_ENOUGH, improve
from moesaic.placement.slots import Placement, gpu_load
from moesaic.spec.experts import FloatArray, IntArray

CHANGES = 6  # slots tried for other experts, per layer that exchanges leave short of even
FLATNESS = 0.9
"""Exponent of the load that copies are counted by: the next load is flatter than this one, and where
exchanges make the placement even anyway, copies may go by that.

Source: DeepSeek-V3's counts of six workloads: 0.8 to 0.95 hold better on the five others than 1, by 0.1 to
         0.2 %.
"""


def local_search(
    load_LE: FloatArray, grid: SlotGrid, *, start: IntArray | None = None, budget_L: IntArray | None = None
) -> Placement:
    """The placement with the least busy GPUs that the search finds; no copy shares a GPU with another.

    From `start` it only takes moves that help, within the budget of each layer, and is never worse. Without
    one it is never worse than `lpt`; a small layer also tries other numbers of copies.

    Shapes:  load_LE [L, E], no layer without load.
    """
    if start is not None:
        return Placement(ids_LGC=improve(load_LE[None], start, num_changes=CHANGES * 2, budget_L=budget_L))
    counted = greedy_copies(load_LE**FLATNESS, grid.num_slots, most=grid.num_gpus)
    ids = improve(load_LE[None], pack_apart(load_LE, counted, grid.num_gpus), num_changes=0)
    first = lpt(load_LE, grid).ids_LGC
    worst = gpu_load(load_LE, ids).max(axis=1)
    even = load_LE.sum(axis=1) / grid.num_gpus
    weak = np.flatnonzero((worst * GOOD_ENOUGH > even) | (worst > gpu_load(load_LE, first).max(axis=1)))
    if len(weak):
        again = improve(load_LE[None, weak], first[weak], num_changes=CHANGES)
        better = gpu_load(load_LE[weak], again).max(axis=1) < worst[weak]
        ids[weak[better]] = again[better]
        worst = gpu_load(load_LE, ids).max(axis=1)
    if grid.num_slots <= MOST_SLOTS and grid.num_redundant:
        for layer in np.flatnonzero(worst * GOOD_ENOUGH > even).tolist():
            tried = search_counts(load_LE[None, layer], grid.num_slots, grid.num_gpus)
            if gpu_load(load_LE[layer, None], tried[None]).max() < worst[layer]:
                ids[layer] = tried
    return Placement(ids_LGC=ids)
