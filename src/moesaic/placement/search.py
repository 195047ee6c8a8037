"""Local search over copies and places together: exchanges of two slots, and slots that change their expert.

Works on all layers at once, for one load or for several that one placement has to serve. Two copies of an
expert never share a GPU: no exchange or change that would make them do so is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moesaic.placement.slots import BoolArray, copies, held
from moesaic.spec.experts import FloatArray, IntArray

GOOD_ENOUGH = 0.9995  # guess: mean over max from which changing copies is not worth the time
SHARPNESS = (
    40.0  # guess: exp(40 x) of a GPU 1 + x times the mean; higher sees the worst GPU of the worst load only
)
TIES = 1e-3  # weight of the squares beside the maximum: of two equally busy GPUs, one less is better
MAX_EXCHANGES = 4000  # guess: per layer; a stop for a search that would otherwise never end on rounding


@dataclass(kw_only=True, slots=True, eq=False)
class SearchState:
    """A placement under improvement, with what each move needs to be judged.

    Shapes:  loads_SLE [S, L, E], each layer of each load in units of the mean GPU's load; ids_LGC [L, G, C].
    """

    loads_SLE: FloatArray
    ids_LGC: IntArray
    budget_L: IntArray | None = None  # moves from `start_LGC` that each layer may make
    start_LGC: IntArray | None = None
    each_SLE: FloatArray = field(init=False)  # load of one copy
    gpu_SLG: FloatArray = field(init=False)
    has_LGE: BoolArray = field(init=False)
    had_LGE: BoolArray | None = field(init=False, default=None)
    moves_L: IntArray | None = field(init=False, default=None)  # experts that GPUs fetch, from the start

    def __post_init__(self) -> None:
        num_ids = self.loads_SLE.shape[2]
        self.each_SLE = self.loads_SLE / copies(self.ids_LGC, num_ids)
        flat = self.ids_LGC.reshape(1, len(self.ids_LGC), -1)
        self.gpu_SLG = (
            np.take_along_axis(self.each_SLE, flat, 2)
            .reshape(len(self.loads_SLE), *self.ids_LGC.shape)
            .sum(axis=3)
        )
        self.has_LGE = held(self.ids_LGC, num_ids)
        if self.start_LGC is not None:
            self.had_LGE = held(self.start_LGC, num_ids)
            self.moves_L = (self.has_LGE & ~self.had_LGE).sum(axis=(1, 2))

    def worst(self) -> FloatArray:
        """Load of the busiest GPU under the least favourable load, per layer."""
        found: FloatArray = self.gpu_SLG.max(axis=(0, 2))
        return found

    def cost(self) -> FloatArray:
        """What the search lowers, per layer."""
        if len(self.loads_SLE) == 1:
            even: FloatArray = self.worst() + TIES * np.square(self.gpu_SLG[0]).mean(axis=1)
            return even
        found: FloatArray = _penalty(self.gpu_SLG).sum(axis=(0, 2))
        return found


def normalised(loads_SLE: FloatArray, num_gpus: int) -> FloatArray:
    """Every layer of every load in units of the mean GPU's load."""
    found: FloatArray = loads_SLE * (num_gpus / loads_SLE.sum(axis=2, keepdims=True))
    return found


