"""Where experts are may change while a model runs, and no bit does: any choice of copies, any next plan."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from moe_layers import (
    NUM_EXPERTS,
    TOKENS_PER_RANK,
    Model,
    World,
    make_model,
    make_plan,
    make_side,
    num_different,
    on_one_rank,
    rank_steps,
)
from ranks import run_ranks
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from moesaic.errors import PeerLost
from moesaic.experts.blob import BlobLayout
from moesaic.experts.contract import Tag
from moesaic.experts.ffn import LoopFfn
from moesaic.experts.store import ExpertLoader, held_experts
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.dispatch.two_level import TwoLevel
from moesaic.parallel.gloo import GlooTransport
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.moves import PeerMoves, Placed
from moesaic.parallel.transport import MemoryWires, Transport
from moesaic.placement.choice import REPLICA_CHOICES, ReplicaChoice
from moesaic.placement.plan import fetched
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.numerics import DType
from moesaic.steps import Steps, drive, drive_ready

TIMEOUT_S = 20.0


@pytest.mark.parametrize("choice", REPLICA_CHOICES)
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_every_choice_among_copies_gives_the_bits_of_one_rank(
    choice: ReplicaChoice, ranks_per_node: int | None
) -> None:
    """Also when the ranks know of different loads: who sends decides, and says where."""
    model, plan, wires = make_model("float32", 6), make_plan("replicated", 4), MemoryWires(4)
    nodes = {} if ranks_per_node is None else {"ranks_per_node": ranks_per_node}
    kind: Any = Exchange if ranks_per_node is None else TwoLevel
    sides = []
    for rank in range(4):
        transport = wires.transport(rank)
        side = kind(model.layers, model.numerics, plan, transport, replica_choice=choice, **nodes)
        side.observe([np.random.default_rng(rank).integers(0, 99, NUM_EXPERTS) for _ in model.layers])
        sides.append(side)
    steps = rank_steps(model, World(wires=wires, sides=sides, plan=plan), TOKENS_PER_RANK[4])
    y_TD = torch.cat(drive_ready([one for (one,) in steps]))
    assert num_different(y_TD, on_one_rank(model)) == 0


# ---- one plan after another ----


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rank:
    """One rank that keeps its experts from step to step, whatever plan they follow."""

    model: Model
    placed: Placed
    routed: Staged

    def step(self, x_TD: Tensor, number: int) -> Steps[Tensor]:
        for layer_idx, _ in self.model.layers:
            tag = Tag(
                epoch=0,
                plan_version=self.placed.plan.version,
                step_id=number,
                micro_batch=0,
                chunk=0,
                layer_idx=layer_idx,
            )
            routing = self.model.routers[layer_idx](x_TD)
            x_TD = x_TD + (yield from self.routed.forward(x_TD, routing, tag, None))
        return x_TD


def make_rank(
    model: Model, plan: ExpertPlan, wires: Transport, moves: Transport, ranks_per_node: int | None = None
) -> Rank:
    loader = ExpertLoader(model.layers, model.numerics.formats, plan=plan, rank=wires.rank)
    for (layer_idx, logical_id, part), tensor in model.parts.items():
        loader.put(layer_idx, logical_id, part, tensor)
    store, side = loader.finish(), make_side(model, plan, wires, "subtrees", None, ranks_per_node)
    layer_idxs = [layer_idx for layer_idx, _ in model.layers]
    return Rank(
        model=model,
        placed=Placed(plan, store, side, layer_idxs, moves),
        routed=Staged(tokens=side, experts=side, ffn=LoopFfn(model.layers[0][1], store, model.ops)),
    )


def next_plans(num_ranks: int, count: int) -> list[ExpertPlan]:
    """Legal plans that have little in common, of rising version."""
    kinds = ("random", "replicated", "contiguous")
    return [replace(make_plan(kinds[seed % 3], num_ranks, seed=seed), version=seed) for seed in range(count)]


@pytest.mark.parametrize(
    ("dtype", "num_ranks", "ranks_per_node"),
    [
        ("float32", 2, None),
        ("bfloat16", 3, None),
        pytest.param("float32", 4, None, marks=pytest.mark.long),
        ("float32", 4, 2),
    ],
)
def test_another_plan_before_every_step_gives_the_bits_of_one_rank(
    dtype: DType, num_ranks: int, ranks_per_node: int | None
) -> None:
    model, plans = make_model(dtype, 6), next_plans(num_ranks, 5)
    wires, moves = MemoryWires(num_ranks), MemoryWires(num_ranks)
    ranks = [
        make_rank(model, plans[0], wires.transport(i), moves.transport(i), ranks_per_node)
        for i in range(num_ranks)
    ]
    for number, plan in enumerate(plans[1:]):
        sent = drive_ready([rank.placed.adopt(plan) for rank in ranks])
        fetched_bytes = sum(len(keys) for keys in fetched(plans[number], plan)) * expert_bytes(model)
        assert sum(sent) == fetched_bytes > 0
        parts = model.x_TD.split(TOKENS_PER_RANK[num_ranks])
        steps = [rank.step(x_TD, number) for rank, x_TD in zip(ranks, parts, strict=True)]
        assert num_different(torch.cat(drive_ready(steps)), on_one_rank(model)) == 0
        for i, rank in enumerate(ranks):
            for layer_idx, ids in held_experts(model.layers, plan, i).items():
                assert rank.placed.store.held(layer_idx) == ids
    assert not moves.boxes
    assert sum(rank.placed.store.weight_bytes for rank in ranks) == held_bytes(model, plans[-1])


def expert_bytes(model: Model) -> int:
    return BlobLayout.of(model.layers[0][1], model.numerics.formats.default.weight).num_bytes


def held_bytes(model: Model, plan: ExpertPlan) -> int:
    """Of all ranks: each distinct expert of a rank once."""
    pairs = zip(plan.slot_rank, plan.slot_expert, strict=True)
    return sum(len(set(zip(a.tolist(), b.tolist(), strict=True))) for a, b in pairs) * expert_bytes(model)


def test_blobs_that_went_astray_are_seen() -> None:
    """The negative control: an expert that arrives with a byte changed gives other bits."""
    model, plans = make_model("float32", 6), next_plans(2, 2)
    wires, moves = MemoryWires(2), MemoryWires(2)
    ranks = [make_rank(model, plans[0], wires.transport(i), moves.transport(i)) for i in range(2)]

    class Damaged(PeerMoves):
        def layer(self, *options: Any) -> Steps[Mapping[int, Tensor]]:
            found = yield from super().layer(*options)
            return {i: blob.roll(64) for i, blob in found.items()}

    layer_idxs = [layer_idx for layer_idx, _ in model.layers]
    drive_ready([
        rank.placed.store.adopt(plans[1], Damaged(plans[0], plans[1], layer_idxs, moves.transport(i)))
        for i, rank in enumerate(ranks)
    ])  # fmt: skip
    for rank in ranks:
        rank.placed._follower.adopt(plans[1])
    parts = model.x_TD.split(TOKENS_PER_RANK[2])
    steps = [rank.step(x_TD, 0) for rank, x_TD in zip(ranks, parts, strict=True)]
    assert num_different(torch.cat(drive_ready(steps)), on_one_rank(model)) > 0


def test_experts_that_left_give_their_memory_back() -> None:
    model = make_model("float32", 6)
    here, there = (
        replace(contiguous_plan((NUM_EXPERTS,) * 2, 1), slot_rank=(np.full(NUM_EXPERTS, rank),) * 2)
        for rank in (0, 1)
    )
    wires, moves = MemoryWires(2), MemoryWires(2)
    ranks = [make_rank(model, here, wires.transport(i), moves.transport(i)) for i in range(2)]
    arenas = [StorageWeakRef(a.data.untyped_storage()) for a in ranks[0].placed.store._arenas.values()]
    assert not any(arena.expired() for arena in arenas)
    drive_ready([rank.placed.adopt(there) for rank in ranks])
    assert [rank.placed.store.weight_bytes for rank in ranks] == [0, held_bytes(model, here)]
    assert all(arena.expired() for arena in arenas)


def test_processes_swap_plans_between_steps() -> None:
    model, plans = make_model("float32", 6), next_plans(2, 3)
    bounds = list(pairwise([0, *np.cumsum(TOKENS_PER_RANK[2]).tolist()]))
    expected = on_one_rank(model)

    def compute(mesh: Mesh) -> list[int]:
        wires = GlooTransport(mesh, num_lanes=2)
        rank = make_rank(model, plans[0], wires, GlooTransport(mesh, num_lanes=1, name="moves"))
        rows, found = slice(*bounds[mesh.rank]), []
        for number, plan in enumerate(plans):
            drive([rank.placed.adopt(plan)], TIMEOUT_S)
            (y_TD,) = drive([rank.step(model.x_TD[rows], number)], TIMEOUT_S)
            found.append(num_different(y_TD, expected[rows]))
        return found

    assert run_ranks(2, compute) == [[0, 0, 0]] * 2


def test_a_rank_that_dies_during_a_swap_is_named_with_the_layer() -> None:
    model, plans = make_model("float32", 6), next_plans(2, 2)

    def compute(mesh: Mesh) -> None:
        wires = GlooTransport(mesh, num_lanes=2)
        rank = make_rank(model, plans[0], wires, GlooTransport(mesh, num_lanes=1, name="moves"))
        if mesh.rank == 1:
            os._exit(7)
        drive([rank.placed.adopt(plans[1])], TIMEOUT_S)

    error, _ = run_ranks(2, compute, dying=(1,))
    assert isinstance(error, PeerLost)
    assert (error.rank, error.layer_idx, error.stage) == (1, model.layers[0][0], "move")


def test_a_rank_that_is_silent_during_a_swap_is_named_in_time() -> None:
    model, plans = make_model("float32", 6), next_plans(2, 2)
    wires, moves = MemoryWires(2), MemoryWires(2)
    rank = make_rank(model, plans[0], wires.transport(0), moves.transport(0))
    with pytest.raises(PeerLost, match=r"rank 1 did not answer within 0\.1 s .*stage move"):
        drive([rank.placed.adopt(plans[1])], 0.1)
