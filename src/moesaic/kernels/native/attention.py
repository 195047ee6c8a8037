"""Attention and KV writes over the native kernels: tensors and tables become pointers, made once per step.

Which positions a row sees, and in which order they are added, is the kernel's business: `attention.hpp`.
"""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.kv_format import POOL_KINDS, row_width
from moesaic.kernels.kv_view import KvPlaces, KvView


class NativeAttention:
    """Causal attention of a step's rows over a pool, and the writes before it.

    Owns:    nothing; `kernels` has the threads and the scratch.
    """

    def __init__(self, kernels: Any, *, kv_block: int, num_lanes: int, seam: torch.dtype) -> None:
        self._kernels = kernels
        self._kv_block = kv_block
        self._num_lanes = num_lanes
        self._seam = seam

    def __call__(
        self,
        q_THC: Tensor,
        view: KvView,
        *,
        softmax_scale: float,
        window: int | None,
        is_chunked: bool,
        sinks_H: Tensor | None,
        value_width: int | None,
    ) -> Tensor:
        """[T, H, value width] in the seam dtype."""
        keys = view.key_pool
        values = keys if view.value_pool is None else view.value_pool
        q_THC = (q_THC if q_THC.dtype == self._seam else q_THC.to(self._seam)).contiguous()
        num_tokens, num_heads, key_width = q_THC.shape
        assert row_width(keys) == key_width, f"queries of {key_width}, keys of {row_width(keys)}"
        value_row_width = row_width(values)
        value_width = value_width or value_row_width
        sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
        assert sinks_H is None or len(sinks_H) == num_heads, "a sink per head"
        rows, ids = _tables(view.places)
        out_THC = q_THC.new_empty(num_tokens, num_heads, value_width)
        self._kernels.attention(
            q_THC.data_ptr(),
            q_THC.numel(),
            keys.data_ptr(),
            keys.nbytes,
            values.data_ptr(),
            values.nbytes,
            out_THC.data_ptr(),
            out_THC.numel(),
            0 if sinks_H is None else sinks_H.data_ptr(),
            rows.buffer_info()[0],
            len(rows) // ROW_NUMBERS,
            ids.buffer_info()[0],
            len(ids),
            num_tokens,
            num_heads,
            keys.shape[1],
            key_width,
            value_width,
            value_row_width,
            self._kv_block,
            self._num_lanes,
            window or 0,
            is_chunked,
            softmax_scale,
            self._seam == torch.bfloat16,
            POOL_KINDS[keys.dtype],
        )
        return out_THC

    def write(self, view: KvView, key_TGC: Tensor, value_TGC: Tensor | None) -> None:
        """Store a step's keys and values in their slots; blocks whose first token is written are cleared."""
        self._write(view.key_pool, view.places, key_TGC)
        if view.value_pool is not None:
            assert value_TGC is not None, "a pool with values needs values"
            self._write(view.value_pool, view.places, value_TGC)

    def _write(self, pool: Tensor, places: KvPlaces, new_TGC: Tensor) -> None:
        new_TGC = new_TGC.contiguous()
        num_tokens, num_groups, width = new_TGC.shape
        assert num_tokens == places.slot_T.shape[0], "a slot for each new token"
        assert (num_groups, width) == (pool.shape[1], row_width(pool)), "rows as wide as the pool's"
        self._kernels.write_kv(
            new_TGC.data_ptr(),
            new_TGC.numel(),
            pool.data_ptr(),
            pool.nbytes,
            places.slot_T.data_ptr(),
            num_tokens,
            places.fresh_blocks.data_ptr(),
            places.fresh_blocks.shape[0],
            num_groups,
            width,
            self._kv_block,
            new_TGC.dtype == torch.bfloat16,
            POOL_KINDS[pool.dtype],
        )


ROW_NUMBERS = 5
"""Of a sequence: its first row, how many, their first position, where its block ids begin, and how many."""


def _tables(places: KvPlaces) -> tuple[array[int], array[int]]:
    """The sequences of a step and the ids of their blocks, as the kernels read them; made at first use."""
    found = places.plans.get(_tables)
    if found is None:
        rows, ids = array("q"), array("i")
        for row in places.rows:
            rows.extend((row.first_row, row.num_tokens, row.start_idx, len(ids), len(row.blocks)))
            ids.extend(row.blocks)
        found = places.plans[_tables] = (rows, ids)
    return found


def pointers(places: KvPlaces) -> tuple[int, ...]:
    """Slots, blocks that begin, sequences and ids, an address and a count each; made at first use."""
    found = places.plans.get(pointers)
    if found is None:
        rows, ids = _tables(places)
        found = places.plans[pointers] = (
            places.slot_T.data_ptr(),
            places.slot_T.shape[0],
            places.fresh_blocks.data_ptr(),
            places.fresh_blocks.shape[0],
            rows.buffer_info()[0],
            len(rows) // ROW_NUMBERS,
            ids.buffer_info()[0],
            len(ids),
        )
    return found
