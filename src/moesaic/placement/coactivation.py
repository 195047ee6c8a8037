"""Experts that the same tokens use are put on one node: fewer rows cross between nodes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moesaic.placement.grid import SlotGrid
from moesaic.placement.pack import greedy_copies, largest_first, pack_apart
from moesaic.placement.search import improve
from moesaic.placement.slots import Placement
from moesaic.spec.experts import FloatArray, IntArray

Pairs = Mapping[tuple[int, int], FloatArray]
"""Tokens by two experts: of one layer, (l, l), symmetric; or of two, (l, m), where m is deeper: rows are l's.

Shapes:  each [E, E].
"""

SLACK = 0.05  # guess: how much busier than the mean a node may be for the sake of its pairs
MAX_EXCHANGES = 2000


def coactivation(load_LE: FloatArray, grid: SlotGrid, pairs: Pairs) -> Placement:
    """Experts onto nodes by their pairs, then copies and GPUs within each node by load.

    Layers go from shallow to deep, so that a layer is placed near those before it.

    Source: a Kernighan-Lin exchange (Bell Syst. Tech. J. 49, 1970) on the pair counts, nodes kept even.
    """
    nodes, layers = grid.num_nodes, len(load_LE)
    node_LE = np.zeros((layers, grid.num_experts), dtype=np.int64)
    for layer in range(layers):
        pull_EN = np.zeros((grid.num_experts, nodes))
        for (first, second), counts in pairs.items():
            if second == layer and first < layer:
                pull_EN += counts.T @ np.eye(nodes)[node_LE[first]]
        within = pairs.get((layer, layer), np.zeros((grid.num_experts, grid.num_experts)))
        node_LE[layer] = partition(load_LE[layer], within, pull_EN, nodes)
    ids = np.empty((layers, grid.num_gpus, grid.slots_per_gpu), dtype=np.int64)
    for node in range(nodes):
        mine = np.stack([np.flatnonzero(row == node) for row in node_LE])
        load = np.take_along_axis(load_LE, mine, axis=1)
        gpus = grid.gpus_per_node
        packed = pack_apart(load, greedy_copies(load, grid.num_slots // nodes, most=gpus), gpus)
        inside = improve(np.maximum(load, 1e-12)[None], packed, num_changes=0)
        found = np.take_along_axis(mine, inside.reshape(layers, -1), axis=1)
        ids[:, node * gpus : (node + 1) * gpus] = found.reshape(layers, gpus, -1)
    return Placement(ids_LGC=ids)


def partition(load_E: FloatArray, within_EE: FloatArray, pull_EN: FloatArray, num_nodes: int) -> IntArray:
    """The node of each expert, as many on every node, none busier than `SLACK` above the mean if it can be.

    First the exchanges that keep most pairs together, whatever the load; then, from the busiest node, those
    that lose fewest, until it is no busier than allowed.

    Shapes:  pull_EN [E, nodes], what an expert has with each node from other layers; returns [E].
    """
    nodes_1E, _ = largest_first(load_E[None], num_nodes)
    node: IntArray = nodes_1E[0]
    within = within_EE + within_EE.T
    np.fill_diagonal(within, 0.0)
    for _ in range(MAX_EXCHANGES):
        gain = _gains(node, within, pull_EN)
        best = int(gain.argmax())
        if gain.flat[best] <= 1e-9 * max(float(within.sum()), 1.0):
            break
        i, j = divmod(best, len(load_E))
        node[i], node[j] = node[j], node[i]
    limit = load_E.sum() / num_nodes * (1.0 + SLACK)
    for _ in range(MAX_EXCHANGES):
        load_N = np.bincount(node, weights=load_E, minlength=num_nodes)
        busiest = int(load_N.argmax())
        less = load_E[:, None] - load_E[None, :]  # what the node of i loses
        helps = (node == busiest)[:, None] & (less > 0) & (load_N[node][None, :] + less < load_N[busiest])
        if load_N[busiest] <= limit or not helps.any():
            break
        gain = np.where(helps, _gains(node, within, pull_EN), -np.inf)
        i, j = divmod(int(gain.argmax()), len(load_E))
        node[i], node[j] = node[j], node[i]
    return node


def _gains(node_E: IntArray, within_EE: FloatArray, pull_EN: FloatArray) -> FloatArray:
    """Pairs brought together, less those parted, when two experts change nodes: [E, E], 0 within a node."""
    reach = within_EE @ np.eye(pull_EN.shape[1])[node_E] + pull_EN  # what each expert has with each node
    gain = reach[:, node_E] - np.take_along_axis(reach, node_E[:, None], 1)  # expert i on the node of j
    found: FloatArray = gain + gain.T - 2.0 * within_EE
    found[node_E[:, None] == node_E[None, :]] = 0.0
    return found


def crossing_share(placement: Placement, pairs: Pairs, num_nodes: int) -> float:
    """Part of all pairs whose experts share no node.

    Where both have copies on one node, the pair can stay on it. Random placement has 1 - 1 / nodes.
    """
    ids = placement.ids_LGC
    layers, gpus, _ = ids.shape
    on_node = np.zeros((layers, num_nodes, 1 + int(ids.max())))
    for node in range(num_nodes):
        mine = ids[:, node * gpus // num_nodes : (node + 1) * gpus // num_nodes].reshape(layers, -1)
        np.put_along_axis(on_node[:, node], mine, 1.0, axis=1)
    apart = total = 0.0
    for (first, second), counts in pairs.items():
        counts = counts.copy()
        if first == second:
            np.fill_diagonal(counts, 0.0)
        together = (on_node[first].T @ on_node[second]) > 0
        apart += float(counts[~together].sum())
        total += float(counts.sum())
    return apart / total if total else 0.0


def pairs_of_routes(routes_LTK: IntArray, num_experts: int) -> dict[tuple[int, int], FloatArray]:
    """How many tokens chose both of two experts, per layer; entries below 0 are no choice.

    Shapes:  routes_LTK [L, T, K].
    """
    found: dict[tuple[int, int], FloatArray] = {}
    for layer, routes_TK in enumerate(routes_LTK):
        chosen = np.zeros((len(routes_TK), num_experts), dtype=np.float32)
        token, k = np.nonzero(routes_TK >= 0)
        chosen[token, routes_TK[token, k]] = 1.0
        found[layer, layer] = (chosen.T @ chosen).astype(np.float64)
        np.fill_diagonal(found[layer, layer], 0.0)
    return found
