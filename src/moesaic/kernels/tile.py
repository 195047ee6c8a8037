"""How a step's attention is cut into tiles: which positions are computed together, against which blocks.

Decides speed and memory only: a row's bits are the same in every tile that it may be in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels.invariance import Tiling
from moesaic.kernels.kv_view import KvPlaces, KvRow

Position = TypeVar("Position", int, Tensor)
SCORE_TILES = 4  # guess


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """The shape of one layer's attention under given numerics.

    Units:   tile_bytes bounds the widened keys, and the widened values, that are held at a time; scores may
             take SCORE_TILES times that, since a tile of few rows reads all its keys for little work.
    """

    num_heads: int
    num_groups: int
    key_width: int
    value_width: int
    kv_block: int
    num_lanes: int
    window: int | None
    is_chunked: bool  # the window starts at a multiple of itself, it does not trail
    tile_bytes: int

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one group's keys."""
        return self.num_heads // self.num_groups

    @property
    def stride(self) -> int:
        """Positions in one step of all lanes."""
        return self.kv_block * self.num_lanes

    def span(self, first: int, count: int) -> tuple[int, int]:
        """The steps of the lanes [from, to) that hold what `count` positions from `first` on may see."""
        oldest = 0 if self.window is None else max(0, self.oldest(first))
        return oldest // self.stride, (first + count - 1) // self.stride + 1

    def most_steps(self, last: int) -> int:
        """How many steps one position up to `last` may see; a chunk that is full, a window that trails."""
        oldest = 0 if self.window is None else max(0, last - self.window + 1)
        return last // self.stride + 1 - oldest // self.stride

    def oldest(self, position: Position) -> Position:
        """The first position of the window of `position`; below 0 where the sequence is shorter."""
        assert self.window is not None, "without a window every position is visible"
        return position // self.window * self.window if self.is_chunked else position - self.window + 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tile:
    """Some positions (B sequences, P each) against the steps of lanes that any of them sees.

    J steps of L lanes are blocks in order. A group has R = P * heads per group rows, padded.

    Shapes:  rows_N [B * P] int64, rows of the batch; query_1B11R1 int32, their positions, -1 in padding;
             key_J11L1S int32, the positions of the blocks; key_index [B, G, J * L] and value_index
             [J, B, G, L] int64 into a pool seen as [blocks * G, ..].
    """

    rows_N: Tensor
    num_sequences: int
    num_positions: int
    first_step: int
    num_steps: int
    query_1B11R1: Tensor
    key_J11L1S: Tensor
    key_index: Tensor
    value_index: Tensor

    @property
    def num_rows(self) -> int:
        """Rows of a group, R."""
        return self.query_1B11R1.shape[4]


def cut(places: KvPlaces, geometry: Geometry, tiling: Tiling, null_block: int) -> Iterator[Tile]:
    """Tiles of a step: single positions of many sequences together, several of one sequence alone."""
    singles = sorted((row for row in places.rows if row.num_tokens == 1), key=lambda row: -row.start_idx)
    together: list[KvRow] = []
    for row in singles:
        if together and not _is_fitting(geometry, tiling, together, row):
            yield _tile(geometry, tiling, null_block, together, 0, 1)
            together = []
        together.append(row)
    if together:
        yield _tile(geometry, tiling, null_block, together, 0, 1)
    for row in places.rows:
        at = 0
        while row.num_tokens > 1 and at < row.num_tokens:
            count = min(_num_fitting(geometry, tiling, row), row.num_tokens - at)
            yield _tile(geometry, tiling, null_block, [row], at, count)
            at += count


def _is_fitting(geometry: Geometry, tiling: Tiling, together: list[KvRow], row: KvRow) -> bool:
    """Whether a tile of single positions, longest sequence first, takes one more."""
    count, longest = len(together) + 1, together[0].start_idx + geometry.stride
    # Sequences of a tile are padded to the longest: one half as long waits for the next tile.
    if 2 * (row.start_idx + geometry.stride) < longest:
        return False
    width = max(geometry.key_width, geometry.value_width)
    step_bytes = count * geometry.num_groups * geometry.stride * width * 4
    num_rows = geometry.num_groups * tiling.padded(geometry.heads_per_group)
    score_bytes = count * num_rows * (longest + geometry.stride) * 4
    return step_bytes <= geometry.tile_bytes and score_bytes <= SCORE_TILES * geometry.tile_bytes


def _num_fitting(geometry: Geometry, tiling: Tiling, row: KvRow) -> int:
    """How many positions of a row a tile takes."""
    num_steps = geometry.most_steps(row.start_idx + row.num_tokens - 1)
    score_bytes = num_steps * geometry.stride * geometry.num_heads * 4
    fitting = SCORE_TILES * geometry.tile_bytes // score_bytes
    return max(1, min(fitting, tiling.max_rows // geometry.heads_per_group))


def _tile(
    geometry: Geometry, tiling: Tiling, null_block: int, rows: list[KvRow], at: int, count: int
) -> Tile:
    """The tile of positions at .. at + count of each of `rows`."""
    lanes, kv_block, groups = geometry.num_lanes, geometry.kv_block, geometry.num_groups
    spans = [geometry.span(row.start_idx + at, count) for row in rows]
    first_step, end_step = min(low for low, _ in spans), max(high for _, high in spans)
    num_steps = end_step - first_step
    first_block, end_block = first_step * lanes, end_step * lanes
    table = torch.full((len(rows), end_block - first_block), null_block, dtype=torch.int64)
    for i, row in enumerate(rows):
        blocks = torch.tensor(row.blocks[first_block:end_block], dtype=torch.int64)
        table[i, : len(blocks)] = torch.where(blocks < 0, null_block, blocks)
    key_index = table[:, None, :] * groups + torch.arange(groups)[None, :, None]
    value_index = key_index.view(len(rows), groups, num_steps, lanes).permute(2, 0, 1, 3).contiguous()
    positions = torch.tensor([[row.start_idx + at + i for i in range(count)] for row in rows])
    query_BR = positions.to(torch.int32).repeat_interleave(geometry.heads_per_group, dim=1)
    query_BR = F.pad(query_BR, (0, tiling.padded(query_BR.shape[1]) - query_BR.shape[1]), value=-1)
    keys = torch.arange(first_block * kv_block, end_block * kv_block, dtype=torch.int32)
    return Tile(
        rows_N=torch.tensor([row.first_row + at + i for row in rows for i in range(count)]),
        num_sequences=len(rows),
        num_positions=count,
        first_step=first_step,
        num_steps=num_steps,
        query_1B11R1=query_BR[None, :, None, None, :, None],
        key_J11L1S=keys.view(num_steps, 1, 1, lanes, 1, kv_block),
        key_index=key_index,
        value_index=value_index,
    )
