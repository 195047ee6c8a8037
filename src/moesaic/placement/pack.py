"""Greedy copies and largest-first packing, over all layers at once."""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from moesaic.placement.slots import held
from moesaic.spec.experts import FloatArray, IntArray


def greedy_copies(weights_LE: FloatArray, num_slots: int, most: int | None = None) -> IntArray:
    """Ids that fill `num_slots` slots: one of each, then one more of whatever has the most load a copy.

    This is the split that makes the largest load of one copy least. Ties go to the lowest id; `most` bounds
    the copies of an expert.

    Shapes:  weights_LE [L, E]; returns [L, num_slots], the extra copies last.
    Source:  EPLB, github.com/deepseek-ai/EPLB.
    """
    layers, num_ids = weights_LE.shape
    count = np.ones((layers, num_ids))
    ids = np.empty((layers, num_slots), dtype=np.int64)
    ids[:, :num_ids] = np.arange(num_ids)
    each, rows = weights_LE.astype(np.float64).copy(), np.arange(layers)
    for slot in range(num_ids, num_slots):
        busiest = each.argmax(axis=1)
        ids[:, slot] = busiest
        count[rows, busiest] += 1
        now = count[rows, busiest]
        each[rows, busiest] = weights_LE[rows, busiest] / now
        if most is not None:
            each[rows[now >= most], busiest[now >= most]] = -1.0
    return ids


def copy_weights(weights_LE: FloatArray, ids_LP: IntArray) -> FloatArray:
    """Load of each slot when copies share evenly.

    Shapes:  returns [L, P].
    """
    layers, num_ids = weights_LE.shape
    flat = (ids_LP + np.arange(layers)[:, None] * num_ids).ravel()
    count = np.bincount(flat, minlength=layers * num_ids).reshape(layers, num_ids)
    each: FloatArray = np.take_along_axis(weights_LE / np.maximum(count, 1), ids_LP, axis=1)
    return each


def largest_first(slot_weights_LP: FloatArray, num_gpus: int) -> tuple[IntArray, IntArray]:
    """The heaviest first, each onto the least loaded GPU that has a free slot; ties to the lowest index.

    Slots that do not divide leave the last ones of some GPUs free.

    Shapes:  returns the GPU and the slot of that GPU of each item, both [L, P].
    Source:  longest processing time first with a limit on items; `balanced_packing` of EPLB.
    """
    layers, num_items = slot_weights_LP.shape
    room = -(-num_items // num_gpus)
    order = np.argsort(-slot_weights_LP, axis=1, kind="stable")
    gpu, slot = np.empty((layers, num_items), np.int64), np.empty((layers, num_items), np.int64)
    for layer in range(layers):  # a heap a layer takes the time of all layers in step, and far less for one
        weights, used = slot_weights_LP[layer].tolist(), [0] * num_gpus
        open_gpus = [(0.0, idx) for idx in range(num_gpus)]
        for item in order[layer].tolist():
            load, chosen = open_gpus[0]
            gpu[layer, item], slot[layer, item] = chosen, used[chosen]
            used[chosen] += 1
            if used[chosen] < room:
                heapq.heapreplace(open_gpus, (load + weights[item], chosen))
            else:
                heapq.heappop(open_gpus)
    return gpu, slot


class Slots(NamedTuple):
    """Physical slots of one layer, rank by rank.

    Shapes:  each [E + num_redundant]; share is the part of its expert's tokens that a copy takes.
    """

    rank: IntArray
    expert: IntArray
    share: FloatArray


def placed_slots(load_E: FloatArray, num_ranks: int, num_redundant: int) -> Slots:
    """Which rank holds which copy of one layer's experts, for estimates: neither has to divide.

    Contiguous without redundant slots; with them greedy copies of the hottest, largest first.
    """
    if num_redundant <= 0:
        experts = np.arange(len(load_E))
        return Slots(experts * num_ranks // len(load_E), experts, np.ones(len(load_E)))
    ids = np.sort(greedy_copies(load_E[None], len(load_E) + num_redundant), axis=1)
    rank = largest_first(copy_weights(load_E[None], ids), num_ranks)[0][0]
    by_rank = np.argsort(rank, kind="stable")
    expert = ids[0, by_rank]
    return Slots(rank[by_rank], expert, 1.0 / np.bincount(expert)[expert])


def pack_apart(weights_LE: FloatArray, ids_LP: IntArray, num_gpus: int) -> IntArray:
    """Largest first with a slot limit, two copies of an expert never on one GPU.

    Shapes:  returns ids_LGC [L, G, C].
    """
    layers, num_items = ids_LP.shape
    room, rows = num_items // num_gpus, np.arange(layers)
    slot_weights = copy_weights(weights_LE, ids_LP)
    order = np.argsort(-slot_weights, axis=1, kind="stable")
    found = np.empty((layers, num_gpus, room), np.int64)
    load, used = np.zeros((layers, num_gpus)), np.zeros((layers, num_gpus), np.int64)
    has = np.zeros((layers, num_gpus, weights_LE.shape[1]), np.bool_)
    twice = 1e3 * max(float(slot_weights.sum(axis=1).max(initial=0.0)), 1.0)  # worse than any load
    for step in range(num_items):
        item = order[:, step]
        ids = ids_LP[rows, item]
        chosen = (load + twice * has[rows, :, ids]).argmin(axis=1)
        found[rows, chosen, used[rows, chosen]] = ids
        has[rows, chosen, ids] = True
        used[rows, chosen] += 1
        load[rows, chosen] += slot_weights[rows, item]
        full = used[rows, chosen] == room
        load[rows[full], chosen[full]] = np.inf
    return separate(found, weights_LE.shape[1])


def separate(ids_LGC: IntArray, num_ids: int) -> IntArray:
    """The same copies with none beside another of its expert: each such one is exchanged with another GPU's.

    A GPU with an expert twice has at most C - 2 others, and a GPU without that expert has C: so one of those
    can always be exchanged, as long as no expert has more copies than there are GPUs.

    Shapes:  ids_LGC [L, G, C]; returns the same.
    """
    found = ids_LGC.copy()
    has = held(found, num_ids)
    repeated = np.sort(found, axis=2)
    crowded = (repeated[:, :, 1:] == repeated[:, :, :-1]).any(axis=2)
    for layer, gpu in np.argwhere(crowded).tolist():
        for slot, expert in enumerate(found[layer, gpu].tolist()):
            if expert not in found[layer, gpu, :slot]:
                continue
            for other in np.flatnonzero(~has[layer, :, expert]).tolist():
                free = [c for c, one in enumerate(found[layer, other].tolist()) if not has[layer, gpu, one]]
                if free:
                    taken = int(found[layer, other, free[0]])
                    found[layer, other, free[0]], found[layer, gpu, slot] = expert, taken
                    has[layer, other] = False
                    has[layer, other, found[layer, other]] = True
                    has[layer, gpu, taken] = True
                    break
    return found
