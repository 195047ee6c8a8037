"""Tokens that several ranks have at once: nothing is sent forth, or each rank sends a part; same bits."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fakes_ranks import random_copies
from marks import needs_native
from moe_layers import (
    NUM_TOKENS,
    WIDTH,
    Model,
    make_model,
    make_plan,
    make_tag,
    num_different,
    on_one_rank,
)
from ranks import run_ranks, segments_left
from torch import Tensor

from moesaic.engine.layout import data_parallel
from moesaic.errors import CapacityError, PeerLost
from moesaic.experts.contract import RoutedExperts, Routing, Tag
from moesaic.kernels.matmul import noise
from moesaic.kernels.ops import choose
from moesaic.layers.linear import InnerLinear
from moesaic.parallel import segment
from moesaic.parallel.dispatch.build import connect, connect_replica
from moesaic.parallel.dispatch.exchange import Exchange, Returns
from moesaic.parallel.dispatch.gathered import Gathered
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.gloo import GlooTransport
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.segment import LaneSize
from moesaic.parallel.shared_memory import SharedMemoryTransport, segments_in_one_process
from moesaic.parallel.tensor import SplitRows, TensorRanks, largest_messages
from moesaic.parallel.transport import MemoryWires, Transport
from moesaic.spec.deployment import Layout
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.layout_rules import Dispatcher, TpWires
from moesaic.spec.numerics import DType, preset
from moesaic.spec.tensor_split import TensorSplit
from moesaic.steps import Steps, drive, drive_ready

TIMEOUT_S = 20.0
NUM_LEAVES = 4


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    assert not segments_left()


def gathered(model: Model, plan: ExpertPlan, wires: Transport, returns: Returns) -> RoutedExperts:
    rng = np.random.default_rng(0)
    slots = [random_copies(plan, at, rng) for at in range(len(model.layers))]
    side = Gathered(model.layers, model.numerics, plan, wires, returns=returns, slots=slots)
    return Staged(tokens=side, experts=side, ffn=model.ffn(plan, wires.rank), num_chunks=2)


def split_rows(model: Model, plan: ExpertPlan, wires: Transport, of_replica: Transport) -> RoutedExperts:
    side = Exchange(model.layers, model.numerics, plan, wires)
    staged = Staged(tokens=side, experts=side, ffn=model.ffn(plan, wires.rank))
    split = TensorSplit(rank=of_replica.rank, size=of_replica.num_ranks, num_leaves=NUM_LEAVES)
    return SplitRows(staged, TensorRanks(of_replica, split), model.x_TD.dtype)


@pytest.mark.parametrize("returns", ["choices", "subtrees"])
@pytest.mark.parametrize(
    ("dtype", "kind", "num_ranks"),
    [("float32", "replicated", 2), ("float32", "random", 3), ("bfloat16", "replicated", 4)],
)
def test_every_rank_gets_all_rows_right_and_sends_none(
    dtype: DType, kind: str, num_ranks: int, returns: Returns
) -> None:
    model, plan, wires = make_model(dtype, 6), make_plan(kind, num_ranks), MemoryWires(num_ranks)
    ends = [wires.transport(rank) for rank in range(num_ranks)]
    parts = model.x_TD.tensor_split(2)
    steps = [
        model.forward(gathered(model, plan, end, returns), part, at)
        for end in ends
        for at, part in enumerate(parts)
    ]
    done = drive_ready(steps)
    for rank in range(num_ranks):
        assert num_different(torch.cat(done[2 * rank : 2 * rank + 2]), on_one_rank(model)) == 0
    assert not wires.boxes
    assert sum(int(end.traffic.send_bytes.sum()) for end in ends) == 0


@pytest.mark.parametrize(
    ("num_ranks", "tp", "rows"), [(2, 2, [260]), (4, 2, [131, 129]), (4, 2, [0, 1]), (3, 3, [260])]
)
def test_ranks_of_a_replica_send_each_a_part_of_its_rows(num_ranks: int, tp: int, rows: list[int]) -> None:
    model, plan = make_model("float32"), make_plan("replicated", num_ranks)
    wires, replicas = MemoryWires(num_ranks), [MemoryWires(tp) for _ in rows]
    starts = [0, *np.cumsum(rows).tolist()]
    steps = []
    for rank in range(num_ranks):
        replica, part = divmod(rank, tp)
        routed = split_rows(model, plan, wires.transport(rank), replicas[replica].transport(part))
        steps.append(model.forward(routed, model.x_TD[starts[replica] : starts[replica + 1]]))
    for rank, found in enumerate(drive_ready(steps)):
        replica = rank // tp
        expected = on_one_rank(model)[starts[replica] : starts[replica + 1]]
        assert num_different(found, expected) == 0


def layout_of(num_ranks: int, tp: int, dispatcher: Dispatcher, returns: Returns = "choices") -> Layout:
    found = data_parallel(num_ranks, tp=tp, dispatcher=dispatcher, returns=returns, num_micro_batches=2)
    return replace(found, is_fused=False)


def connected(
    mesh: Mesh, tp: int, dispatcher: Dispatcher, wires: TpWires, num_tokens: int = NUM_TOKENS
) -> Transport:
    """The wires to the other ranks of a replica, as an engine's rank makes them."""
    model, layout = make_model("float32"), layout_of(mesh.num_ranks, tp, dispatcher)
    spec: Any = SimpleNamespace(hidden=WIDTH, moe_layers=model.layers)
    split = TensorSplit(rank=mesh.rank % tp, size=tp, num_leaves=NUM_LEAVES)
    return connect_replica(layout, mesh, spec, model.numerics, num_tokens, split=split, wires=wires)


