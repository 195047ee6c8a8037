from __future__ import annotations

import pytest
import torch

from moesaic.errors import ConfigError
from moesaic.kernels.matmul import noise
from moesaic.kernels.wire import from_bytes, round_to_wire, to_bytes
from moesaic.spec.numerics import WIRE_FORMATS, Effect, WireFormat, preset, wire_row_bytes


@pytest.mark.parametrize("width", [1, 24, 128, 300])
@pytest.mark.parametrize("format", WIRE_FORMATS)
def test_bytes_are_those_counted_and_say_the_same_rows(format: WireFormat, width: int) -> None:
    rows = round_to_wire(noise((5, width)), format)
    rows_RB = to_bytes(rows)
    assert (rows_RB.dtype, rows_RB.shape) == (torch.uint8, (5, wire_row_bytes(format, width)))
    again = from_bytes(rows_RB[[3, 1]], format, width).unpack(torch.float32)
    assert torch.equal(again, rows.unpack(torch.float32)[[3, 1]])
    assert from_bytes(rows_RB[:0], format, width).unpack(torch.float32).shape == (0, width)


def test_fp8_takes_half_the_bytes_of_bfloat16_and_a_scale_a_group() -> None:
    assert wire_row_bytes("bfloat16", 7168) == 14336
    assert wire_row_bytes("fp8", 7168) == 7168 + 4 * 56


def test_fp8_rounds_each_group_by_its_own_greatest_number() -> None:
    x = noise((50, 256)) * torch.logspace(-20, 20, 50)[:, None]
    x[:, 128:] *= 1e-3
    x[3] = 0.0
    found = round_to_wire(x, "fp8").unpack(torch.float32)
    for group in (slice(0, 128), slice(128, 256)):
        greatest = x[:, group].abs().amax(dim=1, keepdim=True)
        # Three bits behind the first: half a step of 16 at 448.
        assert ((found - x)[:, group].abs() <= 16.02 / 448 * greatest).all()
    assert torch.equal(found[3], x[3])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_spoils_its_group_and_no_other(bad: float) -> None:
    x = noise((3, 256))
    x[1, 2] = bad
    found = round_to_wire(x, "fp8").unpack(torch.float32)
    assert found[1, :128].isnan().all()
    assert found[1, 128:].isfinite().all()
    assert found[[0, 2]].isfinite().all()


def test_rounding_on_the_way_is_part_of_the_numerics_and_declared() -> None:
    numerics = preset("portable", dtype="bfloat16", wire_format="fp8")
    assert numerics.effects() == (("wire=fp8", Effect.LOSSY),)
    assert numerics.digest() != preset("portable", dtype="bfloat16").digest()
    assert preset("portable", dtype="bfloat16").effects() == ()
    wide = preset("portable", dtype="float32", wire_format="bfloat16")
    assert wide.effects() == (("wire=bfloat16", Effect.LOSSY),)
    with pytest.raises(ConfigError, match=r"numerics.wire_format 'fp4' is not built"):
        preset("portable", dtype="bfloat16", wire_format="fp4")  # type: ignore[arg-type]
