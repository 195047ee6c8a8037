"""How numbers are stored: one `Packed` for rows on a wire and for weights, of experts and linears alike.

Knows nothing of layers, of who sends what to whom, or of the order in which kernels read a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.errors import CheckpointError, ConfigError, nearest
from moesaic.spec.numerics import WIRE_GROUP, DType, Format, WireFormat
from moesaic.spec.quantised import ACTIVATION_FORMAT, BLOCK, QUANTISED, Quantised

_TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16}
)


def torch_dtype(name: DType | Format | WireFormat) -> torch.dtype:
    """The torch dtype of a dtype's or an unscaled format's name.

    Raises: ConfigError for a name that no kernel computes with.
    """
    if name not in _TORCH_DTYPES:
        raise ConfigError(f"no torch dtype for {name!r}; {nearest(name, _TORCH_DTYPES)}")
    return _TORCH_DTYPES[name]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """Rows in one format: data, times scales, after zero points were taken off.

    Shapes:  data [R, D] in the format's storage dtype, int8 of integer formats; scales [R, G] float16 of
             weights, float32 of activations and of rows in fp8; zeros [R, G] int8. G groups of equal size,
             the last cut at D.
    """

    format: Format | WireFormat
    data: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows R."""
        return self.data.shape[0]

    @property
    def width(self) -> int:
        """Numbers in a row, D."""
        return self.data.shape[-1]

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The rows as numbers of `dtype`; the packed memory itself where nothing has to change."""
        if self.scales is None:
            return self.data.to(dtype)
        return (self.values() * self._spread(self.scales)).to(dtype)

    def values(self) -> Tensor:
        """The whole numbers [R, D] that the scales multiply, as float32."""
        values_RD = self.data.float()
        return values_RD if self.zeros is None else values_RD - self._spread(self.zeros)

    def _spread(self, of_group_RG: Tensor) -> Tensor:
        """[R, D] float32: each number's own entry of [R, G]."""
        size = group_size(self.format, self.width)
        return of_group_RG.float().repeat_interleave(size, dim=1)[:, : self.width]


def group_size(format: Format | WireFormat, width: int) -> int:
    """Numbers under one scale in rows of `width`."""
    return WIRE_GROUP if format == "fp8" else QUANTISED[format].group_size(width)


def pack(x_RD: Tensor, format: Format, *, name: str = "a weight") -> Packed:
    """`x_RD` rounded to nearest even into `format`; no copy where it is in that format already.

    Raises: ConfigError for an unknown format; CheckpointError, calling the tensor `name`, where an integer
            format cannot hold it.
    """
    if format not in QUANTISED:
        return Packed(format=format, data=x_RD.to(torch_dtype(format)))
    kind = QUANTISED[format]
    grouped_RGK = grouped(x_RD.float(), kind.group_size(x_RD.shape[1]))
    if not grouped_RGK.isfinite().all():
        raise CheckpointError(
            f"{name} holds numbers that are NaN or infinite, which {format} cannot; repair the checkpoint"
        )
    data_RGK, scales_RG, zeros_RG = _round_weight(grouped_RGK, kind)
    if not scales_RG.isfinite().all():
        raise CheckpointError(
            f"{name}: numbers of size {float(grouped_RGK.abs().max()):g} need scales beyond float16's 65504, "
            f"which {format} cannot keep; use bfloat16"
        )
    return Packed(
        format=format,
        data=data_RGK.flatten(1)[:, : x_RD.shape[1]].to(torch.int8),
        scales=scales_RG,
        zeros=zeros_RG,
    )


def _round_weight(x_RGK: Tensor, kind: Quantised) -> tuple[Tensor, Tensor, Tensor | None]:
    """Whole numbers, float16 scales, and zero points where the format has them.

    Numbers are rounded by the scale as float16 holds it. Of 4 bits without zero points the number of greatest
    size becomes -8, whatever its sign: the scale takes the sign, and all 16 values are of use.
    """
    if kind.has_zeros:
        low_RG, high_RG = x_RGK.amin(-1).clamp(max=0.0), x_RGK.amax(-1).clamp(min=0.0)
        scales_RG = ((high_RG - low_RG) / 15.0).half()
        zeros_RG = _quotient(-low_RG, scales_RG.float()).round().clamp(0, 15)
        data_RGK = _quotient(x_RGK, scales_RG.float().unsqueeze(-1)).round() + zeros_RG.unsqueeze(-1)
        return data_RGK.clamp(0, 15), scales_RG, zeros_RG.to(torch.int8)
    if kind.bits == 8:
        scales_RG, least, most = (x_RGK.abs().amax(-1) / 127.0).half(), -127, 127
    else:
        greatest_RG1 = x_RGK.gather(-1, x_RGK.abs().argmax(-1, keepdim=True))
        scales_RG, least, most = (greatest_RG1.squeeze(-1) / -8.0).half(), -8, 7
    data_RGK = _quotient(x_RGK, scales_RG.float().unsqueeze(-1)).round()
    return data_RGK.clamp(least, most), scales_RG, None


def round_rows(x_TD: Tensor) -> Packed:
    """Rows as the activation of integer weights: int8, a float32 scale for each block of 32.

    The scale is the greatest size / 127; a number is divided by it and rounded to even. A block that holds a
    number that is not finite gets the scale NaN: its row's results are NaN, its neighbours' are not.
    """
    x_TBK = grouped(x_TD.float(), BLOCK)
    scales_TB = x_TBK.abs().amax(-1) / 127.0
    is_good_TB = scales_TB.isfinite()
    data_TBK = _quotient(x_TBK, scales_TB.where(is_good_TB, 0.0).unsqueeze(-1)).round().clamp(-127, 127)
    return Packed(
        format=ACTIVATION_FORMAT,
        data=data_TBK.flatten(1)[:, : x_TD.shape[1]].to(torch.int8),
        scales=scales_TB.where(is_good_TB, torch.nan),
    )


def grouped(x_RD: Tensor, size: int) -> Tensor:
    """[R, G, size] of [R, D], with zeros behind a row's last number."""
    return F.pad(x_RD, (0, -x_RD.shape[1] % size)).unflatten(1, (-1, size))


def _quotient(x: Tensor, by: Tensor) -> Tensor:
    """x / by, and zero where `by` is zero."""
    return torch.where(by == 0.0, 0.0, x / by)
