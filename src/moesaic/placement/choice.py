"""Which copy of an expert takes a token: tables and pure functions, the same in engine and simulator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesaic.errors import ConfigError
from moesaic.hashing import rendezvous
from moesaic.spec.experts import ExpertPlan, FloatArray, IntArray

MAX_TABLE = 64  # entries of a row: shares are met to 1 / 64


def choice_table(
    plan: ExpertPlan, layer_idx: int, node_id: int | None = None, gpus_per_node: int = 1
) -> IntArray:
    """Weighted round robin as a gather: token number t of an expert goes to slot table[expert, t mod width].

    Copies get as many entries as their share says, spread evenly, so that any stretch of tokens is split as
    the whole. With a node, only its own copies are named where it has some: two-level choice, the node first.

    Shapes:  layer_idx counts sparse layers; returns [E, width] int64 slots; -1 for an expert without a slot.
    """
    ids, ranks, share = plan.slot_expert[layer_idx], plan.slot_rank[layer_idx], plan.slot_share[layer_idx]
    whole = plan.slot_slice[layer_idx] == 0
    num_experts = 1 + int(ids.max(initial=-1))
    rows: list[IntArray] = []
    for expert in range(num_experts):
        slots = np.flatnonzero((ids == expert) & whole & (share > 0))
        if node_id is not None:
            near = slots[ranks[slots] // gpus_per_node == node_id]
            slots = near if len(near) else slots
        rows.append(_turns(slots, share[slots]))
    width = int(np.lcm.reduce([len(row) for row in rows])) if rows else 1
    width = min(width, MAX_TABLE)
    return np.stack([np.resize(row, width) for row in rows]) if rows else np.empty((0, width), np.int64)


def _turns(slots: IntArray, share: FloatArray) -> IntArray:
    """Slots in turn, each as often as its share, the one furthest behind its share first."""
    if not len(slots):
        return np.array([-1], dtype=np.int64)
    share = share / share.sum()
    if np.allclose(share, share[0]):
        return slots.astype(np.int64)
    behind, found = np.zeros(len(slots)), np.empty(MAX_TABLE, np.int64)
    for turn in range(MAX_TABLE):
        behind += share
        pick = int(behind.argmax())
        behind[pick] -= 1.0
        found[turn] = slots[pick]
    return found


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
