"""Exchanges between processes: what one thread proved of the dispatcher holds over a real transport."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from fakes_ranks import random_copies
from moe_layers import TOKENS_PER_RANK, make_model, make_plan, make_side, num_different, on_one_rank
from ranks import run_ranks
from torch import Tensor

from moesaic.errors import ConfigError, PeerLost
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.message import Returns
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.dispatch.two_level import TwoLevel
from moesaic.parallel.gloo import GlooTransport
from moesaic.parallel.mesh import Identity, Mesh
from moesaic.parallel.transport import Purpose
from moesaic.steps import drive

TIMEOUT_S = 20.0


def parts_of(rank: int, num_ranks: int, turn: int) -> list[Tensor]:
    """Messages of all sizes, none among them, that say where they come from."""
    return [torch.full(((rank + 2 * peer + turn) % 5,), 10 * rank + turn) for peer in range(num_ranks)]


def bytes_of(parts: list[Tensor]) -> list[Tensor]:
    return [part.to(torch.uint8) for part in parts]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_messages_of_any_size_arrive_in_order_on_every_lane(num_ranks: int) -> None:
    def talk(mesh: Mesh) -> bool:
        wires = GlooTransport(mesh, num_lanes=2)
        purpose = Purpose(layer_idx=0, stage="send")
        arrivals = [
            wires.exchange(bytes_of(parts_of(mesh.rank, num_ranks, turn)), lane=turn % 2, purpose=purpose)
            for turn in range(6)
        ]
        # The later ones are looked at first, and on some ranks only.
        for turn in (5, 4, 3) if mesh.rank == 1 else ():
            arrivals[turn].ready()
        for turn, arrival in enumerate(arrivals):
            arrival.wait(TIMEOUT_S)
            assert arrival.ready()
            expected = [bytes_of(parts_of(source, num_ranks, turn))[mesh.rank] for source in range(num_ranks)]
            assert all(torch.equal(a, b) for a, b in zip(arrival.take(), expected, strict=True))
        sent = wires.traffic.send_bytes
        assert sent[mesh.rank] == 0
        return int(sent.sum()) == sum(
            part.numel()
            for turn in range(6)
            for peer, part in enumerate(parts_of(mesh.rank, num_ranks, turn))
            if peer != mesh.rank
        )

    assert run_ranks(num_ranks, talk) == [True] * num_ranks


@pytest.mark.parametrize(
    ("num_ranks", "returns", "num_micro_batches", "ranks_per_node"),
    [
        (2, "choices", 2, None),
        (4, "subtrees", 1, None),
        (3, "choices", 3, None),
        (4, "subtrees", 2, 2),
        (3, "choices", 1, 2),
    ],
)
def test_processes_give_the_bits_of_one_rank(
    num_ranks: int, returns: Returns, num_micro_batches: int, ranks_per_node: int | None
) -> None:
    model, plan = make_model("float32"), make_plan("replicated", num_ranks)
    rng = np.random.default_rng(0)
    slots = [random_copies(plan, at, rng) for at in range(len(model.layers))]
    bounds = list(pairwise([0, *np.cumsum(TOKENS_PER_RANK[num_ranks]).tolist()]))
    expected = on_one_rank(model)

    def compute(mesh: Mesh) -> int:
        kind = Exchange if ranks_per_node is None else TwoLevel
        wires = GlooTransport(mesh, num_lanes=kind.LANES * num_micro_batches * 2, num_chunks=2)
        side = make_side(model, plan, wires, returns, slots, ranks_per_node)
        routed = Staged(tokens=side, experts=side, ffn=model.ffn(plan, mesh.rank))
        rows = slice(*bounds[mesh.rank])
        parts = model.x_TD[rows].tensor_split(num_micro_batches)
        done = drive([model.forward(routed, part, at) for at, part in enumerate(parts)], TIMEOUT_S)
        return num_different(torch.cat(done), expected[rows])

    assert run_ranks(num_ranks, compute) == [0] * num_ranks


def test_a_rank_that_dies_is_named_with_layer_and_stage() -> None:
    def talk(mesh: Mesh) -> None:
        wires = GlooTransport(mesh, num_lanes=1)
        for layer_idx, stage in ((3, "send"), (4, "collect")):
            if layer_idx == 4 and mesh.rank == 1:
                os._exit(7)
            purpose = Purpose(layer_idx=layer_idx, stage=stage)  # type: ignore[arg-type]
            wires.exchange([torch.ones(9, dtype=torch.uint8)] * 3, lane=0, purpose=purpose).wait(TIMEOUT_S)

    for error in run_ranks(3, talk, dying=(1,))[::2]:
        assert isinstance(error, PeerLost)
        assert (error.rank, error.layer_idx, error.stage) == (1, 4, "collect")


def test_ranks_that_would_compute_something_else_are_refused() -> None:
    same = Identity(version="1", checkpoint="c", numerics="n", backend="native/avx2", layout="dp 3")

    def meet(mesh: Mesh) -> None:
        mesh.agree(same if mesh.rank < 2 else replace(same, backend="native/portable", version="2"))

    for error in run_ranks(3, meet):
        assert isinstance(error, ConfigError)
        assert "ranks 0 and 2 differ in version 1 and 2; backend native/avx2 and native/portable" in str(
            error
        )
