"""Expert parallelism where every rank has every token: nothing is sent forth, each rank picks its own jobs.

    send      nothing                     receive   the jobs of this rank's slots, rows as they are here
    collect   one exchange of results     reply     the same results to every rank

That is how tokens stand under tensor-parallel attention: its ranks have computed the same rows and routes.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from moesaic.experts.contract import ExpertBatch, Routing, Tag, Ticket
from moesaic.kernels.wire import round_to_wire, to_bytes
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.message import Jobs
from moesaic.parallel.transport import Arrival, Purpose
from moesaic.steps import DONE, Wait


class Gathered(Exchange):
    """Both sides of one rank, for all layers; T is the same on all ranks, and so are the rows."""

    LANES: ClassVar[int] = 1
    """Of the transport, per micro-batch and chunk."""

    def __init__(self, *args: Any, **options: Any) -> None:
        """As `Exchange`."""
        super().__init__(*args, **options)
        self._kept: dict[Tag, Jobs] = {}

    def send(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Ticket:
        """Keep this rank's own jobs; the others keep theirs."""
        layer, rank = self._layers[tag.layer_idx], self.transport.rank
        # All ranks take the same copy of each choice.
        slot_N, sent = self._sort(layer, routing, tag.layer_idx)
        jobs, rows = (_own(counts, rank) for counts in (sent.jobs, sent.rows))
        order_J = sent.order_J[jobs]
        choice_J = order_J if self._num_slices == 1 else order_J // self._num_slices
        self._kept[tag] = Jobs(
            row_J=sent.row_J[jobs],
            slot_J=layer.local_P[slot_N[order_J]],
            choice_J=choice_J % routing.experts_TK.shape[1],
            weight_J=routing.weights_TK.reshape(-1)[choice_J],
            rows_RB=to_bytes(round_to_wire(x_TD.index_select(0, sent.row_R[rows]), self._wire)),
        )
        return self._ticket(tag, routing, sent)

    def next(self, tag: Tag | None) -> Wait:
        """Over at once: the rows are here."""
        return DONE

    def receive(self, tag: Tag | None) -> ExpertBatch:
        """The batch of `tag`."""
        assert tag is not None, "every rank sends, so every rank knows what is next"
        return self._batch(tag, [self._kept.pop(tag)])

    def _back(self, messages: list[Tensor], tag: Tag) -> Arrival:
        """Send the one answer to all ranks."""
        purpose = Purpose(layer_idx=tag.layer_idx, stage="collect")
        return self.transport.exchange(
            messages * self.transport.num_ranks, lane=self._lane(tag), purpose=purpose
        )


def _own(counts: list[int], rank: int) -> slice:
    first = sum(counts[:rank])
    return slice(first, first + counts[rank])
