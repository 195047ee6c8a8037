"""KV and state bytes on one rank: blocks or slots of every layer, and where a step's tokens stand in them.

The ledger decides who owns a block or a slot; here is only memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import ConfigError, UnsupportedModelError
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.kv_format import pool_zeros
from moesaic.kernels.state_view import StatePlaces, StateRow, StateView
from moesaic.layers.attention import KvPlaces, KvRow, KvView
from moesaic.sched.ledger import CacheGroup, cache_groups
from moesaic.sched.step import RowPlan
from moesaic.spec.model import GqaSpec, LinearSpec, MambaSpec, MlaSpec, ModelSpec
from moesaic.spec.numerics import Numerics


class KvPool:
    """Keys, values and states of every layer, allocated once; one number of blocks or slots per cache group.

    A pool of blocks has one more than the ledger gives out: the last, always zero, stands in for missing
    blocks. A pool of slots has none to spare: a sequence that begins reads no slot.

    Owns:    `num_bytes` of zeroed memory, which the system backs when blocks or slots are first written.
    """

    def __init__(self, spec: ModelSpec, numerics: Numerics, num_blocks: tuple[int, ...]) -> None:
        """Raises: UnsupportedModelError for states of a mixer that is not run; ConfigError for num_blocks."""
        self.groups: tuple[CacheGroup, ...] = cache_groups(spec, numerics.kv_format, numerics.kv_block)
        if len(num_blocks) != len(self.groups) or any(count < 1 for count in num_blocks):
            raise ConfigError(
                f"num_blocks must have one count of at least 1 for each of {len(self.groups)} cache groups, "
                f"got {num_blocks}"
            )
        self.kv_block = numerics.kv_block
        self.num_blocks = num_blocks
        self._format = numerics.kv_format
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

    def tensors(self, layer_idx: int) -> tuple[Tensor, Tensor | None]:
        """A layer's keys and values, or its states and tails; the same as long as the pool lives."""
        return self._tensors[layer_idx]

    def group_of(self, layer_idx: int) -> int:
        """Which of `groups` a layer belongs to, and which of a batch's `places` are its own."""
        return self._group_of[layer_idx]

    def view(self, layer_idx: int, batch: BatchLayout) -> KvView | StateView:
        """What a layer's mixer reads and writes in a step."""
        first, second = self._tensors[layer_idx]
        places = batch.places[self._group_of[layer_idx]]
        if isinstance(places, KvPlaces):
            return KvView(key_pool=first, value_pool=second, places=places)
        assert second is not None, "a state has the tail of its convolution beside it"
        return StateView(states=first, tails=second, places=places)

    def _allocate(self, mixer: object, num_blocks: int) -> tuple[Tensor, Tensor | None]:
        """Pools [blocks + 1, G, kv_block, C] of one layer, or its states and tails as in `StateView`."""
        if isinstance(mixer, LinearSpec):
            shape = (num_blocks, mixer.num_value_heads, mixer.key_dim, mixer.value_dim)
            # A tail of bytes would need scales of its own: it is small, and float32 beside pools of bytes.
            dtype = torch_dtype("bfloat16" if self._format == "bfloat16" else "float32")
            tails = torch.zeros((num_blocks, mixer.conv_width - 1, mixer.conv_channels), dtype=dtype)
            return torch.zeros(shape, dtype=torch.float32), tails
        if isinstance(mixer, MambaSpec):
            raise UnsupportedModelError("Mamba-2 mixers keep states that this build does not run")
        if isinstance(mixer, MlaSpec):
            return self._zeros(num_blocks, 1, mixer.kv_lora_rank + mixer.rope_dim), None
        assert isinstance(mixer, GqaSpec), f"{type(mixer).__name__} keeps no tokens"
        sizes = (num_blocks, mixer.num_kv_heads, mixer.head_dim)
        return self._zeros(*sizes), self._zeros(*sizes)

    def _zeros(self, num_blocks: int, num_groups: int, width: int) -> Tensor:
        return pool_zeros((num_blocks + 1, num_groups, self.kv_block, width), self._format)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchLayout:
    """Where the tokens of a batch stand, row after row; made once per step for all layers.

    Shapes:  positions_T [T] int64.
    """

    positions_T: Tensor
    num_positions: int  # one more than the last of them; 0: there are no tokens
    places: tuple[KvPlaces | StatePlaces, ...]  # one per cache group

    def kv_places(self, group_idx: int) -> KvPlaces:
        """Of a group that keeps keys and values."""
        places = self.places[group_idx]
        assert isinstance(places, KvPlaces), "a group of states has no blocks"
        return places

    @classmethod
    def of(cls, rows: Sequence[RowPlan], pool: KvPool) -> BatchLayout:
        """The layout of some rows of a `BatchPlan`, in their order."""
        positions: list[int] = []
        first_rows: list[int] = []
        for row in rows:
            first_rows.append(len(positions))
            positions.extend(range(row.start_idx, row.start_idx + row.num_tokens))
        return cls(
            positions_T=torch.tensor(positions, dtype=torch.int64),
            num_positions=max(positions, default=-1) + 1,
            places=tuple(
                _state_places(rows, first_rows)
                if group.kind == "state"
                else _kv_places(rows, first_rows, group_idx, pool.kv_block)
                for group_idx, group in enumerate(pool.groups)
            ),
        )


def _kv_places(rows: Sequence[RowPlan], first_rows: Sequence[int], group_idx: int, kv_block: int) -> KvPlaces:
    kv_rows = tuple(
        KvRow(
            first_row=first_row,
            num_tokens=row.num_tokens,
            start_idx=row.start_idx,
            blocks=row.blocks[group_idx],
        )
        for row, first_row in zip(rows, first_rows, strict=True)
    )
    return KvPlaces.of(kv_rows, kv_block)


def _state_places(rows: Sequence[RowPlan], first_rows: Sequence[int]) -> StatePlaces:
    state_rows = []
    for row, first_row in zip(rows, first_rows, strict=True):
        assert row.state_to is not None, f"{row.request_id} has no slot for its state"
        assert (row.state_from is None) == (row.start_idx == 0), (
            "a state is read where a sequence goes on, and only there"
        )
        state_rows.append(
            StateRow(
                first_row=first_row,
                num_tokens=row.num_tokens,
                slot_from=row.state_from,
                slot_to=row.state_to,
            )
        )
    return StatePlaces.of(state_rows)
