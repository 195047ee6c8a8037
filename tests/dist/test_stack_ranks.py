"""Consecutive layers in one native call on each rank: bits of one rank, whoever is late, whatever plan."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes_ranks import drive_shuffled, in_turns
from marks import needs_native
from moe_layers import make_plan
from paged import PagedModel
from ranks import run_ranks
from stacks import VOCAB, Told, in_halves, stacks, write_model
from test_fused_ranks import layout_of
from test_swap import next_plans
from torch import Tensor

from moesaic.errors import PeerLost
from moesaic.experts.contract import Tag
from moesaic.kernels import native
from moesaic.kv.pool import BatchLayout
from moesaic.models.build import LoadedModel, Share, build, load, read_spec
from moesaic.models.checkpoint import Checkpoint
from moesaic.parallel.dispatch.build import lane_sizes
from moesaic.parallel.dispatch.fused_ranks import FusedRanks
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.segment import Segment, SegmentShape
from moesaic.parallel.shared_memory import SharedMemoryTransport, segments_in_one_process
from moesaic.parallel.transport import MemoryWires, Transport
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import DType, Format, Numerics, preset
from moesaic.steps import Steps, drive, drive_ready

pytestmark = needs_native
TIMEOUT_S = 20.0
MAX_TOKENS = 64
Rows = list[tuple[str, list[int]]]


def make_rows(rank: int, step: int, micro_batch: int = 0) -> Rows:
    """Sequences of one rank and micro-batch: prompts past the window, then a row each, and at times none."""
    rng = random.Random(f"{rank} {step} {micro_batch}")
    if (rank + step) % 4 == 3:
        return []
    names = [f"{rank} {micro_batch} {i}" for i in range(3 if step else 2)]
    return [(name, rng.choices(range(VOCAB), k=rng.choice([1, 5] if step else [9, 30]))) for name in names]


def numerics_of(folder: Path, format: Format | None) -> Numerics:
    backend = f"native/{native.levels()[-1]}"
    return preset("portable", dtype=read_spec(folder).dtype, backend=backend, format=format)


class Rank:
    """One rank with sequences of its own."""

    def __init__(
        self,
        folder: Path,
        plan: ExpertPlan,
        end: Segment,
        *,
        format: Format | None = None,
        num_threads: int = 1,
        moves: Transport | None = None,
    ) -> None:
        self.transport = SharedMemoryTransport(end)

        def dispatcher(spec: ModelSpec, numerics: Numerics, down_biases: Any) -> FusedRanks:
            self.fused = FusedRanks(spec.moe_layers, numerics, plan, self.transport)
            return self.fused

        self.model: LoadedModel = build(
            Checkpoint.open(folder),
            read_spec(folder),
            numerics_of(folder, format),
            num_threads=num_threads,
            share=Share(rank=end.rank, plan=plan, dispatcher=dispatcher, moves=moves),
        )
        self.paged = PagedModel(self.model)
        self.told = Told()

    def forward(self, rows: Rows, step_id: int, micro_batch: int = 0) -> Steps[Tensor]:
        """Logits of all rows."""
        plans = [self.paged._plan(name, tokens) for name, tokens in rows]
        tokens_T = torch.tensor([token for _, tokens in rows for token in tokens], dtype=torch.int64)
        layout = BatchLayout.of(plans, self.paged.pool)
        tag = Tag(epoch=0, plan_version=0, step_id=step_id, micro_batch=micro_batch, chunk=0, layer_idx=0)
        decoder = self.paged.model.decoder
        hidden_TD = yield from decoder.forward(tokens_T, layout, self.paged.pool, tag, self.told)
        return decoder.logits(hidden_TD)


def sizes_of(folder: Path, num_ranks: int, num_micro_batches: int) -> Any:
    spec = read_spec(folder)
    layout = layout_of(num_ranks, num_micro_batches)
    return lane_sizes(layout, spec.moe_layers, numerics_of(folder, None), MAX_TOKENS)


def make_ranks(
    folder: Path, plan: ExpertPlan, num_ranks: int, *, num_micro_batches: int = 1, **options: Any
) -> list[Rank]:
    """In this thread."""
    ends = segments_in_one_process(num_ranks, sizes_of(folder, num_ranks, num_micro_batches))
    wires = MemoryWires(num_ranks)
    return [Rank(folder, plan, end, moves=wires.transport(end.rank), **options) for end in ends]


@dataclass
class Alone:
    """What one rank that has all experts says of the same sequences, half by half."""

    logits: list[list[Tensor]]  # by step, by rank
    told: list[list[Told]]
    pools: list[list[Tensor]]  # by rank


def alone(folder: Path, num_ranks: int, num_steps: int, format: Format | None = None) -> Alone:
    numerics = numerics_of(folder, format)
    model = in_halves(load(folder, num_threads=1, backend=numerics.backend, format=format))
    paged = [PagedModel(model) for _ in range(num_ranks)]
    found = Alone([], [], [])
    for step in range(num_steps):
        found.told.append([Told() for _ in paged])
        found.logits.append([])
        for rank, (one, told) in enumerate(zip(paged, found.told[-1], strict=True)):
            rows = make_rows(rank, step)
            logits = one.step(*rows, observe=told) if rows else []
            found.logits[-1].append(torch.cat(logits) if logits else torch.empty(0, VOCAB))
    found.pools = [pools_of(one) for one in paged]
    return found


def pools_of(paged: PagedModel) -> list[Tensor]:
    pairs = [paged.pool.tensors(layer_idx) for layer_idx in range(len(paged.model.decoder.layers))]
    return [one for pair in pairs for one in pair if one is not None]


def same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(found, expected, strict=True)
    )


# ---- in one thread ----


@pytest.mark.parametrize(
    ("num_layers", "num_ranks", "dtype", "format"),
    [
        (1, 2, "float32", None),
        (2, 3, "bfloat16", "int8-g32"),
        (2, 2, "bfloat16", "int4-g32"),
        (3, 2, "float32", None),
    ],
)
def test_ranks_give_the_bits_of_one_that_goes_half_by_half(
    num_layers: int, num_ranks: int, dtype: DType, format: Format | None, tmp_path: Path
) -> None:
    folder = write_model(tmp_path, num_layers, dtype)
    plan = (
        make_plan("replicated", 3)
        if num_layers == 2 and num_ranks == 3
        else contiguous_plan((16,) * num_layers, num_ranks)
    )
    expected = alone(folder, num_ranks, 4, format)
    ranks = make_ranks(folder, plan, num_ranks, format=format)
    for step in range(4):
        for rank in ranks:
            rank.told = Told()
        found = drive_ready([one.forward(make_rows(rank, step), step) for rank, one in enumerate(ranks)])
        assert same(found, expected.logits[step])
        for rank, one in enumerate(ranks):
            if make_rows(rank, step):
                for (at, *told), (other_at, *other) in zip(
                    one.told.routings, expected.told[step][rank].routings, strict=True
                ):
                    assert at == other_at
                    assert same(told, other)
    for rank, pools in zip(ranks, expected.pools, strict=True):
        assert same(pools_of(rank.paged), pools)
        assert [len(stack._layers) for stack in stacks(rank.model.decoder)] == [num_layers]
        assert rank.fused.lanes[0].counts.launches == 4 * num_layers


def test_a_stack_beside_ranks_that_go_half_by_half(tmp_path: Path) -> None:
    """Messages are the same: ranks may differ in how they call."""
    folder = write_model(tmp_path, 2)
    expected = alone(folder, 2, 3)
    ranks = make_ranks(folder, contiguous_plan((16, 16), 2), 2)
    ranks[1].paged.model = in_halves(ranks[1].model)
    for step in range(3):
        found = drive_ready([one.forward(make_rows(rank, step), step) for rank, one in enumerate(ranks)])
        assert same(found, expected.logits[step])


@pytest.mark.parametrize("seed", [5, 6])
def test_micro_batches_in_any_order_give_the_bits_of_one_rank(seed: int, tmp_path: Path) -> None:
    folder = write_model(tmp_path, 2, "bfloat16")
    expected = alone(folder, 3, 1)
    ranks = make_ranks(folder, make_plan("replicated", 3), 3, num_micro_batches=2)
    of_ranks = []
    for rank, one in enumerate(ranks):
        rows = make_rows(rank, 0)
        parts = [rows[:1], rows[1:]]
        of_ranks.append(in_turns([one.forward(part, 0, at) for at, part in enumerate(parts)]))
    found = [torch.cat(one) for one in drive_shuffled(of_ranks, seed)]
    assert same(found, expected.logits[0])


def test_another_plan_before_every_step_moves_no_bit(tmp_path: Path) -> None:
    folder, plans = write_model(tmp_path, 2), next_plans(3, 4)
    expected = alone(folder, 3, 4)
    ranks = make_ranks(folder, plans[0], 3)
    for step, plan in enumerate(plans):
        if step > 0:
            placed = [rank.model.placed for rank in ranks]
            assert sum(drive_ready([one.adopt(plan) for one in placed if one is not None])) > 0
        before = [rank.fused.lanes[0].counts.jobs for rank in ranks]
        found = drive_ready([one.forward(make_rows(rank, step), step) for rank, one in enumerate(ranks)])
        assert same(found, expected.logits[step])
        for at, rank in enumerate(ranks):
            has_slots = any((slots == at).any() for slots in plan.slot_rank)
            assert (rank.fused.lanes[0].counts.jobs > before[at]) == has_slots


def test_who_is_late_is_named_with_layer_and_stage(tmp_path: Path) -> None:
    folder, plan = write_model(tmp_path, 3), contiguous_plan((16, 16, 16), 2)

    def forwards(late_rounds: int) -> Steps[Tensor]:
        """The first rank's, after the other has been looked at so often."""
        ranks = make_ranks(folder, plan, 2)
        first, second = (one.forward(make_rows(rank, 0), 0) for rank, one in enumerate(ranks))
        waits = [next(first), next(second)] if late_rounds else [next(first)]
        for _ in range(late_rounds):
            for wait in waits[::-1]:
                wait.ready()
        return first

    for late_rounds, layer, stage in ((0, 0, "send"), (1, 0, "collect")):
        began_s = time.monotonic()
        with pytest.raises(
            PeerLost, match=rf"rank 1 did not answer .*\(layer {layer}, stage {stage}\)"
        ) as lost:
            drive([forwards(late_rounds)], 0.2)
        assert 0.2 <= lost.value.seconds <= time.monotonic() - began_s
    with pytest.raises(PeerLost, match="rank 1 did not answer") as lost:
        drive([forwards(2)], 0.2)
    assert lost.value.layer_idx in (1, 2)