@pytest.mark.parametrize("wires", ["gloo", pytest.param("shared_memory", marks=needs_native)])
def test_processes_add_leaves_and_gather_rows_as_one_rank_does(wires: TpWires) -> None:
    """Four ranks, two replicas of two: groups of a part of the ranks carry the sums."""
    model, plan = make_model("float32"), make_plan("random", 4)
    numerics = preset("portable", dtype="float32", matmul_shards=NUM_LEAVES)
    weight_DF, x_TF = noise((24, 64), seed=1), noise((9, 64))
    bounds = list(pairwise([0, 131, 260]))

    def compute(mesh: Mesh) -> tuple[int, int, int]:
        ops, part = choose(numerics, num_threads=1), mesh.part(2)
        of_replica = connected(mesh, 2, "exchange", wires)
        assert isinstance(of_replica, SharedMemoryTransport) == (wires == "shared_memory")
        split = TensorSplit(rank=part.rank, size=2, num_leaves=NUM_LEAVES)
        columns = split.part(64)
        mine = slice(columns.start, columns.stop)
        linear = InnerLinear(
            weight_DF[:, mine].contiguous(), None, ops, TensorRanks(of_replica, split).sums(0)
        )
        (y_TD,) = drive([linear.forward(x_TF[:, mine])], TIMEOUT_S)
        rows = slice(*bounds[mesh.rank // 2])
        routed = split_rows(model, plan, GlooTransport(mesh, num_lanes=2), of_replica)
        (z_TD,) = drive([model.forward(routed, model.x_TD[rows])], TIMEOUT_S)
        wrong = num_different(z_TD, on_one_rank(model)[rows])
        return num_different(y_TD, ops.linear_inner(x_TF, weight_DF)), wrong, part.first_rank

    assert run_ranks(4, compute) == [(0, 0, 0), (0, 0, 0), (0, 0, 2), (0, 0, 2)]


@needs_native
@pytest.mark.parametrize(("num_ranks", "returns"), [(2, "choices"), (3, "subtrees")])
def test_processes_gather_over_memory_that_they_share(num_ranks: int, returns: Returns) -> None:
    model, plan = make_model("float32", 6), make_plan("replicated", num_ranks)
    layout = layout_of(num_ranks, num_ranks, "gathered", returns)
    expected = on_one_rank(model)

    def compute(mesh: Mesh) -> int:
        wires = connect(layout, mesh, model.layers, model.numerics, NUM_TOKENS, tp_wires="shared_memory")
        assert isinstance(wires, SharedMemoryTransport)
        routed = gathered(model, plan, wires, returns)
        parts = model.x_TD.tensor_split(2)
        done = drive([model.forward(routed, part, at) for at, part in enumerate(parts)], TIMEOUT_S)
        return num_different(torch.cat(done), expected)

    assert run_ranks(num_ranks, compute) == [0] * num_ranks


@needs_native
def test_a_rank_of_a_replica_that_is_killed_is_named_by_its_number_among_all() -> None:
    def add(mesh: Mesh) -> None:
        wires = connected(mesh, 2, "exchange", "shared_memory")
        sums = TensorRanks(wires, TensorSplit(rank=mesh.rank % 2, size=2, num_leaves=2)).sums(7)
        for turn in range(2):
            if turn == 1 and mesh.rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            drive([sums.join([torch.ones(3, WIDTH)], 1)], TIMEOUT_S)

    alive, again, error, _ = run_ranks(4, add, dying=(3,))
    assert (alive, again) == (None, None)
    assert isinstance(error, PeerLost)
    assert (error.rank, error.layer_idx, error.stage) == (3, 7, "sum")
    assert error.seconds < TIMEOUT_S / 4


@needs_native
def test_sums_that_shared_memory_does_not_hold_are_refused_on_every_rank() -> None:
    """Also on those of the replica that had room."""

    def meet(mesh: Mesh) -> None:
        connected(mesh, 2, "exchange", "shared_memory", 10**12 if mesh.rank < 2 else 1)

    for error in run_ranks(4, meet):
        assert isinstance(error, CapacityError)
        assert "2 ranks need" in str(error)
        assert "or ask for --tp-wires gloo" in str(error)


@needs_native
@pytest.mark.parametrize("size", [2, 3])
def test_lanes_hold_the_sums_and_rows_of_the_largest_batch_and_no_more(size: int) -> None:
    """Of three ranks with eight leaves one has two subtrees."""
    model = make_model("bfloat16")
    spec: Any = SimpleNamespace(hidden=WIDTH, moe_layers=model.layers)
    splits = [TensorSplit(rank=rank, size=size, num_leaves=8) for rank in range(size)]
    exact = largest_messages(spec, model.numerics, splits[0], 7)

    def add(*less: int) -> list[Tensor]:
        lanes = [
            LaneSize(message_bytes=lane.message_bytes - few) for lane, few in zip(exact, less, strict=True)
        ]
        ends = [SharedMemoryTransport(one) for one in segments_in_one_process(size, lanes)]
        ranks = [TensorRanks(end, split) for end, split in zip(ends, splits, strict=True)]
        leaf_TD = torch.ones(7, WIDTH)
        roots = [[one.num_leaves * leaf_TD for one in each.subtrees[at]] for at, each in enumerate(ranks)]
        sums = drive_ready([each.sums(1).join(own, 0) for each, own in zip(ranks, roots, strict=True)])
        rows = [SplitRows(Untouched(), each, torch.bfloat16) for each in ranks]
        routing = Routing(experts_TK=torch.zeros(7, 1, dtype=torch.int64), weights_TK=torch.ones(7, 1))
        x_TD = model.x_TD[:7]
        found = drive_ready([one.forward(x_TD, routing, make_tag(1), None) for one in rows])
        assert all(torch.equal(one, x_TD) for one in found)
        return sums

    assert all(torch.equal(one, torch.full((7, WIDTH), 8.0)) for one in add(0, 0))
    for less in ((segment.LINE, 0), (0, segment.LINE)):
        with pytest.raises(ValueError, match="inboxes have"):
            add(*less)


class Untouched(RoutedExperts):
    def forward(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Steps[Tensor]:
        yield from ()
        return x_TD


def different_rows(found_TD: Tensor, expected_TD: Tensor) -> int:
    return int((found_TD != expected_TD).any(dim=1).sum())


def test_one_partial_sum_per_rank_is_caught_here_too() -> None:
    model, plan, wires = make_model("float32", 6), make_plan("random", 3), MemoryWires(3)
    wrong = replace(model, numerics=replace(model.numerics, combine="per_rank"))
    steps = [
        wrong.forward(gathered(wrong, plan, wires.transport(rank), "choices"), model.x_TD)
        for rank in range(3)
    ]
    assert all(different_rows(found, on_one_rank(model)) > 100 for found in drive_ready(steps))
