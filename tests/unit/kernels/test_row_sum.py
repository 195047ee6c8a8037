from __future__ import annotations

import pytest
import torch

from moesaic.kernels.invariance import ProofTable
from moesaic.kernels.matmul import noise
from moesaic.kernels.row_sum import RowSum


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("width", [1, 24, 100, 256, 2048])
def test_a_rows_sum_follows_that_row_alone(width: int, num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        row_sum, x_NC = RowSum(ProofTable()), noise((600, width))
        total_N1 = row_sum(x_NC)
        torch.testing.assert_close(total_N1, x_NC.sum(-1, keepdim=True), rtol=1e-4, atol=1e-4)
        for rows in (slice(0, 1), slice(3, 8), slice(7, 40), slice(250, 263), slice(599, 600)):
            assert torch.equal(row_sum(x_NC[rows].clone()), total_N1[rows])
        assert torch.equal(row_sum(x_NC.view(150, 4, width)).view(600, 1), total_N1)
    finally:
        torch.set_num_threads(before)


def test_a_poisoned_row_harms_no_neighbour() -> None:
    row_sum, x_NC = RowSum(ProofTable()), noise((9, 96))
    total_N1 = row_sum(x_NC)
    x_NC[4] = float("nan")
    poisoned_N1 = row_sum(x_NC)
    assert poisoned_N1[4].isnan().all()
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(poisoned_N1[kept], total_N1[kept])


def test_no_rows_have_no_sums() -> None:
    assert RowSum(ProofTable())(torch.empty(0, 64)).shape == (0, 1)
    assert RowSum(ProofTable())(torch.empty(0, 4, 64)).shape == (0, 4, 1)
