"""Experts over several ranks in one native call each: the bits of `Staged` on one rank, whoever is late."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from fakes_ranks import drive_shuffled, in_turns, random_copies
from marks import needs_native
from moe_layers import (
    NUM_EXPERTS,
    NUM_TOKENS,
    TOKENS_PER_RANK,
    Model,
    make_model,
    make_plan,
    make_tag,
    num_different,
    on_one_rank,
)
from ranks import run_ranks, segments_left

from moesaic.errors import ConfigError, PeerLost
from moesaic.experts.contract import Routing
from moesaic.experts.store import ResidentStore
from moesaic.kernels import native
from moesaic.kernels.ops import choose
from moesaic.parallel.dispatch.build import lane_sizes, make_dispatcher
from moesaic.parallel.dispatch.fused_ranks import FusedRanks
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.segment import Segment, SegmentShape
from moesaic.parallel.shared_memory import SharedMemoryTransport, segments_in_one_process
from moesaic.spec.deployment import Grid, Layout
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.numerics import DType, Format, preset
from moesaic.steps import Steps, drive, drive_ready

pytestmark = needs_native
TIMEOUT_S = 20.0


@lru_cache
def native_model(
    dtype: DType,
    num_choices: int = 6,
    weight_on: Literal["output", "input"] = "output",
    format: Format | None = None,
) -> Model:
    """The model of the other dispatchers' tests, its experts by native kernels."""
    numerics = preset("portable", dtype=dtype, backend=f"native/{native.levels()[-1]}", format=format)
    model = make_model(dtype, num_choices, weight_on)
    return replace(model, numerics=numerics, ops=choose(numerics, num_threads=1))


def layout_of(num_ranks: int, num_micro_batches: int = 1) -> Layout:
    ranks = tuple(range(num_ranks))
    return Layout(
        attention=Grid(axes={"dp": num_ranks}, ranks=ranks),
        experts=Grid(axes={"ep": num_ranks}, ranks=ranks),
        dispatcher="shared_memory",
        num_micro_batches=num_micro_batches,
        is_fused=True,
    )


class Rank:
    """One rank's layers."""

    def __init__(self, model: Model, plan: ExpertPlan, end: Segment, slots: Any = None) -> None:
        self.model = model
        self.transport = SharedMemoryTransport(end)
        self.fused = FusedRanks(model.layers, model.numerics, plan, self.transport, slots=slots)
        store = model.ffn(plan, end.rank)._store
        assert isinstance(store, ResidentStore)
        self.layers = {at: self.fused.layer(at, spec, store, model.ops) for at, spec in model.layers}

    def forward(self, x_TD: torch.Tensor, micro_batch: int = 0, step_id: int = 1) -> Steps[torch.Tensor]:
        for at, layer in self.layers.items():
            tag = replace(make_tag(at, micro_batch), step_id=step_id)
            x_TD = x_TD + (yield from layer.forward(x_TD, self.model.routers[at](x_TD), tag, None))
        return x_TD


def make_ranks(
    model: Model, plan: ExpertPlan, num_ranks: int, *, num_micro_batches: int = 1, slots: Any = None
) -> list[Rank]:
    """In this thread."""
    sizes = lane_sizes(layout_of(num_ranks, num_micro_batches), model.layers, model.numerics, NUM_TOKENS)
    return [Rank(model, plan, end, slots) for end in segments_in_one_process(num_ranks, sizes)]


def steps_of(ranks: Sequence[Rank], sizes: Sequence[int]) -> list[Steps[torch.Tensor]]:
    rows = ranks[0].model.x_TD.split(list(sizes))
    return [rank.forward(x_TD) for rank, x_TD in zip(ranks, rows, strict=True)]


# ---- in one thread ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_choices", [1, 6, 8])
@pytest.mark.parametrize(("kind", "num_ranks"), [("contiguous", 2), ("random", 3), ("replicated", 4)])
def test_any_placement_gives_the_bits_of_one_rank(
    dtype: DType, num_choices: int, kind: str, num_ranks: int
) -> None:
    model, plan = native_model(dtype, num_choices), make_plan(kind, num_ranks)
    rng = np.random.default_rng(0)
    slots = [random_copies(plan, at, rng) for at in range(2)]
    ranks = make_ranks(model, plan, num_ranks, slots=slots)
    y_TD = torch.cat(drive_ready(steps_of(ranks, TOKENS_PER_RANK[num_ranks])))
    assert num_different(y_TD, on_one_rank(model)) == 0
    assert [rank.fused.lanes[0].counts.launches for rank in ranks] == [len(model.layers)] * num_ranks
    assert sum(rank.fused.lanes[0].counts.jobs for rank in ranks) == 2 * NUM_TOKENS * num_choices


@pytest.mark.parametrize("format", ["int8-g32", "int4-g32"])
def test_integer_weights_give_the_bits_of_one_rank(format: Format) -> None:
    model, plan = native_model("bfloat16", 6, format=format), make_plan("replicated", 3)
    y_TD = torch.cat(drive_ready(steps_of(make_ranks(model, plan, 3), TOKENS_PER_RANK[3])))
    assert num_different(y_TD, on_one_rank(model)) == 0


