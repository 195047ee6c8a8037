"""MXFP4 against the specification's own table and against transformers."""

from __future__ import annotations

import math

import pytest
import torch

from moesaic.kernels import mxfp4

# OCP MX 1.0, table 5: the sixteen codes of E2M1.
CODES = {
    0b0000: 0.0, 0b0001: 0.5, 0b0010: 1.0, 0b0011: 1.5, 0b0100: 2.0, 0b0101: 3.0, 0b0110: 4.0, 0b0111: 6.0,
    0b1000: -0.0, 0b1001: -0.5, 0b1010: -1.0, 0b1011: -1.5, 0b1100: -2.0, 0b1101: -3.0, 0b1110: -4.0,
    0b1111: -6.0,
}  # fmt: skip


def random_bytes(*shape: int, seed: int = 0, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("scale", [0, 1, 120, 127, 128, 130, 251])
def test_every_code_under_a_scale(scale: int) -> None:
    """Low half first: byte 0x21 is 0.5, then 1.0."""
    assert mxfp4.decode(torch.full((1, 16), 0x21, dtype=torch.uint8), torch.tensor([127], dtype=torch.uint8))[
        :2
    ].tolist() == [0.5, 1.0]
    for high, upper in CODES.items():
        blocks = torch.tensor([[high << 4 | low for low in CODES]], dtype=torch.uint8)
        found = mxfp4.decode(blocks, torch.tensor([scale], dtype=torch.uint8))
        expected = [math.ldexp(value, scale - 127) for low in CODES.values() for value in (low, upper)]
        assert found.dtype == torch.float32
        assert torch.equal(found, torch.tensor(expected, dtype=torch.float64).float())
        assert torch.equal(found.signbit(), torch.tensor([math.copysign(1, value) < 0 for value in expected]))
        assert torch.equal(found.bfloat16().float(), found), "bfloat16 holds it too"


def test_a_scale_is_that_of_its_own_block() -> None:
    blocks, scales = random_bytes(3, 5, 16), random_bytes(3, 5, low=100, high=140)
    whole = mxfp4.decode(blocks, scales)
    assert whole.shape == (3, 5 * 32)
    for row in range(3):
        for block in range(5):
            alone = mxfp4.decode(blocks[row, block : block + 1], scales[row, block : block + 1])
            assert torch.equal(whole[row, 32 * block : 32 * block + 32], alone)


def test_what_has_no_number_is_not_finite() -> None:
    blocks = torch.full((1, 16), 0x77, dtype=torch.uint8)  # 6 everywhere
    assert mxfp4.decode(blocks, torch.tensor([255], dtype=torch.uint8)).isnan().all()
    assert mxfp4.decode(blocks, torch.tensor([254], dtype=torch.uint8)).isinf().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_transformers(dtype: torch.dtype) -> None:
    """Its gate and up columns stand as x @ W takes them, so its result is turned."""
    module = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = random_bytes(4, 6, 3, 16), random_bytes(4, 6, 3, seed=1, low=1, high=250)
    theirs = module.convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(mxfp4.decode(blocks, scales).to(dtype), theirs.transpose(1, 2))
