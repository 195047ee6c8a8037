"""Experts that are cut along their inner width over ranks: the bits of one rank, whoever has which slice.

slice of 2    0           1                rank 0 has slice 0 of expert 3, rank 2 slice 1 of it:
leaves        0  1        2  3             each sends the root of its leaves, in float32,
roots          01    +     23              and where the token is they are added by the tree
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from fakes_ranks import drive_shuffled, in_turns
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_native
from moe_layers import (
    HEAD_BYTES,
    JOB_BYTES,
    NUM_TOKENS,
    ROW_BYTES,
    TOKENS_PER_RANK,
    WIDTH,
    Model,
    World,
    make_tag,
    num_different,
    on_one_rank,
    random_model,
    spied_routings,
)
from ranks import run_ranks
from torch import Tensor

from moesaic.audit.layout_cells import Placement, make_plan
from moesaic.cost.exchange import copies_once, returned_bytes
from moesaic.errors import ConfigError
from moesaic.experts.blob import BlobLayout
from moesaic.experts.contract import Routing
from moesaic.experts.ffn import LoopFfn
from moesaic.experts.store import ExpertLoader, ResidentStore
from moesaic.kernels.ops import backends
from moesaic.parallel.dispatch import exchange
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.gathered import Gathered
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.message import largest_messages
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.dispatch.two_level import TwoLevel
from moesaic.parallel.gloo import GlooTransport
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.moves import Placed
from moesaic.parallel.segment import LaneSize
from moesaic.parallel.shared_memory import SharedMemoryTransport, segments_in_one_process
from moesaic.parallel.transport import MemoryWires, Transport
from moesaic.placement.plan import fetched
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.model import GateSpec, MoeSpec
from moesaic.spec.numerics import Format, preset
from moesaic.steps import Steps, drive, drive_ready

NUM_LEAVES = 4
TIMEOUT_S = 20.0


@lru_cache
def make_model(
    dtype: str = "float32",
    *,
    num_experts: int = 16,
    format: Format | None = None,
    backend: str = "reference",
    has_bias: bool = True,
    weight_on: Literal["output", "input"] = "output",
) -> Model:
    """Two layers whose sums over the inner width have four leaves."""
    rng = torch.Generator().manual_seed(num_experts)
    spec = MoeSpec(
        num_experts=num_experts,
        experts_per_token=4,
        expert_width=128 if format else 32,
        gate=GateSpec(score="softmax"),
        shared=None,
        row_width=WIDTH,
        has_bias=has_bias,
        weight_on=weight_on,
    )
    numerics = preset(
        "portable",
        dtype=dtype,  # type: ignore[arg-type]
        format=format,
        backend=backend,
        matmul_shards=NUM_LEAVES,
    )
    return random_model(spec, numerics, rng)


def plan_of(model: Model, num_ranks: int, placement: Placement, num_slices: int) -> ExpertPlan:
    counts = tuple(spec.num_experts for _, spec in model.layers)
    return make_plan(counts, num_ranks, placement, num_slices)


def store_of(model: Model, plan: ExpertPlan, rank: int) -> ResidentStore:
    loader = ExpertLoader(model.layers, model.numerics.formats, plan=plan, rank=rank)
    for (layer_idx, logical_id, part), tensor in model.parts.items():
        loader.put(layer_idx, logical_id, part, tensor)
    return loader.finish()


def side_of(
    model: Model, plan: ExpertPlan, wires: Transport, store: ResidentStore, kind: type[Exchange], **more: Any
) -> Exchange:
    return kind(model.layers, model.numerics, plan, wires, down_biases=store.down_biases, **more)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rank:
    """One rank that keeps its slices from step to step."""

    store: ResidentStore
    side: Exchange
    routed: Staged


def make_rank(
    model: Model, plan: ExpertPlan, wires: Transport, kind: type[Exchange] = Exchange, **more: Any
) -> Rank:
    store = store_of(model, plan, wires.rank)
    side = side_of(model, plan, wires, store, kind, **more)
    ffn = LoopFfn(model.layers[0][1], store, model.ops, num_slices=store.num_slices)
    return Rank(store=store, side=side, routed=Staged(tokens=side, experts=side, ffn=ffn))


def in_one_thread(
    model: Model,
    plan: ExpertPlan,
    sizes: Sequence[int],
    kind: type[Exchange] = Exchange,
    **more: Any,
) -> Tensor:
    wires = MemoryWires(len(sizes))
    ranks = [make_rank(model, plan, wires.transport(i), kind, **more) for i in range(len(sizes))]
    parts = model.x_TD.split(list(sizes))
    y_TD = torch.cat(
        drive_ready([model.forward(rank.routed, x_TD) for rank, x_TD in zip(ranks, parts, strict=True)])
    )
    assert not wires.boxes
    return y_TD


# ---- the bits of one rank ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("placement", "num_ranks", "num_slices", "kind", "more"),
    [
        ("contiguous", 2, 2, Exchange, {}),
        ("random", 3, 4, Exchange, {}),
        ("replicated", 4, 2, Exchange, {"replica_choice": "hash"}),
        ("replicated", 4, 2, TwoLevel, {"ranks_per_node": 2}),
        ("random", 3, 4, TwoLevel, {"ranks_per_node": 2}),
    ],
)
def test_slices_give_the_bits_of_one_rank(
    dtype: str, placement: Placement, num_ranks: int, num_slices: int, kind: type[Exchange], more: Any
) -> None:
    model = make_model(dtype)
    plan = plan_of(model, num_ranks, placement, num_slices)
    y_TD = in_one_thread(model, plan, TOKENS_PER_RANK[num_ranks], kind, **more)
    assert num_different(y_TD, on_one_rank(model)) == 0


@pytest.mark.parametrize("backend", sorted({backends()[0], backends()[-1]}))
@pytest.mark.parametrize(
    "format",
    [
        "int8",
        "int4-g32-zp",
        pytest.param("int8-g32", marks=pytest.mark.long),
        pytest.param("int4-g32", marks=pytest.mark.long),
    ],
)
def test_slices_of_integer_weights(format: Format, backend: str) -> None:
    """Also where a row has one scale: it is rounded whole, then cut."""
    model = make_model("bfloat16", format=format, backend=backend)
    y_TD = in_one_thread(model, plan_of(model, 2, "replicated", 4), TOKENS_PER_RANK[2])
    assert num_different(y_TD, on_one_rank(model)) == 0


def test_slices_in_native_kernels_and_with_weights_on_the_input() -> None:
    model = make_model("bfloat16", backend=backends()[-1], weight_on="input")
    y_TD = in_one_thread(model, plan_of(model, 3, "random", 2), TOKENS_PER_RANK[3])
    assert num_different(y_TD, on_one_rank(model)) == 0


def test_sixteen_ranks_share_eight_experts() -> None:
    """More ranks than experts: each has one half of one."""
    model = make_model(num_experts=8)
    plan = contiguous_plan((8, 8), 16, 2)
    assert all(np.array_equal(np.sort(ranks), np.arange(16)) for ranks in plan.slot_rank)
    sizes = [40, 0, 17, 1, 30, 9, 11, 13, 21, 2, 28, 16, 19, 20, 18, 15]
    assert num_different(in_one_thread(model, plan, sizes), on_one_rank(model)) == 0


def test_every_rank_gathers_the_roots_where_all_have_all_rows() -> None:
    model, wires = make_model(), MemoryWires(3)
    plan = plan_of(model, 3, "replicated", 2)
    ranks = [make_rank(model, plan, wires.transport(i), Gathered) for i in range(3)]
    for y_TD in drive_ready([model.forward(rank.routed, model.x_TD) for rank in ranks]):
        assert num_different(y_TD, on_one_rank(model)) == 0


@needs_native
def test_slices_over_shared_memory_fill_the_largest_messages() -> None:
    """All slices of all experts are on the other rank, and come back in float32."""
    model = make_model("bfloat16")
    plan = plan_of(model, 2, "contiguous", 2)
    plan = replace(plan, slot_rank=tuple(np.ones_like(ranks) for ranks in plan.slot_rank))
    sizes = largest_messages(model.layers[0][1], model.numerics, "choices", NUM_TOKENS, 2)
    ends = segments_in_one_process(2, [LaneSize(message_bytes=size) for size in sizes])
    ranks = [make_rank(model, plan, SharedMemoryTransport(end)) for end in ends]
    steps = [model.forward(ranks[0].routed, model.x_TD), model.forward(ranks[1].routed, model.x_TD[:0])]
    y_TD, _ = drive(steps, TIMEOUT_S)
    assert num_different(y_TD, on_one_rank(model)) == 0
    traffic = [rank.side.transport.traffic for rank in ranks]
    assert (traffic[0].send_bytes[1], traffic[1].collect_bytes[0]) == tuple(2 * size for size in sizes)


def test_slices_over_processes() -> None:
    model = make_model("bfloat16")
    plan, bounds = plan_of(model, 3, "replicated", 2), list(pairwise([0, 131, 131, NUM_TOKENS]))

    def compute(mesh: Mesh) -> int:
        rank = make_rank(model, plan, GlooTransport(mesh, num_lanes=Exchange.LANES))
        rows = slice(*bounds[mesh.rank])
        (y_TD,) = drive([model.forward(rank.routed, model.x_TD[rows])], TIMEOUT_S)
        return num_different(y_TD, on_one_rank(model)[rows])

    on_one_rank(model)  # once, before the ranks fork
    assert run_ranks(3, compute) == [0, 0, 0]


@settings(max_examples=4)
@given(st.data())
def test_no_placement_of_slices_or_order_of_arrival_changes_a_bit(data: st.DataObject) -> None:
    model = make_model()
    num_ranks = data.draw(st.integers(1, 4), label="ranks")
    num_slices = data.draw(st.sampled_from([2, 4]), label="slices")
    seed = data.draw(st.integers(0, 2**20), label="seed")
    rng = np.random.default_rng(seed)
    plan = plan_of(model, num_ranks, "replicated", num_slices)
    plan = replace(plan, slot_rank=tuple(rng.integers(0, num_ranks, len(one)) for one in plan.slot_rank))
    cuts = np.sort(rng.integers(0, NUM_TOKENS, num_ranks - 1)).tolist()
    wires, steps = MemoryWires(num_ranks), []
    for rank, (first, stop) in enumerate(pairwise([0, *cuts, NUM_TOKENS])):
        made = make_rank(model, plan, wires.transport(rank))
        parts = model.x_TD[first:stop].tensor_split(2)
        steps.append([model.forward(made.routed, part, at) for at, part in enumerate(parts)])
    found = drive_shuffled([in_turns(of_rank) for of_rank in steps], seed)
    y_TD = torch.cat([part for of_rank in found for part in of_rank])
    assert num_different(y_TD, on_one_rank(model)) == 0


# ---- another plan ----


def test_slices_move_whole_to_where_another_plan_has_them() -> None:
    model, num_ranks = make_model(), 3
    plans = [plan_of(model, num_ranks, kind, 2) for kind in ("contiguous", "replicated", "random")]
    wires, moves = MemoryWires(num_ranks), MemoryWires(num_ranks)
    ranks = [make_rank(model, plans[0], wires.transport(i)) for i in range(num_ranks)]
    placed = [
        Placed(plans[0], rank.store, rank.side, (1, 2), moves.transport(i)) for i, rank in enumerate(ranks)
    ]
    blob_bytes = BlobLayout.of(model.layers[0][1], "float32", 2).num_bytes
    for before, after in pairwise(plans):
        sent = drive_ready([one.adopt(after) for one in placed])
        assert sum(sent) == sum(len(keys) for keys in fetched(before, after)) * blob_bytes > 0
        parts = model.x_TD.split(TOKENS_PER_RANK[num_ranks])
        steps: list[Steps[Tensor]] = [
            model.forward(rank.routed, x_TD) for rank, x_TD in zip(ranks, parts, strict=True)
        ]
        assert num_different(torch.cat(drive_ready(steps)), on_one_rank(model)) == 0
    with pytest.raises(ConfigError, match="into 4 slices, and those in memory are in 2"):
        drive_ready([ranks[0].store.adopt(plan_of(model, num_ranks, "random", 4))])


# ---- what travels ----


def test_a_row_goes_once_to_a_rank_and_a_root_comes_back_for_each_slice() -> None:
    model = make_model("bfloat16")
    plan = plan_of(model, 2, "contiguous", 2)  # each rank has both slices of half of the experts
    wires = MemoryWires(2)
    ranks = [make_rank(model, plan, wires.transport(i)) for i in range(2)]
    routings = spied_routings(World(wires=wires, sides=[rank.side for rank in ranks], plan=plan))
    drive_ready(
        [model.forward(rank.routed, part) for rank, part in zip(ranks, model.x_TD.split(130), strict=True)]
    )
    away = [(experts_TK < 8) == (rank == 1) for rank, experts_TK in routings]
    num_rows, num_jobs = sum(int(x.any(1).sum()) for x in away), 2 * sum(int(x.sum()) for x in away)
    traffic = [rank.side.transport.traffic for rank in ranks]
    heads = 4 * HEAD_BYTES
    assert sum(int(one.send_bytes.sum()) for one in traffic) == (
        heads + num_rows * ROW_BYTES // 2 + num_jobs * JOB_BYTES
    )
    assert sum(int(one.collect_bytes.sum()) for one in traffic) == heads + num_jobs * ROW_BYTES


def test_as_many_bytes_travel_as_the_planner_prices() -> None:
    """Uniform choices, two groups of two ranks, each with one slice of the experts of its group."""
    model, num_ranks, num_tokens, num_slices = make_model("bfloat16", num_experts=16), 4, 4096, 2
    plan, wires = contiguous_plan((16, 16), num_ranks, num_slices), MemoryWires(num_ranks)
    ranks = [make_rank(model, plan, wires.transport(i)) for i in range(num_ranks)]
    rng = np.random.default_rng(0)
    choices = np.sort([rng.choice(16, 4, replace=False) for _ in range(num_tokens)])
    routing = Routing(experts_TK=torch.from_numpy(choices), weights_TK=torch.ones(num_tokens, 4))
    x_TD = torch.zeros(num_tokens, WIDTH, dtype=torch.bfloat16)
    nobody = Routing(experts_TK=routing.experts_TK[:0], weights_TK=routing.weights_TK[:0])
    drive_ready(
        [
            rank.routed.forward(
                x_TD if i == 0 else x_TD[:0], routing if i == 0 else nobody, make_tag(1), None
            )
            for i, rank in enumerate(ranks)
        ]
    )
    num_heads, seam_bytes = num_ranks - 1, 2
    away = 2 * int((choices >= 8).sum()) + int((choices < 8).sum())  # slices that are on other ranks
    sent = int(ranks[0].side.transport.traffic.send_bytes.sum()) - num_heads * HEAD_BYTES - away * JOB_BYTES
    expected = copies_once(num_tokens, 4, num_ranks, 16, num_slices)
    assert sent / (WIDTH * seam_bytes) == pytest.approx(expected, rel=0.01)
    returned = sum(int(rank.side.transport.traffic.collect_bytes[0]) for rank in ranks[1:])
    assert returned == num_heads * HEAD_BYTES + away * WIDTH * 4
    priced = returned_bytes(num_tokens, 4, num_ranks, WIDTH, result_bytes=seam_bytes, num_slices=num_slices)
    assert returned == pytest.approx(priced, rel=0.02)


# ---- what would be wrong ----


def test_roots_that_are_added_slice_after_slice_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the order that a loop over slices suggests."""

    def folded(root_JD: Tensor, job_NU: Tensor, *rest: object, seam: torch.dtype) -> Tensor:
        root_NUD = root_JD[job_NU.reshape(-1)].view(*job_NU.shape, WIDTH)
        return reduce(torch.add, root_NUD.unbind(1)).to(seam)

    monkeypatch.setattr(exchange, "join_slices", folded)
    model = make_model(has_bias=False)
    y_TD = in_one_thread(model, plan_of(model, 3, "random", 4), TOKENS_PER_RANK[3])
    assert torch.allclose(y_TD, on_one_rank(model), rtol=1e-4, atol=1e-4)
    assert num_different(y_TD, on_one_rank(model)) > y_TD.numel() // 4


