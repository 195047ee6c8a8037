"""Rows on their way to experts: how they are rounded, and the bytes that they are on a wire.

    float32, bfloat16     the numbers
    fp8                   e4m3 bytes, then a float32 scale for each 128 numbers: greatest size / 448

A scale follows its row alone, so a row is rounded alike whoever it is sent with, and where nothing is sent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.formats import Packed, grouped, torch_dtype
from moesaic.spec.numerics import DTYPE_BYTES, WIRE_GROUP, WireFormat

_MOST = 448.0  # the greatest number of e4m3


def round_to_wire(x_RD: Tensor, format: WireFormat) -> Packed:
    """The rows rounded to nearest even; no copy where they are in that format already.

    A group of fp8 that holds a number that is not finite gets the scale NaN.
    """
    if format != "fp8":
        return Packed(format=format, data=x_RD.to(torch_dtype(format)))
    wide_RGK = grouped(x_RD.float(), WIRE_GROUP)
    scales_RG = wide_RGK.abs().amax(-1) / _MOST
    divisor_RG1 = scales_RG.unsqueeze(-1)
    is_good_RG1 = divisor_RG1.isfinite() & (divisor_RG1 != 0.0)
    data_RGK = torch.where(is_good_RG1, wide_RGK / divisor_RG1, 0.0).clamp(-_MOST, _MOST)
    return Packed(
        format=format,
        data=data_RGK.flatten(1)[:, : x_RD.shape[1]].to(torch.float8_e4m3fn),
        scales=scales_RG.where(scales_RG.isfinite(), torch.nan),
    )


def to_bytes(rows: Packed) -> Tensor:
    """[R, bytes of a row] uint8: what `from_bytes` reads."""
    data_RB = _bytes(rows.data)
    return data_RB if rows.scales is None else torch.cat((data_RB, _bytes(rows.scales)), dim=1)


def from_bytes(rows_RB: Tensor, format: WireFormat, width: int) -> Packed:
    """Rows of `width` numbers."""
    if format in DTYPE_BYTES:
        return Packed(format=format, data=_numbers(rows_RB.contiguous(), torch_dtype(format), width))
    scales_RB = rows_RB[:, width:].clone(memory_format=torch.contiguous_format)  # stands at a multiple of 4
    return Packed(
        format=format,
        data=rows_RB[:, :width].view(torch.float8_e4m3fn),
        scales=_numbers(scales_RB, torch.float32, -(-width // WIRE_GROUP)),
    )


def _bytes(numbers_RN: Tensor) -> Tensor:
    num_rows, width = numbers_RN.shape
    return numbers_RN.contiguous().view(-1).view(torch.uint8).view(num_rows, width * numbers_RN.itemsize)


def _numbers(rows_RB: Tensor, dtype: torch.dtype, width: int) -> Tensor:
    return rows_RB.view(-1).view(dtype).view(len(rows_RB), width)
