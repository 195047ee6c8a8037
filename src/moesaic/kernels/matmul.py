"""Matmuls whose result rows depend on their own row alone, called in the tiles that `invariance` proves."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.errors import KernelUnavailable
from moesaic.kernels.invariance import MAX_ROWS, ProofTable, Tiling, Trial

MAX_COLUMNS = 8192  # result columns of one call: bounds what the proof of a vocabulary costs
ALIGNMENT = 64  # bytes; kernels for few columns treat rows that start off a vector's boundary in another way
PATTERN = 1 << 20  # numbers drawn for a proof; larger operands repeat them


class TiledMatmul:
    """x @ weight.T and its batched kin.

    Raises: KernelUnavailable from any call whose shape cannot be made invariant.
    """

    def __init__(self, table: ProofTable) -> None:
        self._table = table

    def linear(self, x_TD: Tensor, weight_FD: Tensor) -> Tensor:
        """[T, F] in the operands' dtype."""
        # Rare and slow: a copy of the weight per call.
        if missing := -weight_FD.shape[1] % _unit(weight_FD):
            x_TD, weight_FD = F.pad(x_TD, (0, missing)), F.pad(weight_FD, (0, missing))
        x_TD = _aligned(x_TD)
        if weight_FD.shape[0] <= MAX_COLUMNS:
            return self._linear(x_TD, weight_FD)
        return torch.cat([self._linear(x_TD, part) for part in weight_FD.split(MAX_COLUMNS)], dim=1)

    def bmm(self, a_NTC: Tensor, b_NCM: Tensor) -> Tensor:
        """[N, T, M] float32 of float32 operands."""
        if missing := -a_NTC.shape[2] % _unit(a_NTC):
            a_NTC, b_NCM = F.pad(a_NTC, (0, missing)), F.pad(b_NCM, (0, 0, 0, missing))
        num_items, num_rows, width = a_NTC.shape
        num_columns = b_NCM.shape[2]
        # One matrix may go another way through torch than several.
        key = ("bmm", min(num_items, 2), width, num_columns)
        tiling = self._table.tiling(key, lambda: _bmm_trial(min(num_items, 2), width, num_columns))
        y_NTM = a_NTC.new_empty((num_items, num_rows, num_columns))
        for start in range(0, num_rows, tiling.max_rows):
            part = a_NTC[:, start : start + tiling.max_rows]
            rows = part.shape[1]
            padded = pad_rows(_aligned(part), tiling.padded(rows))
            y_NTM[:, start : start + rows] = torch.bmm(padded, b_NCM)[:, :rows]
        return y_NTM

    def prove_linear(self, num_columns: int, width: int, dtype: torch.dtype) -> None:
        """Prove the calls that a contiguous weight [num_columns, width] will need."""
        width += -width % (ALIGNMENT // dtype.itemsize)
        for columns in {min(num_columns, MAX_COLUMNS), num_columns % MAX_COLUMNS} - {0}:
            self._linear_tiling(columns, width, width, dtype)

    def prove_leaf(self, num_columns: int, width: int, num_shards: int) -> None:
        """Prove the float32 call of one of `num_shards` leaves of a weight [num_columns, width]."""
        self.prove_linear(num_columns, width // num_shards, torch.float32)

    def prove_columns(self, whole: int, part: int, width: int, dtype: torch.dtype) -> None:
        """Prove that `part` columns of a weight [whole, width] have the bits that they have in the whole.

        Raises: KernelUnavailable when they have others.
        """
        rows, weight_FD = noise((MAX_ROWS, width), dtype), noise((whole, width), dtype, seed=1)
        expected = self.linear(rows, weight_FD)
        for first in {0, whole - part}:
            found = self.linear(rows, weight_FD[first : first + part].contiguous())
            if not torch.equal(found, expected[:, first : first + part]):
                raise _split_differs(f"{part} of {whole} columns of a matmul over {width}")

    def prove_items(self, width: int, num_columns: int) -> None:
        """Prove that one item of `bmm` alone has the bits that it has among several.

        Raises: KernelUnavailable when it has others.
        """
        a_NTC, b_NCM = noise((3, MAX_ROWS, width)), noise((3, width, num_columns), seed=1)
        alone = torch.cat([self.bmm(a_NTC[i : i + 1], b_NCM[i : i + 1]) for i in range(3)])
        if not torch.equal(alone, self.bmm(a_NTC, b_NCM)):
            raise _split_differs(f"one head's matmul {width} x {num_columns}")

    def _linear(self, x_TD: Tensor, weight_FD: Tensor) -> Tensor:
        num_rows = x_TD.shape[0]
        num_columns, width = weight_FD.shape
        tiling = self._linear_tiling(num_columns, width, weight_FD.stride(0), weight_FD.dtype)
        if num_rows <= tiling.max_rows:
            padded = tiling.padded(num_rows)
            if padded == num_rows:
                return F.linear(x_TD, weight_FD)
            return F.linear(pad_rows(x_TD, padded), weight_FD)[:num_rows]
        y_TF = x_TD.new_empty((num_rows, num_columns))
        for start in range(0, num_rows, tiling.max_rows):
            part = x_TD[start : start + tiling.max_rows]
            rows = part.shape[0]
            y_TF[start : start + rows] = F.linear(pad_rows(part, tiling.padded(rows)), weight_FD)[:rows]
        return y_TF

    def _linear_tiling(self, num_columns: int, width: int, stride: int, dtype: torch.dtype) -> Tiling:
        key = ("linear", num_columns, width, stride, dtype)
        return self._table.tiling(key, lambda: _linear_trial(num_columns, width, stride, dtype))


def _split_differs(what: str) -> KernelUnavailable:
    return KernelUnavailable(
        f"torch computes {what} by itself with other bits than in the whole, so that ranks cannot share it: "
        "use native kernels, or dp in place of tp"
    )


def _unit(x: Tensor) -> int:
    """Numbers of x's dtype whose bytes are ALIGNMENT."""
    return ALIGNMENT // x.element_size()


def _aligned(x: Tensor) -> Tensor:
    """`x` contiguous, from an address that is a multiple of ALIGNMENT."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """`x` with zero rows (the last dim but one) added up to `num_rows`; `x` itself when it has them."""
    if x.shape[-2] == num_rows:
        return x
    return F.pad(x, (0, 0, 0, num_rows - x.shape[-2]))


def noise(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """Numbers without structure, for a proof; the same ones every time."""
    generator = torch.Generator().manual_seed(seed)
    numel = torch.Size(shape).numel()
    # An odd length, so that no row repeats another at the same columns.
    drawn = torch.randn(min(numel, PATTERN - 1), generator=generator).to(dtype)
    if drawn.numel() < numel:
        drawn = drawn.repeat(-(-numel // drawn.numel()))[:numel]
    return drawn.view(shape)


def _linear_trial(num_columns: int, width: int, stride: int, dtype: torch.dtype) -> Trial:
    # A weight may be a view: `width` columns of rows `stride` apart.
    weight_FD = noise((num_columns, stride), dtype, seed=1)[:, :width]
    return Trial(
        name=f"linear {num_columns} x {width} {str(dtype).removeprefix('torch.')}",
        calls=(lambda rows_TD: F.linear(rows_TD, weight_FD),),
        rows=noise((MAX_ROWS, width), dtype),
        flops_per_row=2.0 * num_columns * width,
        allow_fixed=True,
    )


def _bmm_trial(num_items: int, width: int, num_columns: int) -> Trial:
    b_NCM = noise((num_items, width, num_columns), seed=1)
    return Trial(
        name=f"bmm {width} x {num_columns}",
        calls=(lambda rows_NTC: torch.bmm(rows_NTC, b_NCM),),
        rows=noise((num_items, MAX_ROWS, width)),
        flops_per_row=2.0 * num_items * width * num_columns,
        allow_fixed=True,
    )
