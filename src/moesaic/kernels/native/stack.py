"""Consecutive layers, attention and sparse half by turns, as one native call: see door_stack.cpp.

Addresses of weights and pools are bound once; a step brings its own. Knows nothing of plans or batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from moesaic.kernels.kv_format import POOL_KINDS
from moesaic.kernels.native.gqa import GqaLayer
from moesaic.kernels.native.moe import HalfLayer
from moesaic.kernels.native.moe_ranks import RankLayer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StackLayer:
    """One layer: what it computes with, its pools, and which of a step's places and rotations are its own.

    `rope` is -1 where nothing turns.
    """

    attention: GqaLayer
    sparse: HalfLayer | RankLayer
    keys: Tensor
    values: Tensor
    places: int
    rope: int


class NativeStack:
    """The layers of one micro-batch.

        begin(x, num_x, y, num_tokens, positions, places, tables, experts, weights,
              epoch, plan_version, step_id, timeout_s) -> int

    is how many layers are over: all, or over ranks as many as could be without any waiting for longer than
    that; `advance(timeout_s)` goes on. x and y are addresses of [T, D] in the seam dtype, positions of [T]
    int64, experts and weights of [layers, T, K] int64 and float32, which are written; all without gaps, and
    valid until the call is over. `places` are `attention.pointers` of each group of layers, one after the
    other; `tables` are address of cosines and of sines, rows and width of each rotation. ValueError: as the
    calls of the halves.
    """

    def __init__(
        self, compiled: Any, kernels: Any, layers: Sequence[StackLayer], num_places: int, num_ropes: int
    ) -> None:
        """Raises: ValueError from the kernels for layers that do not follow each other."""
        self._kept = [(layer.attention, layer.sparse) for layer in layers]  # pools belong to the caller
        native = compiled.Stack(kernels, num_places, num_ropes)
        for layer in layers:
            keys, values = layer.keys, layer.values
            assert keys.dtype == values.dtype, "the pools of a layer have one format"
            pools = keys.data_ptr(), keys.nbytes, values.data_ptr(), values.nbytes, POOL_KINDS[keys.dtype]
            attention, sparse = layer.attention.native, layer.sparse
            if isinstance(sparse, RankLayer):
                native.add_ranks(attention, sparse.native, *pools, layer.places, layer.rope)
            else:
                native.add(attention, *sparse.native, *pools, layer.places, layer.rope)
        self.begin = native.begin
        self.advance = native.advance
        self.late = native.late
        """() -> (rank, layer, stage, seconds): whom a call that is not over waits for, and since when."""
