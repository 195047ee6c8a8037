from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moesaic.errors import CheckpointError, ConfigError
from moesaic.kernels import native
from moesaic.kernels.formats import pack, round_rows
from moesaic.kernels.integer_matmul import integer_linear
from moesaic.kernels.matmul import noise
from moesaic.kernels.ops import Ops, backends, choose
from moesaic.kernels.panel import PanelWeight, to_panels
from moesaic.spec.numerics import DType, Format, FormatPair, preset
from moesaic.spec.quantised import QUANTISED

FORMATS: list[Format] = list(QUANTISED)  # type: ignore[arg-type]
NATIVE = [name for name in backends() if name != "reference"]
# Median relative error of a result, both operands rounded: measured 0.007 of 8 bits, 0.09 to 0.12 of 4.
ERROR = {8: 0.02, 4: 0.16}


def weight_of(rows: int, width: int, format: Format, *, seed: int = 1) -> PanelWeight:
    return to_panels(pack(noise((rows, width), seed=seed), format))


def ops_of(backend: str, *, dtype: DType = "float32", num_threads: int = 1, shards: int = 1) -> Ops:
    numerics = preset("portable", dtype=dtype, backend=backend).with_leaves(matmul_shards=shards)
    return choose(numerics, num_threads=num_threads)


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(12345.0), b.nan_to_num(12345.0))


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), width=st.integers(1, 300), format=st.sampled_from(FORMATS))
def test_panels_hold_what_was_packed(rows: int, width: int, format: Format) -> None:
    packed = pack(noise((rows, width)), format)
    panels = to_panels(packed)
    assert panels.data.numel() == QUANTISED[format].matrix_bytes(rows, width)
    assert panels.shape == (rows, width)
    back = panels.unpack()
    assert torch.equal(back.data, packed.data)
    assert back.scales is not None
    assert packed.scales is not None
    assert torch.equal(back.scales, packed.scales)
    assert (back.zeros is None) == (packed.zeros is None)
    if packed.zeros is not None and back.zeros is not None:
        assert torch.equal(back.zeros, packed.zeros)


@pytest.mark.parametrize("format", FORMATS)
def test_a_result_is_near_that_of_the_floats(format: Format) -> None:
    x_TD, weight_FD = noise((8, 512)), noise((40, 512), seed=1)
    found = integer_linear(x_TD, to_panels(pack(weight_FD, format)))
    expected = x_TD.double() @ weight_FD.double().T
    error = float((found - expected).norm() / expected.norm())
    assert 1e-4 < error < ERROR[QUANTISED[format].bits]


@pytest.mark.skipif(not NATIVE, reason="the native kernels were not built in this installation")
@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 64),
    columns=st.integers(1, 50),
    leaf=st.integers(1, 200),
    shards=st.sampled_from([1, 1, 2, 4]),
    num_threads=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    format=st.sampled_from(FORMATS),
    data=st.data(),
)
def test_every_level_gives_the_references_bits_and_a_row_is_its_own(
    rows: int,
    columns: int,
    leaf: int,
    shards: int,
    num_threads: int,
    dtype: DType,
    format: Format,
    data: st.DataObject,
) -> None:
    backend = data.draw(st.sampled_from(NATIVE))
    width = leaf if shards == 1 else -(-leaf // 128) * 128 * shards
    x_TD, weight_FD = noise((rows, width), getattr(torch, dtype)), weight_of(columns, width, format)
    expected = ops_of("reference", dtype=dtype, shards=shards).linear_inner(x_TD, weight_FD)
    ops = ops_of(backend, dtype=dtype, num_threads=num_threads, shards=shards)
    found = ops.linear_inner(x_TD, weight_FD)
    assert torch.equal(found, expected)
    row = data.draw(st.integers(0, rows - 1))
    assert torch.equal(ops.linear_inner(x_TD[row : row + 1].clone(), weight_FD)[0], found[row])


@pytest.mark.parametrize("backend", backends())
def test_leaves_meet_as_neighbours_and_eight_differ_from_one(backend: str) -> None:
    x_TD, weight_FD = noise((5, 8 * 64)), weight_of(20, 8 * 64, "int4-g64")
    ops = ops_of(backend, shards=8)
    found = ops.linear_inner(x_TD, weight_FD)
    assert torch.equal(found, integer_linear(x_TD, weight_FD, num_shards=8))
    assert not torch.equal(found, ops.linear(x_TD, weight_FD)), "one leaf must show another order than eight"


@pytest.mark.parametrize("backend", backends())
def test_products_and_sums_are_rounded_apart(backend: str) -> None:
    # Two blocks: -(1 + 2^-10) + (1 + 2^-12 + 2^-11 + ...): a fused sum would keep the second product's tail.
    x_TD, weight_FD = torch.zeros(1, 64), torch.zeros(1, 64)
    x_TD[0, 32], weight_FD[0, 32] = 127 * (1 + 2.0**-20), 127 * (1 + 2.0**-10)
    packed = pack(weight_FD, "int8-g32")
    assert packed.scales is not None
    rows = round_rows(x_TD)
    assert rows.scales is not None
    second = float(rows.scales[0, 1] * packed.scales[0, 1].float()) * 127.0 * 127.0
    rounded = torch.tensor(second, dtype=torch.float32)
    assert float(rounded) != second, "the product must have a tail to lose"
    x_TD[0, 0], weight_FD[0, 0] = -127.0, 127.0
    first = torch.tensor(-127.0 * 127.0)
    found = ops_of(backend).linear(x_TD, to_panels(pack(weight_FD, "int8-g32")))
    assert found.item() == (first + rounded).item()
    assert found.item() != torch.tensor(float(first) + second, dtype=torch.float32).item()


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("format", FORMATS)
def test_extremes_do_not_saturate(backend: str, format: Format) -> None:
    x_TD = torch.full((5, 256), 3.0)
    x_TD[:, 1::2] *= torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0])[:, None]
    weight_FD = torch.full((33, 256), -2.0)
    weight_FD[1::2, ::2] = 2.0
    found = ops_of(backend).linear(x_TD, to_panels(pack(weight_FD, format)))
    assert torch.equal(found, integer_linear(x_TD, to_panels(pack(weight_FD, format))))
    assert torch.allclose(found, x_TD @ weight_FD.T, rtol=0.15, atol=0.15 * 256 * 6)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_poisoned_row_is_all_nan_and_harms_no_neighbour(backend: str, bad: float) -> None:
    x_TD, weight_FD = noise((9, 100)), weight_of(30, 100, "int4-g32-zp")
    ops = ops_of(backend, num_threads=2)
    expected = ops.linear(x_TD, weight_FD)
    x_TD[4, 70] = bad
    found = ops.linear(x_TD, weight_FD)
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[kept], expected[kept])
    assert found[4].isnan().all()


