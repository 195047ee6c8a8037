"""Integer formats of weights: bits, groups, zero points, and the bytes that a matrix takes. Torch-free.

A group is the numbers of one row of a weight that share a scale (float16), and a zero point where the format
has them. Kernels read panels of 16 rows, each with its scales and zero points in front of its groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from moesaic.errors import ConfigError

BLOCK = 32  # numbers of an activation row under one scale; a group of a weight is whole blocks
PANEL_ROWS = 16
SCALE_BYTES = 2  # float16

ACTIVATION_FORMAT: Final[Literal["int8-g32"]] = "int8-g32"
"""How a row that meets integer weights is rounded: by blocks of 32, symmetric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """One integer format. The width of a weight is padded with zeros up to whole groups."""

    name: str
    bits: int
    group: int | None  # None: a whole row
    has_zeros: bool = False

    def group_size(self, width: int) -> int:
        """Numbers under one scale in rows of `width`."""
        return _up(width, BLOCK) if self.group is None else self.group

    def padded_width(self, width: int) -> int:
        """Numbers stored of a row of `width`."""
        return _up(width, self.group_size(width))

    def num_groups(self, width: int) -> int:
        """Groups in a row of `width`."""
        return self.padded_width(width) // self.group_size(width)

    def panel_bytes(self, width: int) -> int:
        """Bytes of 16 rows."""
        head_bytes = (SCALE_BYTES + self.has_zeros) * self.num_groups(width)
        return PANEL_ROWS * (head_bytes + self.padded_width(width) * self.bits // 8)

    def matrix_bytes(self, rows: int, width: int) -> int:
        """Bytes of a matrix [rows, width]; the rows are padded to whole panels."""
        return _up(rows, PANEL_ROWS) // PANEL_ROWS * self.panel_bytes(width)

    def bits_per_weight(self, width: int) -> float:
        """Bits that a weight takes in rows of `width`, scales and zero points counted."""
        return 8.0 * self.panel_bytes(width) / (PANEL_ROWS * width)

    def check_shards(self, width: int, num_shards: int) -> None:
        """A leaf of a split row is whole groups, or whole blocks where a row is one group.

        Raises: ConfigError with the arithmetic, and a format that fits if there is one.
        """
        if self._fits(width, num_shards):
            return
        unit = self.group or BLOCK
        fitting = [one.name for one in QUANTISED.values() if one._fits(width, num_shards)]
        raise ConfigError(
            f"{self.name} weights with rows of {width} cannot be split into {num_shards} shards: "
            f"{width} / {num_shards} = {width / num_shards:g} is not a multiple of {unit}; ask for fewer "
            "shards" + (f", or a format that fits: {', '.join(fitting)}" if fitting else "")
        )

    def _fits(self, width: int, num_shards: int) -> bool:
        return num_shards == 1 or width % (num_shards * (self.group or BLOCK)) == 0


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


QUANTISED: Mapping[str, Quantised] = MappingProxyType(
    {
        one.name: one
        for one in (
            Quantised(name="int8", bits=8, group=None),
            Quantised(name="int8-g32", bits=8, group=32),
            Quantised(name="int4-g32", bits=4, group=32),
            Quantised(name="int4-g64", bits=4, group=64),
            Quantised(name="int4-g128", bits=4, group=128),
            Quantised(name="int4-g32-zp", bits=4, group=32, has_zeros=True),
            Quantised(name="int4-g64-zp", bits=4, group=64, has_zeros=True),
            Quantised(name="int4-g128-zp", bits=4, group=128, has_zeros=True),
        )
    }
)
"""The integer formats by name; `spec.numerics.Format` lists the same names."""


def check_shards_of(format: str, width: int, num_shards: int) -> None:
    """Whether a row of `width` numbers in any format can be split into equal leaves.

    Raises: ConfigError with the arithmetic.
    """
    if format in QUANTISED:
        QUANTISED[format].check_shards(width, num_shards)
    elif width % num_shards:
        raise ConfigError(
            f"numerics.matmul_shards = {num_shards} does not divide an inner width of {width}; "
            "ask for fewer shards"
        )
