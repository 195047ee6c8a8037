from __future__ import annotations

import pytest
import torch

from moesaic.errors import ConfigError
from moesaic.kernels.kv_format import POOL_DTYPES, pack_rows, pool_zeros, row_width, unpack_rows
from moesaic.kernels.matmul import noise
from moesaic.spec.numerics import KV_FORMATS, KvFormat, kv_row_bytes

# Of the row's greatest number: half a step of 127, and half of the last of three bits below 448.
STEP: dict[KvFormat, float] = {"int8": 0.5 / 127, "fp8": 16 / 448}


@pytest.mark.parametrize("format", KV_FORMATS)
def test_rows_have_the_bytes_that_the_ledger_counts(format: KvFormat) -> None:
    pool = pool_zeros((2, 3, 16, 24), format)
    assert row_width(pool) == 24
    assert pool.nbytes == 2 * 3 * 16 * kv_row_bytes(format, 24)
    assert torch.equal(unpack_rows(pool), torch.zeros(2, 3, 16, 24))
    large = pool_zeros((600, 8, 16, 32), format)
    assert (large.shape[:3], large.dtype) == ((600, 8, 16), pool.dtype)
    assert row_width(large) == 32
    assert not large.view(torch.uint8).any()


@pytest.mark.parametrize("format", STEP)
def test_rounding_is_to_nearest_by_each_rows_scale(format: KvFormat) -> None:
    x = noise((50, 64)) * torch.logspace(-20, 20, 50)[:, None]
    x[3] = 0.0
    found = unpack_rows(pack_rows(x, POOL_DTYPES[format]))
    greatest = x.abs().amax(dim=-1, keepdim=True)
    assert ((found - x).abs() <= STEP[format] * 1.001 * greatest).all()
    assert torch.equal(found[3], x[3])
    again = unpack_rows(pack_rows(found, POOL_DTYPES[format]))
    torch.testing.assert_close(again, found, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("format", STEP)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_nan_and_no_other(format: KvFormat, bad: float) -> None:
    x = noise((3, 8))
    x[1, 2] = bad
    found = unpack_rows(pack_rows(x, POOL_DTYPES[format]))
    assert found[1].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="int4"):
        pool_zeros((1, 1, 1, 1), "int4")  # type: ignore[arg-type]
