"""The sparse half of a layer over ranks, one native call on each: bits, plans, who is late, times."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from marks import needs_native
from moe_layers import (
    INNER,
    NUM_TOKENS,
    TOKENS_PER_RANK,
    WIDTH,
    Model,
    make_plan,
    make_tag,
    num_different,
)
from ranks import run_ranks
from test_fused_ranks import TIMEOUT_S, join, layout_of, native_model
from test_swap import next_plans
from torch import Tensor

from moesaic.errors import PeerLost
from moesaic.experts.contract import Routing
from moesaic.experts.router import Router
from moesaic.experts.store import ResidentStore
from moesaic.kernels.matmul import noise
from moesaic.kernels.ops import choose
from moesaic.layers.norm import RmsNorm
from moesaic.models.decoder import FfnHalf
from moesaic.models.dense_block import DenseBlock
from moesaic.models.moe_block import MoeBlock
from moesaic.parallel.dispatch.build import lane_sizes
from moesaic.parallel.dispatch.fused_ranks import FusedRanks
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.meter import Meter
from moesaic.parallel.moves import Placed
from moesaic.parallel.segment import Segment
from moesaic.parallel.shared_memory import SharedMemoryTransport, segments_in_one_process
from moesaic.parallel.transport import MemoryWires, Transport
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.model import DenseSpec
from moesaic.spec.numerics import DType
from moesaic.steps import Steps, drive, drive_ready

pytestmark = needs_native
EPS = 1e-5


def make_norm(model: Model, layer_idx: int) -> RmsNorm:
    rng = torch.Generator().manual_seed(layer_idx)
    weight_D = 1 + torch.randn(WIDTH, generator=rng) / 4
    return RmsNorm(weight_D.to(model.x_TD.dtype), EPS, model.ops)


def make_router(model: Model, layer_idx: int) -> Router:
    weight_ED = model.routers[layer_idx]._weight_ED
    assert weight_ED is not None
    return Router(dict(model.layers)[layer_idx], weight_ED, None, None, model.ops)


def make_shared(model: Model, layer_idx: int) -> DenseBlock:
    """A shared expert with a gate of its own."""
    shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER), "output_gate": (1, WIDTH)}
    weights = {
        name: noise(shape, model.x_TD.dtype, seed=10 * layer_idx + i)
        for i, (name, shape) in enumerate(shapes.items())
    }
    return DenseBlock(DenseSpec(width=INNER, has_output_gate=True), weights, model.ops)


@lru_cache
def in_parts(model: Model, has_shared: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The reference, one rank part by part: the stream after all layers, and each layer's choices."""
    local, chosen = Local(model.layers, model.numerics), []
    routed = Staged(tokens=local, experts=local, ffn=model.ffn())
    x_TD = model.x_TD
    for moe_idx, (layer_idx, _) in enumerate(model.layers):
        router = make_router(model, layer_idx)
        shared = make_shared(model, layer_idx) if has_shared else None
        block = MoeBlock(moe_idx=moe_idx, router=router, routed=routed, shared=shared)
        half = FfnHalf(layer_idx=layer_idx, norm=make_norm(model, layer_idx), ffn=block)

        def observe(_: int, routing: Routing) -> None:
            chosen.append(routing.experts_TK)

        [x_TD] = drive([half.forward(x_TD, make_tag(0), observe)], TIMEOUT_S)
    return x_TD, tuple(chosen)


class Rank:
    """One rank's sparse halves."""

    def __init__(
        self,
        model: Model,
        plan: ExpertPlan,
        end: Segment,
        *,
        moves: Transport | None = None,
        has_shared: bool = False,
    ) -> None:
        self.transport = SharedMemoryTransport(end)
        self.fused = FusedRanks(model.layers, model.numerics, plan, self.transport)
        self.meter = Meter()
        store = model.ffn(plan, end.rank)._store
        assert isinstance(store, ResidentStore)
        self.placed = Placed(plan, store, self.fused, [at for at, _ in model.layers], moves)
        self.halves = []
        self.chosen: list[Tensor] = []
        for moe_idx, (layer_idx, spec) in enumerate(model.layers):
            norm = make_norm(model, layer_idx)
            router = make_router(model, layer_idx).fused(layer_idx, norm.weight_D, norm.eps)
            assert router is not None
            layer = self.fused.layer(layer_idx, spec, store, model.ops, self.meter)
            shared = make_shared(model, layer_idx).fused(layer_idx) if has_shared else None
            half = layer.half(moe_idx, router, shared)
            assert half is not None
            self.halves.append(half)

    def forward(self, x_TD: Tensor, micro_batch: int = 0, step_id: int = 1) -> Steps[Tensor]:
        """As a decoder does it: one tag for all layers."""
        tag = replace(make_tag(0, micro_batch), step_id=step_id)
        for half in self.halves:
            x_TD = yield from half.forward(x_TD, tag, self._observe)
        return x_TD

    def _observe(self, moe_idx: int, routing: Routing) -> None:
        self.chosen.append(routing.experts_TK.clone())


