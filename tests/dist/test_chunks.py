"""Rows sent in parts: the first part is computed while others are on their way, and no bit changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from fakes_ranks import drive_shuffled
from marks import needs_native
from moe_layers import (
    TOKENS_PER_RANK,
    Model,
    make_model,
    make_plan,
    num_different,
    on_one_rank,
)
from torch import Tensor

from moesaic.engine.layout import data_parallel
from moesaic.experts.contract import ExpertBatch, ExpertFfn
from moesaic.parallel import segment
from moesaic.parallel.dispatch.build import lane_sizes, make_dispatcher, num_lanes
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.segment import SegmentShape
from moesaic.parallel.shared_memory import SharedMemoryTransport, segments_in_one_process
from moesaic.parallel.transport import Arrival, MemoryWires, Purpose, Transport
from moesaic.spec.deployment import Layout
from moesaic.spec.layout_rules import Dispatcher
from moesaic.steps import Steps, Wait, drive_ready


def layout_of(num_ranks: int, dispatcher: Dispatcher, num_chunks: int, num_micro_batches: int = 1) -> Layout:
    return data_parallel(
        num_ranks,
        tp=num_ranks if dispatcher == "gathered" else 1,
        dispatcher=dispatcher,
        num_chunks=num_chunks,
        num_micro_batches=num_micro_batches,
        ranks_per_node=2,
    )


def steps_of(model: Model, layout: Layout, ends: Sequence[Transport]) -> list[Steps[Tensor]]:
    """Each rank's generators, one a micro-batch; `Staged` is told no number of chunks, as in an engine."""
    plan, steps = make_plan("replicated", layout.num_ranks), []
    is_gathered = layout.dispatcher == "gathered"
    rows = [model.x_TD] * len(ends) if is_gathered else model.x_TD.split(TOKENS_PER_RANK[layout.num_ranks])
    for end, x_TD in zip(ends, rows, strict=True):
        side = make_dispatcher(layout, model.layers, model.numerics, plan, end)
        assert isinstance(side, Exchange)
        routed = Staged(tokens=side, experts=side, ffn=model.ffn(plan, end.rank))
        parts = x_TD.tensor_split(layout.num_micro_batches)
        steps += [model.forward(routed, part, at) for at, part in enumerate(parts)]
    return steps


@pytest.mark.parametrize("dispatcher", ["exchange", "two_level", "gathered"])
def test_parts_have_lanes_of_their_own_and_give_the_bits_of_the_whole(dispatcher: Dispatcher) -> None:
    model, layout = make_model("float32", 6), layout_of(4, dispatcher, 3, num_micro_batches=2)
    wires, lanes = MemoryWires(4, num_chunks=3), set()
    ends = [wires.transport(rank) for rank in range(4)]
    for end in ends:

        def exchange(parts: Sequence[Tensor], *, lane: int, purpose: Purpose, spied=end.exchange) -> Arrival:
            lanes.add(lane)
            return spied(parts, lane=lane, purpose=purpose)

        end.exchange = exchange  # type: ignore[method-assign]
    found = drive_shuffled(steps_of(model, layout, ends), seed=3)
    assert lanes == set(range(num_lanes(layout)))
    if dispatcher == "gathered":
        found = found[:2]
    assert num_different(torch.cat(found), on_one_rank(model)) == 0


@needs_native
@pytest.mark.parametrize("num_chunks", [1, 2, 5])
def test_inboxes_hold_all_parts_at_once_in_the_room_of_the_whole(num_chunks: int) -> None:
    """Everything is sent before anybody looks: no message has to wait for an inbox."""
    model, layout = make_model("float32", 6), layout_of(2, "shared_memory", num_chunks)
    sizes = lane_sizes(layout, model.layers, model.numerics, max(TOKENS_PER_RANK[2]))
    ends = [SharedMemoryTransport(end, num_chunks=num_chunks) for end in segments_in_one_process(2, sizes)]
    steps = steps_of(model, layout, ends)
    waits = [next(step) for step in steps]  # both have sent
    assert all(wait.ready() for wait in waits)
    places, memory = ends[0].segment.shape.places(), ends[0].segment.memory
    first = [start + segment.LINE for start, *_ in places[::2]]  # heads of inboxes of rank 0, after a line
    assert [int(memory[at : at + 8].view(torch.int64)) for at in first] == [1] * num_chunks
    found = drive_ready([_resume(step, wait) for step, wait in zip(steps, waits, strict=True)])
    assert num_different(torch.cat(found), on_one_rank(model)) == 0
    whole = lane_sizes(
        layout_of(2, "shared_memory", 1), model.layers, model.numerics, max(TOKENS_PER_RANK[2])
    )
    need, once = (SegmentShape(num_ranks=2, lanes=tuple(lanes)).num_bytes for lanes in (sizes, whole))
    assert need < 1.1 * once


