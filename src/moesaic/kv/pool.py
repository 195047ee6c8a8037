"""KV bytes on one rank: a block pool per layer, and where a step's tokens stand in them.

The ledger decides who owns a block; here is only memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import ConfigError, UnsupportedModelError
from moesaic.kernels.formats import torch_dtype
from moesaic.layers.attention import KvPlaces, KvRow, KvView
from moesaic.sched.ledger import CacheGroup, cache_groups
from moesaic.sched.step import RowPlan
from moesaic.spec.model import GqaSpec, MlaSpec, ModelSpec
from moesaic.spec.numerics import Numerics


class KvPool:
    """Keys and values of every layer, allocated once; one number of blocks per cache group.

    A pool has one block more than the ledger gives out: the last, always zero, stands in for missing blocks.

    Owns:    `num_bytes` of zeroed memory, which the system backs when blocks are first written.
    """

    def __init__(self, spec: ModelSpec, numerics: Numerics, num_blocks: tuple[int, ...]) -> None:
        """Raises: UnsupportedModelError for recurrent states; ConfigError for wrong num_blocks."""
        self.groups: tuple[CacheGroup, ...] = cache_groups(spec, numerics.kv_format, numerics.kv_block)
        states = [group.layer_idxs for group in self.groups if group.kind == "state"]
        if states:
            raise UnsupportedModelError(
                f"layers {', '.join(str(idx) for idxs in states for idx in idxs)} keep recurrent states "
                "(linear attention or Mamba), which this build does not run"
            )
        if len(num_blocks) != len(self.groups) or any(count < 1 for count in num_blocks):
            raise ConfigError(
                f"num_blocks must have one count of at least 1 for each of {len(self.groups)} cache groups, "
                f"got {num_blocks}"
            )
        self.kv_block = numerics.kv_block
        self.num_blocks = num_blocks
        self._dtype = torch_dtype(numerics.kv_format)
        self._group_of: dict[int, int] = {}
        self._tensors: dict[int, tuple[Tensor, Tensor | None]] = {}
        for group_idx, group in enumerate(self.groups):
            for layer_idx in group.layer_idxs:
                self._group_of[layer_idx] = group_idx
                self._tensors[layer_idx] = self._allocate(spec.layers[layer_idx].mixer, num_blocks[group_idx])

    @property
    def num_bytes(self) -> int:
        """Bytes of all pools."""
        tensors = (tensor for pair in self._tensors.values() for tensor in pair if tensor is not None)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def view(self, layer_idx: int, batch: BatchLayout) -> KvView:
        """What a layer's attention reads and writes in a step."""
        key_pool, value_pool = self._tensors[layer_idx]
        return KvView(
            key_pool=key_pool, value_pool=value_pool, places=batch.places[self._group_of[layer_idx]]
        )

    def _allocate(self, mixer: object, num_blocks: int) -> tuple[Tensor, Tensor | None]:
        """Pools [blocks + 1, G, kv_block, C] of one layer."""
        if isinstance(mixer, MlaSpec):
            return self._zeros(num_blocks, 1, mixer.kv_lora_rank + mixer.rope_dim), None
        assert isinstance(mixer, GqaSpec), f"{type(mixer).__name__} keeps no tokens"
        shape = (num_blocks, mixer.num_kv_heads, mixer.head_dim)
        return self._zeros(*shape), self._zeros(*shape)

    def _zeros(self, num_blocks: int, num_groups: int, width: int) -> Tensor:
        return torch.zeros((num_blocks + 1, num_groups, self.kv_block, width), dtype=self._dtype)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchLayout:
    """Where the tokens of a batch stand, row after row; made once per step for all layers.

    Shapes:  positions_T [T] int64.
    """

    positions_T: Tensor
    places: tuple[KvPlaces, ...]  # one per cache group

    @classmethod
    def of(cls, rows: Sequence[RowPlan], pool: KvPool) -> BatchLayout:
        """The layout of some rows of a `BatchPlan`, in their order."""
        positions: list[int] = []
        kv_rows: list[list[KvRow]] = [[] for _ in pool.groups]
        for row in rows:
            for group_rows, blocks in zip(kv_rows, row.blocks, strict=True):
                kv_row = KvRow(
                    first_row=len(positions),
                    num_tokens=row.num_tokens,
                    start_idx=row.start_idx,
                    blocks=blocks,
                )
                group_rows.append(kv_row)
            positions.extend(range(row.start_idx, row.start_idx + row.num_tokens))
        return cls(
            positions_T=torch.tensor(positions, dtype=torch.int64),
            places=tuple(KvPlaces.of(tuple(group), pool.kv_block) for group in kv_rows),
        )