def make_ranks(
    model: Model, plan: ExpertPlan, num_ranks: int, *, moves: bool = False, has_shared: bool = False
) -> list[Rank]:
    """In this thread."""
    sizes = lane_sizes(layout_of(num_ranks), model.layers, model.numerics, NUM_TOKENS)
    wires = MemoryWires(num_ranks)
    return [
        Rank(model, plan, end, moves=wires.transport(end.rank) if moves else None, has_shared=has_shared)
        for end in segments_in_one_process(num_ranks, sizes)
    ]


def steps_of(
    ranks: Sequence[Rank], model: Model, sizes: Sequence[int], step_id: int = 1
) -> list[Steps[Tensor]]:
    parts = model.x_TD.split(list(sizes))
    return [rank.forward(x_TD, step_id=step_id) for rank, x_TD in zip(ranks, parts, strict=True)]


# ---- in one thread ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "num_ranks"), [("contiguous", 2), ("random", 3), ("replicated", 4)])
def test_any_placement_gives_the_bits_of_the_parts_on_one_rank(
    dtype: DType, kind: str, num_ranks: int
) -> None:
    model = native_model(dtype, 6, format="int8-g32" if num_ranks == 3 else None)
    expected_TD, chosen = in_parts(model)
    ranks = make_ranks(model, make_plan(kind, num_ranks), num_ranks)
    y_TD = torch.cat(drive_ready(steps_of(ranks, model, TOKENS_PER_RANK[num_ranks])))
    assert num_different(y_TD, expected_TD) == 0
    for layer, expected_TK in enumerate(chosen):
        assert torch.equal(torch.cat([rank.chosen[layer] for rank in ranks]), expected_TK)
    counts = [rank.fused.lanes[0].counts for rank in ranks]
    assert [one.launches for one in counts] == [len(model.layers)] * num_ranks
    assert sum(one.jobs for one in counts) == sum(rank.meter.read().num_jobs for rank in ranks)
    assert sum(one.jobs for one in counts) == 2 * NUM_TOKENS * 6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_shared_expert_is_added_before_the_residual(dtype: DType) -> None:
    model = native_model(dtype, 6)
    ranks = make_ranks(model, make_plan("random", 3), 3, has_shared=True)
    y_TD = torch.cat(drive_ready(steps_of(ranks, model, TOKENS_PER_RANK[3])))
    assert num_different(y_TD, in_parts(model, True)[0]) == 0
    assert num_different(y_TD, in_parts(model)[0]) > y_TD.numel() // 2


def test_weights_on_the_input_travel_with_the_jobs() -> None:
    model = native_model("float32", 4, "input")
    y_TD = torch.cat(
        drive_ready(steps_of(make_ranks(model, make_plan("random", 3), 3), model, [131, 0, 129]))
    )
    assert num_different(y_TD, in_parts(model)[0]) == 0
    assert num_different(y_TD, in_parts(native_model("float32", 4))[0]) > y_TD.numel() // 2


def test_another_plan_before_every_step_takes_effect_and_moves_no_bit() -> None:
    model, plans = native_model("float32", 6), next_plans(3, 4)
    ranks = make_ranks(model, plans[0], 3, moves=True)
    for number, plan in enumerate(plans[1:]):
        sent = drive_ready([rank.placed.adopt(plan) for rank in ranks])
        assert sum(sent) > 0
        before = [rank.fused.lanes[0].counts.jobs for rank in ranks]
        y_TD = torch.cat(drive_ready(steps_of(ranks, model, TOKENS_PER_RANK[3], step_id=number)))
        assert num_different(y_TD, in_parts(model)[0]) == 0
        for at, rank in enumerate(ranks):
            has_slots = any((slots == at).any() for slots in plan.slot_rank)
            assert (rank.fused.lanes[0].counts.jobs > before[at]) == has_slots


