"""From placements to `ExpertPlan`s and back, and from one plan to the next: moves, stages, a lost rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

from moesaic.errors import ConfigError
from moesaic.placement.slots import Placement, held
from moesaic.spec.experts import ExpertKey, ExpertPlan, FloatArray, IntArray


def plan_of(placement: Placement, share_LGC: FloatArray, *, version: int = 0) -> ExpertPlan:
    """The plan that a placement with shares is. Slots go rank by rank.

    Shapes:  share_LGC [L, G, C].
    """
    ids = placement.ids_LGC
    layers, gpus, room = ids.shape
    flat = ids.reshape(layers, -1)
    return ExpertPlan(
        version=version,
        slot_rank=tuple(np.repeat(np.arange(gpus, dtype=np.int64), room) for _ in range(layers)),
        slot_expert=tuple(flat // placement.num_slices),
        slot_slice=tuple(flat % placement.num_slices),
        slot_share=tuple(share_LGC.reshape(layers, -1)),
    )


def placement_of(plan: ExpertPlan) -> Placement:
    """The placement that a plan with equally many slots on every rank is.

    Raises: ConfigError when ranks or layers differ in slots, or when layers are cut differently.
    """
    rows: list[IntArray] = []
    num_slots = max((len(ranks) for ranks in plan.slot_rank), default=0)
    for name, ids in (("expert", plan.slot_expert), ("slice", plan.slot_slice)):
        most = max((int(row.max(initial=0)) for row in ids), default=0)
        if most >= max(num_slots, 1):
            raise ConfigError(f"the plan names {name} {most} in {num_slots} slots; ids are below that")
    num_slices = 1 + max((int(parts.max(initial=0)) for parts in plan.slot_slice), default=0)
    for layer, (ranks, experts, parts) in enumerate(
        zip(plan.slot_rank, plan.slot_expert, plan.slot_slice, strict=True)
    ):
        sizes = np.bincount(ranks, minlength=plan.num_ranks)
        if len(set(sizes.tolist())) != 1 or (rows and len(ranks) != rows[0].size):
            raise ConfigError(
                f"layer {layer} of the plan has {sizes.min()} to {sizes.max()} slots a rank; a balanced "
                "placement "
                "has as many on every rank and in every layer"
            )
        order = np.argsort(ranks, kind="stable")
        rows.append((experts * num_slices + parts)[order].reshape(plan.num_ranks, -1))
    if not rows:
        raise ConfigError("the plan has no layers")
    return Placement(ids_LGC=np.stack(rows), num_slices=num_slices)


def relabel(placement: Placement, current_LGC: IntArray) -> Placement:
    """The same sets of experts on the GPUs that hold most of them already.

    Which GPU has which set does not change any load, only what has to be fetched: an assignment problem a
    layer.

    Shapes:  current_LGC [L, G, any]; the same GPUs.
    """
    num_ids = 1 + int(max(placement.ids_LGC.max(), current_LGC.max()))
    new, old = held(placement.ids_LGC, num_ids), held(current_LGC, num_ids)
    found = np.empty_like(placement.ids_LGC)
    for layer, (wanted, there) in enumerate(zip(new, old, strict=True)):
        kept = there.astype(np.float32) @ wanted.T.astype(np.float32)  # [old GPU, new set]
        gpu, chosen = linear_sum_assignment(-kept)
        found[layer, gpu] = placement.ids_LGC[layer, chosen]
    return Placement(ids_LGC=found, num_slices=placement.num_slices)


def spread_over_nodes(placement: Placement, load_LE: FloatArray, num_nodes: int) -> Placement:
    """The same sets of experts, those with copies of one expert on different nodes where that can be.

    A token finds an expert on its own node more often then, and no load changes. Sets go one by one to the
    node with room that gains most.
    """
    ids, weights = placement.ids_LGC, placement.weights(load_LE)
    layers, gpus, _ = ids.shape
    room = gpus // num_nodes
    has = held(ids, weights.shape[1])
    value = has * weights[:, None, :]
    order = np.argsort(-(value * (has.sum(axis=1) > 1)[:, None]).sum(axis=2), axis=1, kind="stable")
    covered = np.zeros((layers, num_nodes, weights.shape[1]), dtype=np.bool_)
    used, at = np.zeros((layers, num_nodes), dtype=np.int64), np.arange(layers)
    found = np.empty_like(ids)
    for step in range(gpus):
        gpu = order[:, step]
        gain = (value[at, gpu][:, None] * ~covered).sum(axis=2)
        node = np.where(used < room, gain, -1.0).argmax(axis=1)
        found[at, node * room + used[at, node]] = ids[at, gpu]
        covered[at, node] |= has[at, gpu]
        used[at, node] += 1
    return Placement(ids_LGC=found, num_slices=placement.num_slices)


def local_share(placement: Placement, load_LE: FloatArray, num_nodes: int) -> float:
    """Part of all choices that find a copy on their token's own node, tokens being everywhere alike."""
    ids, weights = placement.ids_LGC, placement.weights(load_LE)
    layers = len(ids)
    on_node = held(ids.reshape(layers, num_nodes, -1), weights.shape[1]).mean(axis=1)
    return float((on_node * weights).sum() / weights.sum())


