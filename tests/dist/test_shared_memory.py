"""The dispatcher over shared memory: in one thread, over processes, and when a rank is killed."""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from fakes_ranks import drive_shuffled, in_turns, random_copies
from marks import needs_native
from moe_layers import (
    NUM_TOKENS,
    TOKENS_PER_RANK,
    World,
    make_model,
    make_plan,
    make_side,
    make_tag,
    num_different,
    on_one_rank,
    rank_steps,
)
from ranks import run_ranks, segments_left
from test_gloo import bytes_of, parts_of

from moesaic.engine.layout import data_parallel
from moesaic.errors import CapacityError, KernelUnavailable, PeerLost
from moesaic.kernels import native
from moesaic.parallel import segment
from moesaic.parallel.dispatch.message import (
    Jobs,
    Returns,
    largest_messages,
    pack,
    pack_jobs,
    pack_roots,
    sort_jobs,
)
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.segment import LaneSize, Segment, SegmentShape
from moesaic.parallel.shared_memory import SharedMemoryTransport, segments_in_one_process
from moesaic.parallel.transport import MemoryWires, Purpose
from moesaic.parallel.tree import evaluate_subtrees
from moesaic.spec.numerics import DType
from moesaic.steps import drive, drive_ready

pytestmark = needs_native
TIMEOUT_S = 20.0
SEND = Purpose(layer_idx=0, stage="send")


@pytest.fixture(autouse=True)
def _nothing_stays() -> object:
    yield
    assert not segments_left()


def lanes_of(model: object, returns: Returns, num_micro_batches: int = 1) -> list[LaneSize]:
    spec = model.layers[0][1]  # type: ignore[attr-defined]
    sizes = largest_messages(spec, model.numerics, returns, NUM_TOKENS)  # type: ignore[attr-defined]
    return [LaneSize(message_bytes=size) for size in sizes] * num_micro_batches


def make_ranks(
    model: object, kind: str, num_ranks: int, returns: Returns = "choices", num_micro_batches: int = 1
) -> World:
    """All ranks in this thread."""
    plan, rng = make_plan(kind, num_ranks), np.random.default_rng(0)
    slots = [random_copies(plan, at, rng) for at in range(2)]
    ends = segments_in_one_process(num_ranks, lanes_of(model, returns, num_micro_batches))
    sides = [
        make_side(model, plan, SharedMemoryTransport(end), returns, slots, None)  # type: ignore[arg-type]
        for end in ends
    ]
    return World(wires=MemoryWires(num_ranks), sides=sides, plan=plan)


# ---- in one thread ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("returns", ["choices", "subtrees"])
@pytest.mark.parametrize(
    ("kind", "num_ranks"), [("contiguous", 1), ("contiguous", 2), ("random", 3), ("replicated", 4)]
)
def test_any_placement_gives_the_bits_of_one_rank(
    dtype: DType, returns: Returns, kind: str, num_ranks: int
) -> None:
    model = make_model(dtype, 6)
    steps = rank_steps(model, make_ranks(model, kind, num_ranks, returns), TOKENS_PER_RANK[num_ranks])
    y_TD = torch.cat(drive_ready([one for (one,) in steps]))
    assert num_different(y_TD, on_one_rank(model)) == 0


@pytest.mark.parametrize(("num_micro_batches", "num_chunks"), [(2, 1), (1, 3), (2, 4)])
def test_micro_batches_and_chunks_give_the_bits_of_one_batch(num_micro_batches: int, num_chunks: int) -> None:
    """With more chunks than inboxes some messages go when others were taken."""
    model = make_model("float32")
    world = make_ranks(model, "replicated", 4, num_micro_batches=num_micro_batches)
    steps = rank_steps(
        model, world, TOKENS_PER_RANK[4], num_micro_batches=num_micro_batches, num_chunks=num_chunks
    )
    parts = [one for of_rank in drive_shuffled([in_turns(s) for s in steps], seed=5) for one in of_rank]
    assert num_different(torch.cat(parts), on_one_rank(model)) == 0


def test_a_row_that_is_changed_on_its_way_is_noticed() -> None:
    """The comparison can fail: one bit of one row, in the memory between two ranks."""
    model = make_model("float32")
    world = make_ranks(model, "contiguous", 2)
    steps = [one for (one,) in rank_steps(model, world, TOKENS_PER_RANK[2])]
    waits = [next(step) for step in steps]
    assert all(wait.ready() for wait in waits)
    memory = world.sides[0].transport.segment.memory  # type: ignore[attr-defined]
    place = int((memory.view(torch.int32) == model.x_TD[0, 0].view(torch.int32)).nonzero()[0])
    memory.view(torch.int32)[place] ^= 1
    assert num_different(torch.cat(drive_ready(steps)), on_one_rank(model)) > 0


