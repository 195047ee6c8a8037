"""The rows of one micro-batch as arrays, and what its routers chose, counted. Knows no model, no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moesaic.experts.contract import Routing
from moesaic.sched.step import RowPlan
from moesaic.spec.experts import IntArray, Phase


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MicroBatch:
    """Rows laid end to end; `offsets[i]` is where row i begins.

        rows      [a a a a][b][c c]
        offsets    0        4  5        T = 7

    Shapes:  token_ids [T] int64; is_decode_T [T] bool.
    """

    rows: tuple[RowPlan, ...]
    offsets: tuple[int, ...]
    token_ids: IntArray
    is_decode_T: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, rows: Sequence[RowPlan], prompt_lengths: Sequence[int]) -> MicroBatch:
        """Lay out rows. A row is decode when it computes one token that was generated."""
        counts = [row.num_tokens for row in rows]
        is_decode = [
            row.num_tokens == 1 and row.start_idx >= length
            for row, length in zip(rows, prompt_lengths, strict=True)
        ]
        starts = np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))
        return cls(
            rows=tuple(rows),
            offsets=tuple(int(start) for start in starts[:-1]),
            token_ids=np.fromiter((i for row in rows for i in row.token_ids), np.int64, int(starts[-1])),
            is_decode_T=np.repeat(np.array(is_decode, dtype=np.bool_), counts),
        )

    def row_span(self, i: int) -> slice:
        """Where row i stands."""
        return slice(self.offsets[i], self.offsets[i] + self.rows[i].num_tokens)


class Census:
    """Counts what the routers chose in one step: logical experts, real tokens, once, by phase.

    Shapes:  counts[phase] has one [E] int64 array per MoE layer.
    """

    def __init__(self, num_experts: Sequence[int], *, keeps_routes: bool) -> None:
        self._num_experts = tuple(num_experts)
        self._keeps_routes = keeps_routes
        self.counts: dict[Phase, list[IntArray]] = {}
        self.num_tokens: dict[Phase, int] = {}

    def observer(self, batch: MicroBatch) -> BatchObserver:
        """What a decoder tells its choices to, for one micro-batch."""
        masks: dict[Phase, npt.NDArray[np.bool_] | None]
        num_decode = int(np.count_nonzero(batch.is_decode_T))
        num_prefill = len(batch.is_decode_T) - num_decode
        if num_decode and num_prefill:
            masks = {"prefill": ~batch.is_decode_T, "decode": batch.is_decode_T}
        else:
            masks = {"decode": None} if num_decode else {"prefill": None} if num_prefill else {}
        for phase in masks:
            if phase not in self.counts:
                self.counts[phase] = [np.zeros(num, dtype=np.int64) for num in self._num_experts]
                self.num_tokens[phase] = 0
            self.num_tokens[phase] += num_decode if phase == "decode" else num_prefill
        return BatchObserver(self, masks, [] if self._keeps_routes else None)


class BatchObserver:
    """Called once per MoE layer with its routing."""

    def __init__(
        self,
        census: Census,
        masks: dict[Phase, npt.NDArray[np.bool_] | None],
        routes: list[IntArray] | None,
    ) -> None:
        self._census = census
        self._masks = masks
        self._routes = routes

    def __call__(self, moe_idx: int, routing: Routing) -> None:
        """Count one layer's choices."""
        experts_TK = routing.experts_TK.numpy()
        for phase, mask_T in self._masks.items():
            chosen = experts_TK if mask_T is None else experts_TK[mask_T]
            counts_E = self._census.counts[phase][moe_idx]
            counts_E += np.bincount(chosen.ravel(), minlength=len(counts_E))
        if self._routes is not None:
            self._routes.append(experts_TK)

    def routes(self) -> IntArray | None:
        """Every choice of the micro-batch; None unless traced.

        Shapes:  [T, num_moe_layers, K] int64; layers that choose fewer experts are filled with -1.
        """
        if not self._routes:
            return None
        width = max(layer.shape[1] for layer in self._routes)
        padded = [
            np.pad(layer, ((0, 0), (0, width - layer.shape[1])), constant_values=-1) for layer in self._routes
        ]
        return np.stack(padded, axis=1)
