"""How numbers are stored in a KV pool: as floats, or as bytes under one scale for each token and head.

    int8    byte = round(number / scale), scale = greatest size / 127
    fp8     e4m3 byte of number / scale,  scale = greatest size / 448

A row of bytes is followed by its scale, a float32, so that a block is one piece of memory in every format.
The scale follows the row alone: what a token's keys become depends on no other token.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType

import torch
from torch import Tensor

from moesaic.errors import ConfigError, nearest
from moesaic.kernels.huge_pages import HUGE_BYTES, map_bytes
from moesaic.spec.numerics import KV_SCALE_BYTES, KvFormat

POOL_DTYPES: Mapping[KvFormat, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.uint8}
)
"""The dtype of a pool in each format, by which kernels know it: fp8 numbers and scales are plain bytes."""

POOL_KINDS: Mapping[torch.dtype, int] = MappingProxyType(
    {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
)
"""As the native kernels number them."""

_MOST: Mapping[torch.dtype, float] = MappingProxyType({torch.int8: 127.0, torch.uint8: 448.0})


def pool_zeros(shape: tuple[int, ...], format: KvFormat) -> Tensor:
    """A pool of zeros with rows of `shape[-1]` numbers, in huge pages where it fills one.

    Raises: ConfigError for a format that no pool has.
    """
    if format not in POOL_DTYPES:
        raise ConfigError(f"no KV pool is kept in {format!r}; {nearest(format, POOL_DTYPES)}")
    dtype = POOL_DTYPES[format]
    extra = KV_SCALE_BYTES if dtype in _MOST else 0
    stored = (*shape[:-1], shape[-1] + extra)
    num_bytes = prod(stored) * dtype.itemsize
    if num_bytes < HUGE_BYTES:
        return torch.zeros(stored, dtype=dtype)
    return torch.from_numpy(map_bytes(num_bytes)).view(dtype).view(stored)


def row_width(pool: Tensor) -> int:
    """Numbers in a row of a pool."""
    return pool.shape[-1] - (KV_SCALE_BYTES if pool.dtype in _MOST else 0)


def pack_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [.., C] as a pool of `dtype` keeps them.

    Numbers are rounded to nearest even. A row that holds a number that is not finite gets the scale NaN.
    """
    if dtype not in _MOST:
        return x.to(dtype)
    wide, most = x.float(), _MOST[dtype]
    scale = wide.abs().amax(dim=-1, keepdim=True) / most
    is_good = scale.isfinite() & (scale != 0.0)
    parts = torch.where(is_good, wide / scale, 0.0).clamp(-most, most)
    bytes_ = parts.round().to(torch.int8) if dtype == torch.int8 else parts.to(torch.float8_e4m3fn)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    return torch.cat((bytes_.view(torch.uint8), scale.view(torch.uint8)), dim=-1).view(dtype)


def unpack_rows(rows: Tensor) -> Tensor:
    """The numbers [.., C] of a pool's rows, float32."""
    if rows.dtype not in _MOST:
        return rows.float()
    kept = torch.int8 if rows.dtype == torch.int8 else torch.float8_e4m3fn
    width = row_width(rows)
    scale = rows[..., width:].contiguous().view(torch.float32)
    return rows[..., :width].contiguous().view(kept).float() * scale
