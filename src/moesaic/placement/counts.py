"""Copies and packing decided together: a beam search over the copies of each expert. For small layers."""

from __future__ import annotations

import numpy as np

from moesaic.placement.pack import greedy_copies, pack_apart
from moesaic.placement.search import SearchState, exchange, normalised
from moesaic.placement.slots import copies
from moesaic.spec.experts import FloatArray, IntArray

BEAM = 6
ROUNDS = 12
MOST_TRIED = 96  # vectors of a round, those with the smallest largest copy
PATIENCE = 2  # rounds without a better placement
MOST_SLOTS = 64  # larger layers have packings fine enough that greedy copies do


def search_counts(loads_SE: FloatArray, num_slots: int, num_gpus: int) -> IntArray:
    """The best placement found when copies are moved one by one from expert to expert, each time packed anew.

    Greedy copies make the largest copy small; a pack may want a larger one beside small neighbours instead.

    Shapes:  loads_SE [S, E] of one layer; returns ids [G, C].
    """
    loads_SE = normalised(loads_SE[:, None], num_gpus)[:, 0]
    planned = loads_SE.max(axis=0)
    start = copies(greedy_copies(planned[None], num_slots, most=num_gpus)[:, :, None], len(planned))[0]
    seen = {tuple(start.tolist())}
    best_cost, best_ids, wait = np.inf, np.empty((0, 0), np.int64), 0
    beam = start[None]
    for _ in range(ROUNDS):
        cost, ids = _pack(loads_SE, beam, num_gpus)
        order = np.argsort(cost, kind="stable")[:BEAM]
        if cost[order[0]] < best_cost * (1.0 - 1e-9):
            best_cost, best_ids, wait = float(cost[order[0]]), ids[order[0]], 0
        else:
            wait += 1
        beam = _neighbours(beam[order], num_gpus, seen)
        largest = (planned / np.maximum(beam, 1)).max(axis=1)
        beam = beam[np.argsort(largest, kind="stable")[:MOST_TRIED]]
        if wait > PATIENCE or not len(beam):
            break
    return best_ids


def _pack(loads_SE: FloatArray, counts_NE: IntArray, num_gpus: int) -> tuple[FloatArray, IntArray]:
    """Cost and ids of each vector of counts, packed and exchanged as if each were a layer."""
    num, num_ids = counts_NE.shape
    ids = np.repeat(np.tile(np.arange(num_ids), num), counts_NE.ravel()).reshape(num, -1)
    planned = np.repeat(loads_SE.max(axis=0)[None], num, axis=0)
    state = SearchState(
        loads_SLE=np.repeat(loads_SE[:, None], num, axis=1), ids_LGC=pack_apart(planned, ids, num_gpus)
    )
    exchange(state, num_targets=1)
    return state.cost(), state.ids_LGC


def _neighbours(beam_BE: IntArray, num_gpus: int, seen: set[tuple[int, ...]]) -> IntArray:
    """Every vector one copy away that was not seen yet."""
    found = []
    for counts in beam_BE:
        for giver in np.flatnonzero(counts > 1).tolist():
            for taker in np.flatnonzero(counts < num_gpus).tolist():
                other = counts.copy()
                other[giver] -= 1
                other[taker] += 1
                key = tuple(other.tolist())
                if key not in seen:
                    seen.add(key)
                    found.append(other)
    return np.array(found, dtype=np.int64).reshape(-1, beam_BE.shape[1])
