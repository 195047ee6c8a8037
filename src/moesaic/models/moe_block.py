"""The sparse half of a layer: router, routed experts and the expert that every token shares.

Sees one seam, `RoutedExperts`: layout, format, tier, fusion and overlap are decided behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.experts.contract import Observe, RoutedExperts, Routing, Tag
from moesaic.steps import Steps

Norm = Callable[[Tensor], Tensor]
"""Of rows [T, D], the same shape and dtype."""


class Dense(Protocol):
    """A feed-forward network that every token goes through."""

    def forward(self, x_TD: Tensor, micro_batch: int) -> Steps[Tensor]:
        """y_TD in the seam dtype; waits where ranks share its width."""
        ...


def _same(x_TD: Tensor) -> Tensor:
    return x_TD


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BranchNorms:
    """Norms before and after each branch of a sparse half; most models have none."""

    routed_in: Norm = _same
    routed_out: Norm = _same
    shared_in: Norm = _same
    shared_out: Norm = _same


class MoeBlock:
    """y = routed(x) + shared(x), rounded once; the shared expert runs while the rows are away."""

    def __init__(
        self,
        *,
        moe_idx: int,
        router: Callable[[Tensor], Routing],
        routed: RoutedExperts,
        shared: Dense | None,
        norms: BranchNorms = BranchNorms(),
    ) -> None:
        self.moe_idx = moe_idx
        self.router = router
        self.routed = routed
        self.shared = shared
        self.norms = norms

    def forward(self, x_TD: Tensor, tag: Tag, observe: Observe | None = None) -> Steps[Tensor]:
        """y_TD [T, D] in the seam dtype.

        Raises: PeerLost from a wait, through whoever drives.
        """
        routing = self.router(x_TD)
        if observe is not None:
            observe(self.moe_idx, routing)
        norms, shared = self.norms, self.shared
        steps = self.routed.forward(norms.routed_in(x_TD), routing, tag, None)
        wait = next(steps)  # the rows are sent
        shared_TD = None
        if shared is not None:
            shared_TD = yield from shared.forward(norms.shared_in(x_TD), tag.micro_batch)
        yield wait
        routed_TD = norms.routed_out((yield from steps))
        return routed_TD if shared_TD is None else routed_TD + norms.shared_out(shared_TD)
