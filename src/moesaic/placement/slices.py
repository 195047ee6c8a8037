"""Virtual experts: each expert cut along its inner width into slices that are placed one by one."""

from __future__ import annotations

import numpy as np

from moesaic.placement.grid import SlotGrid
from moesaic.placement.local_search import local_search
from moesaic.placement.slots import Placement
from moesaic.spec.experts import FloatArray


def slices(load_LE: FloatArray, grid: SlotGrid, num_slices: int) -> Placement:
    """Slices placed like experts of their part of the load; the outputs of an expert's slices add up to its
    own.

    A token goes to a GPU of every slice, so up to `num_slices` times as many rows are sent. In return more
    GPUs than experts can share the work, 16 for 8 experts, and a slot of memory splits finer.

    Shapes:  `grid` counts slices in place of experts.
    """
    weights = np.repeat(load_LE / num_slices, num_slices, axis=-1)
    return Placement(ids_LGC=local_search(weights, grid).ids_LGC, num_slices=num_slices)
