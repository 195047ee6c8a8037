"""Sums over ranks by the tree: bit for bit the matmul of one rank, for any number of ranks and any format."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce

import pytest
import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.kernels.matmul import noise
from moesaic.kernels.ops import Ops, backends, choose
from moesaic.kernels.panel import PanelWeight, Weight, pack_panels, slice_columns
from moesaic.layers.linear import InnerLinear
from moesaic.parallel.tensor import TensorRanks, add_roots
from moesaic.parallel.transport import MemoryWires
from moesaic.spec.numerics import Format, preset
from moesaic.spec.tensor_split import Subtree, TensorSplit
from moesaic.steps import drive_ready

WIDTH, ROWS, COLUMNS = 512, 7, 24


def make_ops(backend: str, dtype: str, num_leaves: int) -> Ops:
    numerics = preset("portable", dtype=dtype, backend=backend, matmul_shards=num_leaves)  # type: ignore[arg-type]
    return choose(numerics, num_threads=1)


def columns_of(weight_DF: Weight, columns: range) -> Weight:
    if isinstance(weight_DF, PanelWeight):
        return slice_columns(weight_DF, columns)
    return weight_DF[:, columns.start : columns.stop].contiguous()


def on_ranks(
    ops: Ops, x_TF: Tensor, weight_DF: Weight, bias_D: Tensor | None, size: int, num_leaves: int
) -> list[Tensor]:
    wires, steps = MemoryWires(size), []
    for rank in range(size):
        split = TensorSplit(rank=rank, size=size, num_leaves=num_leaves)
        columns = split.part(WIDTH)
        sums = TensorRanks(wires.transport(rank), split).sums(3)
        linear = InnerLinear(columns_of(weight_DF, columns), bias_D, ops, sums)
        steps.append(linear.forward(x_TF[:, columns.start : columns.stop]))
    return drive_ready(steps)


def cases() -> Iterator[tuple[str, str, Format | None]]:
    for backend in (backends()[0], backends()[-1]):
        for dtype in ("float32", "bfloat16"):
            yield backend, dtype, None
        for format in ("int8", "int4-g32", "int4-g32-zp"):
            yield backend, "bfloat16", format


@pytest.mark.parametrize(("backend", "dtype", "format"), sorted(set(cases()), key=str))
def test_any_number_of_ranks_gives_the_bits_of_one(backend: str, dtype: str, format: Format | None) -> None:
    kind = getattr(torch, dtype)
    x_TF, bias_D = noise((ROWS, WIDTH), kind), noise((COLUMNS,), kind, seed=2)
    weight_DF: Weight = noise((COLUMNS, WIDTH), kind, seed=1)
    if format is not None:
        weight_DF = pack_panels(weight_DF, format)  # type: ignore[arg-type]
    for num_leaves in (4, 8):
        ops = make_ops(backend, dtype, num_leaves)
        expected = ops.linear_inner(x_TF, weight_DF, bias_D)
        for size in (2, 3, num_leaves - 1, num_leaves):
            for found in on_ranks(ops, x_TF, weight_DF, bias_D, size, num_leaves):
                assert torch.equal(found, expected)
        nothing = on_ranks(ops, x_TF[:0], weight_DF, bias_D, 3, num_leaves)
        assert all(found.shape == (0, COLUMNS) for found in nothing)


@pytest.mark.parametrize("backend", sorted({backends()[0], backends()[-1]}))
def test_a_sum_rank_after_rank_is_another_sum(backend: str) -> None:
    """The negative control: what a layout suggests, and an all-reduce may do."""
    ops = make_ops(backend, "float32", 4)
    x_TF, weight_DF = noise((ROWS, WIDTH)), noise((COLUMNS, WIDTH), seed=1)
    leaves = [
        ops.inner_root(x_TF[:, at : at + 128], weight_DF[:, at : at + 128].contiguous(), 1)
        for at in range(0, WIDTH, 128)
    ]
    right = ops.linear_inner(x_TF, weight_DF)
    assert torch.equal(add_roots({Subtree(0, i): leaf for i, leaf in enumerate(leaves)}, 4), right)
    folded = reduce(torch.add, leaves)
    assert torch.allclose(folded, right, rtol=1e-4, atol=1e-4)
    assert int((folded != right).sum()) > right.numel() // 8


def test_ranks_that_computed_other_rows_are_refused() -> None:
    ops, wires = make_ops("reference", "float32", 2), MemoryWires(2)
    steps = []
    for rank, rows in enumerate((3, 4)):
        split = TensorSplit(rank=rank, size=2, num_leaves=2)
        sums = TensorRanks(wires.transport(rank), split).sums(5)
        weight_DF = torch.ones(COLUMNS, WIDTH // 2)
        steps.append(InnerLinear(weight_DF, None, ops, sums).forward(torch.ones(rows, WIDTH // 2)))
    with pytest.raises(
        ConfigError, match=r"out of step: rank 0 adds 3 rows of layer 5, rank 1 sent 384 bytes"
    ):
        drive_ready(steps)


@pytest.mark.parametrize("format", ["int8", "int8-g32", "int4-g64", "int4-g32-zp"])
def test_columns_of_packed_weights_are_those_of_the_whole(format: Format) -> None:
    weight_FD = pack_panels(noise((40, 192), seed=3), format)
    numbers_FD = weight_FD.unpack().values()
    for columns in (range(64), range(64, 192), range(128, 192)):
        part = slice_columns(weight_FD, columns)
        assert part.shape == (40, len(columns))
        assert torch.equal(part.unpack().values(), numbers_FD[:, columns.start : columns.stop])
