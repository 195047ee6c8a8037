"""Expert parallelism by two exchanges of exact size: rows go once to each rank that serves them, and back.

    rank s, token side                                        rank d, expert side
      send     head | jobs (row, slot) | rows  ------------->  receive   jobs sorted by (slot, s, token)
                                                                  |      experts
      collect  <--------------------- head | results  -------  reply     in the order in which s sent its jobs

A row is sent once to a rank, with all its jobs there. What comes back is `choices` (one row per choice),
`subtrees` (roots of whole subtrees of the combine tree), or, under `combine="per_rank"`, one partial sum per
token and rank: the order that a layout suggests, declared reassociated. A choice of an expert that the plan
cuts makes a job for each slice; their roots come back in float32 and are joined where the token is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import ExpertBatch, ExpertSide, Routing, Tag, Ticket, TokenSide
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.wire import from_bytes, round_to_wire, to_bytes
from moesaic.parallel.dispatch.following import Following
from moesaic.parallel.dispatch.message import (
    Jobs,
    Returns,
    Sorted,
    open_jobs,
    open_message,
    open_roots,
    pack,
    pack_jobs,
    pack_roots,
    sort_jobs,
    starts,
)
from moesaic.parallel.dispatch.slots import LayerTable
from moesaic.parallel.transport import Arrival, Purpose, Transport
from moesaic.parallel.tree import combine_choices, combine_subtrees, evaluate_subtrees, join_slices, weigh
from moesaic.placement.choice import ReplicaChoice
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.layout_rules import SLICE_RETURNS
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import Numerics, wire_row_bytes
from moesaic.steps import Wait


@dataclass(kw_only=True, slots=True, eq=False)
class _Ticket:
    """One send; over when the results are back."""

    tag: Tag
    routing: Routing
    sent: Sorted  # its rows are tokens, its jobs choices: t * K + k, or slices of such
    returned: Wait


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Received:
    """The messages of one exchange, by source.

    Shapes:  order_J [J]: job of the batch -> job as it was received.
    """

    order_J: Tensor
    by_source: list[Jobs]


class Exchange(Following, TokenSide, ExpertSide):
    """Both sides of one rank of expert parallelism, for all layers.

    Every rank takes part in every exchange, with or without tokens, with or without experts.

    A message goes to a group of ranks that see to it among themselves; here a group is one rank.
    """

    LANES: ClassVar[int] = 2
    """Of the transport, per micro-batch and chunk."""

    def __init__(  # noqa: PLR0913 - one for all that a rank of a layout has
        self,
        moe_layers: Sequence[tuple[int, MoeSpec]],
        numerics: Numerics,
        plan: ExpertPlan,
        transport: Transport,
        *,
        returns: Returns = "choices",
        slots: Sequence[Tensor] | None = None,
        replica_choice: ReplicaChoice = "turns",
        group_size: int = 1,
        down_biases: Mapping[int, Tensor] | None = None,
    ) -> None:
        """`slots` replaces the choice of copies, until another plan comes: [E, V] a layer, see `LayerTable`.

        `down_biases` are `ResidentStore.down_biases`, for a plan with slices.

        Raises: ConfigError for a plan that leaves an expert without a slot or names a rank there is not, and
                for slices whose results would not come back one by one, or without their biases.
        """
        if plan.num_slices > 1:
            if returns != "choices" or numerics.combine != "tree":
                raise ConfigError(SLICE_RETURNS)
            lacking = sorted({at for at, spec in moe_layers if spec.has_bias} - set(down_biases or {}))
            if lacking:
                raise ConfigError(f"slices of experts of layers {lacking} need the biases of down")
        self._down_biases = down_biases or {}
        self._numerics = numerics
        self.transport = transport
        self._returns = returns
        super().__init__(
            moe_layers,
            plan,
            transport.num_ranks,
            group_size=group_size,
            group_id=transport.rank // group_size,
            slots=slots,
            replica_choice=replica_choice,
        )
        self._num_groups = -(-transport.num_ranks // group_size)
        self._seam, self._partial = torch_dtype(numerics.seam_dtype), torch_dtype(numerics.partial_dtype)
        self._wire = numerics.wire_format
        self._arrivals: dict[Tag, Arrival] = {}
        self._received: dict[Tag, _Received] = {}
        self._returns_of: dict[Tag, Arrival] = {}

    # ---- the token side ----

    @property
    def num_chunks(self) -> int:
        """Those of the transport."""
        return self.transport.num_chunks

    def send(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Ticket:
        """Hand each group the rows it serves, each row once."""
        layer = self._layers[tag.layer_idx]
        # Turns among copies start elsewhere on each rank and layer.
        slot_N, sent = self._sort(layer, routing, self.transport.rank + tag.layer_idx)
        choice_J = sent.order_J if self._num_slices == 1 else sent.order_J // self._num_slices
        jobs = Jobs(
            row_J=sent.row_J,
            slot_J=layer.local_P[slot_N[sent.order_J]],
            choice_J=choice_J % routing.experts_TK.shape[1],
            weight_J=routing.weights_TK.reshape(-1)[choice_J],
            rows_RB=to_bytes(round_to_wire(x_TD, self._wire)).index_select(0, sent.row_R),
        )
        self._arrivals[tag] = self._forth(pack_jobs(tag, jobs, sent), tag)
        return self._ticket(tag, routing, sent)

    def _sort(self, layer: LayerTable, routing: Routing, first: int) -> tuple[Tensor, Sorted]:
        """The slot of every choice, or of every slice of it, and which of them go to which group."""
        part_TK, count = routing.experts_TK, self._num_slices
        if count > 1:
            part_TK = (part_TK.unsqueeze(-1) * count + torch.arange(count)).flatten(1)
        num_tokens, num_parts = part_TK.shape
        slot_N = layer.choose(part_TK, first).reshape(-1)
        token_N = torch.arange(num_tokens * num_parts) // num_parts
        return slot_N, sort_jobs(layer.group_P[slot_N], token_N, self._num_groups, num_tokens)

    def _ticket(self, tag: Tag, routing: Routing, sent: Sorted) -> Ticket:
        return _Ticket(tag=tag, routing=routing, sent=sent, returned=_Returned(self, tag))

    def collect(self, ticket: Ticket) -> Tensor:
        """y_TD [T, D] in the seam dtype: the tree over each token's choices. Spends the ticket."""
        assert isinstance(ticket, _Ticket), "a ticket of another dispatcher"
        tag, sent, routing = ticket.tag, ticket.sent, ticket.routing
        messages = self._returns_of.pop(tag).take()
        spec = self._layers[tag.layer_idx].spec
        num_tokens, num_choices = routing.experts_TK.shape
        if self._numerics.combine == "per_rank":
            y_TD = torch.zeros((num_tokens, spec.row_width), dtype=self._partial)
            for message, token_R in zip(messages, sent.row_R.split(sent.rows), strict=True):
                y_TD[token_R] += open_message(message, tag)[1].view(self._partial).view(-1, spec.row_width)
            return y_TD.to(self._seam)
        if self._returns == "subtrees":
            roots = [
                open_roots(message, tag, token_R, partial=self._partial, width=spec.row_width)
                for message, token_R in zip(messages, sent.row_R.split(sent.rows), strict=True)
            ]
            return combine_subtrees(roots, num_tokens, num_choices, seam=self._seam)
        out_JD = torch.cat([self._results(message, tag, spec) for message in messages])
        job_N = torch.empty(len(out_JD), dtype=torch.int64)
        job_N[sent.order_J] = torch.arange(len(out_JD))
        if self._num_slices > 1:
            out_JD = join_slices(
                out_JD,
                job_N.view(-1, self._num_slices),
                self._down_biases.get(tag.layer_idx),
                routing.experts_TK.reshape(-1),
                seam=self._seam,
            )
            job_N = torch.arange(len(out_JD))
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
        return self._batch(
            tag,
            [
                open_jobs(message, tag, row_bytes=self._row_bytes(tag))
                for message in self._arrivals.pop(tag).take()
            ],
        )

    def _batch(self, tag: Tag, got: list[Jobs]) -> ExpertBatch:
        """The jobs of all sources, whose rows follow each other."""
        layer = self._layers[tag.layer_idx]
        first_J = torch.repeat_interleave(
            starts([len(one.rows_RB) for one in got]), torch.tensor([len(one.row_J) for one in got])
        )
        # Within a source jobs are in token order, so a stable sort leaves (slot, source, token).
        sorted_J, order_J = torch.sort(torch.cat([one.slot_J for one in got]), stable=True)
        self._received[tag] = _Received(order_J=order_J, by_source=got)
        num_slots = layer.num_slots[self.transport.rank]
        return ExpertBatch(
            tag=tag,
            x_RD=from_bytes(torch.cat([one.rows_RB for one in got]), self._wire, layer.spec.row_width),
            row_J=(torch.cat([one.row_J for one in got]) + first_J).index_select(0, order_J),
            offsets_L1=torch.searchsorted(sorted_J, torch.arange(num_slots + 1)),
            weight_J=torch.cat([one.weight_J for one in got]).index_select(0, order_J),
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
        parts = as_received_JD.split([len(jobs.row_J) for jobs in got.by_source])
        answers = [
            self._answer(tag, spec, out_JD, jobs) for out_JD, jobs in zip(parts, got.by_source, strict=True)
        ]
        self._returns_of[tag] = self._back(answers, tag)

    # ---- how messages travel ----

    def _lane(self, tag: Tag) -> int:
        """The first lane of a part of a step; chunks beyond the transport's share lanes in turn."""
        num_chunks = self.transport.num_chunks
        return self.LANES * (tag.micro_batch * num_chunks + tag.chunk % num_chunks)

    def _forth(self, messages: list[Tensor], tag: Tag) -> Arrival:
        """Send one message to each group; what arrives is one from each rank."""
        purpose = Purpose(layer_idx=tag.layer_idx, stage="send")
        return self.transport.exchange(messages, lane=self._lane(tag), purpose=purpose)

    def _back(self, messages: list[Tensor], tag: Tag) -> Arrival:
        """Send one message to each rank; what arrives is one from each group."""
        purpose = Purpose(layer_idx=tag.layer_idx, stage="collect")
        return self.transport.exchange(messages, lane=self._lane(tag) + 1, purpose=purpose)

    # ---- inside ----

    def _answer(self, tag: Tag, spec: MoeSpec, out_JD: Tensor, jobs: Jobs) -> Tensor:
        """The message to one source."""
        if self._numerics.combine == "tree" and self._returns == "choices":
            return pack(tag, (len(out_JD), 0), out_JD)
        leaf_JD = weigh(out_JD, jobs.weight_J if spec.weight_on == "output" else None, self._partial)
        if self._numerics.combine == "per_rank":
            sums_RD = torch.zeros((len(jobs.rows_RB), out_JD.shape[-1]), dtype=self._partial)
            for choice in range(spec.experts_per_token):
                is_choice = jobs.choice_J == choice
                sums_RD[jobs.row_J[is_choice]] += leaf_JD[is_choice]
            return pack(tag, (len(sums_RD), 0), sums_RD)
        return pack_roots(tag, evaluate_subtrees(leaf_JD, jobs.row_J, jobs.choice_J, spec.experts_per_token))

    def _row_bytes(self, tag: Tag) -> int:
        return wire_row_bytes(self._wire, self._layers[tag.layer_idx].spec.row_width)

    def _results(self, message: Tensor, tag: Tag, spec: MoeSpec) -> Tensor:
        """out_JD of a message of choices."""
        dtype = self._seam if self._num_slices == 1 else torch.float32
        return open_message(message, tag)[1].view(dtype).view(-1, spec.row_width)


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
