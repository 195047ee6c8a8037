"""MegaScale-Infer's objective: an expert costs at least the time in which its weights are read."""

from __future__ import annotations

import numpy as np

from moesaic.placement.grid import SlotGrid
from moesaic.placement.local_search import local_search
from moesaic.placement.slots import Placement
from moesaic.spec.experts import FloatArray


def megascale(load_LE: FloatArray, grid: SlotGrid, floor: float) -> Placement:
    """The placement that makes max over GPUs j of C_j = sum of x_ij max(a_i, K) small.

    a_i is the load of expert i, x_ij the part of it on GPU j, K = `floor` times the mean load of the layer's
    experts. Their greedy is replaced by the search, which starts from it and only improves.

    Source: MegaScale-Infer, arXiv:2504.02263, sec. 6 (load balance of experts).
    """
    return local_search(floored(load_LE, floor), grid)


def floored(load_LE: FloatArray, floor: float) -> FloatArray:
    """max(a_i, K)."""
    found: FloatArray = np.maximum(load_LE, floor * load_LE.mean(axis=1, keepdims=True))
    return found
