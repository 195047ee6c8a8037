"""N ranks in one thread: a dispatcher whose wires are dictionaries, and drivers that run it in any order.

    rank s, token side                                          rank d, expert side
      send ---- rows of s that d's slots serve ---- inbox[d][tag][s] ----> receive
                                                                             |  experts
      collect <--- answers, by (token, choice) ---- outbox[s][tag][d] <---- reply

What goes back is `choices` (one row per choice), `subtrees` (roots of whole subtrees of the combine tree),
or, under `combine="per_rank"`, one partial sum per token and rank: the wrong order, as a negative control.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import PeerLost
from moesaic.experts.contract import ExpertBatch, ExpertFfn, ExpertSide, Routing, Tag, Ticket, TokenSide
from moesaic.kernels.formats import Packed, pack, torch_dtype
from moesaic.parallel.tree import Subtrees, combine_choices, combine_subtrees, evaluate_subtrees, weigh
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import Numerics
from moesaic.steps import Steps, Wait

T = TypeVar("T")
Returns = Literal["choices", "subtrees"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """What one token rank sends to one expert rank: each row once, and the jobs that use it."""

    x_RD: Packed
    row_J: Tensor  # jobs in (token, choice) order
    slot_J: Tensor  # counted on the receiving rank
    token_J: Tensor
    choice_J: Tensor
    weight_J: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """What comes back for one `Rows`: addressed, so that the order of arrival cannot matter."""

    token_J: Tensor
    choice_J: Tensor
    out_JD: Tensor
    roots: Subtrees | None


@dataclass(frozen=True, slots=True, eq=False)
class Complete:
    """Waits until a box holds something from every sender."""

    look: Callable[[], Mapping[int, object]]
    senders: tuple[int, ...]
    layer_idx: int
    stage: str

    def ready(self) -> bool:
        return len(self.look()) == len(self.senders)

    def wait(self, timeout_s: float) -> None:
        """In one thread nothing arrives while one sleeps."""
        box = self.look()
        for sender in self.senders:
            if sender not in box:
                raise PeerLost(rank=sender, layer_idx=self.layer_idx, stage=self.stage, seconds=timeout_s)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankTicket:
    tag: Tag
    routing: Routing
    returned: Wait


class Ranks:
    """The wires between ranks, and what every rank knows: the plan and the table of replicas.

    `tables[layer]` is [V, E]: the slot of each expert, by variant; rank, layer and token pick the variant.
    """

    def __init__(
        self,
        moe_layers: Sequence[tuple[int, MoeSpec]],
        numerics: Numerics,
        plan: ExpertPlan,
        *,
        tables: Sequence[Tensor] | None = None,
        num_ranks: int | None = None,
        token_ranks: Sequence[int] | None = None,
        expert_ranks: Sequence[int] | None = None,
        returns: Returns = "choices",
    ) -> None:
        self.specs = dict(moe_layers)
        self.numerics = numerics
        self.num_ranks = plan.num_ranks if num_ranks is None else num_ranks
        self.token_ranks = tuple(range(self.num_ranks) if token_ranks is None else token_ranks)
        self.expert_ranks = tuple(range(self.num_ranks) if expert_ranks is None else expert_ranks)
        self.returns = returns
        self.inbox: dict[tuple[int, Tag], dict[int, Rows]] = {}
        self.outbox: dict[tuple[int, Tag], dict[int, Answer]] = {}
        self.sent: dict[int, list[Tag]] = {rank: [] for rank in self.token_ranks}
        self.sent_bytes = 0  # off the rank only
        self.returned_bytes = 0
        self.layers: dict[int, _Placement] = {}
        for at, layer_idx in enumerate(self.specs):
            table_VE = first_copies(plan, at) if tables is None else tables[at]
            self.layers[layer_idx] = _Placement(plan, at, table_VE, self.num_ranks)

    def side(self, rank: int) -> RankSide:
        return RankSide(self, rank)

    def sides(self) -> list[RankSide]:
        return [self.side(rank) for rank in range(self.num_ranks)]


class _Placement:
    """Slots of one layer."""

    def __init__(self, plan: ExpertPlan, at: int, table_VE: Tensor, num_ranks: int) -> None:
        self.rank_P = torch.from_numpy(plan.slot_rank[at])
        self.table_VE = table_VE
        self.local_P = torch.empty_like(self.rank_P)
        self.num_slots = []
        for rank in range(num_ranks):
            mine = (self.rank_P == rank).nonzero().squeeze(-1)
            self.local_P[mine] = torch.arange(len(mine))
            self.num_slots.append(len(mine))


class RankSide(TokenSide, ExpertSide):
    """Both sides of one rank."""

    def __init__(self, world: Ranks, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.num_received = 0
        self.orders: dict[Tag, Tensor] = {}

    # ---- the token side ----

    def send(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Ticket:
        world, place = self.world, self.world.layers[tag.layer_idx]
        variant_T = (torch.arange(len(x_TD)) + self.rank + tag.layer_idx) % len(place.table_VE)
        slot_TK = place.table_VE[variant_T.unsqueeze(-1), routing.experts_TK]
        rank_TK = place.rank_P[slot_TK]
        packed = pack(x_TD, world.numerics.wire_format)
        for dest in world.expert_ranks:
            token_J, choice_J = (rank_TK == dest).nonzero(as_tuple=True)
            token_R, row_J = token_J.unique(return_inverse=True)
            rows = Rows(
                x_RD=Packed(format=packed.format, data=packed.data[token_R]),
                row_J=row_J,
                slot_J=place.local_P[slot_TK[token_J, choice_J]],
                token_J=token_J,
                choice_J=choice_J,
                weight_J=routing.weights_TK[token_J, choice_J],
            )
            box = world.inbox.setdefault((dest, tag), {})
            assert self.rank not in box, f"rank {self.rank} sent {tag} twice"
            box[self.rank] = rows
            if dest != self.rank:
                world.sent_bytes += rows.x_RD.data.nbytes
        world.sent[self.rank].append(tag)
        answers = world.outbox.setdefault((self.rank, tag), {})
        returned = Complete(lambda: answers, world.expert_ranks, tag.layer_idx, "collect")
        return RankTicket(tag=tag, routing=routing, returned=returned)

    def collect(self, ticket: Ticket) -> Tensor:
        assert isinstance(ticket, RankTicket)
        world, routing = self.world, ticket.routing
        spec, numerics = world.specs[ticket.tag.layer_idx], world.numerics
        seam, partial = torch_dtype(numerics.seam_dtype), torch_dtype(numerics.partial_dtype)
        num_tokens, num_choices = routing.experts_TK.shape
        answers = list(world.outbox.pop((self.rank, ticket.tag)).values())  # in order of arrival
        if numerics.combine == "per_rank":
            y_TD = torch.zeros((num_tokens, spec.row_width), dtype=partial)
            for answer in answers:
                y_TD[answer.token_J] += answer.out_JD
            return y_TD.to(seam)
        if world.returns == "subtrees":
            roots = [answer.roots for answer in answers if answer.roots is not None]
            return combine_subtrees(roots, num_tokens, num_choices, seam=seam)
        out_ND = torch.full((num_tokens * num_choices, spec.row_width), float("nan"), dtype=seam)
        for answer in answers:
            out_ND[answer.token_J * num_choices + answer.choice_J] = answer.out_JD
        job_TK = torch.arange(len(out_ND)).view(num_tokens, num_choices)
        weights_TK = routing.weights_TK if spec.weight_on == "output" else None
        return combine_choices(out_ND, job_TK, weights_TK, partial=partial, seam=seam)

    # ---- the expert side ----

    def next(self, tag: Tag | None) -> Wait:
        def look() -> Mapping[int, object]:
            wanted = self._oldest() if tag is None else tag
            return {} if wanted is None else self.world.inbox.get((self.rank, wanted), {})

        return Complete(look, self.world.token_ranks, -1 if tag is None else tag.layer_idx, "send")

    def receive(self, tag: Tag | None) -> ExpertBatch:
        tag = self._oldest() if tag is None else tag
        assert tag is not None, "nothing was sent"
        box = self.world.inbox[self.rank, tag]
        sent = [box[source] for source in self.world.token_ranks]
        first_rows = np.cumsum([0] + [rows.x_RD.num_rows for rows in sent])[:-1].tolist()
        slot_J, order_J = torch.sort(torch.cat([rows.slot_J for rows in sent]), stable=True)
        self.orders[tag] = order_J
        self.num_received += 1
        num_slots = self.world.layers[tag.layer_idx].num_slots[self.rank]
        data = torch.cat([rows.x_RD.data for rows in sent])
        row_J = torch.cat([rows.row_J + first for rows, first in zip(sent, first_rows, strict=True)])
        return ExpertBatch(
            tag=tag,
            x_RD=Packed(format=self.world.numerics.wire_format, data=data),
            row_J=row_J[order_J],
            offsets_L1=torch.searchsorted(slot_J, torch.arange(num_slots + 1)),
            weight_J=torch.cat([rows.weight_J for rows in sent])[order_J],
            num_jobs=len(order_J),
            hint_L=None,
        )

    def reply(self, batch: ExpertBatch, out_JD: Tensor) -> None:
        world, tag = self.world, batch.tag
        box = world.inbox.pop((self.rank, tag))
        in_order_JD = torch.empty_like(out_JD)
        in_order_JD[self.orders.pop(tag)] = out_JD
        start = 0
        for source in world.token_ranks:
            rows = box[source]
            stop = start + len(rows.slot_J)
            answer = self._answer(rows, in_order_JD[start:stop], world.specs[tag.layer_idx])
            start = stop
            world.outbox.setdefault((source, tag), {})[self.rank] = answer
            if source != self.rank:
                values = answer.out_JD if answer.roots is None else answer.roots.value_QD
                world.returned_bytes += values.nbytes

    def _answer(self, rows: Rows, out_JD: Tensor, spec: MoeSpec) -> Answer:
        numerics = self.world.numerics
        partial = torch_dtype(numerics.partial_dtype)
        leaf_JD = weigh(out_JD, rows.weight_J if spec.weight_on == "output" else None, partial)
        if numerics.combine == "per_rank":
            # What a rank would do that knows no tree: fold its own choices, send one sum per token.
            sums_RD = torch.zeros((rows.x_RD.num_rows, out_JD.shape[-1]), dtype=partial)
            for choice in range(spec.experts_per_token):
                is_choice = rows.choice_J == choice
                sums_RD[rows.row_J[is_choice]] += leaf_JD[is_choice]
            token_R = rows.token_J.unique()
            return Answer(token_J=token_R, choice_J=token_R, out_JD=sums_RD, roots=None)
        roots = None
        if self.world.returns == "subtrees":
            roots = evaluate_subtrees(leaf_JD, rows.token_J, rows.choice_J, spec.experts_per_token)
        return Answer(token_J=rows.token_J, choice_J=rows.choice_J, out_JD=out_JD, roots=roots)

    def _oldest(self) -> Tag | None:
        order = self.world.sent[self.world.token_ranks[0]]
        return order[self.num_received] if self.num_received < len(order) else None


def first_copies(plan: ExpertPlan, at: int) -> Tensor:
    """[1, E]: the first slot of each expert."""
    experts, first = np.unique(plan.slot_expert[at], return_index=True)
    assert np.array_equal(experts, np.arange(len(experts))), "every expert needs a slot"
    return torch.from_numpy(first).unsqueeze(0)


def random_copies(plan: ExpertPlan, at: int, rng: np.random.Generator, num_variants: int = 3) -> Tensor:
    """[V, E]: in each variant any copy of each expert."""
    slots = plan.slot_expert[at]
    copies = [np.flatnonzero(slots == expert) for expert in range(slots.max() + 1)]
    return torch.tensor([[int(rng.choice(slots_of)) for slots_of in copies] for _ in range(num_variants)])


def serve_experts(side: RankSide, ffn: ExpertFfn, num_batches: int) -> Steps[None]:
    """The loop of a rank that has experts and no tokens: it asks for whatever is next."""
    for _ in range(num_batches):
        yield side.next(None)
        batch = side.receive(None)
        side.reply(batch, (yield from ffn(batch)))


def ask_experts(side: RankSide, x_TD: Tensor, routing: Routing, tag: Tag) -> Steps[Tensor]:
    """The routed experts of a rank that has tokens and no experts."""
    ticket = side.send(x_TD, routing, tag, None)
    yield ticket.returned
    return side.collect(ticket)


def in_turns(steps: Sequence[Steps[T]]) -> Steps[list[T]]:
    """`steps.drive` as a generator: one rank with its micro-batches, its waits passed on."""
    results: dict[int, T] = {}
    waits: dict[int, Wait] = {}
    while len(results) < len(steps):
        for i, step in enumerate(steps):
            if i in results:
                continue
            if i in waits:
                yield waits[i]
            try:
                waits[i] = next(step)
            except StopIteration as end:
                results[i] = end.value
    return [results[i] for i in range(len(steps))]


def drive_shuffled(steps: Sequence[Steps[T]], seed: int) -> list[T]:
    """Run generators to their ends, moving any that can move: any order in which messages might arrive."""
    rng = random.Random(seed)
    results: dict[int, T] = {}
    waits: dict[int, Wait] = {}
    while len(results) < len(steps):
        movable = [i for i in range(len(steps)) if i not in results and (i not in waits or waits[i].ready())]
        assert movable, f"deadlock: {sorted(set(range(len(steps))) - set(results))} wait and none can move"
        i = rng.choice(movable)
        try:
            waits[i] = next(steps[i])
        except StopIteration as end:
            results[i] = end.value
    return [results[i] for i in range(len(steps))]