@pytest.mark.parametrize("backend", backends())
def test_tiny_huge_and_zero_rows_have_the_references_bits(backend: str) -> None:
    x_TD, weight_FD = noise((6, 64)), weight_of(17, 64, "int4-g64")
    x_TD *= torch.tensor([0.0, 1e-45, 2.7e-43, 1e-38, 1e38, 1.0])[:, None]
    found = ops_of(backend).linear(x_TD, weight_FD)
    assert same(found, integer_linear(x_TD, weight_FD))
    assert (found[0] == 0.0).all()
    nothing = ops_of(backend).linear(noise((3, 64)), to_panels(pack(torch.zeros(5, 64), "int4-g32")))
    assert (nothing == 0.0).all()
    assert ops_of(backend).linear(x_TD[:0], weight_FD).shape == (0, 17)


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_format_cannot_hold_is_refused_by_name(format: Format) -> None:
    for bad in (float("nan"), float("inf")):
        weight_FD = noise((3, 64))
        weight_FD[1, 2] = bad
        with pytest.raises(CheckpointError, match=f"layer 3, up holds numbers that are NaN.*{format}"):
            pack(weight_FD, format, name="layer 3, up")
    with pytest.raises(CheckpointError, match=r"layer 3, up.*float16's 65504"):
        pack(noise((3, 64)) * 1e9, format, name="layer 3, up")


def test_leaves_that_cut_a_group_are_refused_with_the_arithmetic() -> None:
    x_TD, weight_FD = noise((2, 256)), weight_of(8, 256, "int4-g128")
    for backend in backends():
        with pytest.raises(ConfigError, match=r"256 / 4 = 64 is not a multiple of 128.*int4-g64"):
            ops_of(backend, shards=4).linear_inner(x_TD, weight_FD)
    assert FormatPair.of("int4-g128").activation == "int8-g32"


@pytest.mark.skipif(not NATIVE, reason="the native kernels were not built in this installation")
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_boundary_refuses_or_computes(data: st.DataObject) -> None:
    kernels = native.module().Kernels(native.levels()[-1], 1)
    weight_FD = weight_of(20, 96, "int4-g32-zp")
    x_TD, y_TF = noise((3, 96)), torch.empty(3, 20)
    good: dict[str, Any] = {
        "x": x_TD.data_ptr(), "weight": weight_FD.data.data_ptr(), "weight_bytes": weight_FD.data.numel(),
        "y": y_TF.data_ptr(), "rows": 3, "columns": 20, "width": 96, "sections": 1, "group": 32, "bits": 4,
        "has_zeros": True, "shards": 1, "is_bfloat16": False, "is_float32_out": True,
    }  # fmt: skip
    kernels.packed_linear(**good)
    assert torch.equal(y_TF, integer_linear(x_TD, weight_FD))
    wrong = st.one_of(st.integers(-(2**63), -1), st.integers(2**32, 2**63 - 1))
    name = data.draw(
        st.sampled_from(["rows", "columns", "width", "weight_bytes", "sections", "group", "bits", "shards"])
    )
    near = {"columns": [36, 40], "width": [95 - 32, 97], "sections": [0, 3], "group": [0, 31, 64],
            "bits": [0, 5, 8], "shards": [0, 2, 3], "weight_bytes": [0, 1 << 20]}  # fmt: skip
    value = data.draw(st.one_of(wrong, st.sampled_from(near[name])) if name in near else wrong)
    with pytest.raises(ValueError, match="linear"):
        kernels.packed_linear(**(good | {name: value}))
    for pointer in ("x", "y", "weight"):
        with pytest.raises(ValueError, match="no storage"):
            kernels.packed_linear(**(good | {pointer: 0}))
