"""Tokens that several ranks have at once: nothing is sent forth, or each rank sends a part; same bits always."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from fakes_ranks import random_copies
from ranks import run_ranks
from test_same_bits import Model, make_model, make_plan, num_different, on_one_rank
from torch import Tensor

from moesaic.experts.contract import RoutedExperts
from moesaic.kernels.matmul import noise
from moesaic.kernels.ops import choose
from moesaic.layers.linear import InnerLinear
from moesaic.parallel.dispatch.exchange import Exchange, Returns
from moesaic.parallel.dispatch.gathered import Gathered
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.gloo import GlooTransport
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.tensor import SplitRows, TensorRanks
from moesaic.parallel.transport import MemoryWires, Transport
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.numerics import DType, preset
from moesaic.spec.tensor_split import TensorSplit
from moesaic.steps import drive, drive_ready

TIMEOUT_S = 20.0
NUM_LEAVES = 4


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


def test_processes_add_leaves_and_gather_rows_as_one_rank_does() -> None:
    """Four ranks, two replicas of two: groups of a part of the ranks carry the sums."""
    model, plan = make_model("float32"), make_plan("random", 4)
    numerics = preset("portable", dtype="float32", matmul_shards=NUM_LEAVES)
    weight_DF, x_TF = noise((24, 64), seed=1), noise((9, 64))
    bounds = list(pairwise([0, 131, 260]))

    def compute(mesh: Mesh) -> tuple[int, int, int]:
        ops, part = choose(numerics, num_threads=1), mesh.part(2)
        of_replica = GlooTransport(part, num_lanes=TensorRanks.LANES)
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
