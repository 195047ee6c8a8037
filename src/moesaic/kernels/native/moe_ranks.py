"""The routed experts of a layer over all ranks of a machine, in one native call on each: see moe_ranks.hpp.

Knows nothing of plans or of how the memory that ranks share came to be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.kernels.native.moe import MoeLayer
from moesaic.kernels.native.router import RouterLayer
from moesaic.kernels.native.shared import SharedLayer

Counters = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankCounts:
    """What the calls of one lane did, since it was made. Time beside sending and waiting is computing."""

    launches: int  # one a layer, whatever call it is part of
    jobs: int  # of this rank's experts
    weight_bytes: int  # once for each time a slot was opened, biases too
    send_s: float  # sorting jobs, writing rows and results for others
    wait_s: float  # no thread had anything to do


class RankLane:
    """The calls of one micro-batch on one rank, one after the other."""

    def __init__(
        self,
        compiled: Any,
        kernels: Any,
        wire: Any,
        lane: int,
        num_results: int,
        sent: Counters,
        returned: Counters,
    ) -> None:
        """`num_results` is the most choices of a batch, the same on every rank.

        Shapes:  sent and returned [W] int64 are counted up: bytes by rank.
        """
        self._compiled, self._counters = compiled, (sent, returned)
        self._native = compiled.MoeRanks(
            kernels, wire, lane, num_results, sent.ctypes.data, returned.ctypes.data
        )
        self.advance = self._native.advance
        """(timeout_s) -> bool: go on with a call that was not over; whether it is."""

    @property
    def counts(self) -> RankCounts:
        """So far."""
        launches, jobs, weight_bytes, send_ns, wait_ns = self._native.counts()
        return RankCounts(
            launches=launches,
            jobs=jobs,
            weight_bytes=weight_bytes,
            send_s=1e-9 * send_ns,
            wait_s=1e-9 * wait_ns,
        )

    def late(self) -> tuple[int, str]:
        """Of a call that is not over: whom it waits for, and with which stage."""
        rank, stage = self._native.late()
        return rank, stage

    def layer(
        self,
        router: RouterLayer | None,
        shared: SharedLayer | None,
        experts: MoeLayer,
        slots: Any,
        first: int,
    ) -> RankLayer:
        """The calls of one layer. Token number t counts from `first` where copies of an expert take turns."""
        return RankLayer(self._compiled, self._native, router, shared, experts, slots, first)


class RankLayer:
    """One layer on one lane: all that does not change from call to call is bound once.

        begin(x, num_x, experts, weights, y, num_tokens, epoch, plan_version, step_id, timeout_s) -> bool

    sends rows, computes what is here and combines what returns; whether all of it was done in time. x, y,
    experts and weights are addresses, of [T, D] in the seam dtype, [T, K] int64 and [T, K] float32 without
    gaps, and stay valid until the call is over. With a router x is the residual stream, which is normed
    first, y = x + what the experts give, the shared one too, and what was chosen is written; else choices are
    read. Epoch, plan
    version and step are the same on every rank. ValueError: an expert that does not exist, more tokens than
    there is room for, ranks that are out of step.
    """

    def __init__(
        self,
        compiled: Any,
        lane: Any,
        router: RouterLayer | None,
        shared: SharedLayer | None,
        experts: MoeLayer,
        slots: Any,
        first: int,
    ) -> None:
        self._kept = (router, shared, experts)  # whose weights the call reads
        self.native = compiled.RankLayer(
            lane,
            None if router is None else router.native,
            None if shared is None else shared.native,
            experts.native,
            slots,
            first,
        )
        self.begin = self.native.begin