def test_a_rank_that_stays_away_is_named() -> None:
    model = make_model("float32")
    (present,), _ = rank_steps(model, make_ranks(model, "contiguous", 2), [130, 130])
    with pytest.raises(PeerLost, match=r"rank 1 did not answer .*stage send"):
        drive([present], 0.2)


def test_messages_of_any_size_arrive_in_order_and_wait_for_room() -> None:
    """Six exchanges before the first is taken, over inboxes for two: the others go as room is made."""
    num_ranks = 3
    ends = segments_in_one_process(num_ranks, [LaneSize(message_bytes=4)] * 2)
    wires = [SharedMemoryTransport(end) for end in ends]
    arrivals = [
        [
            one.exchange(bytes_of(parts_of(one.rank, num_ranks, turn)), lane=turn % 2, purpose=SEND)
            for one in wires
        ]
        for turn in range(6)
    ]
    assert not any(arrival.ready() for arrival in arrivals[4])
    for turn, of_turn in enumerate(arrivals):
        for arrival in [*of_turn, *of_turn]:
            arrival.ready()
        for rank, arrival in enumerate(of_turn):
            assert arrival.ready()
            arrival.wait(0.0)
            expected = [bytes_of(parts_of(source, num_ranks, turn))[rank] for source in range(num_ranks)]
            assert all(torch.equal(a, b) for a, b in zip(arrival.take(), expected, strict=True))


def test_a_message_that_is_too_large_is_refused() -> None:
    wires = SharedMemoryTransport(segments_in_one_process(2, [LaneSize(message_bytes=64)])[0])
    wires.exchange(
        [torch.zeros(65, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)], lane=0, purpose=SEND
    )
    with pytest.raises(ValueError, match="a message of 65 bytes to rank 1, inboxes have 64"):
        wires.exchange([torch.zeros(65, dtype=torch.uint8)] * 2, lane=0, purpose=SEND)


# ---- sizes, and what stays behind ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_choices", [1, 5, 6, 8])
def test_inboxes_are_as_large_as_the_largest_message_and_no_larger(dtype: DType, num_choices: int) -> None:
    model, tag = make_model(dtype), make_tag(1)
    spec = replace(model.layers[0][1], experts_per_token=num_choices)
    rows, jobs = 7, 7 * num_choices
    some_J, rows_RD = torch.arange(jobs), model.x_TD[:rows]
    given = Jobs(
        row_J=some_J // num_choices, slot_J=some_J, choice_J=some_J % num_choices,
        weight_J=torch.rand(jobs), rows_RB=rows_RD.contiguous().view(torch.uint8),
    )  # fmt: skip
    (sent,) = pack_jobs(tag, given, sort_jobs(torch.zeros_like(some_J), given.row_J, 1, rows))
    choices, subtrees = (largest_messages(spec, model.numerics, how, rows) for how in ("choices", "subtrees"))
    assert sent.numel() == choices[0] == subtrees[0]
    assert pack(tag, (jobs, 0), rows_RD.repeat(num_choices, 1)).numel() == choices[1]
    rng, found = np.random.default_rng(0), []
    for here in [np.arange(num_choices) % 2 == 0, *(rng.random(num_choices) < 0.5 for _ in range(40))]:
        at_J = torch.from_numpy(np.flatnonzero(np.tile(here, rows)))
        leaves = evaluate_subtrees(
            torch.ones(len(at_J), spec.row_width), at_J // num_choices, at_J % num_choices, num_choices
        )
        found.append(pack_roots(tag, leaves).numel())
    assert found[0] == max(found) == subtrees[1]
    per_rank = replace(model.numerics, combine="per_rank")
    assert largest_messages(spec, per_rank, "choices", rows)[1] == pack(tag, (0, 0), rows_RD.float()).numel()


def test_a_segment_is_as_large_as_its_parts_and_lanes_do_not_overlap() -> None:
    shape = SegmentShape(
        num_ranks=3,
        lanes=(LaneSize(message_bytes=65), LaneSize(message_bytes=0, num_results=1, result_bytes=1)),
    )
    inbox = 64 + 128  # its head, and two lines for 65 bytes
    first = 3 * 64 + 6 * (64 + 2 * inbox)
    assert shape.places() == [(3 * 64, 128, 0), (first, 0, 128)]
    assert shape.num_bytes == first + 6 * (64 + 2 * 64) + 3 * 128