def test_weights_on_the_input_travel_with_the_jobs() -> None:
    model, plan = native_model("float32", 4, "input"), make_plan("random", 3)
    y_TD = torch.cat(drive_ready(steps_of(make_ranks(model, plan, 3), TOKENS_PER_RANK[3])))
    assert num_different(y_TD, on_one_rank(model)) == 0
    assert num_different(y_TD, on_one_rank(native_model("float32", 4))) > y_TD.numel() // 2


@pytest.mark.parametrize("seed", [5, 6])
def test_micro_batches_in_any_order_give_the_bits_of_one_batch(seed: int) -> None:
    model, plan = native_model("float32"), make_plan("replicated", 4)
    ranks = make_ranks(model, plan, 4, num_micro_batches=2)
    of_ranks = []
    for rank, x_TD in zip(ranks, model.x_TD.split(TOKENS_PER_RANK[4]), strict=True):
        parts = x_TD.tensor_split(2)
        of_ranks.append(in_turns([rank.forward(part, at) for at, part in enumerate(parts)]))
    parts = [one for of_rank in drive_shuffled(of_ranks, seed) for one in of_rank]
    assert num_different(torch.cat(parts), on_one_rank(model)) == 0


def test_a_slow_rank_delays_its_own_rows_only() -> None:
    """Ranks 0 and 1 hold all experts: their tokens are done before rank 2 has begun, but not their turn."""
    model, plan = native_model("float32"), make_plan("contiguous", 2)
    ranks = make_ranks(model, plan, 3)
    (layer_idx, _), tag = model.layers[0], make_tag(1)
    steps, calls = [], []
    for rank, x_TD in zip(ranks, model.x_TD.split([100, 100, 60]), strict=True):
        steps.append(rank.layers[layer_idx].forward(x_TD, model.routers[layer_idx](x_TD), tag, None))
        calls.append(next(steps[-1]))
    for _ in range(3):
        assert not calls[0].ready()
        assert not calls[1].ready()
    early_TD = torch.cat([call._held[2] for call in calls[:2]])
    opened = [rank.fused.lanes[0].counts for rank in ranks[:2]]
    assert sum(one.jobs for one in opened) == 200 * 6, "all jobs of both are done"
    last = drive_ready([_finish(step, call) for step, call in zip(steps, calls, strict=True)])
    assert num_different(early_TD, torch.cat(last[:2])) == 0


def _finish(step: Steps[torch.Tensor], call: Any) -> Steps[torch.Tensor]:
    yield call
    return (yield from step)


def test_a_row_that_is_changed_on_its_way_is_noticed() -> None:
    """The comparison can fail: one bit of one row, in the memory between two ranks."""
    model = native_model("float32")
    ranks = make_ranks(model, make_plan("contiguous", 2), 2)
    steps = steps_of(ranks, [NUM_TOKENS, 0])
    call = next(steps[0])
    assert not call.ready()
    memory = ranks[0].transport.segment.memory.view(torch.int32)
    memory[int((memory == model.x_TD[0, 0].view(torch.int32)).nonzero()[0])] ^= 1
    y_TD = torch.cat(drive_ready([_finish(steps[0], call), steps[1]]))
    assert num_different(y_TD, on_one_rank(model)) > 0


def test_who_is_late_is_named_with_layer_and_stage() -> None:
    """A rank that never began has not sent; one that began and went no further has not returned."""
    model, plan = native_model("float32"), make_plan("contiguous", 2)
    present, _ = steps_of(make_ranks(model, plan, 2), [130, 130])
    with pytest.raises(PeerLost, match=r"rank 1 did not answer .*\(layer 1, stage send\)"):
        drive([present], 0.2)
    present, slow = steps_of(make_ranks(model, plan, 2), [130, 130])
    assert not next(slow).ready()
    with pytest.raises(PeerLost, match=r"rank 1 did not answer .*\(layer 1, stage collect\)"):
        drive([present], 0.2)


def test_ranks_at_different_steps_are_refused() -> None:
    model = native_model("float32")
    ranks = make_ranks(model, make_plan("contiguous", 2), 2)
    ahead, behind = ranks[0].forward(model.x_TD[:1], step_id=8), ranks[1].forward(model.x_TD[:1], step_id=7)
    next(ahead).ready()
    with pytest.raises(
        ValueError, match=r"out of step: this rank is at step 7 .* rank 0 sent for step 8, layer 1"
    ):
        next(behind).ready()


