"""Both sides of the seam on one rank: rows are pointed at, not copied, and still rounded to the wire format.

The rounding is what makes one rank give the bits of many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import ExpertBatch, ExpertSide, Routing, Tag, Ticket, TokenSide
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.wire import round_to_wire
from moesaic.parallel.tree import combine_choices
from moesaic.spec.experts import ExpertPlan, IntArray, contiguous_plan
from moesaic.spec.layout_rules import LOCAL_SLICES
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import Numerics
from moesaic.steps import DONE, Wait


@dataclass(kw_only=True, slots=True, eq=False, weakref_slot=True)
class _LocalTicket:
    """One send: filled by `receive` and `reply`, emptied by `collect`."""

    tag: Tag
    x_TD: Tensor
    routing: Routing
    hint_E: Tensor | None
    order_J: Tensor | None = None  # job -> choice, t * K + k
    out_JD: Tensor | None = None
    returned: Wait = DONE


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _LayerSlots:
    """Where the experts of one layer are on this rank.

    Shapes:  slot_E [E] int64, None where slot == logical id; expert_L [L] int64; bounds_L1 [L + 1]: 0 to L.
    """

    spec: MoeSpec
    slot_E: Tensor | None
    expert_L: Tensor
    bounds_L1: Tensor


class Local(TokenSide, ExpertSide):
    """The dispatcher of one rank that holds every expert; one for all layers."""

    def __init__(
        self, moe_layers: Sequence[tuple[int, MoeSpec]], numerics: Numerics, plan: ExpertPlan | None = None
    ) -> None:
        """Without a plan slot == logical id; `moe_layers` is `ModelSpec.moe_layers`.

        Raises: ConfigError when the plan leaves an expert without a slot or uses a second rank.
        """
        self._moe_layers = tuple(moe_layers)
        if plan is None:
            plan = contiguous_plan(tuple(spec.num_experts for _, spec in moe_layers), 1)
        self.adopt(plan)
        self._numerics = numerics
        self._seam, self._partial = torch_dtype(numerics.seam_dtype), torch_dtype(numerics.partial_dtype)
        layer_idxs = [layer_idx for layer_idx, _ in moe_layers]
        self._layer_after = dict(pairwise(layer_idxs))
        # Weak: a step that fails midway drops its tickets, and nothing of it stays here.
        self._tickets: WeakValueDictionary[Tag, _LocalTicket] = WeakValueDictionary()

    def adopt(self, plan: ExpertPlan) -> None:
        """Find experts in the slots of another plan, from the next step on.

        Raises: ConfigError as the constructor.
        """
        if plan.num_ranks > 1:
            raise ConfigError(
                f"expert plan version {plan.version} uses {plan.num_ranks} ranks, the local dispatcher is "
                "one; use a plan for one rank or a dispatcher between ranks"
            )
        if plan.num_slices > 1:
            raise ConfigError(f"expert plan version {plan.version} has slices, and {LOCAL_SLICES}")
        self._layers = {
            layer_idx: _layer_slots(layer_idx, spec, plan.slot_expert[at])
            for at, (layer_idx, spec) in enumerate(self._moe_layers)
        }

    def observe(self, loads: Sequence[IntArray]) -> None:
        """Nothing to choose: one copy of each expert is used."""

    def send(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Ticket:
        """Keep the rows where `receive` finds them."""
        ticket = _LocalTicket(tag=tag, x_TD=x_TD, routing=routing, hint_E=hint_E)
        self._tickets[tag] = ticket
        return ticket

    def next(self, tag: Tag | None) -> Wait:
        """Over at once: what was sent is here."""
        return DONE

    def receive(self, tag: Tag | None) -> ExpertBatch:
        """The batch of `tag`, or of the oldest send that was not received."""
        if tag is None:
            tag = next(at for at, ticket in self._tickets.items() if ticket.order_J is None)
        ticket, layer = self._tickets[tag], self._layers[tag.layer_idx]
        experts_N = ticket.routing.experts_TK.reshape(-1)
        slot_N = experts_N if layer.slot_E is None else layer.slot_E.index_select(0, experts_N)
        # Choices stand in token order, so a stable sort by slot leaves jobs in (slot, token) order.
        slot_J, order_J = torch.sort(slot_N, stable=True)
        ticket.order_J = order_J
        return ExpertBatch(
            tag=tag,
            x_RD=round_to_wire(ticket.x_TD, self._numerics.wire_format),
            row_J=order_J // layer.spec.experts_per_token,
            offsets_L1=torch.searchsorted(slot_J, layer.bounds_L1),
            weight_J=ticket.routing.weights_TK.reshape(-1).index_select(0, order_J),
            num_jobs=order_J.shape[0],
            hint_L=self._hint(ticket),
        )

    def reply(self, batch: ExpertBatch, out_JD: Tensor) -> None:
        """Hand the results to the ticket; whose choice a job is, its order says."""
        assert out_JD.dtype == self._seam, f"replies are {self._seam}, got {out_JD.dtype}"
        self._tickets[batch.tag].out_JD = out_JD

    def collect(self, ticket: Ticket) -> Tensor:
        """y_TD [T, D] in the seam dtype: the tree over each token's choices. Spends the ticket."""
        assert isinstance(ticket, _LocalTicket), "a ticket of another dispatcher"
        assert self._tickets.get(ticket.tag) is ticket, f"the ticket of {ticket.tag} is spent"
        assert ticket.order_J is not None, f"{ticket.tag} was never received"
        assert ticket.out_JD is not None, f"{ticket.tag} was never replied to"
        del self._tickets[ticket.tag]
        spec = self._layers[ticket.tag.layer_idx].spec
        jobs_J = torch.arange(ticket.order_J.shape[0])
        job_N = torch.empty_like(jobs_J).scatter_(0, ticket.order_J, jobs_J)
        return combine_choices(
            ticket.out_JD,
            job_N.view(-1, spec.experts_per_token),
            ticket.routing.weights_TK if spec.weight_on == "output" else None,
            partial=self._partial,
            seam=self._seam,
        )

    def _hint(self, ticket: _LocalTicket) -> Tensor | None:
        after = self._layer_after.get(ticket.tag.layer_idx)
        if ticket.hint_E is None or after is None:
            return None
        return ticket.hint_E.index_select(0, self._layers[after].expert_L)


def _layer_slots(layer_idx: int, spec: MoeSpec, slot_expert: np.ndarray) -> _LayerSlots:
    """Which slot serves each expert; one rank gains nothing from a second copy."""
    slot_E = np.full(spec.num_experts, -1, dtype=np.int64)
    slot_E[slot_expert] = np.arange(len(slot_expert))
    lost = np.flatnonzero(slot_E < 0)
    if lost.size:
        raise ConfigError(
            f"the expert plan gives no slot to experts {lost.tolist()} of layer {layer_idx}; each needs one"
        )
    is_identity = np.array_equal(slot_E, np.arange(len(slot_expert)))
    return _LayerSlots(
        spec=spec,
        slot_E=None if is_identity else torch.from_numpy(slot_E),
        expert_L=torch.from_numpy(slot_expert.copy()),
        bounds_L1=torch.arange(len(slot_expert) + 1),
    )
