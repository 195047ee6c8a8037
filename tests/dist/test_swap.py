"""Where experts are may change while a model runs, and no bit changes: any choice of copies, any plan after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_same_bits import (
    NUM_EXPERTS,
    TOKENS_PER_RANK,
    World,
    make_model,
    make_plan,
    num_different,
    on_one_rank,
    rank_steps,
)

from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.two_level import TwoLevel
from moesaic.parallel.transport import MemoryWires
from moesaic.placement.choice import REPLICA_CHOICES, ReplicaChoice
from moesaic.steps import drive_ready


@pytest.mark.parametrize("choice", REPLICA_CHOICES)
@pytest.mark.parametrize("ranks_per_node", [None, 2])
def test_every_choice_among_copies_gives_the_bits_of_one_rank(
    choice: ReplicaChoice, ranks_per_node: int | None
) -> None:
    """Also when the ranks know of different loads: who sends decides, and says where."""
    model, plan, wires = make_model("float32", 6), make_plan("replicated", 4), MemoryWires(4)
    nodes = {} if ranks_per_node is None else {"ranks_per_node": ranks_per_node}
    kind: Any = Exchange if ranks_per_node is None else TwoLevel
    sides = []
    for rank in range(4):
        transport = wires.transport(rank)
        side = kind(model.layers, model.numerics, plan, transport, replica_choice=choice, **nodes)
        side.observe([np.random.default_rng(rank).integers(0, 99, NUM_EXPERTS) for _ in model.layers])
        sides.append(side)
    steps = rank_steps(model, World(wires=wires, sides=sides, plan=plan), TOKENS_PER_RANK[4])
    y_TD = torch.cat(drive_ready([one for (one,) in steps]))
    assert num_different(y_TD, on_one_rank(model)) == 0
