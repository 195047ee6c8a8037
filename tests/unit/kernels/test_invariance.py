from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moesaic.errors import KernelUnavailable
from moesaic.kernels.invariance import FIXED_ROWS, MAX_ROWS, ProofTable, Tiling, Trial, prove_shape

ROWS = torch.randn(MAX_ROWS, 40, generator=torch.Generator().manual_seed(0))
RowCall = Callable[[Tensor], Tensor]


def forward(rows: Tensor) -> Tensor:
    """The sum of each row, from left to right."""
    total = rows[:, :1]
    for i in range(1, rows.shape[1]):
        total = total + rows[:, i : i + 1]
    return total


def backward(rows: Tensor) -> Tensor:
    """The same sum from right to left."""
    return forward(rows.flip(-1))


def trial(*calls: RowCall, allow_fixed: bool = True, flops_per_row: float = 1.0) -> Trial:
    return Trial(name="a sum", calls=calls, rows=ROWS, flops_per_row=flops_per_row, allow_fixed=allow_fixed)


def test_the_two_orders_differ() -> None:
    assert not torch.equal(forward(ROWS), backward(ROWS))


def test_a_call_that_is_invariant_needs_no_padding() -> None:
    assert prove_shape(trial(forward)).tiling == Tiling(quantum=1, max_rows=MAX_ROWS)


@pytest.mark.parametrize("quantum", [2, 4, 8])
def test_few_rows_in_another_order_cost_padding(quantum: int) -> None:
    """A BLAS with one kernel for rows in groups and another for what is left over."""

    def call(rows: Tensor) -> Tensor:
        cut = len(rows) // quantum * quantum
        return torch.cat((forward(rows[:cut]), backward(rows[cut:])))

    proof = prove_shape(trial(call))
    assert proof.tiling == Tiling(quantum=quantum, max_rows=MAX_ROWS)
    assert all(count % quantum == 0 for count in proof.row_counts)


def test_an_order_by_number_of_rows_leaves_fixed_tiles() -> None:
    def call(rows: Tensor) -> Tensor:
        return forward(rows) if len(rows) % 64 == 0 else backward(rows)

    assert prove_shape(trial(call)).tiling == Tiling(quantum=FIXED_ROWS, max_rows=FIXED_ROWS)
    with pytest.raises(KernelUnavailable, match="a sum on the reference backend"):
        prove_shape(trial(call, allow_fixed=False))


def test_an_order_by_place_is_refused() -> None:
    def call(rows: Tensor) -> Tensor:
        half = len(rows) // 2
        return torch.cat((forward(rows[:half]), backward(rows[half:])))

    with pytest.raises(KernelUnavailable, match="depend on its neighbours"):
        prove_shape(trial(call))


def test_ways_of_calling_must_agree() -> None:
    with pytest.raises(KernelUnavailable):
        prove_shape(trial(forward, backward))


def test_large_shapes_are_proved_on_fewer_rows() -> None:
    proof = prove_shape(trial(forward, flops_per_row=1e8))
    assert proof.tiling.max_rows == FIXED_ROWS
    assert max(proof.row_counts) <= FIXED_ROWS


def test_table_proves_a_shape_once() -> None:
    table, made = ProofTable(), []

    def make() -> Trial:
        made.append(1)
        return trial(forward)

    assert table.tiling("shape", make) == table.tiling("shape", make)
    assert len(made) == 1
    proof = table.proof()
    assert (proof.quantum, len(proof.shapes)) == (1, 1)
    assert "1 shapes proved bit for bit" in proof.summary()
    assert "nothing to prove" in ProofTable().proof().summary()
