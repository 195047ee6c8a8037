"""Integer weights as kernels read them: panels of 16 rows, scales and zero points in front of their group.

    panel    group | group | ...                          16 rows, each padded with zeros to whole groups
    group    16 scales (float16) | 16 zero points, a byte each | block | block | ...
    block    32 numbers of each row, 64 bytes at a time: [half of the panel][8 rows][4 bytes]
    4 bytes  of 8 bits, numbers 4c .. 4c + 3; of 4 bits, byte i is number 8j + i and, above it, 8j + 4 + i

A number of 4 bits is stored as value + zero point, which is 8 where the format has none. The layout is the
same for every instruction level.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.formats import Packed, pack
from moesaic.spec.numerics import Format
from moesaic.spec.quantised import BLOCK, PANEL_ROWS, QUANTISED, SCALE_BYTES, Quantised, check_shards_of

_CHUNK = 1 << 20  # numbers rounded at once: some 30 MB of passing tensors
MIDDLE = 8  # zero point of formats of 4 bits that store none


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PanelWeight:
    """A weight [F, D] in an integer format. Its rows are sections of equal size, each of whole panels.

    Shapes:  data [panels, bytes of a panel] uint8; may be a view of an arena.
    """

    format: Format
    data: Tensor
    num_rows: int
    width: int
    num_sections: int = 1  # 2: gate rows, then up rows

    @property
    def kind(self) -> Quantised:
        """The facts of the format."""
        return QUANTISED[self.format]

    @property
    def shape(self) -> tuple[int, int]:
        """[F, D], as a tensor has it."""
        return self.num_rows, self.width

    def unpack(self) -> Packed:
        """The rows one after the other: what `kernels.formats.pack` made."""
        kind, num_groups = self.kind, self.kind.num_groups(self.width)
        groups = self.data.view(self.data.shape[0], num_groups, -1)
        head = PANEL_ROWS * SCALE_BYTES
        scales_PGR = groups[:, :, :head].contiguous().view(torch.float16)
        zeros_PGR = groups[:, :, head : head + PANEL_ROWS] if kind.has_zeros else None
        blocks_PX = groups[:, :, head + PANEL_ROWS * kind.has_zeros :].contiguous().flatten(1)
        data_PRD = (_numbers_of_bytes if kind.bits == 8 else _numbers_of_halves)(blocks_PX)
        if kind.bits == 4 and not kind.has_zeros:
            data_PRD = data_PRD - MIDDLE
        return Packed(
            format=self.format,
            data=self._rows(data_PRD)[:, : self.width].to(torch.int8).contiguous(),
            scales=self._rows(scales_PGR.transpose(1, 2)),
            zeros=None if zeros_PGR is None else self._rows(zeros_PGR.transpose(1, 2)).to(torch.int8),
        )

    def _rows(self, of_panel_PRX: Tensor) -> Tensor:
        """[F, X] of [panels, 16, X]: without the rows of padding at the end of each section."""
        in_section = self.num_rows // self.num_sections
        sections = of_panel_PRX.reshape(self.num_sections, -1, of_panel_PRX.shape[-1])
        return sections[:, :in_section].reshape(self.num_rows, -1)


Weight = Tensor | PanelWeight
"""A weight [F, D] as a matmul takes it."""


def check_shards(weight_DF: Weight, num_shards: int) -> None:
    """Refuse a row-parallel matmul whose leaves would not be whole.

    Raises: ConfigError with the arithmetic.
    """
    format = weight_DF.format if isinstance(weight_DF, PanelWeight) else "float32"
    check_shards_of(format, weight_DF.shape[1], num_shards)


def slice_columns(weight_FD: PanelWeight, columns: range) -> PanelWeight:
    """A copy of some columns, which begin and end with a group, or with a block of 32 where a row is one.

    Scales are those of the whole: a row that is one group keeps the scale of all its numbers.
    """
    kind, width = weight_FD.kind, weight_FD.width
    unit = kind.group or BLOCK
    assert columns.start % unit == 0, "columns begin with a group"
    assert columns.stop % unit == 0 or columns.stop == width, "columns end with a group"
    num_groups, num_panels = kind.num_groups(width), weight_FD.data.shape[0]
    groups = weight_FD.data.view(num_panels, num_groups, -1)
    first, stop = columns.start // unit, -(-columns.stop // unit)
    if kind.group is None:
        head_bytes = PANEL_ROWS * (SCALE_BYTES + kind.has_zeros)
        block_bytes = PANEL_ROWS * BLOCK * kind.bits // 8
        numbers = groups[:, :, head_bytes + first * block_bytes : head_bytes + stop * block_bytes]
        data = torch.cat((groups[:, :, :head_bytes], numbers), dim=2)
    else:
        data = groups[:, first:stop]
    return PanelWeight(
        format=weight_FD.format,
        data=data.reshape(num_panels, -1).contiguous(),
        num_rows=weight_FD.num_rows,
        width=len(columns),
        num_sections=weight_FD.num_sections,
    )


def pack_panels(
    weight_FD: Tensor, format: Format, *, name: str = "a weight", into: PanelWeight | None = None
) -> PanelWeight:
    """`weight_FD` rounded into an integer format, some rows at a time, so that no second copy is ever held.

    Shapes:  any strides; `into`, if given, is of one section and is what is returned.
    Raises:  CheckpointError as `kernels.formats.pack`.
    """
    num_rows, width = weight_FD.shape
    if into is None:
        kind = QUANTISED[format]
        data = torch.empty((-(-num_rows // PANEL_ROWS), kind.panel_bytes(width)), dtype=torch.uint8)
        into = PanelWeight(format=format, data=data, num_rows=num_rows, width=width)
    panels = max(1, _CHUNK // (PANEL_ROWS * width))
    for i, rows_RD in enumerate(weight_FD.split(panels * PANEL_ROWS)):
        data = to_panels(pack(rows_RD, format, name=name)).data
        into.data[i * panels : i * panels + data.shape[0]] = data
    return into


def to_panels(packed: Packed) -> PanelWeight:
    """The weight in the order in which kernels read it, as one section.

    Shapes:  `packed` as `kernels.formats.pack` makes it for an integer format.
    """
    assert packed.format != "fp8", "rows on a wire are no weight"
    kind, (num_rows, width) = QUANTISED[packed.format], packed.data.shape
    assert packed.scales is not None, "integer formats have scales"
    num_groups, num_panels = kind.num_groups(width), -(-num_rows // PANEL_ROWS)
    rows, columns = num_panels * PANEL_ROWS - num_rows, kind.padded_width(width) - width
    parts = [_head(packed.scales, rows).view(torch.uint8)]
    if packed.zeros is not None:
        parts.append(_head(packed.zeros.to(torch.uint8), rows))
        # Padding is a value of zero: in a column the group's zero point, in a row all zeros.
        behind = packed.zeros[:, -1:].expand(num_rows, columns)
        data_RD = torch.cat((packed.data, behind), dim=1)
    else:
        data_RD = F.pad(packed.data, (0, columns))
        if kind.bits == 4:
            data_RD = data_RD + MIDDLE
    data_PRD = F.pad(data_RD, (0, 0, 0, rows)).view(num_panels, PANEL_ROWS, -1)
    blocks = (_bytes_of_numbers if kind.bits == 8 else _halves_of_numbers)(data_PRD)
    parts.append(blocks.reshape(num_panels, num_groups, -1))
    return PanelWeight(
        format=packed.format,
        data=torch.cat(parts, dim=2).view(num_panels, -1),
        num_rows=num_rows,
        width=width,
    )


def _head(of_row_RG: Tensor, rows: int) -> Tensor:
    """[panels, G, 16] of [R, G], with zeros for `rows` more rows."""
    padded = F.pad(of_row_RG, (0, 0, 0, rows)).view(-1, PANEL_ROWS, of_row_RG.shape[1])
    return padded.transpose(1, 2).contiguous()


def _bytes_of_numbers(data_PRD: Tensor) -> Tensor:
    """[panels, blocks * 8 * 64] uint8, 8 chunks of 64 bytes in a block."""
    chunks = data_PRD.view(data_PRD.shape[0], PANEL_ROWS, -1, 4)
    return chunks.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)


def _numbers_of_bytes(blocks_PX: Tensor) -> Tensor:
    chunks = blocks_PX.view(torch.int8).view(blocks_PX.shape[0], -1, PANEL_ROWS, 4)
    return chunks.transpose(1, 2).flatten(2)


def _halves_of_numbers(data_PRD: Tensor) -> Tensor:
    """[panels, blocks * 4 * 64] uint8, 4 pairs of 64 bytes in a block."""
    pairs = data_PRD.to(torch.uint8).view(data_PRD.shape[0], PANEL_ROWS, -1, 2, 4)
    both = pairs[..., 0, :] | pairs[..., 1, :] << 4
    return both.transpose(1, 2).flatten(1)


def _numbers_of_halves(blocks_PX: Tensor) -> Tensor:
    both = blocks_PX.view(blocks_PX.shape[0], -1, PANEL_ROWS, 4).transpose(1, 2)
    return torch.stack((both & 15, both >> 4), dim=3).flatten(2).to(torch.int16)
