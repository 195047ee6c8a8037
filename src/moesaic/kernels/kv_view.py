"""What one step reads and writes in a KV pool, as the attention kernels see it.

Torch values only: who owns a block, and why, is the ledger's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KvRow:
    """The tokens [start_idx, start_idx + num_tokens) of one sequence: rows first_row .. of the batch.

    `blocks` are the ids of the blocks of positions 0 .. start_idx + num_tokens; -1 where a window has passed.
    """

    first_row: int
    num_tokens: int
    start_idx: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvPlaces:
    """Where a step's tokens stand in one cache group; made once per step and shared by the group's layers.

    Shapes:  slot_T [T] int64, block * kv_block + offset of each new token; fresh_blocks [n] int64, the blocks
             whose first token is written in this step.
    """

    rows: tuple[KvRow, ...]
    kv_block: int
    slot_T: Tensor
    fresh_blocks: Tensor
    plans: dict[Any, Any] = field(default_factory=dict)  # kernels keep what they derive from the rows here

    @classmethod
    def of(cls, rows: tuple[KvRow, ...], kv_block: int) -> KvPlaces:
        """The places of `rows`, which must be in batch order without gaps."""
        slots: list[int] = []
        fresh: list[int] = []
        for row in rows:
            assert row.first_row == len(slots), "rows must follow each other in batch order"
            for position in range(row.start_idx, row.start_idx + row.num_tokens):
                block, offset = row.blocks[position // kv_block], position % kv_block
                assert block >= 0, f"position {position} is written into a block that was freed"
                slots.append(block * kv_block + offset)
                if offset == 0:
                    fresh.append(block)
        return cls(
            rows=rows,
            kv_block=kv_block,
            slot_T=torch.tensor(slots, dtype=torch.int64),
            fresh_blocks=torch.tensor(fresh, dtype=torch.int64),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class KvView:
    """One layer's pool and the places of this step in it.

    The last block of a pool is never given out and always zero: missing blocks are read from there, so that
    nothing another sequence left behind can be multiplied in.

    Shapes:  key_pool [blocks + 1, G, kv_block, C]; value_pool the same with its own width, or None where
             values are the first columns of the keys (MLA). Both contiguous, in a format of `kv_format`, by
             which a row may be longer than C.
    """

    key_pool: Tensor
    value_pool: Tensor | None
    places: KvPlaces

    @property
    def rows(self) -> tuple[KvRow, ...]:
        """The sequences of the step."""
        return self.places.rows

    @property
    def slot_T(self) -> Tensor:
        """The slot of each new token."""
        return self.places.slot_T