def test_a_step_after_one_that_was_too_long_is_as_ever() -> None:
    """What cannot begin is refused before anything is sent; the next step of all ranks is undisturbed."""
    model = native_model("float32")
    ranks = make_ranks(model, make_plan("contiguous", 2), 2)
    with pytest.raises(ValueError, match=f"layer 1: {NUM_TOKENS + 1} tokens are more than the memory"):
        next(ranks[0].forward(torch.zeros(NUM_TOKENS + 1, WIDTH))).ready()
    assert ranks[0].transport.traffic.send_bytes.sum() == 0
    y_TD = torch.cat(drive_ready(steps_of(ranks, model, [130, 130])))
    assert num_different(y_TD, in_parts(model)[0]) == 0


def test_who_is_late_is_named_with_layer_and_stage() -> None:
    model, plan = native_model("float32"), make_plan("contiguous", 2)
    present, _ = steps_of(make_ranks(model, plan, 2), model, [130, 130])
    with pytest.raises(PeerLost, match=r"rank 1 did not answer .*\(layer 1, stage send\)"):
        drive([present], 0.2)
    present, slow = steps_of(make_ranks(model, plan, 2), model, [130, 130])
    assert not next(slow).ready()
    with pytest.raises(PeerLost, match=r"rank 1 did not answer .*\(layer 1, stage collect\)"):
        drive([present], 0.2)


# ---- over processes ----


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(2, 2), (3, 1)])
def test_processes_give_the_bits_of_the_parts_step_after_step(num_ranks: int, num_threads: int) -> None:
    """Steps of two micro-batches: ranks come late by turns, and with fewer rows or none."""
    model, plan = native_model("bfloat16"), make_plan("replicated", num_ranks)
    bounds = list(pairwise([0, *np.cumsum(TOKENS_PER_RANK[num_ranks]).tolist()]))
    expected_TD, _ = in_parts(model)

    def compute(mesh: Mesh) -> tuple[int, int]:
        own = replace(model, ops=choose(model.numerics, num_threads=num_threads))
        rank = Rank(own, plan, join(mesh, own, 2))
        rows, wrong, draw = slice(*bounds[mesh.rank]), 0, random.Random(mesh.rank)
        for step_id in range(6):
            x_TD, part_TD = (one[rows][:: step_id % 3 + 1] for one in (model.x_TD, expected_TD))
            time.sleep(draw.choice([0.0, 0.0, 0.003]))
            parts = [rank.forward(x, at, step_id) for at, x in enumerate(x_TD.tensor_split(2))]
            wrong += num_different(torch.cat(drive(parts, TIMEOUT_S)), part_TD)
        return wrong, sum(lane.counts.launches for lane in rank.fused.lanes)

    assert run_ranks(num_ranks, compute) == [(0, 6 * 2 * 2)] * num_ranks


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_late_rank_makes_the_others_wait_and_not_itself(num_threads: int) -> None:
    model, plan, late_s = native_model("float32"), make_plan("contiguous", 2), 0.3

    def compute(mesh: Mesh) -> tuple[float, float, float]:
        own = replace(model, ops=choose(model.numerics, num_threads=num_threads))
        rank = Rank(own, plan, join(mesh, own))
        drive([rank.forward(model.x_TD[:100])], TIMEOUT_S)
        mesh.meet("both are warm")
        before, began_s = rank.meter.read(), time.perf_counter()
        if mesh.rank == 1:
            time.sleep(late_s)
        drive([rank.forward(model.x_TD[:100], step_id=2)], TIMEOUT_S)
        spent_s, after = time.perf_counter() - began_s, rank.meter.read()
        return spent_s, after.wait_s - before.wait_s, after.transfer_s - before.transfer_s

    (spent_s, wait_s, transfer_s), (late_spent_s, late_wait_s, late_transfer_s) = run_ranks(2, compute)
    assert late_s / 2 < wait_s < spent_s
    assert late_wait_s < late_spent_s - late_s + 0.01
    assert late_wait_s < wait_s / 2
    for sent_s, of_s in ((transfer_s, spent_s - wait_s), (late_transfer_s, late_spent_s - late_s)):
        assert 0.0 < sent_s < of_s