def improve(
    loads_SLE: FloatArray,
    ids_LGC: IntArray,
    *,
    num_changes: int,
    num_targets: int = 1,
    budget_L: IntArray | None = None,
) -> IntArray:
    """A placement that is never worse than the one given.

    For one load that is its busiest GPU; for several, the sum of a steep penalty over all GPUs and loads.
    `num_changes` slots per layer are tried as copies of other experts once exchanges alone find nothing;
    `num_targets` GPUs, the busiest first, are tried before a layer counts as done.

    Shapes:  loads_SLE [S, L, E], none of its layers without load; ids_LGC [L, G, C]; returns [L, G, C].
    """
    loads = normalised(loads_SLE, ids_LGC.shape[1])
    state = _state(loads, ids_LGC, ids_LGC, budget_L)
    exchange(state, num_targets)
    best = state.ids_LGC
    cost, worst = state.cost(), state.worst()
    rank = np.zeros(len(best), dtype=np.int64)
    for _ in range(num_changes):
        open_layers = np.flatnonzero((rank >= 0) & (worst > 1.0 / GOOD_ENOUGH))
        if not len(open_layers):
            break
        budget = None if budget_L is None else budget_L[open_layers]
        trial = _state(loads[:, open_layers], best[open_layers], ids_LGC[open_layers], budget)
        changed = change_slots(trial, rank[open_layers])
        rank[open_layers[~changed]] = -1  # nothing left to try
        open_layers, keep = open_layers[changed], changed
        if not len(open_layers):
            continue
        trial = _state(
            loads[:, open_layers], trial.ids_LGC[keep], ids_LGC[open_layers],
            None if budget is None else budget[keep],
        )  # fmt: skip
        exchange(trial, num_targets)
        better = trial.cost() < cost[open_layers] * (1.0 - 1e-9)
        if len(loads) == 1:
            better &= trial.worst() <= worst[open_layers]
        if budget_L is not None:
            better &= _moves(trial) <= budget_L[open_layers]
        won = open_layers[better]
        best[won], cost[won], worst[won] = trial.ids_LGC[better], trial.cost()[better], trial.worst()[better]
        rank[won] = 0
        rank[open_layers[~better]] += 1
    return best


def _state(loads: FloatArray, ids: IntArray, start: IntArray, budget: IntArray | None) -> SearchState:
    return SearchState(
        loads_SLE=loads, ids_LGC=ids.copy(), budget_L=budget, start_LGC=None if budget is None else start
    )


def _moves(state: SearchState) -> IntArray:
    assert state.moves_L is not None, "a budget is counted from a start"
    return state.moves_L


def _penalty(load: FloatArray) -> FloatArray:
    found: FloatArray = np.exp(np.minimum(SHARPNESS * (load - 1.0), 500.0))
    return found