def test_what_a_call_cannot_do_is_refused_before_anything_is_sent() -> None:
    model = native_model("float32")
    ranks = make_ranks(model, make_plan("contiguous", 2), 2)
    layer, tag = ranks[0].layers[1], make_tag(1)

    def forward(num_tokens: int, expert: int) -> None:
        routing = Routing(
            experts_TK=torch.full((num_tokens, 6), expert), weights_TK=torch.ones(num_tokens, 6)
        )
        next(layer.forward(torch.zeros(num_tokens, 64), routing, tag, None)).ready()

    with pytest.raises(
        ValueError, match=f"choice 0 of token 0 is expert {NUM_EXPERTS}, and experts are 0 to 15"
    ):
        forward(1, NUM_EXPERTS)
    with pytest.raises(
        ValueError, match=f"{NUM_TOKENS + 1} tokens are more than the memory that ranks share"
    ):
        forward(NUM_TOKENS + 1, 0)
    assert ranks[0].transport.traffic.send_bytes.sum() == 0
    wrong = replace(model.numerics, combine="per_rank")
    with pytest.raises(ConfigError, match="a fused layer sums by the tree only"):
        FusedRanks(model.layers, wrong, make_plan("contiguous", 2), ranks[0].transport)
    with pytest.raises(ConfigError, match="one call of native kernels, the backend is reference"):
        ranks[0].fused.layer(1, model.layers[0][1], model.ffn()._store, make_model("float32").ops)  # type: ignore[arg-type]
    layout = replace(layout_of(2), returns="subtrees")
    with pytest.raises(ConfigError, match="no subtrees"):
        make_dispatcher(layout, model.layers, model.numerics, make_plan("contiguous", 2), ranks[0].transport)


def test_bytes_are_the_rows_and_the_jobs_and_nothing_else() -> None:
    model, plan = native_model("float32"), make_plan("contiguous", 2)
    ranks = make_ranks(model, plan, 2)
    routing, tag = model.routers[1](model.x_TD), make_tag(1)
    steps = []
    for rank, rows in zip(ranks, (slice(0, 130), slice(130, None)), strict=True):
        part = Routing(experts_TK=routing.experts_TK[rows], weights_TK=routing.weights_TK[rows])
        steps.append(rank.layers[1].forward(model.x_TD[rows], part, tag, None))
    drive_ready(steps)
    away = (routing.experts_TK < NUM_EXPERTS // 2) == (torch.arange(NUM_TOKENS) >= 130).unsqueeze(-1)
    jobs = int(away.sum())
    sent = 2 * 32 + 16 * jobs + 4 * 64 * int(away.any(1).sum())
    traffic = [rank.transport.traffic for rank in ranks]
    assert sum(int(one.send_bytes.sum()) for one in traffic) == sent
    assert sum(int(one.collect_bytes.sum()) for one in traffic) == 4 * 64 * jobs


# ---- over processes ----


def join(mesh: Mesh, model: Model, num_micro_batches: int = 1) -> Segment:
    layout = layout_of(mesh.num_ranks, num_micro_batches)
    sizes = lane_sizes(layout, model.layers, model.numerics, NUM_TOKENS)
    return Segment.join(mesh, SegmentShape(num_ranks=mesh.num_ranks, lanes=tuple(sizes)))


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(2, 2), (3, 1)])
def test_processes_give_the_bits_of_one_rank_step_after_step(num_ranks: int, num_threads: int) -> None:
    """Six steps of two micro-batches: ranks come late by turns, and with fewer rows or none."""
    model, plan = native_model("bfloat16"), make_plan("replicated", num_ranks)
    bounds = list(pairwise([0, *np.cumsum(TOKENS_PER_RANK[num_ranks]).tolist()]))
    expected = on_one_rank(model)

    def compute(mesh: Mesh) -> tuple[int, int]:
        own = replace(model, ops=choose(model.numerics, num_threads=num_threads))
        rank = Rank(own, plan, join(mesh, own, 2))
        rows, wrong, draw = slice(*bounds[mesh.rank]), 0, random.Random(mesh.rank)
        for step_id in range(6):
            x_TD, part = model.x_TD[rows][:: step_id % 3 + 1], expected[rows][:: step_id % 3 + 1]
            time.sleep(draw.choice([0.0, 0.0, 0.003]))
            parts = [rank.forward(x, at, step_id) for at, x in enumerate(x_TD.tensor_split(2))]
            wrong += num_different(torch.cat(drive(parts, TIMEOUT_S)), part)
        return wrong, sum(lane.counts.launches for lane in rank.fused.lanes)

    assert run_ranks(num_ranks, compute) == [(0, 6 * 2 * 2)] * num_ranks


def test_a_rank_that_is_killed_is_named_at_once_and_leaves_nothing() -> None:
    model, plan = native_model("float32"), make_plan("contiguous", 3)

    def compute(mesh: Mesh) -> None:
        rank = Rank(model, plan, join(mesh, model))
        for step_id in range(2):
            if step_id == 1 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            drive([rank.forward(model.x_TD[:20], step_id=step_id)], TIMEOUT_S)

    for error in run_ranks(3, compute, dying=(1,))[::2]:
        assert isinstance(error, PeerLost)
        assert (error.rank, error.layer_idx, error.stage) == (1, 1, "send")
        assert error.seconds < TIMEOUT_S / 4
    assert not segments_left()
