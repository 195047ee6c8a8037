"""A plan as the deployment file that the engine reads: instances, grids, and which expert is where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from moesaic.cost.load import ExpertShares
from moesaic.cost.offload import layers_bytes
from moesaic.cost.term import Interval as Doubt
from moesaic.cost.term import step_seconds
from moesaic.hashing import digest
from moesaic.placement.pack import Slots, pack_apart, placed_slots
from moesaic.planner.plan import Plan, Pool
from moesaic.spec.deployment import (
    Deployment,
    ExpertTier,
    Grid,
    Instance,
    Interval,
    Layout,
    Prediction,
    TierPlan,
)
from moesaic.spec.experts import ExpertPlan, FloatArray, Phase
from moesaic.spec.layout_rules import Dispatcher
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import AUTO_BACKEND, Numerics, preset

PHASES: dict[str, frozenset[Phase]] = {
    "serve": frozenset({"prefill", "decode"}), "prefill": frozenset({"prefill"}),
    "decode": frozenset({"decode"}),
    "attention": frozenset({"decode"}),
}  # fmt: skip


def deployment_of(plan: Plan, model: ModelSpec, shares: ExpertShares | None) -> Deployment:
    """The deployment of a plan. `shares` is the recorded load that copies are placed by; None: all alike.

    Formats that this engine does not compute in are named in `numerics.backend`: a plan for another engine.
    Else the backend is left to the machine that runs it.
    """
    pools = list(plan.pools)
    instances = []
    while pools:
        pool = pools.pop(0)
        experts = pools.pop(0) if pool.role == "attention" else pool
        instances.append(_instance(pool, experts, model, shares))
    pace = step_seconds(plan.decode) if plan.tpot is None else plan.tpot
    slower, faster = (float(pace.value) / float(bound) for bound in (pace.high, pace.low))
    return Deployment(
        model_digest=digest(model), numerics=_numerics(plan.pools, model), instances=tuple(instances),
        predicted=Prediction(
            tokens_per_s=Interval(low=plan.tokens_per_s * slower, high=plan.tokens_per_s * faster),
            ttft_s=_interval(plan.ttft), tpot_s=None if plan.tpot is None else _interval(plan.tpot),
            source=plan.source,
        ),
    )  # fmt: skip


def _interval(doubt: Doubt) -> Interval:
    return Interval(low=float(doubt.low), high=float(doubt.high))


def _numerics(pools: Sequence[Pool], model: ModelSpec) -> Numerics:
    choice = pools[0].choice
    weights = choice.weights or model.weight_format
    is_own = {weights, choice.kv, choice.dispatch} <= {"bfloat16", "float32"}
    backend = (
        AUTO_BACKEND if is_own else f"external weights={weights} kv={choice.kv} dispatch={choice.dispatch}"
    )
    shards = max(max(pool.layout["tp"], pool.layout["expert_tp"]) for pool in pools)
    lanes = max(pool.layout["kvp"] for pool in pools)
    numerics = preset("portable", dtype=model.dtype, backend=backend)
    return numerics.with_leaves(
        matmul_shards=max(numerics.matmul_shards, 1 << (shards - 1).bit_length()),
        kv_lanes=max(numerics.kv_lanes, lanes),
    )


def _instance(pool: Pool, experts: Pool, model: ModelSpec, shares: ExpertShares | None) -> Instance:
    own, theirs = pool.layout, experts.layout
    num_attention = own["dp"] * own["kvp"] * own["tp"]
    num_experts = theirs["ep"] * theirs["expert_tp"]
    first = num_attention if pool is not experts else 0
    layout = Layout(
        attention=Grid(
            axes={"dp": own["dp"], "kvp": own["kvp"], "tp": own["tp"]}, ranks=tuple(range(num_attention))
        ),
        experts=Grid(
            axes={"ep": theirs["ep"], "tp": theirs["expert_tp"]},
            ranks=tuple(range(first, first + num_experts))
        ),
        dispatcher=_dispatcher(pool, experts), pipeline=own["pp"], num_micro_batches=own["num_micro_batches"],
    )  # fmt: skip
    return Instance(
        name="decode" if pool.role == "attention" else pool.role, phases=PHASES[pool.role], count=pool.count,
        machines={"attention": pool.cluster.node, "expert": experts.cluster.node},
        layout=layout,
        plan=expert_plan(model, theirs["ep"], theirs["expert_tp"], theirs["num_redundant"], shares),
        tiers=_tiers(pool, model),
    )  # fmt: skip


def _tiers(pool: Pool, model: ModelSpec) -> TierPlan:
    """Budgets of the tiers below the devices that hold experts."""
    held, each = pool.residency, layers_bytes(model, pool.choice.formats.experts)
    if held is None:
        return TierPlan()
    wanted: tuple[tuple[Literal["host", "disk"], int], ...] = (("host", held.host), ("disk", held.disk))
    return TierPlan(
        experts=tuple(
            ExpertTier(place=place, budget_bytes=int(count * each)) for place, count in wanted if count
        )
    )


def _dispatcher(pool: Pool, experts: Pool) -> Dispatcher:
    if pool is not experts:
        return "remote"
    if pool.devices == pool.layout["pp"]:
        return "local"
    return "exchange" if pool.layout["dp"] > 1 and pool.layout["ep"] > 1 else "gathered"


def expert_plan(
    model: ModelSpec, ep: int, expert_tp: int, num_redundant: int, shares: ExpertShares | None
) -> ExpertPlan:
    """Slots of every sparse layer: copies of the experts that are hottest in the load, each cut into
    slices."""
    ranks, ids, slices, parts = [], [], [], []
    for moe_idx, (_, moe) in enumerate(model.moe_layers):
        layer = None if shares is None else shares.of_layer(moe_idx)
        even = np.full(moe.num_experts, 1.0 / moe.num_experts)
        slots = _apart(placed_slots(even if layer is None else layer, ep, num_redundant), layer, ep)
        cut = np.tile(np.arange(expert_tp, dtype=np.int64), len(slots.rank))
        ranks.append(np.repeat(slots.rank, expert_tp) * expert_tp + cut)
        ids.append(np.repeat(slots.expert, expert_tp))
        slices.append(cut)
        parts.append(np.repeat(slots.share, expert_tp))
    return ExpertPlan(
        version=0, slot_rank=tuple(ranks), slot_expert=tuple(ids), slot_slice=tuple(slices),
        slot_share=tuple(parts)
    )  # fmt: skip


def _apart(slots: Slots, load_E: FloatArray | None, num_ranks: int) -> Slots:
    """The same copies, none on a rank with another of its expert, where it would take memory and no load.

    Slots that do not divide stay as they are: they are an estimate, and no engine holds them.
    """
    if load_E is None or len(slots.expert) % num_ranks:
        return slots
    row = np.sort(slots.expert.reshape(num_ranks, -1), axis=1)
    if not (row[:, 1:] == row[:, :-1]).any():
        return slots
    expert = pack_apart(load_E[None], np.sort(slots.expert)[None], num_ranks).reshape(-1)
    return slots._replace(expert=expert, share=1.0 / np.bincount(expert)[expert])
