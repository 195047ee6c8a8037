"""How to call a matmul so that a row's bits depend on that row alone, found and proved on this machine.

A BLAS picks another kernel, and so another order of summation, for few rows than for many. Padding the rows
to a multiple of some quantum keeps it in one kernel. Which quantum holds differs between machines, thread
counts and shapes, so it is tried here, bit for bit, on the shapes that a model has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import KernelUnavailable

QUANTA = (1, 2, 4, 8, 16, 32)
FIXED_ROWS = 32
MAX_ROWS = 256
# guess: flops that the proof of one shape may take: 0.15 s in float32, 0.6 s in bfloat16 on AVX2
FLOPS_PER_SHAPE = 6e9

RowCall = Callable[[Tensor], Tensor]
"""A matmul as a function of its rows: the last dim but one of its argument and of its result."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiling:
    """Calls have a multiple of `quantum` rows and at most `max_rows`; fixed tiles where the two are equal."""

    quantum: int
    max_rows: int

    def padded(self, num_rows: int) -> int:
        """Rows of the call that computes `num_rows` (at most max_rows) rows."""
        return -(-num_rows // self.quantum) * self.quantum


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What is to be proved of one shape.

    All of `calls` must agree on every row, at every number of rows: they are ways of calling that may be
    mixed, such as one matrix of a batch or all. `rows` [.., MAX_ROWS, C] are numbers without structure.
    """

    name: str
    calls: tuple[RowCall, ...]
    rows: Tensor
    flops_per_row: float
    allow_fixed: bool  # whether tiles of exactly FIXED_ROWS will do


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeProof:
    """One shape, and the row counts at which its bits were those of the full tile."""

    name: str
    tiling: Tiling
    row_counts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class InvarianceProof:
    """What a backend proved before it served."""

    shapes: tuple[ShapeProof, ...]
    num_threads: int
    seconds: float

    @property
    def quantum(self) -> int:
        """The largest quantum among the shapes: rows of the smallest matmul call."""
        return max((shape.tiling.quantum for shape in self.shapes), default=1)

    def summary(self) -> str:
        """One line for the log."""
        if not self.shapes:
            return f"batch invariance: by fixed trees, nothing to prove ({self.num_threads} threads)"
        return (
            f"batch invariance: {len(self.shapes)} shapes proved bit for bit in {self.seconds:.2f} s "
            f"(rows padded to {self.quantum}, {self.num_threads} threads)"
        )


class ProofTable:
    """The tilings proved so far. A shape met for the first time is proved on the spot."""

    def __init__(self) -> None:
        self._proofs: dict[tuple[int, Hashable], ShapeProof] = {}
        self.seconds = 0.0

    @property
    def shapes(self) -> tuple[ShapeProof, ...]:
        """All that was proved, oldest first."""
        return tuple(self._proofs.values())

    def tiling(self, key: Hashable, make_trial: Callable[[], Trial]) -> Tiling:
        """The tiling of the shape `key`, under the current number of threads.

        Raises: KernelUnavailable when no way of calling gives equal bits.
        """
        full_key = (torch.get_num_threads(), key)
        proof = self._proofs.get(full_key)
        if proof is None:
            start_s = time.perf_counter()
            proof = self._proofs[full_key] = prove_shape(make_trial())
            self.seconds += time.perf_counter() - start_s
        return proof.tiling

    def proof(self) -> InvarianceProof:
        """All of it, as a value."""
        return InvarianceProof(shapes=self.shapes, num_threads=torch.get_num_threads(), seconds=self.seconds)


def prove_shape(trial: Trial) -> ShapeProof:
    """The smallest quantum that keeps bits equal; fixed tiles where none does.

    Raises: KernelUnavailable when that fails too.
    """
    max_rows = MAX_ROWS
    while max_rows > FIXED_ROWS and trial.flops_per_row * _num_rows(max_rows) > FLOPS_PER_SHAPE:
        max_rows //= 2
    full = trial.rows[..., :max_rows, :].contiguous()
    expected = trial.calls[0](full)
    for quantum in QUANTA:
        counts = _row_counts(quantum, max_rows)
        if all(_is_equal(trial.calls, full, expected, count) for count in counts):
            tiling = Tiling(quantum=quantum, max_rows=max_rows)
            return ShapeProof(name=trial.name, tiling=tiling, row_counts=counts)
    if trial.allow_fixed and _is_position_free(trial.calls, trial.rows[..., :FIXED_ROWS, :].contiguous()):
        tiling = Tiling(quantum=FIXED_ROWS, max_rows=FIXED_ROWS)
        return ShapeProof(name=trial.name, tiling=tiling, row_counts=(FIXED_ROWS,))
    raise KernelUnavailable(
        f"{trial.name} on the reference backend: with {torch.get_num_threads()} threads no padding of rows "
        f"to {', '.join(map(str, QUANTA))} gives equal bits in batches of different size, so a request's "
        "logits would depend on its neighbours. Try another number of threads"
    )


def _row_counts(quantum: int, max_rows: int) -> tuple[int, ...]:
    """Multiples of `quantum` up to `max_rows`: dense where kernels change, thin above."""
    wanted = {quantum * i for i in (1, 2, 3, 5, 7)}
    wanted |= {rows // quantum * quantum for rows in (28, max_rows // 2 - 1, max_rows - 1)}
    return tuple(sorted(count for count in wanted if 0 < count <= max_rows))


def _num_rows(max_rows: int) -> int:
    """Rows computed in a proof that succeeds with a usual quantum."""
    return max_rows + sum(_row_counts(4, max_rows))


def _is_equal(calls: Sequence[RowCall], full: Tensor, expected: Tensor, count: int) -> bool:
    """Whether `count` rows have the bits that they had in the full tile, wherever they stood in it."""
    last = full.shape[-2] - count
    # Clones: a view would leave the rows where they are in memory, and some kernels follow the address.
    return all(
        torch.equal(call(full[..., at : at + count, :].clone()), expected[..., at : at + count, :])
        for at in sorted({0, min(last, 7)} if count <= 8 else {min(last, 5)})
        for call in calls
    )


def _is_position_free(calls: Sequence[RowCall], rows: Tensor) -> bool:
    """Whether a tile of fixed size gives a row the same bits in whichever place it stands."""
    expected = calls[0](rows)
    return all(
        torch.equal(call(rows.roll(shift, -2)), expected.roll(shift, -2))
        for call in calls
        for shift in range(rows.shape[-2])
    )
