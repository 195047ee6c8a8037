"""Which part of an expert's tokens each of its copies takes, so that the busiest GPU is least busy."""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog  # type: ignore[import-untyped]
from scipy.sparse import coo_matrix  # type: ignore[import-untyped]

from moesaic.placement.slots import Placement, copies
from moesaic.spec.experts import FloatArray, IntArray


def even_shares(placement: Placement, num_experts: int) -> FloatArray:
    """Every copy of an expert takes the same part.

    Shapes:  returns [L, G, C].
    """
    ids = placement.ids_LGC
    count = copies(ids, num_experts * placement.num_slices)
    flat = np.take_along_axis(count, ids.reshape(len(ids), -1), axis=1)
    return 1.0 / flat.reshape(ids.shape)


def solve_shares(placement: Placement, load_LE: FloatArray) -> FloatArray:
    """The shares that make the busiest GPU of each layer least busy: one small linear programme a layer.

    Shapes:  load_LE [L, E]; returns [L, G, C], summing to 1 over the copies of an expert.
    Source:  minimise t, over shares s of copies of experts e on GPUs g: for every g, the sum of s_eg w_e <=
             t; for every e, the sum of s_eg = 1; s >= 0. Experts with one copy are constants.
    """
    weights = placement.weights(load_LE)
    return np.stack([_solve(ids, row) for ids, row in zip(placement.ids_LGC, weights, strict=True)])


def shared_load(placement: Placement, load_LE: FloatArray, share_LGC: FloatArray) -> FloatArray:
    """Load of each GPU under shares.

    Shapes:  returns [L, G].
    """
    weights, ids = placement.weights(load_LE), placement.ids_LGC
    each = np.take_along_axis(weights, ids.reshape(len(ids), -1), axis=1).reshape(ids.shape)
    found: FloatArray = (each * share_LGC).sum(axis=2)
    return found


def _solve(ids_GC: IntArray, weights_E: FloatArray) -> FloatArray:
    gpus, room = ids_GC.shape
    ids, owner = ids_GC.ravel(), np.repeat(np.arange(gpus), room)
    count = np.bincount(ids, minlength=len(weights_E))
    even = 1.0 / count[ids]
    mean = weights_E.sum() / gpus
    free = np.flatnonzero((count[ids] > 1) & (weights_E[ids] > 0))
    if not len(free) or mean == 0:
        return even.reshape(ids_GC.shape)
    # Variables: the load, in units of the mean GPU's, that each free slot takes; and t.
    weights = weights_E / mean
    fixed = np.bincount(owner, weights=weights[ids] * even, minlength=gpus)
    fixed -= np.bincount(owner[free], weights=weights[ids[free]] * even[free], minlength=gpus)
    experts, which = np.unique(ids[free], return_inverse=True)
    num = len(free)
    rows = np.concatenate([owner[free], np.arange(gpus)])
    columns = np.concatenate([np.arange(num), np.full(gpus, num)])
    values = np.concatenate([np.ones(num), -np.ones(gpus)])
    limit = coo_matrix((values, (rows, columns)), shape=(gpus, num + 1))
    whole = coo_matrix((np.ones(num), (which, np.arange(num))), shape=(len(experts), num + 1))
    solved = linprog(
        np.append(np.zeros(num), 1.0),
        A_ub=limit,
        b_ub=-fixed,
        A_eq=whole,
        b_eq=weights[experts],
        method="highs",
    )
    assert solved.status == 0, f"even shares are a solution, so the programme has one: {solved.message}"
    share = even.copy()
    share[free] = np.maximum(solved.x[:num], 0.0) / weights[ids[free]]
    totals = np.bincount(ids, weights=share, minlength=len(weights_E))
    share /= totals[ids]  # the solver's rounding
    return share.reshape(ids_GC.shape)
