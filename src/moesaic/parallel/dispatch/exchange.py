"""Expert parallelism by two exchanges of exact size: rows go once to each rank that serves them, and back.

    rank s, token side                                        rank d, expert side
      send     head | jobs (row, slot) | rows  ------------->  receive   jobs sorted by (slot, s, token)
                                                                  |      experts
      collect  <--------------------- head | results  -------  reply     in the order in which s sent its jobs

A row is sent once to a rank, with all its jobs there. What comes back is `choices` (one row per choice),
`subtrees` (roots of whole subtrees of the combine tree), or, under `combine="per_rank"`, one partial sum per
token and rank: the order that a layout suggests, declared reassociated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import ExpertBatch, ExpertSide, Routing, Tag, Ticket, TokenSide
from moesaic.kernels.formats import Packed, pack, torch_dtype
from moesaic.parallel.dispatch.slots import layer_tables
from moesaic.parallel.transport import Arrival, Purpose, Transport
from moesaic.parallel.tree import Subtrees, combine_choices, combine_subtrees, evaluate_subtrees, weigh
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import Numerics
from moesaic.steps import Wait

Returns = Literal["choices", "subtrees"]

HEAD = 8  # int32 in front of every message: the tag's six, then counts


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sent:
    """The jobs of one send, by destination, then token, then choice.

    Shapes:  token_J, choice_J [J]; row_J [J], the row in its destination's message; token_R [R], the tokens
             of all messages' rows; jobs and rows by rank.
    """

    token_J: Tensor
    choice_J: Tensor
    row_J: Tensor
    token_R: Tensor
    jobs: list[int]
    rows: list[int]


@dataclass(kw_only=True, slots=True, eq=False)
class _Ticket:
    """One send; over when the results are back."""

    tag: Tag
    routing: Routing
    sent: _Sent
    returned: Wait


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Received:
    """The messages of one exchange, by source.

    Shapes:  order_J [J]: job of the batch -> job as it was received; row_J, choice_J, weight_J as received,
             rows counted within their source; jobs and rows by source.
    """

    order_J: Tensor
    row_J: Tensor
    choice_J: Tensor
    weight_J: Tensor
    jobs: list[int]
    rows: list[int]


class Exchange(TokenSide, ExpertSide):
    """Both sides of one rank of expert parallelism, for all layers.

    Every rank takes part in every exchange, with or without tokens, with or without experts.
    """

    def __init__(
        self,
        moe_layers: Sequence[tuple[int, MoeSpec]],
        numerics: Numerics,
        plan: ExpertPlan,
        transport: Transport,
        *,
        returns: Returns = "choices",
        slots: Sequence[Tensor] | None = None,
    ) -> None:
        """`slots` replaces the plan's own choice of copies: [E, V] a layer, see `LayerTable`.

        Raises: ConfigError for a plan that leaves an expert without a slot or names a rank there is not.
        """
        self._numerics = numerics
        self.transport = transport
        self._returns = returns
        self._layers = layer_tables(moe_layers, plan, transport.num_ranks, slots=slots)
        self._seam, self._partial = torch_dtype(numerics.seam_dtype), torch_dtype(numerics.partial_dtype)
        self._wire = torch_dtype(numerics.wire_format)
        self._arrivals: dict[Tag, Arrival] = {}
        self._received: dict[Tag, _Received] = {}
        self._returns_of: dict[Tag, Arrival] = {}

    # ---- the token side ----

    def send(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Ticket:
        """Hand each rank the rows it serves, each row once."""
        layer = self._layers[tag.layer_idx]
        # Turns among copies start elsewhere on each rank and layer.
        slot_TK = layer.choose(routing.experts_TK, self.transport.rank + tag.layer_idx)
        sent = _plan_jobs(layer.rank_P[slot_TK], self.transport.num_ranks)
        rows_RD = pack(x_TD, self._numerics.wire_format).data.index_select(0, sent.token_R)
        slot_J = slot_TK[sent.token_J, sent.choice_J]
        jobs_J3 = torch.stack((sent.row_J, layer.local_P[slot_J], sent.choice_J), dim=1).to(torch.int32)
        weight_J = routing.weights_TK[sent.token_J, sent.choice_J]
        parts = []
        for jobs_D3, weight_D, rows_D, num_rows in zip(
            jobs_J3.split(sent.jobs),
            weight_J.split(sent.jobs),
            rows_RD.split(sent.rows),
            sent.rows,
            strict=True,
        ):
            parts.append(_message(tag, (num_rows, len(jobs_D3)), jobs_D3, weight_D, rows_D))
        lane, purpose = 2 * tag.micro_batch, Purpose(layer_idx=tag.layer_idx, stage="send")
        self._arrivals[tag] = self.transport.exchange(parts, lane=lane, purpose=purpose)
        return _Ticket(tag=tag, routing=routing, sent=sent, returned=_Returned(self, tag))

    def collect(self, ticket: Ticket) -> Tensor:
        """y_TD [T, D] in the seam dtype: the tree over each token's choices. Spends the ticket."""
        assert isinstance(ticket, _Ticket), "a ticket of another dispatcher"
        tag, sent, routing = ticket.tag, ticket.sent, ticket.routing
        messages = [_open(part, tag) for part in self._returns_of.pop(tag).take()]
        spec = self._layers[tag.layer_idx].spec
        num_tokens, num_choices = routing.experts_TK.shape
        if self._numerics.combine == "per_rank":
            y_TD = torch.zeros((num_tokens, spec.row_width), dtype=self._partial)
            for (_, body), token_R in zip(messages, sent.token_R.split(sent.rows), strict=True):
                y_TD[token_R] += body.view(self._partial).view(-1, spec.row_width)
            return y_TD.to(self._seam)
        if self._returns == "subtrees":
            roots = [
                self._roots(counts[0], body, token_R, spec)
                for (counts, body), token_R in zip(messages, sent.token_R.split(sent.rows), strict=True)
            ]
            return combine_subtrees(roots, num_tokens, num_choices, seam=self._seam)
        out_JD = torch.cat([body.view(self._seam).view(-1, spec.row_width) for _, body in messages])
        job_N = torch.empty(num_tokens * num_choices, dtype=torch.int64)
        job_N[sent.token_J * num_choices + sent.choice_J] = torch.arange(len(out_JD))
        return combine_choices(
            out_JD,
            job_N.view(num_tokens, num_choices),
            routing.weights_TK if spec.weight_on == "output" else None,
            partial=self._partial,
            seam=self._seam,
        )

    # ---- the expert side ----

    def next(self, tag: Tag | None) -> Wait:
        """Over when every rank's rows for `tag` are here."""
        assert tag is not None, "every rank sends, so every rank knows what is next"
        return self._arrivals[tag]

    def receive(self, tag: Tag | None) -> ExpertBatch:
        """The batch of `tag`."""
        assert tag is not None, "every rank sends, so every rank knows what is next"
        layer = self._layers[tag.layer_idx]
        messages = [_open(part, tag) for part in self._arrivals.pop(tag).take()]
        rows, jobs = [counts[0] for counts, _ in messages], [counts[1] for counts, _ in messages]
        jobs_of, weights_of, rows_of = [], [], []
        for (num_rows, num_jobs), body in messages:
            ends = (12 * num_jobs, 16 * num_jobs)
            jobs_of.append(body[: ends[0]].view(torch.int32).view(num_jobs, 3))
            weights_of.append(body[ends[0] : ends[1]].view(torch.float32))
            rows_of.append(body[ends[1] :].view(self._wire).view(num_rows, layer.spec.row_width))
        row_J, slot_J, choice_J = torch.cat(jobs_of).long().unbind(1)
        weight_J = torch.cat(weights_of)
        first_J = torch.repeat_interleave(_starts(rows), torch.tensor(jobs))
        # Within a source jobs are in token order, so a stable sort leaves (slot, source, token).
        sorted_J, order_J = torch.sort(slot_J, stable=True)
        self._received[tag] = _Received(
            order_J=order_J, row_J=row_J, choice_J=choice_J, weight_J=weight_J, jobs=jobs, rows=rows
        )
        num_slots = layer.num_slots[self.transport.rank]
        return ExpertBatch(
            tag=tag,
            x_RD=Packed(format=self._numerics.wire_format, data=torch.cat(rows_of)),
            row_J=(row_J + first_J).index_select(0, order_J),
            offsets_L1=torch.searchsorted(sorted_J, torch.arange(num_slots + 1)),
            weight_J=weight_J.index_select(0, order_J),
            num_jobs=len(order_J),
            hint_L=None,
        )

    def reply(self, batch: ExpertBatch, out_JD: Tensor) -> None:
        """Send every result back to whose job it was."""
        tag = batch.tag
        got = self._received.pop(tag)
        as_received_JD = torch.empty_like(out_JD)
        as_received_JD[got.order_J] = out_JD
        spec = self._layers[tag.layer_idx].spec
        parts = []
        for out_SD, row_S, choice_S, weight_S, num_rows in zip(
            as_received_JD.split(got.jobs),
            got.row_J.split(got.jobs),
            got.choice_J.split(got.jobs),
            got.weight_J.split(got.jobs),
            got.rows,
            strict=True,
        ):
            parts.append(self._answer(tag, spec, out_SD, row_S, choice_S, weight_S, num_rows))
        lane, purpose = 2 * tag.micro_batch + 1, Purpose(layer_idx=tag.layer_idx, stage="collect")
        self._returns_of[tag] = self.transport.exchange(parts, lane=lane, purpose=purpose)

    # ---- inside ----

    def _answer(
        self,
        tag: Tag,
        spec: MoeSpec,
        out_JD: Tensor,
        row_J: Tensor,
        choice_J: Tensor,
        weight_J: Tensor,
        num_rows: int,
    ) -> Tensor:
        """The message to one source."""
        if self._numerics.combine == "tree" and self._returns == "choices":
            return _message(tag, (len(out_JD), 0), out_JD)
        leaf_JD = weigh(out_JD, weight_J if spec.weight_on == "output" else None, self._partial)
        if self._numerics.combine == "per_rank":
            sums_RD = torch.zeros((num_rows, out_JD.shape[-1]), dtype=self._partial)
            for choice in range(spec.experts_per_token):
                is_choice = choice_J == choice
                sums_RD[row_J[is_choice]] += leaf_JD[is_choice]
            return _message(tag, (num_rows, 0), sums_RD)
        roots = evaluate_subtrees(leaf_JD, row_J, choice_J, spec.experts_per_token)
        places_Q3 = torch.stack((roots.token_Q, roots.level_Q, roots.node_Q), dim=1).to(torch.int32)
        return _message(tag, (len(places_Q3), 0), places_Q3, roots.value_QD)

    def _roots(self, num_roots: int, body: Tensor, token_R: Tensor, spec: MoeSpec) -> Subtrees:
        row_Q, level_Q, node_Q = body[: 12 * num_roots].view(torch.int32).view(num_roots, 3).long().unbind(1)
        value_QD = body[12 * num_roots :].view(self._partial).view(num_roots, spec.row_width)
        return Subtrees(token_Q=token_R[row_Q], level_Q=level_Q, node_Q=node_Q, value_QD=value_QD)


