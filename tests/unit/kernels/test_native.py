from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_native
from torch import Tensor

from moesaic.errors import ConfigError, KernelUnavailable
from moesaic.kernels import native
from moesaic.kernels.matmul import noise
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.ops import backends, choose, default_backend
from moesaic.spec.numerics import DType, preset

pytestmark = needs_native
LEVELS = native.levels()
DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of the greatest result: sums of up to some hundred terms in float32, and one rounding to bfloat16.
TOLERANCE: dict[DType, float] = {"float32": 3e-6, "bfloat16": 8e-3}


def ops_of(level: str, dtype: DType = "float32", *, num_threads: int = 1, shards: int = 1) -> NativeOps:
    numerics = preset("portable", dtype=dtype, backend=f"native/{level}").with_leaves(matmul_shards=shards)
    ops = choose(numerics, num_threads=num_threads)
    assert isinstance(ops, NativeOps)
    return ops


def operands(rows: int, columns: int, width: int, dtype: DType) -> tuple[Tensor, Tensor]:
    return noise((rows, width), DTYPES[dtype]), noise((columns, width), DTYPES[dtype], seed=1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 7), (1, 64, 64), (7, 33, 100), (66, 40, 512)])
def test_products_are_those_of_float64(level: str, dtype: DType, shape: tuple[int, int, int]) -> None:
    x_TD, weight_FD = operands(*shape, dtype)
    expected = x_TD.double() @ weight_FD.double().T
    found = ops_of(level, dtype).linear(x_TD, weight_FD)
    assert found.dtype == DTYPES[dtype]
    assert (found.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    logits = ops_of(level, dtype).logits(x_TD, weight_FD)
    assert logits.dtype == torch.float32
    assert (logits.double() - expected).abs().max() <= TOLERANCE["float32"] * expected.abs().max()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 64),
    columns=st.integers(1, 40),
    leaf=st.integers(1, 70),
    shards=st.sampled_from([1, 2, 8]),
    num_threads=st.integers(1, 4),
    dtype=st.sampled_from(sorted(DTYPES)),
    data=st.data(),
)
def test_a_rows_bits_follow_that_row_alone(
    rows: int, columns: int, leaf: int, shards: int, num_threads: int, dtype: DType, data: st.DataObject
) -> None:
    level = data.draw(st.sampled_from(LEVELS))
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - first))
    x_TF, weight_DF = operands(rows, columns, leaf * shards, dtype)
    whole = ops_of(level, dtype, num_threads=num_threads, shards=shards).linear_inner(x_TF, weight_DF)
    alone = ops_of(level, dtype, shards=shards)
    part = slice(first, first + count)
    assert torch.equal(alone.linear_inner(x_TF[part].clone(), weight_DF), whole[part])
    column = data.draw(st.integers(0, columns - 1))
    assert torch.equal(alone.linear_inner(x_TF, weight_DF[column:]), whole[:, column:])


@pytest.mark.parametrize("level", LEVELS)
def test_leaves_meet_as_neighbours(level: str) -> None:
    x_TF, weight_DF = operands(9, 20, 8 * 24, "float32")
    leaves = [
        ops_of(level).linear(x_TF[:, low : low + 24], weight_DF[:, low : low + 24])
        for low in range(0, 8 * 24, 24)
    ]
    while len(leaves) > 1:
        leaves = [leaves[i] + leaves[i + 1] for i in range(0, len(leaves), 2)]
    assert torch.equal(ops_of(level, shards=8).linear_inner(x_TF, weight_DF), leaves[0])
    left_fold = ops_of(level).linear(x_TF, weight_DF)
    assert not torch.equal(left_fold, leaves[0]), "one leaf must show another order than eight"


@pytest.mark.parametrize("level", LEVELS)
def test_products_are_fused_only_where_the_level_says_so(level: str) -> None:
    # Two products in one lane: 1 + 2^-12 squared has a tail that a separate rounding drops.
    lanes = 8
    x_TD, weight_FD = torch.zeros(1, 2 * lanes), torch.zeros(1, 2 * lanes)
    x_TD[0, 0], weight_FD[0, 0] = -1.0, 1.0 + 2.0**-11
    x_TD[0, lanes], weight_FD[0, lanes] = 1.0 + 2.0**-12, 1.0 + 2.0**-12
    found = ops_of(level).linear(x_TD, weight_FD).item()
    assert found == (0.0 if level == "portable" else 2.0**-24)


