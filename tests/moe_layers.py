"""Two MoE layers with residuals, on one rank and spread over ranks in one thread.

Two layers, so that a bit lost in the first shows in the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from fakes_ranks import random_copies
from torch import Tensor

from moesaic.experts.blob import BlobLayout, Part
from moesaic.experts.contract import RoutedExperts, Routing, Tag
from moesaic.experts.ffn import LoopFfn
from moesaic.experts.router import Router
from moesaic.experts.store import ExpertLoader
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.ops import Ops, choose
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.message import Returns
from moesaic.parallel.dispatch.staged import Staged
from moesaic.parallel.dispatch.two_level import TwoLevel
from moesaic.parallel.transport import MemoryWires, Transport
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.model import GateSpec, MoeSpec
from moesaic.spec.numerics import DType, Numerics, WireFormat, preset
from moesaic.steps import Steps, drive

NUM_EXPERTS, WIDTH, INNER, NUM_TOKENS = 16, 64, 32, 260
TOKENS_PER_RANK = {1: [260], 2: [129, 131], 3: [131, 0, 129], 4: [131, 0, 97, 32]}
TIMEOUT_S = 1.0
HEAD_BYTES, JOB_BYTES, ROW_BYTES = 32, 16, WIDTH * 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    layers: tuple[tuple[int, MoeSpec], ...]
    numerics: Numerics
    ops: Ops
    routers: dict[int, Router]
    parts: dict[tuple[int, int, Part], Tensor]
    x_TD: Tensor

    def ffn(self, plan: ExpertPlan | None = None, rank: int = 0) -> LoopFfn:
        """The experts of one rank, loaded as a checkpoint would be."""
        loader = ExpertLoader(self.layers, self.numerics.formats, plan=plan, rank=rank)
        for (layer_idx, logical_id, part), tensor in self.parts.items():
            loader.put(layer_idx, logical_id, part, tensor)
        return LoopFfn(self.layers[0][1], loader.finish(), self.ops)

    def forward(self, routed: RoutedExperts, x_TD: Tensor, micro_batch: int = 0) -> Steps[Tensor]:
        for layer_idx, _ in self.layers:
            tag = make_tag(layer_idx, micro_batch)
            x_TD = x_TD + (yield from routed.forward(x_TD, self.routers[layer_idx](x_TD), tag, None))
        return x_TD


def make_tag(layer_idx: int, micro_batch: int = 0) -> Tag:
    return Tag(epoch=0, plan_version=0, step_id=1, micro_batch=micro_batch, chunk=0, layer_idx=layer_idx)


@lru_cache
def make_model(dtype: DType, num_choices: int = 8, weight_on: Literal["output", "input"] = "output") -> Model:
    rng = torch.Generator().manual_seed(num_choices)
    spec = MoeSpec(
        num_experts=NUM_EXPERTS,
        experts_per_token=num_choices,
        expert_width=INNER,
        gate=GateSpec(score="softmax"),
        shared=None,
        row_width=WIDTH,
        has_bias=True,
        weight_on=weight_on,
    )
    return random_model(spec, preset("portable", dtype=dtype), rng)


def random_model(spec: MoeSpec, numerics: Numerics, rng: torch.Generator) -> Model:
    layers, ops = ((1, spec), (2, spec)), choose(numerics, num_threads=1)
    shapes = {part: place.shape for part, place in BlobLayout.of(spec, "float32").places.items()}
    return Model(
        layers=layers,
        numerics=numerics,
        ops=ops,
        routers={
            layer_idx: Router(spec, torch.randn(spec.num_experts, WIDTH, generator=rng) / 4, None, None, ops)
            for layer_idx, _ in layers
        },
        parts={
            (layer_idx, logical_id, part): torch.randn(shape, generator=rng) * shape[-1] ** -0.5
            for layer_idx, _ in layers
            for logical_id in range(spec.num_experts)
            for part, shape in shapes.items()
        },
        x_TD=torch.randn(NUM_TOKENS, WIDTH, generator=rng).to(torch_dtype(numerics.seam_dtype)),
    )


@lru_cache
def over_the_wire(model: Model, wire_format: WireFormat) -> Model:
    """The same model, its rows rounded on their way to experts."""
    return replace(model, numerics=replace(model.numerics, wire_format=wire_format))


@lru_cache
def on_one_rank(model: Model) -> Tensor:
    """The reference: all tokens in one batch, all experts on one rank."""
    local = Local(model.layers, model.numerics)
    return drive(
        [model.forward(Staged(tokens=local, experts=local, ffn=model.ffn()), model.x_TD)], TIMEOUT_S
    )[0]


def make_plan(kind: str, num_ranks: int, seed: int = 0) -> ExpertPlan:
    """contiguous; random: ranks of any size, some without experts; replicated: random with more copies."""
    if kind == "contiguous":
        return contiguous_plan((NUM_EXPERTS, NUM_EXPERTS), num_ranks)
    rng = np.random.default_rng(seed)
    slot_expert, slot_rank = [], []
    for _ in range(2):
        num_copies = 0 if kind == "random" else 9
        experts = np.concatenate([rng.permutation(NUM_EXPERTS), rng.integers(0, NUM_EXPERTS, num_copies)])
        slot_expert.append(experts.astype(np.int64))
        slot_rank.append(rng.integers(0, num_ranks, len(experts)))
    return ExpertPlan(
        version=1,
        slot_rank=tuple(slot_rank),
        slot_expert=tuple(slot_expert),
        slot_slice=tuple(np.zeros_like(slots) for slots in slot_expert),
        slot_share=tuple(np.ones(len(slots)) for slots in slot_expert),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class World:
    """All ranks in one thread."""

    wires: MemoryWires
    sides: list[Exchange]
    plan: ExpertPlan

    def num_bytes(self) -> tuple[int, int]:
        """Sent and returned by all ranks."""
        traffic = [side.transport.traffic for side in self.sides]
        return sum(int(one.send_bytes.sum()) for one in traffic), sum(
            int(one.collect_bytes.sum()) for one in traffic
        )


def make_ranks(
    model: Model,
    plan: ExpertPlan,
    num_ranks: int,
    *,
    returns: Returns = "choices",
    seed: int = 0,
    ranks_per_node: int | None = None,
) -> World:
    """With nodes the dispatcher has two levels."""
    rng = np.random.default_rng(seed)
    slots = [random_copies(plan, at, rng) for at in range(len(model.layers))]
    wires = MemoryWires(num_ranks)
    sides = [
        make_side(model, plan, wires.transport(rank), returns, slots, ranks_per_node)
        for rank in range(num_ranks)
    ]
    return World(wires=wires, sides=sides, plan=plan)


def make_side(
    model: Model,
    plan: ExpertPlan,
    wires: Transport,
    returns: Returns,
    slots: Sequence[Tensor] | None,
    ranks_per_node: int | None,
) -> Exchange:
    if ranks_per_node is None:
        return Exchange(model.layers, model.numerics, plan, wires, returns=returns, slots=slots)
    return TwoLevel(
        model.layers,
        model.numerics,
        plan,
        wires,
        returns=returns,
        slots=slots,
        ranks_per_node=ranks_per_node,
    )


def rank_steps(
    model: Model,
    world: World,
    tokens_per_rank: Sequence[int],
    *,
    num_micro_batches: int = 1,
    num_chunks: int = 1,
) -> list[list[Steps[Tensor]]]:
    """The generators of each rank, one per micro-batch."""
    all_steps = []
    for rank, x_TD in enumerate(model.x_TD.split(list(tokens_per_rank))):
        side, ffn = world.sides[rank], model.ffn(world.plan, rank)
        routed = Staged(tokens=side, experts=side, ffn=ffn, num_chunks=num_chunks)
        parts = x_TD.tensor_split(num_micro_batches)
        all_steps.append([model.forward(routed, part, at) for at, part in enumerate(parts)])
    return all_steps


def num_different(a_TD: Tensor, b_TD: Tensor) -> int:
    """Elements whose bits differ; -0.0 is not 0.0."""
    assert a_TD.shape == b_TD.shape
    assert a_TD.dtype == b_TD.dtype
    bits = torch.int32 if a_TD.dtype == torch.float32 else torch.int16
    return int((a_TD.view(bits) != b_TD.view(bits)).sum())


def spied_routings(world: World) -> list[tuple[int, Tensor]]:
    """(rank, experts_TK) of every send that follows."""
    routings: list[tuple[int, Tensor]] = []
    for rank, side in enumerate(world.sides):

        def send(x_TD: Tensor, routing: Routing, *rest: object, at=rank, spied=side.send) -> object:
            routings.append((at, routing.experts_TK))
            return spied(x_TD, routing, *rest)

        side.send = send  # type: ignore[method-assign]
    return routings