@dataclass(frozen=True, slots=True, eq=False)
class _Returned(Wait):
    """The way back of one send: its exchange begins with this rank's own reply."""

    dispatcher: Exchange
    tag: Tag

    def ready(self) -> bool:
        arrival = self.dispatcher._returns_of.get(self.tag)
        return arrival is not None and arrival.ready()

    def wait(self, timeout_s: float) -> None:
        self.dispatcher._returns_of[self.tag].wait(timeout_s)


def _plan_jobs(rank_TK: Tensor, num_ranks: int) -> _Sent:
    """Which jobs and rows go to which rank, for choices that are served on `rank_TK`."""
    num_tokens, num_choices = rank_TK.shape
    rank_J, order_J = torch.sort(rank_TK.reshape(-1), stable=True)
    token_J, choice_J = order_J // num_choices, order_J % num_choices
    # A row is a rank and a token; both ascend, so equal ones stand together.
    key_R, row_J = torch.unique_consecutive(rank_J * num_tokens + token_J, return_inverse=True)
    rows = torch.bincount(key_R // max(num_tokens, 1), minlength=num_ranks).tolist()
    jobs = torch.bincount(rank_J, minlength=num_ranks).tolist()
    return _Sent(
        token_J=token_J,
        choice_J=choice_J,
        row_J=row_J - torch.repeat_interleave(_starts(rows), torch.tensor(jobs)),
        token_R=key_R % max(num_tokens, 1),
        jobs=jobs,
        rows=rows,
    )


def _starts(sizes: list[int]) -> Tensor:
    """[N] int64: where each of parts that follow each other begins."""
    ends = torch.tensor(sizes).cumsum(0)
    return ends - torch.tensor(sizes)


def _message(tag: Tag, counts: tuple[int, int], *parts: Tensor) -> Tensor:
    """[bytes] uint8: a head that says what this is, and the parts back to back."""
    head = torch.tensor([*_fields(tag), *counts], dtype=torch.int32)
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in (head, *parts)])


def _open(message: Tensor, tag: Tag) -> tuple[tuple[int, int], Tensor]:
    """The counts and the body of a message.

    Raises: ConfigError when the sender was elsewhere than this rank.
    """
    *fields, first, second = message[: 4 * HEAD].view(torch.int32).tolist()
    if fields != _fields(tag):
        raise ConfigError(f"ranks are out of step: this rank is at {tag}, another sent for {fields}")
    return (first, second), message[4 * HEAD :]


def _fields(tag: Tag) -> list[int]:
    return [tag.epoch, tag.plan_version, tag.step_id, tag.micro_batch, tag.chunk, tag.layer_idx]
