"""The sparse half of a layer: router, routed experts and the expert that every token shares.

Sees one seam, `RoutedExperts`. Layout, format, tier, fusion and overlap are decided behind it, so nothing
here asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from moesaic.experts.contract import RoutedExperts, Routing, Tag
from moesaic.steps import Steps

Observe = Callable[[int, Routing], None]
"""Told the MoE layer's number (counted over the MoE layers, from 0) and what its router chose."""


class Dense(Protocol):
    """A feed-forward network that every token goes through."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        """y_TD in the seam dtype."""
        ...


class MoeBlock:
    """y = routed(x) + shared(x), rounded once; the shared expert runs while the rows are away."""

    def __init__(
        self,
        *,
        moe_idx: int,
        router: Callable[[Tensor], Routing],
        routed: RoutedExperts,
        shared: Dense | None,
    ) -> None:
        self.moe_idx = moe_idx
        self.router = router
        self.routed = routed
        self.shared = shared

    def forward(self, x_TD: Tensor, tag: Tag, observe: Observe | None = None) -> Steps[Tensor]:
        """y_TD [T, D] in the seam dtype.

        Raises: PeerLost from a wait, through whoever drives.
        """
        routing = self.router(x_TD)
        if observe is not None:
            observe(self.moe_idx, routing)
        steps = self.routed.forward(x_TD, routing, tag, None)
        wait = next(steps)  # the rows are sent
        shared_TD = None if self.shared is None else self.shared(x_TD)
        yield wait
        routed_TD = yield from steps
        return routed_TD if shared_TD is None else routed_TD + shared_TD
