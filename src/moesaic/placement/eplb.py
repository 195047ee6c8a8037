"""DeepSeek's expert-parallel load balancer, step by step the published one, over all layers at once.

Hierarchical: groups of experts onto nodes, copies within each node, copies onto its GPUs. Global: the last
two steps over all GPUs. It lets two copies of an expert share a GPU; `Placement.num_same_rank` counts them.
"""

from __future__ import annotations

import numpy as np

from moesaic.errors import ConfigError
from moesaic.placement.grid import SlotGrid
from moesaic.placement.pack import copy_weights, greedy_copies, largest_first
from moesaic.placement.slots import Placement
from moesaic.spec.experts import FloatArray, IntArray


def eplb(load_LE: FloatArray, grid: SlotGrid) -> Placement:
    """Global EPLB: whatever groups and nodes there are.

    Source: github.com/deepseek-ai/EPLB, `rebalance_experts` where nodes do not divide groups.
    """
    return Placement(ids_LGC=_copies_onto_gpus(load_LE, grid.num_slots, grid.num_gpus))


def eplb_hierarchical(load_LE: FloatArray, grid: SlotGrid) -> Placement:
    """Hierarchical EPLB: the experts of a group stay on one node, so a token crosses to few nodes.

    Source: github.com/deepseek-ai/EPLB, `rebalance_experts_hierarchical`.
    Raises: ConfigError when nodes do not divide the groups.
    """
    nodes, groups = grid.num_nodes, grid.num_groups
    if groups % nodes:
        raise ConfigError(
            f"hierarchical EPLB puts whole groups on nodes: {groups} groups mod {nodes} nodes = "
            f"{groups % nodes}"
        )
    if grid.num_slots % nodes:
        raise ConfigError(
            f"{grid.num_slots} slots mod {nodes} nodes = {grid.num_slots % nodes}; give a multiple"
        )
    layers, num_experts = load_LE.shape
    size = num_experts // groups
    node, place = largest_first(load_LE.reshape(layers, groups, size).sum(axis=2), nodes)
    by_place = np.empty((layers, groups), np.int64)  # groups in the order of their nodes and places there
    np.put_along_axis(by_place, node * (groups // nodes) + place, np.arange(groups)[None], axis=1)
    expert_of = (by_place[:, :, None] * size + np.arange(size)).reshape(layers * nodes, -1)
    rows = np.repeat(np.arange(layers), nodes)[:, None]
    inside = _copies_onto_gpus(load_LE[rows, expert_of], grid.num_slots // nodes, grid.gpus_per_node)
    ids = np.take_along_axis(expert_of, inside.reshape(layers * nodes, -1), axis=1)
    return Placement(ids_LGC=ids.reshape(layers, grid.num_gpus, -1))


def _copies_onto_gpus(weights_LE: FloatArray, num_slots: int, num_gpus: int) -> IntArray:
    ids = greedy_copies(weights_LE, num_slots)
    layers, room = len(ids), num_slots // num_gpus
    if room == 1:  # nothing to choose: the order of the copies stays
        return ids.reshape(layers, num_gpus, 1)
    gpu, slot = largest_first(copy_weights(weights_LE, ids), num_gpus)
    found = np.empty((layers, num_slots), np.int64)
    np.put_along_axis(found, gpu * room + slot, ids, axis=1)
    return found.reshape(layers, num_gpus, room)
