"""Same bits, wherever they are computed.

One rank computes a stack of MoE layers: that is the reference. Then the same tokens and the same experts are
spread over ranks, and the result must be the same, bit for bit, every element, however they are spread:

    rank 0               rank 1               rank 2               rank 3
    131 tokens           no tokens (idle)     97 tokens            32 tokens
    experts 3 8 9 15     experts 0 1 2 4 5    no experts           experts 6 7 .., a copy of 3
        |                    |                    |                    |
        +--------------------+---------+----------+--------------------+
                                       |
                   each row goes once to each rank that serves it
                   each reply lands at its (token, choice)
                   one tree adds, wherever its pieces are evaluated

Float32 comes first: rounding to bfloat16 hides a wrong order of sums in all but a few elements. The last test
is the negative control: one partial sum per rank, the order that a layout suggests, must be caught here.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from fakes_ranks import drive_shuffled, in_turns
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_layers import (
    HEAD_BYTES,
    JOB_BYTES,
    NUM_EXPERTS,
    NUM_TOKENS,
    ROW_BYTES,
    TIMEOUT_S,
    TOKENS_PER_RANK,
    WIDTH,
    World,
    make_model,
    make_plan,
    make_ranks,
    make_side,
    make_tag,
    num_different,
    on_one_rank,
    over_the_wire,
    rank_steps,
    spied_routings,
)
from torch import Tensor

from moesaic.cost.exchange import copies_once, copies_sent
from moesaic.errors import ConfigError, PeerLost
from moesaic.experts.contract import ExpertBatch, ExpertFfn, Routing
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.message import Returns
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.transport import MemoryWires
from moesaic.spec.experts import contiguous_plan
from moesaic.spec.numerics import DType
from moesaic.steps import Steps, drive, drive_ready

# ---- the matrix ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_choices", [4, 6, 8])
@pytest.mark.parametrize("returns", ["choices", "subtrees"])
@pytest.mark.parametrize(
    ("kind", "num_ranks"),
    [
        ("contiguous", 1),
        ("contiguous", 2),
        ("random", 3),
        ("replicated", 3),
        ("contiguous", 4),
        ("replicated", 4),
    ],
)
def test_any_placement_gives_the_bits_of_one_rank(
    dtype: DType, num_choices: int, returns: Returns, kind: str, num_ranks: int
) -> None:
    model, plan = make_model(dtype, num_choices), make_plan(kind, num_ranks)
    ranks = make_ranks(model, plan, num_ranks, returns=returns)
    steps = rank_steps(model, ranks, TOKENS_PER_RANK[num_ranks])
    y_TD = torch.cat(drive_ready([one for (one,) in steps]))
    assert num_different(y_TD, on_one_rank(model)) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("returns", ["choices", "subtrees"])
@pytest.mark.parametrize(
    ("kind", "num_ranks", "ranks_per_node"),
    [
        ("contiguous", 1, 1),
        ("random", 3, 1),  # nodes of one rank
        ("replicated", 3, 2),  # a last node with one rank, the proxy of two
        ("contiguous", 4, 2),
        ("replicated", 4, 3),
        ("random", 4, 8),  # one node
    ],
)
def test_nodes_of_any_size_give_the_bits_of_one_rank(
    dtype: DType, returns: Returns, kind: str, num_ranks: int, ranks_per_node: int
) -> None:
    model, plan = make_model(dtype, 6), make_plan(kind, num_ranks)
    ranks = make_ranks(model, plan, num_ranks, returns=returns, ranks_per_node=ranks_per_node)
    steps = rank_steps(model, ranks, TOKENS_PER_RANK[num_ranks])
    y_TD = torch.cat(drive_ready([one for (one,) in steps]))
    assert num_different(y_TD, on_one_rank(model)) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_micro_batches", "num_chunks"), [(2, 1), (3, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize(
    ("how", "ranks_per_node"),
    [
        ("strict turns over all", None),
        ("each rank by itself", None),
        ("each rank by itself", 2),  # a proxy hands on when it is looked at, so strict turns would stop
    ],
)
def test_micro_batches_and_chunks_give_the_bits_of_one_batch(
    dtype: DType, num_micro_batches: int, num_chunks: int, how: str, ranks_per_node: int | None
) -> None:
    model, plan = make_model(dtype), make_plan("replicated", 4)
    ranks = make_ranks(model, plan, 4, ranks_per_node=ranks_per_node)
    steps = rank_steps(
        model, ranks, TOKENS_PER_RANK[4], num_micro_batches=num_micro_batches, num_chunks=num_chunks
    )
    if how == "strict turns over all":
        parts = drive([one for of_rank in steps for one in of_rank], TIMEOUT_S)
    else:
        parts = [one for of_rank in drive_shuffled([in_turns(s) for s in steps], seed=5) for one in of_rank]
    assert num_different(torch.cat(parts), on_one_rank(model)) == 0


def test_one_rank_in_micro_batches_and_chunks() -> None:
    model = make_model("float32")
    local = Local(model.layers, model.numerics)
    routed = Staged(tokens=local, experts=local, ffn=model.ffn(), num_chunks=2)
    parts = model.x_TD.tensor_split(3)
    results = drive([model.forward(routed, part, at) for at, part in enumerate(parts)], TIMEOUT_S)
    assert num_different(torch.cat(results), on_one_rank(model)) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_token_alone_gives_the_bits_of_the_batch(dtype: DType) -> None:
    model = make_model(dtype)
    local = Local(model.layers, model.numerics)
    routed = Staged(tokens=local, experts=local, ffn=model.ffn())
    alone = [drive([model.forward(routed, x.unsqueeze(0))], TIMEOUT_S)[0] for x in model.x_TD[:24]]
    assert num_different(torch.cat(alone), on_one_rank(model)[:24]) == 0


@pytest.mark.parametrize("returns", ["choices", "subtrees"])
def test_weights_on_the_input_travel_with_the_rows(returns: Returns) -> None:
    model, plan = make_model("float32", 4, "input"), make_plan("random", 3)
    ranks = make_ranks(model, plan, 3, returns=returns)
    y_TD = torch.cat(drive_ready([one for (one,) in rank_steps(model, ranks, TOKENS_PER_RANK[3])]))
    assert num_different(y_TD, on_one_rank(model)) == 0
    assert num_different(y_TD, on_one_rank(make_model("float32", 4))) > y_TD.numel() // 2


def test_split_roles_give_the_bits_of_one_rank() -> None:
    """Ranks 0 and 1 have tokens and no experts, ranks 2 and 3 experts and no tokens."""
    model = make_model("float32")
    plan = make_plan("replicated", 2, seed=3)
    plan = replace(plan, slot_rank=tuple(ranks + 2 for ranks in plan.slot_rank))
    world = make_ranks(model, plan, 4)
    steps = rank_steps(model, world, [130, 130, 0, 0], num_micro_batches=3)
    results = drive_shuffled([in_turns(of_rank) for of_rank in steps], seed=11)
    y_TD = torch.cat([part for parts in results for part in parts])
    assert num_different(y_TD, on_one_rank(model)) == 0


@settings(max_examples=16)
@given(st.data())
def test_no_placement_split_or_order_of_arrival_changes_a_bit(data: st.DataObject) -> None:
    model = make_model("float32", data.draw(st.sampled_from([4, 6, 8]), label="choices"))
    num_ranks = data.draw(st.integers(1, 4), label="ranks")
    seed = data.draw(st.integers(0, 2**20), label="seed")
    plan = make_plan(data.draw(st.sampled_from(["random", "replicated"]), label="plan"), num_ranks, seed)
    cuts = sorted(
        data.draw(st.lists(st.integers(0, NUM_TOKENS), min_size=num_ranks - 1, max_size=num_ranks - 1))
    )
    sizes = np.diff([0, *cuts, NUM_TOKENS]).tolist()
    ranks = make_ranks(
        model,
        plan,
        num_ranks,
        returns=data.draw(st.sampled_from(["choices", "subtrees"]), label="returns"),
        seed=seed,
        ranks_per_node=data.draw(st.sampled_from([None, 1, 2, 3]), label="ranks per node"),
    )
    steps = rank_steps(
        model,
        ranks,
        sizes,
        num_micro_batches=data.draw(st.integers(1, 3), label="micro-batches"),
        num_chunks=data.draw(st.integers(1, 2), label="chunks"),
    )
    # Not even the turns of one rank's own micro-batches need an order here: every box has an address.
    parts = drive_shuffled([one for of_rank in steps for one in of_rank], seed)
    assert num_different(torch.cat(parts), on_one_rank(model)) == 0
    assert not ranks.wires.boxes


# ---- a dispatcher by itself: experts that return their input ----


class IdentityFfn(ExpertFfn):
    def __call__(self, batch: ExpertBatch) -> Steps[Tensor]:
        yield from ()
        return batch.x_RD.unpack(torch.float32).index_select(0, batch.row_J)


@pytest.mark.parametrize("returns", ["choices", "subtrees"])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_identity_experts_make_a_dispatcher_the_identity(
    num_ranks: int, returns: Returns, ranks_per_node: int | None
) -> None:
    model, plan = make_model("float32", 6), make_plan("replicated", num_ranks, seed=2)
    weights = torch.tensor([1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8])  # exact, and so is each of their sums
    ranks = make_ranks(model, plan, num_ranks, returns=returns, ranks_per_node=ranks_per_node)
    steps = []
    for rank, x_TD in enumerate(model.x_TD.split(TOKENS_PER_RANK[num_ranks])):
        side = ranks.sides[rank]
        experts_TK = model.routers[1](x_TD).experts_TK
        routing = Routing(experts_TK=experts_TK, weights_TK=weights.expand(len(x_TD), 6))
        steps.append(
            Staged(tokens=side, experts=side, ffn=IdentityFfn()).forward(x_TD, routing, make_tag(1), None)
        )
    assert num_different(torch.cat(drive_ready(steps)), model.x_TD) == 0


def test_an_expert_with_one_row_and_experts_with_none() -> None:
    """Row counts that kernels like to treat in their own way, on one rank and on four."""
    model, plan = make_model("float32", 4), make_plan("random", 4, seed=8)
    rng = np.random.default_rng(0)
    choices = np.sort([rng.permutation(np.arange(2, 15))[:4] for _ in range(NUM_TOKENS)], axis=1)
    choices[77, 3] = 15  # its only row; experts 0 and 1 have none
    experts_TK = torch.from_numpy(choices)
    routing = Routing(experts_TK=experts_TK, weights_TK=torch.rand(NUM_TOKENS, 4))
    counts = torch.bincount(experts_TK.flatten(), minlength=NUM_EXPERTS).tolist()
    assert (counts[0], counts[1], counts[15]) == (0, 0, 1)
    local = Local(model.layers, model.numerics)
    whole = Staged(tokens=local, experts=local, ffn=model.ffn())
    (expected,) = drive([whole.forward(model.x_TD, routing, make_tag(1), None)], TIMEOUT_S)
    ranks = make_ranks(model, plan, 4)
    steps, start = [], 0
    for rank, size in enumerate(TOKENS_PER_RANK[4]):
        rows, start = slice(start, start + size), start + size
        part = Routing(experts_TK=experts_TK[rows], weights_TK=routing.weights_TK[rows])
        side = ranks.sides[rank]
        routed = Staged(tokens=side, experts=side, ffn=model.ffn(plan, rank))
        steps.append(routed.forward(model.x_TD[rows], part, make_tag(1), None))
    assert num_different(torch.cat(drive_ready(steps)), expected) == 0


@pytest.mark.parametrize("ranks_per_node", [None, 2, 3])
def test_one_token_and_three_idle_ranks(ranks_per_node: int | None) -> None:
    model, plan = make_model("float32"), make_plan("contiguous", 4)
    ranks = make_ranks(model, plan, 4, ranks_per_node=ranks_per_node)
    one = replace(model, x_TD=model.x_TD[:1])
    steps = [one for (one,) in rank_steps(one, ranks, [0, 0, 1, 0])]
    assert num_different(torch.cat(drive_ready(steps)), on_one_rank(model)[:1]) == 0


@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_a_rank_that_stays_away_is_named(ranks_per_node: int | None) -> None:
    model, plan = make_model("float32"), make_plan("contiguous", 2)
    ranks = make_ranks(model, plan, 2, ranks_per_node=ranks_per_node)
    (present,), _ = rank_steps(model, ranks, [130, 130])
    with pytest.raises(PeerLost, match=r"rank 1 did not answer .*stage send"):
        drive([present], TIMEOUT_S)


def test_bytes_on_the_wire_are_the_rows_and_the_jobs_and_nothing_else() -> None:
    """A row goes once to each rank; subtrees cost fewer values than choices where ranks hold runs."""
    model, plan = make_model("float32"), make_plan("contiguous", 2)
    sent, returned = {}, {}
    for returns in ("choices", "subtrees"):
        world = make_ranks(model, plan, 2, returns=returns)
        routings = spied_routings(world)
        drive_ready([one for (one,) in rank_steps(model, world, [130, 130])])
        sent[returns], returned[returns] = world.num_bytes()
    away = [(experts_TK < NUM_EXPERTS // 2) == (rank == 1) for rank, experts_TK in routings]
    num_rows, num_jobs = sum(int(x.any(1).sum()) for x in away), sum(int(x.sum()) for x in away)
    assert sent["choices"] == sent["subtrees"] == 4 * HEAD_BYTES + num_rows * ROW_BYTES + num_jobs * JOB_BYTES
    assert returned["choices"] == 4 * HEAD_BYTES + num_jobs * ROW_BYTES
    assert returned["subtrees"] < 0.8 * returned["choices"]


def test_as_many_rows_travel_as_the_planner_prices() -> None:
    """Uniform choices: a row goes once to each other rank with any of its experts, and no padding."""
    model, num_ranks, num_tokens = make_model("float32"), 4, 4096
    world = make_ranks(model, make_plan("contiguous", num_ranks), num_ranks)
    rng = np.random.default_rng(0)
    choices = [
        rng.choice(NUM_EXPERTS, model.layers[0][1].experts_per_token, replace=False)
        for _ in range(num_tokens)
    ]
    routing = Routing(
        experts_TK=torch.from_numpy(np.sort(choices)),
        weights_TK=torch.ones(num_tokens, model.layers[0][1].experts_per_token),
    )
    side = world.sides[0]
    side.send(torch.zeros(num_tokens, WIDTH), routing, make_tag(1), None)
    num_away = int((routing.experts_TK >= NUM_EXPERTS // num_ranks).sum())
    sent = int(side.transport.traffic.send_bytes.sum())
    num_rows = (sent - (num_ranks - 1) * HEAD_BYTES - num_away * JOB_BYTES) / ROW_BYTES
    expected = copies_once(num_tokens, routing.experts_TK.shape[1], num_ranks, NUM_EXPERTS)
    assert num_rows == pytest.approx(expected, rel=0.01)
    assert num_rows < 0.7 * copies_sent(num_tokens, routing.experts_TK.shape[1], num_ranks)


@pytest.mark.parametrize("ranks_per_node", [None, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_travel_in_fp8_give_the_bits_of_one_rank_that_rounds_them(
    dtype: DType, ranks_per_node: int | None
) -> None:
    exact = make_model(dtype)
    model = over_the_wire(exact, "fp8")
    world = make_ranks(model, make_plan("replicated", 4), 4, ranks_per_node=ranks_per_node)
    plain = make_ranks(exact, make_plan("replicated", 4), 4, ranks_per_node=ranks_per_node)
    sizes = [130, 0, 97, 33]
    found = drive_ready([one for (one,) in rank_steps(model, world, sizes)])
    drive_ready([one for (one,) in rank_steps(exact, plain, sizes)])
    assert torch.equal(torch.cat(found), on_one_rank(model))
    assert not torch.equal(on_one_rank(model), on_one_rank(exact)), "rounding shows"
    assert world.num_bytes()[0] < plain.num_bytes()[0]
    assert world.num_bytes()[1] == pytest.approx(plain.num_bytes()[1], rel=0.01), "results are not rounded"


def test_a_row_crosses_to_each_node_once() -> None:
    """Four ranks on two nodes: what crosses is what two ranks would send, whichever ranks it is for."""
    model, plan = make_model("float32"), make_plan("contiguous", 4)
    crossed = {}
    for nodes, returns in ((2, "choices"), (2, "subtrees"), (None, "choices"), (None, "subtrees")):
        world = make_ranks(model, plan, 4, returns=returns, ranks_per_node=nodes)  # type: ignore[arg-type]
        routings = spied_routings(world)
        drive_ready([one for (one,) in rank_steps(model, world, [130, 0, 97, 33])])
        far = [[peer // 2 != rank // 2 for peer in range(4)] for rank in range(4)]
        crossed[nodes, returns] = [
            sum(
                int(getattr(side.transport.traffic, name)[far[rank]].sum())
                for rank, side in enumerate(world.sides)
            )
            for name in ("send_bytes", "collect_bytes")
        ]
    away = [(experts_TK < NUM_EXPERTS // 2) == (rank >= 2) for rank, experts_TK in routings]
    num_rows, num_jobs = sum(int(x.any(1).sum()) for x in away), sum(int(x.sum()) for x in away)
    num_messages = 4 * len(model.layers)  # each rank to the one node that is not its own
    heads = num_messages * HEAD_BYTES
    assert num_rows <= 2 * NUM_TOKENS
    assert crossed[2, "choices"][0] == heads + num_rows * ROW_BYTES + num_jobs * JOB_BYTES
    assert crossed[2, "choices"][1] == heads + num_jobs * ROW_BYTES
    assert crossed[2, "subtrees"][0] == crossed[2, "choices"][0] < 0.75 * crossed[None, "choices"][0]
    assert crossed[2, "subtrees"][1] < 0.9 * crossed[None, "subtrees"][1], "a proxy joins what its node holds"


def test_the_copy_on_the_own_node_goes_first() -> None:
    """With every expert on every node nothing crosses but heads."""
    model = make_model("float32")
    experts = np.tile(np.arange(NUM_EXPERTS), 2)
    plan = replace(
        contiguous_plan((2 * NUM_EXPERTS,) * 2, 4),
        slot_expert=(experts, experts),
        slot_share=(np.ones(len(experts)),) * 2,
    )
    wires = MemoryWires(4)
    sides = [make_side(model, plan, wires.transport(rank), "choices", None, 2) for rank in range(4)]
    world = World(wires=wires, sides=sides, plan=plan)
    y_TD = torch.cat(drive_ready([one for (one,) in rank_steps(model, world, TOKENS_PER_RANK[4])]))
    assert num_different(y_TD, on_one_rank(model)) == 0
    for rank, side in enumerate(sides):
        other_node = slice(0, 2) if rank >= 2 else slice(2, 4)
        traffic = side.transport.traffic
        assert int(traffic.send_bytes[other_node].sum()) == len(model.layers) * HEAD_BYTES
        assert int(traffic.collect_bytes[other_node].sum()) == len(model.layers) * HEAD_BYTES


# ---- the negative control ----


@pytest.mark.parametrize("num_choices", [4, 6, 8])
def test_one_partial_sum_per_rank_is_caught(num_choices: int) -> None:
    """The order of sums that a layout suggests gives other bits: these tests can fail."""
    model = make_model("float32", num_choices)
    wrong = replace(model, numerics=replace(model.numerics, combine="per_rank"))
    plan = make_plan("random", 3)
    y_TD = torch.cat(
        drive_ready([one for (one,) in rank_steps(wrong, make_ranks(wrong, plan, 3), [87, 87, 86])])
    )
    assert torch.allclose(y_TD, on_one_rank(model), rtol=1e-4, atol=1e-4)  # the same terms ...
    assert num_different(y_TD, on_one_rank(model)) > y_TD.numel() // 4  # ... in another order


def test_two_levels_refuse_one_partial_sum_per_rank() -> None:
    model = make_model("float32")
    wrong = replace(model, numerics=replace(model.numerics, combine="per_rank"))
    with pytest.raises(ConfigError, match="two_level sums by the tree only"):
        make_ranks(wrong, make_plan("random", 3), 3, ranks_per_node=2)
    with pytest.raises(ConfigError, match="ranks_per_node must be at least 1, got 0"):
        make_ranks(model, make_plan("random", 3), 3, ranks_per_node=0)
