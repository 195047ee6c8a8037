"""Native activations, softmax and their like: right within units in the last place, whatever the place."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_native
from scipy.special import erfc
from torch import Tensor
from torch.nn import functional as F

from moesaic.kernels import native
from moesaic.kernels.matmul import noise
from moesaic.kernels.native.elementwise import FUNCTIONS, act
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.ops import choose
from moesaic.spec.numerics import DType, preset

pytestmark = needs_native
LEVELS = native.levels()


@lru_cache
def ops_of(level: str, dtype: DType = "float32", num_threads: int = 1) -> NativeOps:
    ops = choose(preset("portable", dtype=dtype, backend=f"native/{level}"), num_threads=num_threads)
    assert isinstance(ops, NativeOps)
    return ops


def plain(ops: NativeOps, function: str, x: Tensor, up: Tensor | None = None) -> Tensor:
    limit = 30.0 if function == "softcap" else None
    return act(ops._kernels, function, x, up, out=torch.float32, limit=limit)


def exact(function: str, x: Tensor) -> Tensor:
    """In float64, without the cancellations of the usual formulas."""
    x = x.double()
    if function == "gelu":
        return x * torch.from_numpy(0.5 * erfc(-x.numpy() / np.sqrt(2.0)))
    if function == "gelu_tanh":
        return x * torch.sigmoid(2.0 * (2.0 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    return {
        "silu": lambda: x * torch.sigmoid(x),
        "relu": x.relu,
        "relu2": lambda: x.relu().square(),
        "sigmoid": lambda: torch.sigmoid(x),
        "softcap": lambda: 30.0 * torch.tanh(x / 30.0),
        "softplus": lambda: torch.where(x > 0, x, 0.0) + torch.log1p(torch.exp(-x.abs())),
    }[function]()


# Relative errors in units of 2^-24, while results are normal numbers: measured 3.1 (silu), 7.3 (gelu), 2.5
# (sigmoid), 5.8 (softcap), 4.2 (softplus), and 193 (gelu_tanh: its argument's rounding counts as the argument
# grows, where results are below 1e-30).
ULPS = {
    "silu": 5, "gelu": 12, "gelu_tanh": 300, "sigmoid": 4, "softcap": 8, "softplus": 6, "relu": 0, "relu2": 1,
}  # fmt: skip


@pytest.mark.parametrize("function", ULPS)
def test_functions_are_those_of_float64(function: str) -> None:
    x = torch.cat(
        (torch.linspace(-80.0, 80.0, 50_001), torch.linspace(-1.0, 1.0, 20_001), noise((5000,)) * 3)
    )
    expected = exact(function, x)
    found = plain(ops_of(LEVELS[-1]), function, x).double()
    is_normal = expected.abs() >= 1e-35
    error = ((found - expected).abs() / expected.abs())[is_normal]
    assert error.max() <= ULPS[function] * 2.0**-24
    assert ((found - expected)[~is_normal].abs() <= 1e-35).all()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("function", ULPS)
def test_numbers_beyond_all_range_have_their_limits(level: str, function: str) -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 0.0, 1e-45, -200.0, 200.0])
    ends = {"sigmoid": (1.0, 0.0), "softcap": (30.0, -30.0)}.get(function, (torch.inf, 0.0))
    found = plain(ops_of(level), function, x)
    assert (found[0].item(), found[1].item()) == ends
    assert found.isnan().tolist() == [False, False, True, *[False] * 6]
    assert found[4] == ends[1]
    torch.testing.assert_close(found[7:].double(), exact(function, x[7:]))


@settings(max_examples=40, deadline=None)
@given(
    function=st.sampled_from([name for name in FUNCTIONS if name != "swiglu_clamped"]),
    width=st.integers(1, 300),
    first=st.integers(0, 20),
    count=st.integers(1, 40),
    num_threads=st.sampled_from([1, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_bits_follow_the_number_alone_on_all_levels(
    function: str, width: int, first: int, count: int, num_threads: int, dtype: torch.dtype
) -> None:
    x_TF = (noise((70, 2 * width)) * 4).to(dtype)
    gate_TF, up_TF = x_TF.chunk(2, dim=-1)
    rows = slice(first, first + count)
    whole = [plain(ops_of(level), function, gate_TF) for level in LEVELS]
    for level, expected in zip(LEVELS, whole, strict=True):
        assert torch.equal(expected, whole[0])
        ops = ops_of(level, num_threads=num_threads)
        assert torch.equal(plain(ops, function, gate_TF[rows]), expected[rows])
        assert torch.equal(plain(ops, function, gate_TF[:, width // 2 :].clone()), expected[:, width // 2 :])
        assert torch.equal(plain(ops, function, gate_TF, up_TF), expected * up_TF.float())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("limit", [None, 2.0])
def test_the_clamped_gate_is_what_its_formula_says(level: str, limit: float | None) -> None:
    gate, up = noise((9, 37)) * 5, noise((9, 37), seed=1) * 5
    low_gate, low_up = (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))
    found = ops_of(level).swiglu_clamped(gate, up, limit=limit, slope=1.5)
    torch.testing.assert_close(found, (low_up + 1) * low_gate * torch.sigmoid(1.5 * low_gate))
    ends = ops_of(level).swiglu_clamped(
        torch.tensor([[-torch.inf, torch.nan, 1.0]]),
        torch.tensor([[1.0, 1.0, torch.nan]]),
        limit=7.0,
        slope=1.5,
    )
    assert ends[0, 0] == 0.0
    assert ends[0, 1:].isnan().all()


@pytest.mark.parametrize("level", LEVELS)
def test_activations_are_rounded_to_the_seam_once(level: str) -> None:
    ops = ops_of(level, "bfloat16")
    gate, up = (noise((7, 45), torch.bfloat16) * 3), noise((7, 45), torch.bfloat16, seed=1)
    for kind in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        wide = act(ops._kernels, kind, gate, up, out=torch.float32)
        found = ops.activation(gate, up, kind)
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, wide.to(torch.bfloat16))
    torch.testing.assert_close(ops.activation(gate, None, "gelu"), F.gelu(gate))


@settings(max_examples=30, deadline=None)
@given(width=st.integers(1, 140), num_rows=st.integers(0, 9), seed=st.integers(0, 3))
def test_softmax_of_a_row_follows_that_row_alone(width: int, num_rows: int, seed: int) -> None:
    x = noise((9, width), seed=seed) * 6
    whole = [ops_of(level).softmax_float32(x) for level in LEVELS]
    torch.testing.assert_close(whole[0].double(), x.double().softmax(-1), rtol=5e-6, atol=1e-38)
    for level, expected in zip(LEVELS, whole, strict=True):
        assert torch.equal(expected, whole[0])
        assert torch.equal(ops_of(level).softmax_float32(x[:num_rows]), expected[:num_rows])


@pytest.mark.parametrize("level", LEVELS)
def test_softmax_keeps_what_is_not_finite_in_its_row(level: str) -> None:
    x = noise((4, 11))
    x[0, 3], x[1, 10], x[2, 1] = -torch.inf, torch.nan, torch.inf
    found = ops_of(level).softmax_float32(x)
    torch.testing.assert_close(found[0], x[0].softmax(-1))
    assert found[0, 3] == 0.0
    assert found[1].isnan().all()
    assert found[2].isnan().any()
    assert torch.equal(found[3], ops_of(level).softmax_float32(x[3:])[0])


def test_any_shape_and_none() -> None:
    ops = ops_of(LEVELS[-1])
    x = noise((3, 4, 5))
    torch.testing.assert_close(ops.sigmoid(x), torch.sigmoid(x))
    torch.testing.assert_close(ops.softplus(x.transpose(0, 2)), F.softplus(x.transpose(0, 2)))
    torch.testing.assert_close(ops.softcap(torch.tensor(2.0), 3.0), 3 * torch.tanh(torch.tensor(2.0) / 3))
    assert ops.activation(torch.empty(0, 8), torch.empty(0, 8), "silu").shape == (0, 8)
    assert ops.softmax_float32(torch.empty(0, 5)).shape == (0, 5)


def test_the_boundary_checks_numbers() -> None:
    kernels = native.module().Kernels(LEVELS[0], 1)
    x, y = torch.zeros(2, 8), torch.zeros(2, 8)
    good = {
        "function": 0, "gate": x.data_ptr(), "up": 0, "y": y.data_ptr(), "rows": 2, "columns": 8,
        "gate_stride": 8, "up_stride": 0, "limit": 1.0, "slope": 1.0, "is_bfloat16": False,
        "is_float32_out": True,
    }  # fmt: skip
    kernels.act(**good)
    for name, value in {
        "function": 99, "gate": 0, "y": 0, "rows": -1, "columns": 1 << 40, "gate_stride": 7, "up_stride": -8,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match="activation"):
            kernels.act(**(good | {name: value}))
    with pytest.raises(ValueError, match="gate and an up"):
        kernels.act(**(good | {"function": FUNCTIONS.index("swiglu_clamped")}))
    with pytest.raises(ValueError, match="softmax"):
        kernels.softmax(0, y.data_ptr(), 2, 8)