def fetched(before: ExpertPlan, after: ExpertPlan) -> tuple[frozenset[tuple[int, ExpertKey]], ...]:
    """What each layer's ranks must fetch: (rank, key) that are in the plan after and not before.

    Raises: ConfigError when the plans have different layers.
    """
    if len(before.slot_rank) != len(after.slot_rank):
        raise ConfigError(
            f"plans of different models: {len(before.slot_rank)} and {len(after.slot_rank)} sparse layers"
        )
    keys = [_held_keys(plan) for plan in (before, after)]
    return tuple(frozenset(new - old) for old, new in zip(*keys, strict=True))


def _held_keys(plan: ExpertPlan) -> list[set[tuple[int, ExpertKey]]]:
    arrays = zip(plan.slot_rank, plan.slot_expert, plan.slot_slice, strict=True)
    return [
        {
            (rank, ExpertKey(layer, expert, part))
            for rank, expert, part in zip(ranks.tolist(), experts.tolist(), parts.tolist(), strict=True)
        }
        for layer, (ranks, experts, parts) in enumerate(arrays)
    ]


def stages(
    plan: ExpertPlan, target: ExpertPlan, budget_bytes: int, expert_bytes: Mapping[int, int]
) -> Iterator[ExpertPlan]:
    """Plans from one to the other, each with whole layers exchanged and its version one higher.

    A stage fetches at most `budget_bytes` over all ranks, except that one layer is always done: layers are
    not split. Layers that need nothing fetched go with the first stage.

    Units:  expert_bytes is the size of an expert of each sparse layer, by its position.
    Raises: ConfigError when the plans have different layers, or the budget is not above 0.
    """
    if budget_bytes <= 0:
        raise ConfigError(f"budget_bytes must be above 0, got {budget_bytes}")
    sizes = [len(keys) * expert_bytes[layer] for layer, keys in enumerate(fetched(plan, target))]
    waiting = sorted(range(len(sizes)), key=lambda layer: (sizes[layer] > 0, layer))
    current = plan
    while waiting:
        chosen: list[int] = []
        spent = 0
        while waiting and (not chosen or spent + sizes[waiting[0]] <= budget_bytes):
            spent += sizes[waiting[0]]
            chosen.append(waiting.pop(0))
        current = _with_layers(current, target, frozenset(chosen))
        yield current


def _with_layers(plan: ExpertPlan, target: ExpertPlan, layers: frozenset[int]) -> ExpertPlan:
    sources = [target if layer in layers else plan for layer in range(len(plan.slot_rank))]
    return ExpertPlan(
        version=plan.version + 1,
        slot_rank=tuple(one.slot_rank[layer] for layer, one in enumerate(sources)),
        slot_expert=tuple(one.slot_expert[layer] for layer, one in enumerate(sources)),
        slot_slice=tuple(one.slot_slice[layer] for layer, one in enumerate(sources)),
        slot_share=tuple(one.slot_share[layer] for layer, one in enumerate(sources)),
    )


def without(plan: ExpertPlan, rank: int) -> tuple[ExpertPlan, tuple[ExpertKey, ...]]:
    """The plan without a rank's slots, and the keys that nobody serves then.

    The copies left of an expert share its tokens in the ratio they had.

    Raises: ConfigError when no layer has a slot on that rank.
    """
    if not any(bool((ranks == rank).any()) for ranks in plan.slot_rank):
        raise ConfigError(f"rank {rank} has no slot in the plan; its ranks are 0 to {plan.num_ranks - 1}")
    keep = [ranks != rank for ranks in plan.slot_rank]
    shares: list[FloatArray] = []
    orphans: list[ExpertKey] = []
    for layer, kept in enumerate(keep):
        experts, parts = plan.slot_expert[layer], plan.slot_slice[layer]
        cuts = 1 + int(parts.max(initial=0))
        keys = experts * cuts + parts
        lost = np.setdiff1d(keys, keys[kept])
        orphans += [ExpertKey(layer, key // cuts, key % cuts) for key in lost.tolist()]
        share, left = plan.slot_share[layer][kept].astype(np.float64), keys[kept]
        total = np.bincount(left, weights=share, minlength=1)[left]
        even = 1.0 / np.bincount(left, minlength=1)[left]
        shares.append(np.where(total > 0, share / np.where(total > 0, total, 1.0), even))
    found = ExpertPlan(
        version=plan.version + 1,
        slot_rank=tuple(one[kept] for one, kept in zip(plan.slot_rank, keep, strict=True)),
        slot_expert=tuple(one[kept] for one, kept in zip(plan.slot_expert, keep, strict=True)),
        slot_slice=tuple(one[kept] for one, kept in zip(plan.slot_slice, keep, strict=True)),
        slot_share=tuple(shares),
    )
    return found, tuple(orphans)
