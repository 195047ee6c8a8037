"""The rows of one micro-batch as arrays, and what its routers chose, counted. Knows no model, no sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor

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
    """Counts what the routers chose in one step: logical experts, real tokens, once, by phase."""

    def __init__(self, num_experts: Sequence[int], *, keeps_routes: bool) -> None:
        self._num_experts = tuple(num_experts)
        self._keeps_routes = keeps_routes
        self._counts: dict[Phase, list[IntArray]] = {}
        self._observers: list[BatchObserver] = []
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
            self.num_tokens.setdefault(phase, 0)
            self.num_tokens[phase] += num_decode if phase == "decode" else num_prefill
        observer = BatchObserver(masks, keeps_routes=self._keeps_routes)
        self._observers.append(observer)
        return observer

    def counts(self) -> dict[Phase, list[IntArray]]:
        """By phase, once the forwards are over and before the next step writes their routings again.

        Shapes:  one [E] int64 array per MoE layer.
        """
        starts = np.concatenate(([0], np.cumsum(self._num_experts, dtype=np.int64)))
        found = {phase: np.zeros(int(starts[-1]), dtype=np.int64) for phase in self.num_tokens}
        for observer in self._observers:
            for phase, counts in found.items():
                counts += observer.counts(phase, starts)
        bounds = list(pairwise(starts.tolist()))
        return {phase: [counts[start:stop] for start, stop in bounds] for phase, counts in found.items()}


class BatchObserver:
    """Called once per MoE layer with its routing, which is kept to be counted with all others at once."""

    def __init__(self, masks: dict[Phase, npt.NDArray[np.bool_] | None], *, keeps_routes: bool) -> None:
        """`masks` say which tokens are of a phase; None: all."""
        self._masks = masks
        self._keeps_routes = keeps_routes
        self._chosen: list[tuple[int, Tensor]] = []

    def __call__(self, moe_idx: int, routing: Routing) -> None:
        """Note one layer's choices."""
        self._chosen.append((moe_idx, routing.experts_TK))

    def counts(self, phase: Phase, starts: IntArray) -> IntArray:
        """Of all layers in a row; layer i begins at starts[i].

        Shapes:  starts [num_moe_layers + 1]; returns [starts[-1]] int64.
        """
        if phase not in self._masks or not self._chosen:
            return np.zeros(int(starts[-1]), dtype=np.int64)
        mask_T = self._masks[phase]
        layers = [experts_TK.numpy() for _, experts_TK in self._chosen]
        if mask_T is not None:
            layers = [experts_TK[mask_T] for experts_TK in layers]
        offsets = starts[[moe_idx for moe_idx, _ in self._chosen]]
        ids = np.concatenate([experts_TK.ravel() for experts_TK in layers])
        ids += np.repeat(offsets, [experts_TK.size for experts_TK in layers])
        return np.bincount(ids, minlength=int(starts[-1]))

    def routes(self) -> IntArray | None:
        """Every choice of the micro-batch; None unless traced.

        Shapes:  [T, num_moe_layers, K] int64; layers that choose fewer experts are filled with -1.
        """
        if not self._keeps_routes or not self._chosen:
            return None
        layers = [experts_TK.numpy() for _, experts_TK in self._chosen]
        width = max(layer.shape[1] for layer in layers)
        padded = [
            np.pad(layer, ((0, 0), (0, width - layer.shape[1])), constant_values=-1) for layer in layers
        ]
        return np.stack(padded, axis=1)
