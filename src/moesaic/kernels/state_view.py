"""What one step reads and writes of recurrent states, as the kernels see it.

Torch values only: who owns a slot, and why, is the ledger's business. A state is read from one slot and
written to another, so that a step may be run twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRow:
    """`num_tokens` tokens of one sequence: rows first_row .. of the batch, and the slots of its state."""

    first_row: int
    num_tokens: int
    slot_from: int | None  # None: the sequence begins, from the zero state
    slot_to: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Slots:
    """Where B sequences read and write.

    Shapes:  old_N [N] int64, those of the B that go on, and from_N their slots; to_B [B] int64.
    """

    old_N: Tensor
    from_N: Tensor
    to_B: Tensor

    @classmethod
    def of(cls, rows: Sequence[StateRow]) -> Slots:
        """The slots of `rows`, in their order."""
        old = [(i, row.slot_from) for i, row in enumerate(rows) if row.slot_from is not None]
        old_N, from_N = torch.tensor(old, dtype=torch.int64).view(-1, 2).unbind(1)
        to_B = torch.tensor([row.slot_to for row in rows], dtype=torch.int64)
        return cls(old_N=old_N, from_N=from_N, to_B=to_B)

    def read(self, pool: Tensor) -> Tensor:
        """What the sequences continue from [B, ..]; zeros where one begins, whatever its slots held."""
        if len(self.old_N) == len(self.to_B):
            return pool.index_select(0, self.from_N)
        found = pool.new_zeros((len(self.to_B), *pool.shape[1:]))
        return found.index_copy_(0, self.old_N, pool.index_select(0, self.from_N))

    def write(self, pool: Tensor, new: Tensor) -> None:
        """Store what the sequences end with."""
        pool.index_copy_(0, self.to_B, new)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Taps:
    """Where a causal convolution finds its inputs among the tails of all rows, then the step's tokens.

    Shapes:  input_XT [conv width, T] int64, oldest first; tail_BX [B, conv width - 1] int64, the inputs that
             the next step will need.
    """

    input_XT: Tensor
    tail_BX: Tensor


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scan:
    """Some sequences on their way through time together: at each moment those with a token left.

    Longest first, so that they are always the leading ones. `token_N` holds the batch rows of moment 0, then
    of moment 1, and so on; `counts` says how many sequences each moment has.

        rows [a0 a1 a2] [b0] [c0 c1]  ->  token_N  a0 c0 b0 | a1 c1 | a2      counts  3 2 1
    """

    slots: Slots
    token_N: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StatePlaces:
    """The rows of a step and their slots; made once per step and shared by the layers that keep states."""

    rows: tuple[StateRow, ...]
    slots: Slots
    _taps: dict[int, Taps] = field(default_factory=dict)
    _scans: dict[int, tuple[Scan, ...]] = field(default_factory=dict)
    plans: dict[Any, Any] = field(default_factory=dict)  # kernels keep what they derive from the rows here

    @classmethod
    def of(cls, rows: Sequence[StateRow]) -> StatePlaces:
        """The places of `rows`, which must be in batch order without gaps."""
        at = 0
        for row in rows:
            assert row.first_row == at, "rows must follow each other in batch order"
            assert row.slot_from != row.slot_to, "a state is never updated in place"
            at += row.num_tokens
        return cls(rows=tuple(rows), slots=Slots.of(rows))

    def taps(self, conv_width: int) -> Taps:
        """Where a convolution of that width finds its inputs."""
        if conv_width not in self._taps:
            self._taps[conv_width] = _taps(self.rows, conv_width)
        return self._taps[conv_width]

    def scans(self, max_sequences: int) -> tuple[Scan, ...]:
        """The rows in groups of at most `max_sequences`, rows of like length together."""
        if max_sequences not in self._scans:
            ordered = sorted(self.rows, key=lambda row: -row.num_tokens)
            self._scans[max_sequences] = tuple(
                _scan(tuple(ordered[low : low + max_sequences]))
                for low in range(0, len(ordered), max_sequences)
            )
        return self._scans[max_sequences]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StateView:
    """One layer's states and the places of this step in them.

    Shapes:  states [slots, H, C, C'] float32, a key width by value width matrix per value head; tails [slots,
             conv width - 1, F] in the pool's format, the latest inputs of the convolution, oldest first.
    """

    states: Tensor
    tails: Tensor
    places: StatePlaces


def _taps(rows: Sequence[StateRow], conv_width: int) -> Taps:
    num_tails = len(rows) * (conv_width - 1)
    inputs, tails = [], []
    for i, row in enumerate(rows):
        # The row's own line of inputs: its tail, then its tokens.
        tail = list(range(i * (conv_width - 1), (i + 1) * (conv_width - 1)))
        line = tail + list(range(num_tails + row.first_row, num_tails + row.first_row + row.num_tokens))
        inputs += [line[at : at + conv_width] for at in range(row.num_tokens)]
        tails.append(line[row.num_tokens :])
    input_TX = torch.tensor(inputs, dtype=torch.int64).view(-1, conv_width)
    return Taps(
        input_XT=input_TX.t().contiguous(),
        tail_BX=torch.tensor(tails, dtype=torch.int64).view(len(rows), conv_width - 1),
    )


def _scan(rows: tuple[StateRow, ...]) -> Scan:
    moments = [
        [row.first_row + at for row in rows if row.num_tokens > at] for at in range(rows[0].num_tokens)
    ]
    return Scan(
        slots=Slots.of(rows),
        token_N=torch.tensor([token for moment in moments for token in moment], dtype=torch.int64),
        counts=tuple(len(moment) for moment in moments),
    )
