"""Which copy of an expert takes a token: tables and pure functions, the same in engine and simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from moesaic.errors import ConfigError
from moesaic.hashing import rendezvous
from moesaic.spec.experts import ExpertPlan, FloatArray, IntArray

MAX_TABLE = 64  # entries of a row: shares are met to 1 / 64

ReplicaChoice = Literal["turns", "least-loaded", "hash"]
REPLICA_CHOICES: tuple[ReplicaChoice, ...] = get_args(ReplicaChoice)


def replica_table(
    choice: ReplicaChoice,
    plan: ExpertPlan,
    layer_idx: int,
    load_E: IntArray | None = None,
    *,
    node_id: int | None = None,
    gpus_per_node: int = 1,
) -> IntArray:
    """The table of a policy by its name; `least-loaded` takes turns until there is a load.

    Shapes:  as `choice_table`; load_E [E].
    """
    if choice == "hash":
        return hash_table(plan, layer_idx, node_id, gpus_per_node)
    if choice == "least-loaded" and load_E is not None:
        return least_loaded_table(plan, layer_idx, load_E, node_id, gpus_per_node)
    return choice_table(plan, layer_idx, node_id, gpus_per_node)


def choice_table(
    plan: ExpertPlan, layer_idx: int, node_id: int | None = None, gpus_per_node: int = 1
) -> IntArray:
    """Weighted round robin as a gather: token number t of an expert goes to slot table[expert, t mod width].

    Copies get as many entries as their share says, spread evenly, so that any stretch of tokens is split as
    the whole. With a node, only its own copies are named where it has some: two-level choice, the node first.

    Shapes:  layer_idx counts sparse layers; returns [E, width] int64 slots; -1 for an expert without a slot.
    """
    share = plan.slot_share[layer_idx]
    copies = _copies(plan, layer_idx, node_id, gpus_per_node)
    return _stacked([_turns(slots, share[slots]) for slots in copies])


def hash_table(
    plan: ExpertPlan,
    layer_idx: int,
    node_id: int | None = None,
    gpus_per_node: int = 1,
    num_keys: int = MAX_TABLE,
) -> IntArray:
    """Weighted rendezvous hashing as a gather: key k of an expert goes to slot table[expert, k].

    A copy more takes its share of the keys from the others and moves no other key: from 3 equal copies to 4 a
    quarter moves. The hash is of key and rank, so that one row finds copies of several experts on one rank,
    and goes there once.

    Shapes:  as `choice_table`, with num_keys columns for every expert that has copies.
    Source:  Thaler and Ravishankar, IEEE/ACM Trans. Netw. 6 (1998); weights by -share / ln u: Schindelhauer
             and Schomaker, Weighted distributed hash tables, SPAA 2005.
    """
    ranks, share = plan.slot_rank[layer_idx], plan.slot_share[layer_idx]
    keys_V = np.arange(num_keys, dtype=np.uint64)
    log_VW = np.log(_uniform(keys_V[:, None], np.arange(plan.num_ranks, dtype=np.uint64)))
    rows: list[IntArray] = []
    for slots in _copies(plan, layer_idx, node_id, gpus_per_node):
        if len(slots) < 2:
            rows.append(_turns(slots, share[slots]))
            continue
        rows.append(slots[(-share[slots] / log_VW[:, ranks[slots]]).argmax(axis=1)])
    return _stacked(rows, max_width=max(num_keys, MAX_TABLE))


def least_loaded_table(
    plan: ExpertPlan,
    layer_idx: int,
    load_E: IntArray,
    node_id: int | None = None,
    gpus_per_node: int = 1,
) -> IntArray:
    """Copies that make ranks equal under a load: experts with fewest copies first, each filling up its ranks.

    Of those with as many copies the hottest goes first: whoever comes last finds least room. Shares of the
    plan are not looked at. An expert that nobody chose takes turns.

    Shapes:  as `choice_table`; load_E [E] tokens that chose each expert.
    """
    ranks = plan.slot_rank[layer_idx]
    copies = _copies(plan, layer_idx, node_id, gpus_per_node)
    queued_W = np.zeros(plan.num_ranks)
    for expert, slots in enumerate(copies):
        if len(slots) == 1:
            queued_W[ranks[slots[0]]] += load_E[expert]
    rows = [_turns(slots, np.ones(len(slots))) for slots in copies]
    replicated = [expert for expert, slots in enumerate(copies) if len(slots) > 1 and load_E[expert] > 0]
    for expert in sorted(replicated, key=lambda expert: (len(copies[expert]), -load_E[expert], expert)):
        slots = copies[expert]
        part = _filled(queued_W[ranks[slots]], float(load_E[expert]))
        np.add.at(queued_W, ranks[slots], part)
        rows[expert] = _turns(slots[part > 0], part[part > 0])
    return _stacked(rows)


def _copies(plan: ExpertPlan, layer_idx: int, node_id: int | None, gpus_per_node: int) -> list[IntArray]:
    """The slots of each expert that take tokens; those of a node alone, where it has some."""
    ids, ranks, share = plan.slot_expert[layer_idx], plan.slot_rank[layer_idx], plan.slot_share[layer_idx]
    usable = np.flatnonzero((plan.slot_slice[layer_idx] == 0) & (share > 0))
    found: list[IntArray] = []
    for expert in range(1 + int(ids.max(initial=-1))):
        slots = usable[ids[usable] == expert]
        if node_id is not None:
            near = slots[ranks[slots] // gpus_per_node == node_id]
            slots = near if len(near) else slots
        found.append(slots)
    return found


def _stacked(rows: Sequence[IntArray], *, max_width: int = MAX_TABLE) -> IntArray:
    """Rows of one width, each repeated as often as it takes."""
    if not rows:
        return np.empty((0, 1), np.int64)
    width = min(int(np.lcm.reduce([len(row) for row in rows])), max_width)
    return np.stack([np.resize(row, width) for row in rows])


def _filled(queued_C: FloatArray, load: float) -> FloatArray:
    """How a load is split over ranks with so much waiting, so that the fullest stays as low as can be.

    waiting   5 2 1   load 6   ->   level 4.5: 0 2.5 3.5
    """
    order = np.sort(queued_C)
    levels = (load + np.cumsum(order)) / np.arange(1, len(order) + 1)  # with the lowest 1, 2, .. filled
    return np.maximum(float(levels.min()) - queued_C, 0.0)


def _uniform(keys: npt.NDArray[np.uint64], names: npt.NDArray[np.uint64]) -> FloatArray:
    """A number in (0, 1) of each key and name, the same on every machine.

    Source:  the finaliser of SplitMix64: Steele, Lea and Flood, OOPSLA 2014.
    """
    mixed = keys * np.uint64(0x9E3779B97F4A7C15) + (names + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def _turns(slots: IntArray, share: FloatArray) -> IntArray:
    """Slots in turn, each as often as its share, at even distances."""
    if not len(slots):
        return np.array([-1], dtype=np.int64)
    share = share / share.sum()
    if np.allclose(share, share[0]):
        return slots.astype(np.int64)
    counts = np.floor(share * MAX_TABLE).astype(np.int64)
    behind = np.argsort(counts - share * MAX_TABLE, kind="stable")
    counts[behind[: MAX_TABLE - counts.sum()]] += 1
    place = np.concatenate([(np.arange(count) + 0.5) / count for count in counts.tolist() if count])
    return np.repeat(slots, counts)[np.argsort(place, kind="stable")]


def least_loaded(slots: IntArray, queued_P: FloatArray) -> int:
    """The slot with the least work waiting; ties to the lowest slot.

    Shapes:  slots are the copies of one expert, queued_P the work waiting at every slot's GPU.
    Raises:  ConfigError when there is no slot.
    """
    if not len(slots):
        raise ConfigError("no slot to choose from: the expert has no copy")
    order = np.sort(slots)
    return int(order[np.argmin(queued_P[order])])


def near_first(slots: IntArray, queued_P: FloatArray, node_P: IntArray, node_id: int) -> int:
    """Two levels: the least loaded copy on the token's own node, only then of all. Never another expert."""
    near = slots[node_P[slots] == node_id]
    return least_loaded(near if len(near) else slots, queued_P)


def replica_of_key(key: bytes, names: Sequence[str]) -> str:
    """The replica that a key stays with, whichever others come and go.

    Raises: ConfigError when there is no name.
    """
    if not names:
        raise ConfigError("no replica to choose from: the list of names is empty")
    return names[rendezvous(key, [name.encode() for name in names])]