def test_what_slices_cannot_return_is_refused() -> None:
    model, wires = make_model(), MemoryWires(2)
    plan = plan_of(model, 2, "contiguous", 2)
    store = store_of(model, plan, 0)
    with pytest.raises(ConfigError, match="roots of their sums one by one: choices"):
        side_of(model, plan, wires.transport(0), store, Exchange, returns="subtrees")
    wrong = replace(model, numerics=replace(model.numerics, combine="per_rank"))
    with pytest.raises(ConfigError, match="added by the tree"):
        side_of(wrong, plan, wires.transport(0), store, Exchange)
    with pytest.raises(ConfigError, match=r"layers \[1, 2\] need the biases of down"):
        Exchange(model.layers, model.numerics, plan, wires.transport(0))
    with pytest.raises(ConfigError, match="has slices, and one rank has every expert whole"):
        Local(model.layers, model.numerics, replace(plan, slot_rank=(plan.slot_rank[0] * 0,) * 2))
    with pytest.raises(ConfigError, match=r"4 / 8 = 0\.5 leaves .* can be cut into 1, 2, 4; ask for --matm"):
        LoopFfn(model.layers[0][1], store, model.ops, num_slices=8)
    part = replace(
        plan,
        slot_rank=tuple(one[1:] for one in plan.slot_rank),
        slot_expert=tuple(one[1:] for one in plan.slot_expert),
        slot_slice=tuple(one[1:] for one in plan.slot_slice),
        slot_share=tuple(one[1:] for one in plan.slot_share),
    )
    with pytest.raises(ConfigError, match=r"gives no slot to slices \[0 of expert 0\] of layer 1"):
        side_of(model, part, wires.transport(0), store, Exchange)