def exchange(state: SearchState, num_targets: int) -> None:
    """Exchange slots of the busiest GPU for others' as long as that helps, in all layers side by side.

    One load: a gain is what the sum of squares of the two GPUs loses; every exchange with one lowers the
    busiest. Several: what the sum of `_penalty` over both GPUs and all loads loses.
    """
    layers, gpus, _ = state.ids_LGC.shape
    tried = np.zeros(layers, dtype=np.int64)
    is_open = np.ones(layers, dtype=np.bool_)
    for _ in range(MAX_EXCHANGES):
        rows = np.flatnonzero(is_open)
        if not len(rows):
            return
        load_RG = (
            state.gpu_SLG[0][rows]
            if len(state.gpu_SLG) == 1
            else _penalty(state.gpu_SLG[:, rows]).sum(axis=0)
        )
        if num_targets == 1:
            hot = load_RG.argmax(axis=1)
        else:
            hot = np.argsort(-load_RG, axis=1, kind="stable")[np.arange(len(rows)), tried[rows]]
        gain_RCP = _gains(state, rows, hot, load_RG)
        best = gain_RCP.reshape(len(rows), -1).argmax(axis=1)
        amount = np.take_along_axis(gain_RCP.reshape(len(rows), -1), best[:, None], 1)[:, 0]
        found = amount > 1e-10 * np.maximum(load_RG.sum(axis=1), 1.0)
        num_slots = gain_RCP.shape[2]
        _apply(state, rows[found], hot[found], best[found] // num_slots, best[found] % num_slots)
        tried[rows] = np.where(found, 0, tried[rows] + 1)
        is_open[rows] = tried[rows] < min(num_targets, gpus)


def _gains(state: SearchState, rows: IntArray, hot: IntArray, load_RG: FloatArray) -> FloatArray:
    """What exchanging slot c of the hot GPU for slot p of any gains; -inf where it may not be.

    Shapes:  rows, hot [R]; returns [R, C, P].
    """
    ids = state.ids_LGC[rows]
    num_rows, gpus, room = ids.shape
    at = np.arange(num_rows)
    mine_RC, all_RP = ids[at, hot], ids.reshape(num_rows, -1)
    if len(state.loads_SLE) == 1:
        each, load = state.each_SLE[0][rows], state.gpu_SLG[0][rows]
        less = (
            np.take_along_axis(each, mine_RC, 1)[:, :, None] - np.take_along_axis(each, all_RP, 1)[:, None, :]
        )
        gap = load[at, hot][:, None] - np.repeat(load, room, axis=1)
        gain: FloatArray = less * (gap[:, None, :] - less)
    else:
        each_S, load_S = state.each_SLE[:, rows], state.gpu_SLG[:, rows]
        mine = np.take_along_axis(each_S, mine_RC[None], 2)
        other = np.take_along_axis(each_S, all_RP[None], 2)
        less = mine[:, :, :, None] - other[:, :, None, :]
        hot_S = load_S[:, at, hot]
        after = _penalty(hot_S[:, :, None, None] - less)
        after += _penalty(np.repeat(load_S, room, axis=2)[:, :, None, :] + less)
        gain = (load_RG[at, hot][:, None] + np.repeat(load_RG, room, axis=1))[:, None, :] - after.sum(axis=0)
    has = state.has_LGE[rows]
    arrives_twice = np.take_along_axis(has[at, hot], all_RP, 1)  # an id that the hot GPU has, its own too
    leaves_twice = np.take_along_axis(has, np.repeat(mine_RC[:, None], gpus, axis=1), 2)  # [R, G, C]
    gain[np.broadcast_to(arrives_twice[:, None, :], gain.shape)] = -np.inf
    gain[np.repeat(leaves_twice.transpose(0, 2, 1), room, axis=2)] = -np.inf
    if state.budget_L is not None:
        _forbid_beyond_budget(state, rows, hot, gain)
    return gain


def _forbid_beyond_budget(state: SearchState, rows: IntArray, hot: IntArray, gain: FloatArray) -> None:
    """Leave only exchanges after which the moves from the start are within the budget."""
    assert state.had_LGE is not None, "a budget is counted from a start"
    assert state.budget_L is not None, "called with a budget only"
    ids, had = state.ids_LGC[rows], state.had_LGE[rows]
    num_rows, gpus, room = ids.shape
    at = np.arange(num_rows)
    mine_RC, all_RP = ids[at, hot], ids.reshape(num_rows, -1)
    owner = np.repeat(np.arange(gpus), room)
    comes_hot = ~np.take_along_axis(had[at, hot], all_RP, 1)  # a fetch for the hot GPU
    goes_back = ~np.take_along_axis(had[at, hot], mine_RC, 1)  # undoes one
    comes_other = ~np.take_along_axis(had, np.repeat(mine_RC[:, None], gpus, axis=1), 2).transpose(0, 2, 1)
    back_other = ~had[at[:, None], owner, all_RP]
    delta = comes_hot[:, None, :].astype(np.int64) - goes_back[:, :, None]
    delta += np.repeat(comes_other, room, axis=2).astype(np.int64) - back_other[:, None, :]
    gain[_moves(state)[rows][:, None, None] + delta > state.budget_L[rows][:, None, None]] = -np.inf


def _apply(state: SearchState, rows: IntArray, hot: IntArray, slot: IntArray, other: IntArray) -> None:
    """Exchange slot `slot` of GPU `hot` for slot `other` (over all GPUs), one exchange in each of `rows`."""
    room = state.ids_LGC.shape[2]
    gpu, place = other // room, other % room
    leaves, comes = state.ids_LGC[rows, hot, slot], state.ids_LGC[rows, gpu, place]
    state.ids_LGC[rows, hot, slot], state.ids_LGC[rows, gpu, place] = comes, leaves
    state.has_LGE[rows, hot, leaves] = state.has_LGE[rows, gpu, comes] = False
    state.has_LGE[rows, hot, comes] = state.has_LGE[rows, gpu, leaves] = True
    if state.had_LGE is not None and state.moves_L is not None:
        state.moves_L[rows] = (state.has_LGE[rows] & ~state.had_LGE[rows]).sum(axis=(1, 2))
    less = state.each_SLE[:, rows, leaves] - state.each_SLE[:, rows, comes]
    state.gpu_SLG[:, rows, hot] -= less
    state.gpu_SLG[:, rows, gpu] += less


def change_slots(state: SearchState, rank: IntArray) -> BoolArray:
    """Give one slot of each layer to another expert: the change with the rank[layer]-th lowest cost.

    Only slots whose expert has another copy change; what they take is an expert of the busiest GPU, so that
    its copies share more ways. Loads of the other copies follow.

    Shapes:  rank [L]; returns whether each layer had such a change [L].
    """
    done = np.zeros(len(state.ids_LGC), dtype=np.bool_)
    counts = copies(state.ids_LGC, state.loads_SLE.shape[2])
    for layer, nth in enumerate(rank.tolist()):
        options = _change_options(state, layer, counts[layer])
        if nth < len(options):
            gpu, slot, taker = options[nth]
            state.ids_LGC[layer, gpu, slot] = taker
            done[layer] = True
    return done


def _change_options(state: SearchState, layer: int, count: IntArray) -> list[tuple[int, int, int]]:
    """(GPU, slot, new expert), the one with the lowest busiest GPU first.

    Either a slot elsewhere takes an expert of the busiest GPU, or one of that GPU takes any expert.
    """
    ids, has = state.ids_LGC[layer], state.has_LGE[layer]
    hot = int(state.gpu_SLG[:, layer].max(axis=0).argmax())
    donors = np.argwhere(count[ids] > 1)
    is_hot = donors[:, 0] == hot
    everything = np.arange(state.loads_SLE.shape[2])
    options: list[tuple[float, int, int, int]] = []
    for slots, takers in ((donors[~is_hot], ids[hot]), (donors[is_hot], everything)):
        if len(slots):
            cost = _change_costs(state, layer, count, slots, takers)
            legal = ~has[slots[:, 0]][:, takers].T
            order = np.argsort(np.where(legal, cost, np.inf), axis=None, kind="stable")[: int(legal.sum())]
            taker, slot = np.unravel_index(order, cost.shape)
            found = zip(cost[taker, slot], slots[slot, 0], slots[slot, 1], takers[taker], strict=True)
            options += [(float(c), int(g), int(p), int(e)) for c, g, p, e in found]
    return [option[1:] for option in sorted(options)]


def _change_costs(
    state: SearchState, layer: int, count: IntArray, slots: IntArray, takers: IntArray
) -> FloatArray:
    """The busiest GPU's load after each option, a little of the squares added to part equals.

    Shapes:  slots [D, 2], takers [N]; returns [N, D].
    """
    ids, has = state.ids_LGC[layer], state.has_LGE[layer]
    loads, gpu = state.loads_SLE[:, layer], state.gpu_SLG[:, layer]
    givers = ids[slots[:, 0], slots[:, 1]]
    fewer, more = loads / np.maximum(count - 1, 1), loads / (count + 1)
    fall = (loads / count - more)[:, takers]  # each copy of what gets one more
    rise = (fewer - loads / count)[:, givers]  # each copy of what loses one
    after = gpu[:, None] - fall[:, :, None] * has[:, takers].T[None]  # [S, N, G]
    after = after[:, :, None, :] + (rise[:, :, None] * has[:, givers].T[None])[:, None]  # [S, N, D, G]
    after[:, :, np.arange(len(slots)), slots[:, 0]] += (
        more[:, takers][:, :, None] - fewer[:, givers][:, None, :]
    )
    cost: FloatArray = after.max(axis=(0, 3)) + TIES * np.square(after).mean(axis=(0, 3))
    return cost
