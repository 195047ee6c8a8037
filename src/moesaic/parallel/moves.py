"""One plan of experts takes the place of another while ranks run: which blobs travel, and what follows them.

Every rank works out all moves from the two plans, so that nothing but blobs is sent. Knows not when plans
change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moesaic.experts.store import Moves, ResidentStore
from moesaic.parallel.transport import Purpose, Transport
from moesaic.placement.plan import fetched
from moesaic.spec.experts import ExpertPlan, IntArray
from moesaic.steps import Steps


class Follower(Protocol):
    """Whatever finds experts by a plan: a dispatcher."""

    def adopt(self, plan: ExpertPlan) -> None:
        """Find them where another plan has them, from the next step on."""
        ...

    def observe(self, loads: Sequence[IntArray]) -> None:
        """The tokens that chose each expert of late, per MoE layer [E]."""
        ...


class Placed:
    """The experts of one rank and the dispatcher that finds them, under one plan.

    Without a transport there is one rank, and nothing ever moves.
    """

    def __init__(
        self,
        plan: ExpertPlan,
        store: ResidentStore,
        follower: Follower,
        layer_idxs: Sequence[int],
        transport: Transport | None = None,
    ) -> None:
        """`layer_idxs` are the MoE layers; no exchange of a step goes over the transport's first lane."""
        self.plan = plan
        self.store = store
        self._follower = follower
        self._layer_idxs = tuple(layer_idxs)
        self._transport = transport

    def adopt(self, plan: ExpertPlan) -> Steps[int]:
        """Go over to another plan, between steps and on all ranks at once; returns the bytes sent from here.

        Raises: HostMemoryShort when the machine refuses memory; PeerLost from a wait. The rank is of no use
                then.
        """
        moves = (
            None if self._transport is None else PeerMoves(self.plan, plan, self._layer_idxs, self._transport)
        )
        yield from self.store.adopt(plan, moves)
        self._follower.adopt(plan)
        self.plan = plan
        return 0 if moves is None else moves.sent_bytes

    def observe(self, loads: Sequence[IntArray]) -> None:
        """Tell the dispatcher how often experts were chosen of late."""
        self._follower.observe(loads)


class PeerMoves(Moves):
    """Blobs from rank to rank, one exchange for each layer in which any moves.

    An expert, or slice, that is on several ranks comes from the one that follows from the number of who needs
    it.
    """

    def __init__(
        self, before: ExpertPlan, after: ExpertPlan, layer_idxs: Sequence[int], transport: Transport
    ) -> None:
        self.sent_bytes = 0
        self._transport = transport
        self._ids: dict[
            int, dict[tuple[int, int], list[int]]
        ] = {}  # by layer and (source, target): ascending
        part_ids, num_slices = before.part_ids, before.num_slices
        for at, (layer_idx, keys) in enumerate(zip(layer_idxs, fetched(before, after), strict=True)):
            pairs = self._ids[layer_idx] = {}
            for target, key in sorted(keys):
                part_id = key.part_id(num_slices)
                holders = np.unique(before.slot_rank[at][part_ids[at] == part_id])
                source = int(holders[target % len(holders)])
                pairs.setdefault((source, target), []).append(part_id)

    def layer(
        self, layer_idx: int, give: Callable[[int], Tensor], size: Callable[[int], int]
    ) -> Steps[Mapping[int, Tensor]]:
        """The blobs that this rank was missing, by id."""
        pairs, me = self._ids[layer_idx], self._transport.rank
        if not pairs:
            return {}
        nothing = torch.empty(0, dtype=torch.uint8)
        parts = [
            torch.cat([nothing, *(give(i) for i in pairs.get((me, peer), ()))])
            for peer in range(self._transport.num_ranks)
        ]
        self.sent_bytes += sum(part.numel() for part in parts)
        arrival = self._transport.exchange(parts, lane=0, purpose=Purpose(layer_idx=layer_idx, stage="move"))
        del parts
        yield arrival
        found: dict[int, Tensor] = {}
        for source, message in enumerate(arrival.take()):
            ids = pairs.get((source, me), [])
            found.update(zip(ids, message.split([size(i) for i in ids]), strict=True))
        return found
