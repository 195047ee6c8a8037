"""Greedy copies, then longest processing time first with a slot limit."""

from __future__ import annotations

from moesaic.placement.grid import SlotGrid
from moesaic.placement.pack import greedy_copies, pack_apart
from moesaic.placement.slots import Placement
from moesaic.spec.experts import FloatArray


def lpt(load_LE: FloatArray, grid: SlotGrid) -> Placement:
    """EPLB's two greedy steps, with the rule that two copies of an expert never share a GPU.

    Source: Graham, Bounds on multiprocessing timing anomalies, SIAM J. Appl. Math. 17 (1969): without a slot
            limit the maximum is at most 4/3 of the least possible one.
    """
    ids = greedy_copies(load_LE, grid.num_slots, most=grid.num_gpus)
    return Placement(ids_LGC=pack_apart(load_LE, ids, grid.num_gpus))
