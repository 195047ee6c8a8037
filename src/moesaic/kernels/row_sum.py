"""Sums over the last dim in one call, after the proof that a row's bits do not follow the rows around it."""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.invariance import MAX_ROWS, ProofTable, Trial
from moesaic.kernels.matmul import noise, pad_rows


class RowSum:
    """torch's own row sum, in calls of the size that `invariance` proves.

    `elementwise.sum_last` needs no proof and a dozen calls: right for a router's few numbers.
    """

    def __init__(self, table: ProofTable) -> None:
        self._table = table

    def __call__(self, x: Tensor) -> Tensor:
        """Of float32 x [.., C] the sums [.., 1].

        Raises: KernelUnavailable when no way of calling gives equal bits.
        """
        width = x.shape[-1]
        tiling = self._table.tiling(("row sum", width), lambda: _trial(width))
        rows_NC = x.reshape(-1, width)
        sums = [
            pad_rows(part, tiling.padded(len(part))).sum(dim=-1, keepdim=True)[: len(part)]
            for part in rows_NC.split(tiling.max_rows)
        ]
        return (sums[0] if len(sums) == 1 else torch.cat(sums)).view(*x.shape[:-1], 1)


def _trial(width: int) -> Trial:
    return Trial(
        name=f"row sum of {width}",
        calls=(lambda rows_NC: rows_NC.sum(dim=-1, keepdim=True),),
        rows=noise((MAX_ROWS, width)),
        flops_per_row=width,
        allow_fixed=True,
    )
