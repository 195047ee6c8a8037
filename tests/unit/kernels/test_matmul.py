from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from moesaic.kernels.invariance import ProofTable
from moesaic.kernels.matmul import MAX_COLUMNS, TiledMatmul, noise, pad_rows

DTYPES = [torch.float32, torch.bfloat16]
MATMULS = {1: TiledMatmul(ProofTable())}


def matmul() -> TiledMatmul:
    torch.set_num_threads(1)
    return MATMULS[1]


@settings(max_examples=30)
@given(
    num_rows=st.integers(1, 300),
    start=st.integers(0, 20),
    shape=st.sampled_from([(1, 64), (5, 48), (64, 64), (33, 77), (128, 96), (40, 300)]),
    dtype=st.sampled_from(DTYPES),
)
def test_bits_of_a_row_follow_that_row_alone(
    num_rows: int, start: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight_FD = noise(shape, dtype, seed=1)
    x_TD = noise((330, shape[1]), dtype)
    expected = matmul().linear(x_TD, weight_FD)
    found = matmul().linear(x_TD[start : start + num_rows], weight_FD)
    assert torch.equal(found, expected[start : start + num_rows])


def test_plain_linear_is_not_invariant() -> None:
    """The negative control: without padding, the comparison above fails."""
    torch.set_num_threads(1)
    weight_FD, x_TD = noise((64, 300), seed=1), noise((64, 300))
    expected = F.linear(x_TD, weight_FD)
    if all(torch.equal(F.linear(x_TD[:n], weight_FD), expected[:n]) for n in range(1, 16)):
        pytest.skip("this machine's BLAS is invariant without padding")
    assert torch.equal(matmul().linear(x_TD[:1], weight_FD), matmul().linear(x_TD, weight_FD)[:1])


@pytest.mark.parametrize("columns", [1, 8, 40])
@pytest.mark.parametrize("width", [64, 90, 77])
def test_bits_do_not_follow_the_address(columns: int, width: int) -> None:
    """Kernels for few columns follow the alignment of a row, which differs between rows of an odd width."""
    weight_FD, x_TD = noise((columns, width), seed=1), noise((20, width))
    expected = matmul().linear(x_TD, weight_FD)
    for offset in (1, 2, 7):
        moved_TD = torch.empty(20 * width + offset)[offset:].view(20, width).copy_(x_TD)
        assert torch.equal(matmul().linear(moved_TD, weight_FD), expected)
    assert all(torch.equal(matmul().linear(x_TD[i : i + 1], weight_FD)[0], expected[i]) for i in range(20))


def test_plain_linear_follows_the_address() -> None:
    """The negative control of the test above."""
    torch.set_num_threads(1)
    weight_FD, x_TD = noise((8, 64), seed=1), noise((4, 64))
    expected = F.linear(x_TD, weight_FD)
    moved = [torch.empty(257 + i)[1 + i :].view(4, 64).copy_(x_TD) for i in range(3)]
    if all(torch.equal(F.linear(moved_TD, weight_FD), expected) for moved_TD in moved):
        pytest.skip("this machine's BLAS does not follow the address")


def test_a_poisoned_row_harms_no_neighbour() -> None:
    weight_FD, x_TD = noise((40, 64), seed=1), noise((6, 64))
    expected = matmul().linear(x_TD, weight_FD)
    x_TD[2] = float("nan")
    found = matmul().linear(x_TD, weight_FD)
    assert torch.isnan(found[2]).all()
    assert torch.equal(found[[0, 1, 3, 4, 5]], expected[[0, 1, 3, 4, 5]])


def test_two_threads_keep_the_promise() -> None:
    torch.set_num_threads(2)
    try:
        tiled = TiledMatmul(ProofTable())
        weight_FD, x_TD = noise((64, 96), seed=1), noise((70, 96))
        expected = tiled.linear(x_TD, weight_FD)
        assert all(
            torch.equal(tiled.linear(x_TD[i : i + 9], weight_FD), expected[i : i + 9]) for i in (0, 3, 61)
        )
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_equals_torch(dtype: torch.dtype) -> None:
    weight_FD, x_TD = noise((48, 64), dtype, seed=1), noise((300, 64), dtype)
    found = matmul().linear(x_TD, weight_FD)
    assert found.dtype == dtype
    torch.testing.assert_close(found, F.linear(x_TD, weight_FD), rtol=2e-2, atol=1e-2)


def test_many_columns_are_computed_in_parts() -> None:
    weight_FD, x_TD = noise((MAX_COLUMNS + 70, 16), seed=1), noise((3, 16))
    found = matmul().linear(x_TD, weight_FD)
    assert found.shape == (3, MAX_COLUMNS + 70)
    torch.testing.assert_close(found, F.linear(x_TD, weight_FD))
    assert torch.equal(matmul().linear(x_TD[1:2], weight_FD), found[1:2])


def test_no_rows_are_no_rows() -> None:
    assert matmul().linear(torch.empty(0, 64), noise((48, 64))).shape == (0, 48)
    assert matmul().bmm(torch.empty(4, 0, 64), noise((4, 64, 8))).shape == (4, 0, 8)


@pytest.mark.parametrize(("num_items", "width", "columns"), [(1, 64, 32), (4, 16, 48), (3, 8, 4)])
def test_bmm_keeps_bits_along_its_rows(num_items: int, width: int, columns: int) -> None:
    a_NTC, b_NCM = noise((num_items, 280, width)), noise((num_items, width, columns), seed=1)
    expected = matmul().bmm(a_NTC, b_NCM)
    torch.testing.assert_close(expected, torch.bmm(a_NTC, b_NCM))
    for start, count in ((0, 1), (3, 2), (7, 5), (11, 269)):
        assert torch.equal(
            matmul().bmm(a_NTC[:, start : start + count], b_NCM), expected[:, start : start + count]
        )


def test_padding_adds_zero_rows_or_nothing() -> None:
    x = torch.ones(2, 3, 4)
    assert pad_rows(x, 3) is x
    assert pad_rows(x, 5).sum() == x.sum()