def test_a_step_after_one_that_was_too_long_is_as_ever(tmp_path: Path) -> None:
    folder = write_model(tmp_path, 2)
    expected = alone(folder, 2, 1)
    ranks = make_ranks(folder, contiguous_plan((16, 16), 2), 2)
    long: Rows = [("long", [1] * (MAX_TOKENS + 1))]
    with pytest.raises(ValueError, match=f"layer 0: {MAX_TOKENS + 1} tokens are more than the memory"):
        next(ranks[0].forward(long, 0)).ready()
    assert ranks[0].transport.traffic.send_bytes.sum() == 0
    found = drive_ready([one.forward(make_rows(rank, 0), 1) for rank, one in enumerate(ranks)])
    assert same(found, expected.logits[0])


def test_ranks_at_different_steps_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, 2)
    ranks = make_ranks(folder, contiguous_plan((16, 16), 2), 2)
    ahead, behind = (one.forward(make_rows(0, 0), 8 - rank) for rank, one in enumerate(ranks))
    next(ahead).ready()
    with pytest.raises(ValueError, match=r"this rank is at step 7 .* rank 0 sent for step 8, layer 0"):
        next(behind).ready()


# ---- over processes ----


@pytest.mark.parametrize(("num_ranks", "num_threads"), [(2, 2), (3, 1)])
def test_processes_give_the_bits_of_one_rank_step_after_step(
    num_ranks: int, num_threads: int, tmp_path: Path
) -> None:
    """Two micro-batches, of which the second has no rows in the first step; ranks come late by turns."""
    folder = write_model(tmp_path, 2, "bfloat16")
    plan, num_steps = replace(make_plan("replicated", num_ranks), version=0), 4
    expected = alone(folder, num_ranks, num_steps)

    def compute(mesh: Mesh) -> tuple[bool, int, list[int]]:
        shape = SegmentShape(num_ranks=num_ranks, lanes=tuple(sizes_of(folder, num_ranks, 2)))
        rank = Rank(folder, plan, Segment.join(mesh, shape), num_threads=num_threads)
        draw, is_same = random.Random(mesh.rank), True
        for step in range(num_steps):
            time.sleep(draw.choice([0.0, 0.0, 0.003]))
            rows = make_rows(mesh.rank, step)
            parts = [rank.forward(rows, step, 0), rank.forward([], step, 1)]
            is_same &= same([torch.cat(drive(parts, TIMEOUT_S))], [expected.logits[step][mesh.rank]])
        counts = [lane.counts for lane in rank.fused.lanes]
        jobs = sum(one.jobs for one in counts)
        return is_same, jobs - rank.model.meter.read().num_jobs, [one.launches for one in counts]

    assert run_ranks(num_ranks, compute) == [(True, 0, [2 * num_steps] * 2)] * num_ranks
