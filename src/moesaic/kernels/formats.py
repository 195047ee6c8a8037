"""How numbers are stored: one `Packed` for rows on a wire and for weights, of experts and linears alike.

Knows nothing of layers or of who sends what to whom.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from moesaic.errors import ConfigError, nearest
from moesaic.spec.numerics import DType, Format

_TORCH_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16}
)


def torch_dtype(name: DType | Format) -> torch.dtype:
    """The torch dtype of a dtype's or an unscaled format's name.

    Raises: ConfigError for a name that no kernel computes with.
    """
    if name not in _TORCH_DTYPES:
        raise ConfigError(f"no torch dtype for {name!r}; {nearest(name, _TORCH_DTYPES)}")
    return _TORCH_DTYPES[name]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Packed:
    """Rows in one format. `scales` is None for the formats that have none.

    Shapes:  data [R, D] in the format's storage dtype.
    """

    format: Format
    data: Tensor
    scales: Tensor | None = None

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
        return self.data.to(dtype)


def pack(x_RD: Tensor, format: Format) -> Packed:
    """`x_RD` rounded to nearest even into `format`; no copy where it is in that format already.

    Raises: ConfigError for an unknown format.
    """
    return Packed(format=format, data=x_RD.to(torch_dtype(format)))
