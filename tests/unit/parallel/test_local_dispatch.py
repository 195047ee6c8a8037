"""One rank as token side and expert side, and the four verbs in their order."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import ExpertBatch, ExpertFfn, Routing, Tag
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.staged import Staged
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.model import GateSpec, MoeSpec
from moesaic.spec.numerics import preset
from moesaic.steps import Steps, drive

NUM_EXPERTS, NUM_CHOICES, WIDTH, NUM_TOKENS = 8, 4, 16, 21
SPEC = MoeSpec(
    num_experts=NUM_EXPERTS,
    experts_per_token=NUM_CHOICES,
    expert_width=8,
    gate=GateSpec(score="softmax"),
    shared=None,
    row_width=WIDTH,
)
LAYERS = ((1, SPEC), (3, SPEC))
NUMERICS = preset("portable", dtype="float32")
TAG = Tag(epoch=0, plan_version=0, step_id=5, micro_batch=0, chunk=0, layer_idx=1)


def make_routing(num_tokens: int = NUM_TOKENS, seed: int = 0) -> Routing:
    rng = torch.Generator().manual_seed(seed)
    ids_TE = torch.rand(num_tokens, NUM_EXPERTS, generator=rng).argsort(dim=-1)
    return Routing(
        experts_TK=ids_TE[:, :NUM_CHOICES].sort(dim=-1).values,
        weights_TK=torch.rand(num_tokens, NUM_CHOICES, generator=rng),
    )


def make_rows(num_tokens: int = NUM_TOKENS) -> Tensor:
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(9))


def make_plan(slot_expert: list[int], num_ranks: int = 1) -> ExpertPlan:
    return ExpertPlan(
        version=3,
        slot_rank=(np.arange(len(slot_expert)) % num_ranks,) * 2,
        slot_expert=(np.array(slot_expert),) * 2,
        slot_slice=(np.zeros(len(slot_expert), dtype=np.int64),) * 2,
        slot_share=(np.ones(len(slot_expert)),) * 2,
    )


@dataclass(frozen=True)
class ScaleFfn(ExpertFfn):
    """Expert i multiplies by i + 1: a reply in the wrong place shows."""

    slot_expert: tuple[int, ...] = tuple(range(NUM_EXPERTS))

    def __call__(self, batch: ExpertBatch) -> Steps[Tensor]:
        yield from ()
        jobs_L = batch.offsets_L1.diff()
        expert_J = torch.tensor(self.slot_expert).repeat_interleave(jobs_L)
        return batch.x_RD.unpack(torch.float32)[batch.row_J] * (expert_J + 1).unsqueeze(-1)


def run(
    local: Local, ffn: ExpertFfn, x_TD: Tensor, routing: Routing, tag: Tag = TAG, num_chunks: int = 1
) -> Tensor:
    staged = Staged(tokens=local, experts=local, ffn=ffn, num_chunks=num_chunks)
    return drive([staged.forward(x_TD, routing, tag, None)], timeout_s=1.0)[0]


def expected(x_TD: Tensor, routing: Routing) -> Tensor:
    factors_T1 = ((routing.experts_TK + 1) * routing.weights_TK).sum(dim=-1, keepdim=True)
    return x_TD * factors_T1


def test_every_reply_lands_at_its_token_and_choice() -> None:
    x_TD, routing = make_rows(), make_routing()
    y_TD = run(Local(LAYERS, NUMERICS), ScaleFfn(), x_TD, routing)
    assert torch.allclose(y_TD, expected(x_TD, routing), atol=1e-6)


def test_jobs_are_sorted_by_slot_and_then_token() -> None:
    local, x_TD, routing = Local(LAYERS, NUMERICS), make_rows(), make_routing()
    ticket = local.send(x_TD, routing, TAG, None)
    batch = local.receive(TAG)
    assert batch.num_jobs == len(batch.row_J) == NUM_TOKENS * NUM_CHOICES
    assert batch.offsets_L1[0] == 0
    assert batch.offsets_L1[-1] == batch.num_jobs
    for slot in range(NUM_EXPERTS):
        jobs = slice(int(batch.offsets_L1[slot]), int(batch.offsets_L1[slot + 1]))
        token_J, choice_J = (routing.experts_TK == slot).nonzero(as_tuple=True)
        assert torch.equal(batch.row_J[jobs], token_J)
        assert torch.equal(batch.weight_J[jobs], routing.weights_TK[token_J, choice_J])
    assert batch.x_RD.data.data_ptr() == x_TD.data_ptr()  # no copy of the rows
    assert ticket.returned.ready()


@pytest.mark.parametrize("slot_expert", [[5, 0, 3, 1, 7, 2, 6, 4], [2, 0, 1, 2, 3, 4, 7, 5, 6, 0]])
def test_slots_in_any_order_and_with_copies_give_the_same_bits(slot_expert: list[int]) -> None:
    x_TD, routing = make_rows(), make_routing()
    plan = make_plan(slot_expert)
    y_TD = run(Local(LAYERS, NUMERICS, plan), ScaleFfn(tuple(slot_expert)), x_TD, routing)
    assert torch.equal(y_TD, run(Local(LAYERS, NUMERICS), ScaleFfn(), x_TD, routing))


@pytest.mark.parametrize("num_chunks", [2, 3, 40])
def test_chunks_give_the_same_bits(num_chunks: int) -> None:
    """Also more chunks than tokens: the empty ones are sent, too."""
    x_TD, routing, local = make_rows(), make_routing(), Local(LAYERS, NUMERICS)
    whole = run(local, ScaleFfn(), x_TD, routing)
    assert torch.equal(run(local, ScaleFfn(), x_TD, routing, num_chunks=num_chunks), whole)


def test_no_tokens() -> None:
    y_TD = run(Local(LAYERS, NUMERICS), ScaleFfn(), make_rows(0), make_routing(0))
    assert y_TD.shape == (0, WIDTH)


def test_rows_are_rounded_to_the_wire_format_without_a_wire() -> None:
    x_TD, routing = make_rows(), make_routing()
    narrow = Local(LAYERS, replace(NUMERICS, wire_format="bfloat16"))
    y_TD = run(narrow, ScaleFfn(), x_TD, routing)
    wide = Local(LAYERS, NUMERICS)
    assert torch.equal(y_TD, run(wide, ScaleFfn(), x_TD.bfloat16().float(), routing))
    assert not torch.equal(y_TD, run(wide, ScaleFfn(), x_TD, routing))


def test_weights_on_the_input_are_not_applied_again() -> None:
    spec = replace(SPEC, weight_on="input")
    x_TD, routing = make_rows(), make_routing()
    y_TD = run(Local(((1, spec),), NUMERICS), ScaleFfn(), x_TD, routing)
    unweighted = Routing(experts_TK=routing.experts_TK, weights_TK=torch.ones_like(routing.weights_TK))
    assert torch.allclose(y_TD, expected(x_TD, unweighted), atol=1e-6)


def test_hints_are_told_by_slot_of_the_next_layer() -> None:
    plan = make_plan([5, 0, 3, 1, 7, 2, 6, 4])
    local, hint_E = Local(LAYERS, NUMERICS, plan), torch.arange(NUM_EXPERTS) * 10
    local_ticket = local.send(make_rows(), make_routing(), TAG, hint_E)
    hint_L = local.receive(TAG).hint_L
    assert hint_L is not None
    assert hint_L.tolist() == [50, 0, 30, 10, 70, 20, 60, 40]
    last = replace(TAG, layer_idx=3)
    last_ticket = local.send(make_rows(), make_routing(), last, hint_E)
    assert local.receive(last).hint_L is None
    del local_ticket, last_ticket


def test_a_hint_is_told_once_however_many_chunks() -> None:
    hints = []

    class Listening(ScaleFfn):
        def __call__(self, batch: ExpertBatch) -> Steps[Tensor]:
            hints.append(batch.hint_L)
            return super().__call__(batch)

    local = Local(LAYERS, NUMERICS)
    staged = Staged(tokens=local, experts=local, ffn=Listening(), num_chunks=3)
    drive([staged.forward(make_rows(), make_routing(), TAG, torch.arange(NUM_EXPERTS))], timeout_s=1.0)
    assert [hint is not None for hint in hints] == [True, False, False]


def test_whatever_is_next_is_the_oldest() -> None:
    local = Local(LAYERS, NUMERICS)
    tags = [replace(TAG, micro_batch=i) for i in range(3)]
    tickets = [local.send(make_rows(), make_routing(), tag, None) for tag in tags]
    assert local.next(None).ready()
    assert [local.receive(None).tag for _ in tickets] == tags


def test_a_ticket_is_spent_once() -> None:
    local = Local(LAYERS, NUMERICS)
    ticket = local.send(make_rows(), make_routing(), TAG, None)
    with pytest.raises(AssertionError, match="was never received"):
        local.collect(ticket)
    batch = local.receive(TAG)
    with pytest.raises(AssertionError, match="was never replied to"):
        local.collect(ticket)
    local.reply(batch, torch.zeros(NUM_TOKENS * NUM_CHOICES, WIDTH))
    local.collect(ticket)
    with pytest.raises(AssertionError, match="is spent"):
        local.collect(ticket)


def test_a_step_that_fails_midway_leaves_nothing_and_can_run_again() -> None:
    class Failing(ExpertFfn):
        def __call__(self, batch: ExpertBatch) -> Steps[Tensor]:
            yield from ()
            raise MemoryError("no room for the rows")

    local, x_TD, routing = Local(LAYERS, NUMERICS), make_rows(), make_routing()
    with pytest.raises(MemoryError):
        run(local, Failing(), x_TD, routing)
    gc.collect()
    assert not local._tickets
    assert torch.allclose(run(local, ScaleFfn(), x_TD, routing), expected(x_TD, routing), atol=1e-6)


def test_plans_that_need_more_than_this_rank_are_refused() -> None:
    with pytest.raises(ConfigError, match="version 0 uses 2 ranks, the local dispatcher is one"):
        Local(LAYERS, NUMERICS, contiguous_plan((NUM_EXPERTS, NUM_EXPERTS), 2))
    with pytest.raises(ConfigError, match=r"no slot to experts \[3, 6\] of layer 1"):
        Local(LAYERS, NUMERICS, make_plan([0, 1, 2, 4, 5, 7]))
    with pytest.raises(ConfigError, match="num_chunks must be at least 1, got 0"):
        Staged(tokens=Local(LAYERS, NUMERICS), experts=Local(LAYERS, NUMERICS), ffn=ScaleFfn(), num_chunks=0)