def _resume(step: Steps[Tensor], wait: Wait) -> Steps[Tensor]:
    yield wait
    return (yield from step)


# ---- a wire on which the last part takes long ----


@dataclass
class Late:
    """What has been computed, and whether the last parts have arrived."""

    computed: list[tuple[int, int]] = field(default_factory=list)  # rank, chunk
    is_over: bool = False


class LateTransport(Transport):
    """Messages of one lane are on their way until it is said that they are there."""

    def __init__(self, wires: Transport, lane: int, late: Late) -> None:
        self.rank, self.num_ranks, self.num_chunks = wires.rank, wires.num_ranks, wires.num_chunks
        self.traffic = wires.traffic
        self._wires, self._lane, self._late = wires, lane, late

    def exchange(self, parts: Sequence[Tensor], *, lane: int, purpose: Purpose) -> Arrival:
        arrival = self._wires.exchange(parts, lane=lane, purpose=purpose)
        return LateArrival(arrival, self._late) if lane == self._lane else arrival


class LateArrival(Arrival):
    def __init__(self, arrival: Arrival, late: Late) -> None:
        self._arrival, self._late = arrival, late

    def ready(self) -> bool:
        return self._late.is_over and self._arrival.ready()

    def wait(self, timeout_s: float) -> None:
        self._arrival.wait(timeout_s)

    def take(self) -> list[Tensor]:
        assert self._late.is_over, "taken before it was there"
        return self._arrival.take()


@dataclass
class Watched(ExpertFfn):
    rank: int
    ffn: ExpertFfn
    late: Late

    def __call__(self, batch: ExpertBatch) -> Steps[Tensor]:
        self.late.computed.append((self.rank, batch.tag.chunk))
        return self.ffn(batch)


@pytest.mark.parametrize(("num_chunks", "early"), [(3, [0, 1]), (1, [])])
def test_first_parts_are_computed_before_the_last_has_arrived(num_chunks: int, early: list[int]) -> None:
    """In one part nothing is computed until all is there."""
    model, plan, late = make_model("float32", 6), make_plan("random", 2), Late()
    last = Exchange.LANES * (num_chunks - 1)
    wires, steps = MemoryWires(2, num_chunks=num_chunks), []
    for rank, x_TD in enumerate(model.x_TD.split(TOKENS_PER_RANK[2])):
        side = Exchange(model.layers, model.numerics, plan, LateTransport(wires.transport(rank), last, late))
        ffn = Watched(rank, model.ffn(plan, rank), late)
        steps.append(model.forward(Staged(tokens=side, experts=side, ffn=ffn), x_TD))
    waits: dict[int, Wait] = {}
    assert advance(steps, waits) == []
    assert sorted(late.computed) == [(rank, chunk) for rank in range(2) for chunk in early]
    late.is_over = True
    assert num_different(torch.cat(advance(steps, waits)), on_one_rank(model)) == 0
    assert len(late.computed) == 2 * len(model.layers) * num_chunks


def advance(steps: Sequence[Steps[Tensor]], waits: dict[int, Wait]) -> list[Tensor]:
    """What they return who come to their end, when none can move any more."""
    found: dict[int, Tensor] = {}
    has_moved = True
    while has_moved:
        has_moved = False
        for i, step in enumerate(steps):
            if i in found or (i in waits and not waits[i].ready()):
                continue
            has_moved = True
            try:
                waits[i] = next(step)
            except StopIteration as end:
                found[i] = end.value
    return [found[i] for i in sorted(found)]