@pytest.mark.parametrize("level", LEVELS)
def test_bfloat16_results_are_rounded_to_even(level: str) -> None:
    ops = ops_of(level, "bfloat16")
    smallest = 0.0 if level == "avx512-bf16" else 1e-40  # its products of bfloat16 are zero below 2^-126
    values = torch.tensor([1.0, 1.00390625, 1.01171875, -3.3895e38, smallest], dtype=torch.float64)
    x_TD = torch.ones(1, 2, dtype=torch.bfloat16)
    high = values.to(torch.bfloat16)
    rest = (values - high.double()).to(torch.bfloat16)
    found = ops.linear(x_TD, torch.stack((high, rest), dim=1))
    expected = (high.float() + rest.float()).to(torch.bfloat16)
    assert torch.equal(found[0], expected)
    nan = ops.linear(x_TD, torch.tensor([[float("nan"), 1.0]], dtype=torch.bfloat16))
    assert nan.isnan().all()


@pytest.mark.parametrize("level", LEVELS)
def test_a_poisoned_row_harms_no_neighbour(level: str) -> None:
    x_TD, weight_FD = operands(9, 30, 50, "float32")
    ops = ops_of(level, num_threads=2)
    expected = ops.linear(x_TD, weight_FD)
    x_TD[4] = float("inf")
    found = ops.linear(x_TD, weight_FD)
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(found[kept], expected[kept])
    assert not found[4].isfinite().any()


def test_no_rows_give_no_rows() -> None:
    x_TD, weight_FD = operands(0, 30, 50, "float32")
    assert ops_of(LEVELS[-1]).linear(x_TD, weight_FD).shape == (0, 30)


def test_many_calls_from_many_threads_end_and_agree() -> None:
    from concurrent.futures import ThreadPoolExecutor

    x_TD, weight_FD = operands(5, 300, 64, "float32")
    ops = ops_of(LEVELS[-1], num_threads=4)
    expected = ops.linear(x_TD, weight_FD)
    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(lambda _: ops.linear(x_TD, weight_FD), range(300)):
            assert torch.equal(found, expected)


def test_the_boundary_checks_shapes() -> None:
    kernels = native.module().Kernels(LEVELS[0], 1)
    x, y = torch.zeros(2, 8), torch.zeros(2, 3)
    good = {
        "x": x.data_ptr(), "weight": x.data_ptr(), "y": y.data_ptr(), "rows": 2, "columns": 2, "width": 8,
        "stride": 8, "shards": 1, "is_bfloat16": False, "is_float32_out": True,
    }  # fmt: skip
    for name, value in {
        "rows": -1, "columns": -3, "width": 0, "stride": 7, "shards": 3, "x": 0, "weight": 0, "y": 0,
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match="linear"):
            kernels.linear(**(good | {name: value}))
    for num_threads in (0, -1, 5000):
        with pytest.raises(ValueError, match="num_threads"):
            native.module().Kernels(LEVELS[0], num_threads)


def test_what_cannot_run_is_refused_by_name() -> None:
    with pytest.raises(KernelUnavailable, match="avx9"):
        choose(preset("portable", dtype="float32", backend="native/avx9"), num_threads=1)
    with pytest.raises(ConfigError, match="does not divide"):
        ops_of(LEVELS[0], shards=8).linear_inner(*operands(2, 3, 12, "float32"))
    assert default_backend() in backends()


def test_without_the_module_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", lambda: None)
    assert native.levels() == ()
    assert backends() == ("reference",)
    assert default_backend() == "reference"
    with pytest.raises(KernelUnavailable, match="compiler"):
        native.check_level("avx2")


SHORT_OF_THREADS = """
import resource
from moesaic.kernels import native
kernels = native.module().Kernels
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, 2 * (used + 3 * 2**23,))
try:
    kernels("portable", 64)
except RuntimeError as error:
    print(open("/proc/self/status").read().split("Threads:")[1].split()[0], error)
kernels("portable", 2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_that_do_not_start_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the end of the process nor fewer threads in silence; those that did start have ended."""
    # Memory for three stacks of 8 MiB: the C library takes their size from this limit as the process begins.
    command = ["bash", "-c", 'ulimit -s 8192; exec "$0" -c "$1"', sys.executable, SHORT_OF_THREADS]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert re.match(r"1 num_threads is 64, and the system gave [1-4] \(.*\): ask for fewer", found.stdout)

    def refuse(level: str, num_threads: int) -> None:
        raise RuntimeError(f"num_threads is {num_threads}, and the system gave 1")

    monkeypatch.setattr("moesaic.kernels.native.ops.module", lambda: SimpleNamespace(Kernels=refuse))
    with pytest.raises(KernelUnavailable, match="num_threads is 9, and the system gave 1"):
        ops_of(LEVELS[0], num_threads=9)
