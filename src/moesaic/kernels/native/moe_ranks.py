"""The routed experts of a layer over all ranks of a machine, in one native call on each: see moe_ranks.hpp.

Knows nothing of plans or of how the memory that ranks share came to be.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.kernels.native.moe import MoeCounts, MoeLayer

Counters = np.ndarray[Any, np.dtype[np.int64]]


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
        self._kernels, self._counters = kernels, (sent, returned)
        self._native = compiled.MoeRanks(
            kernels, wire, lane, num_results, sent.ctypes.data, returned.ctypes.data
        )

    @property
    def counts(self) -> MoeCounts:
        """Calls, jobs of this rank's experts, and bytes of weights, once for each time a slot was opened."""
        launches, jobs, weight_bytes = self._native.counts()
        return MoeCounts(launches=launches, jobs=jobs, weight_bytes=weight_bytes)

    def begin(  # noqa: PLR0913 - what a call is
        self,
        layer: MoeLayer,
        slots: Any,
        x_TD: Tensor,
        experts_TK: Tensor,
        weights_TK: Tensor,
        y_TD: Tensor,
        *,
        first: int,
        step: tuple[int, int, int],
        timeout_s: float,
    ) -> bool:
        """Send rows, compute what is here and combine what returns; whether all of it was done in time.

        What is given must stay where it is until the call is over. Token number t counts from `first` where
        copies of an expert take turns; `step` is (epoch, plan version, step), the same on every rank.

        Shapes:  x_TD, y_TD [T, D] in the seam dtype; experts_TK [T, K] int64; weights_TK [T, K] float32, all
                 without gaps.
        Raises:  ValueError for an expert that does not exist, and for ranks that are out of step.
        """
        assert experts_TK.dtype == torch.int64, f"expert ids are int64, got {experts_TK.dtype}"
        assert weights_TK.dtype == torch.float32, f"weights are float32, got {weights_TK.dtype}"
        is_over: bool = self._native.call(
            self._kernels,
            layer.native,
            slots,
            x_TD.data_ptr(),
            x_TD.numel(),
            experts_TK.data_ptr(),
            experts_TK.numel(),
            weights_TK.data_ptr(),
            weights_TK.numel(),
            y_TD.data_ptr(),
            x_TD.shape[0],
            first,
            *step,
            timeout_s,
        )
        return is_over

    def advance(self, timeout_s: float) -> bool:
        """Go on with a call that was not over; whether it is."""
        is_over: bool = self._native.advance(self._kernels, timeout_s)
        return is_over

    def late(self) -> tuple[int, str]:
        """Of a call that is not over: whom it waits for, and with which stage."""
        rank, stage = self._native.late()
        return rank, stage