def test_too_little_shared_memory_is_said_with_its_numbers() -> None:
    shape = SegmentShape(num_ranks=2, lanes=(LaneSize(message_bytes=10**14),))
    with pytest.raises(CapacityError, match=r"need 4\d{14} bytes .* has \d+ free .*remount,size.*--shm-size"):
        segment.reserve(shape)


def test_what_is_left_behind_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of what every test here ends with."""
    monkeypatch.setattr(segment, "FOLDER", tmp_path)
    names = [tmp_path / f"{segment.PREFIX}{name}" for name in (f"own-{os.getpid()}", "dead-1", "lives-1")]
    for path in names:
        path.touch()
    with open(names[2], "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert set(segments_left()) == set(names[:2])
    for path in names:
        path.unlink()


def test_what_a_dead_run_left_is_removed_and_what_a_living_one_holds_is_not() -> None:
    stale = segment.FOLDER / f"{segment.PREFIX}0123-1"  # process 1 lives: the lock tells, not the number
    stale.write_bytes(bytes(64))
    descriptor = segment.reserve(SegmentShape(num_ranks=1, lanes=()))
    own = segment.name(descriptor)
    try:
        assert not stale.exists()
        assert own in segments_left()
        with open(own, "rb") as other, pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert segment.remove_stale() == []
        assert own.exists()
    finally:
        own.unlink()
        os.close(descriptor)


def test_without_native_kernels_the_dispatcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", lambda: None)
    with pytest.raises(
        KernelUnavailable, match=r"memory that ranks share needs native kernels.* use dispatcher exchange"
    ):
        segments_in_one_process(2, [])
    assert data_parallel(2).dispatcher == "exchange"


# ---- over processes ----


def join(mesh: Mesh, lanes: Sequence[LaneSize], num_chunks: int = 1) -> SharedMemoryTransport:
    shape = SegmentShape(num_ranks=mesh.num_ranks, lanes=tuple(lanes))
    return SharedMemoryTransport(Segment.join(mesh, shape), num_chunks=num_chunks)


@pytest.mark.parametrize(
    ("num_ranks", "returns", "num_micro_batches"), [(2, "choices", 2), (4, "subtrees", 1)]
)
def test_processes_give_the_bits_of_one_rank(
    num_ranks: int, returns: Returns, num_micro_batches: int
) -> None:
    model, plan = make_model("float32"), make_plan("replicated", num_ranks)
    bounds = list(pairwise([0, *np.cumsum(TOKENS_PER_RANK[num_ranks]).tolist()]))
    expected = on_one_rank(model)

    def compute(mesh: Mesh) -> int:
        wires = join(mesh, 2 * lanes_of(model, returns, num_micro_batches), num_chunks=2)
        mesh.meet("mapped")
        assert not list(segment.FOLDER.glob(f"{segment.PREFIX}*-{os.getpid()}")), "rank 0 took its name away"
        side = make_side(model, plan, wires, returns, None, None)
        routed = Staged(tokens=side, experts=side, ffn=model.ffn(plan, mesh.rank))
        rows = slice(*bounds[mesh.rank])
        parts = model.x_TD[rows].tensor_split(num_micro_batches)
        done = drive([model.forward(routed, part, at) for at, part in enumerate(parts)], TIMEOUT_S)
        return num_different(torch.cat(done), expected[rows])

    assert run_ranks(num_ranks, compute) == [0] * num_ranks


def test_a_rank_that_is_killed_is_named_at_once_and_leaves_nothing() -> None:
    def talk(mesh: Mesh) -> None:
        wires = join(mesh, [LaneSize(message_bytes=64)])
        for layer_idx in (3, 4):
            if layer_idx == 4 and mesh.rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            purpose = Purpose(layer_idx=layer_idx, stage="collect")
            arrival = wires.exchange([torch.ones(9, dtype=torch.uint8)] * 3, lane=0, purpose=purpose)
            arrival.wait(TIMEOUT_S)
            arrival.take()

    for error in run_ranks(3, talk, dying=(1,))[::2]:
        assert isinstance(error, PeerLost)
        assert (error.rank, error.layer_idx, error.stage) == (1, 4, "collect")
        assert error.seconds < TIMEOUT_S / 4


def test_ranks_hear_why_there_is_no_shared_memory() -> None:
    def meet(mesh: Mesh) -> None:
        join(mesh, [LaneSize(message_bytes=10**14)])

    for error in run_ranks(2, meet):
        assert isinstance(error, CapacityError)
        assert "enlarge it" in str(error)
