"""Placement in the order of ids: where an engine starts that knows no load."""

from __future__ import annotations

import numpy as np

from moesaic.placement.grid import SlotGrid
from moesaic.placement.slots import Placement


def contiguous(grid: SlotGrid, num_layers: int) -> Placement:
    """GPU g holds slots g * C to g * C + C - 1; slot p holds expert p mod E.

    With redundant slots the lowest ids get a second copy, as vLLM's and SGLang's starting placements have it.
    """
    ids = np.arange(grid.num_slots, dtype=np.int64) % grid.num_experts
    return Placement(ids_LGC=np.tile(ids.reshape(1, grid.num_gpus, -1), (num_layers, 1, 1)))
