"""The layouts that `verify --layouts` compares: none is forgotten, none runs without a rule."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from checkpoints import CONFIGS

from moesaic.audit.layout_cells import (
    CHUNKS,
    MATMUL_SHARDS,
    MICRO_BATCHES,
    NO_SHARED_MEMORY,
    NUM_RANKS,
    NUM_SLICES,
    PLACEMENTS,
    RETURNS,
    TENSOR_RANKS,
    Cell,
    Placement,
    Shape,
    find_refusal,
    make_matrix,
    make_plan,
)
from moesaic.spec.families import read_config
from moesaic.spec.layout_rules import (
    DISPATCHERS,
    FUSED_CHUNKS,
    FUSED_RETURNS,
    LOCAL_CHUNKS,
    NOT_BUILT,
    Dispatcher,
)
from moesaic.spec.locate import preset
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import Numerics
from moesaic.spec.numerics import preset as numerics_preset

LEVELS = ("reference", "native/avx2")


def numerics_of(dtype: str, backend: str, shape: Shape) -> Numerics:
    numerics = numerics_preset("portable", dtype=dtype, backend=backend)  # type: ignore[arg-type]  # one of the two
    return numerics if shape.tp == 1 else numerics.with_leaves(matmul_shards=MATMUL_SHARDS)


def leaves_for_slices(dtype: str, backend: str, shape: Shape) -> Numerics:
    return numerics_of(dtype, backend, replace(shape, tp=2) if shape.splits else shape)


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return read_config(preset("olmoe-1b-7b-0924").config, name="olmoe")


def pairs(cell: Cell) -> set[tuple[object, object]]:
    """What meets in a cell; what shared memory carries for exchange meets that dispatcher alone."""
    shape, others = cell.shape, (cell.backend, cell.num_micro_batches, cell.placement)
    if shape.dispatcher == "shared_memory" and not shape.is_fused:
        return {("shared", value) for value in (("ranks", shape.num_ranks), shape.returns, *others)}
    return set(combinations((shape, *others), 2))


def test_long_is_the_product_of_all_that_is_legal(spec: ModelSpec) -> None:
    matrix = make_matrix(spec, ["float32"], LEVELS, leaves_for_slices, is_long=True)
    # local on one rank, exchange on one to four, shared memory and two levels on two to four
    several = 3 * len(RETURNS)
    every = len(NUM_RANKS) * len(RETURNS)
    # replicas of two, three and four ranks, with the results of experts gathered or over other dispatchers
    replicas = [(tp, num_ranks) for tp in TENSOR_RANKS for num_ranks in NUM_RANKS if num_ranks % tp == 0]
    split = len(RETURNS) * len(replicas)
    shapes = {
        "local": 1,
        "gathered": len(RETURNS) * len(TENSOR_RANKS),
        "exchange": every + split,
        "shared_memory": several,
        "two_level": several + split,
    }
    assert set(shapes) == set(DISPATCHERS) - set(NOT_BUILT)
    for_each = len(MICRO_BATCHES) * len(PLACEMENTS)
    fused = 1 + 3  # on one rank, and over shared memory on two to four; where kernels are native
    # slices of experts as choices: over exchange, shared memory and two levels, and gathered
    in_slices = len(NUM_SLICES) * (3 * 3 + len(TENSOR_RANKS))
    whole = sum(shapes.values()) + in_slices
    in_chunks = whole - shapes["local"]
    num_shapes = len(LEVELS) * (whole + (len(CHUNKS) - 1) * in_chunks) + fused
    assert len(matrix.cells) == for_each * num_shapes
    assert len(set(matrix.cells)) == len({cell.name for cell in matrix.cells}) == len(matrix.cells)
    assert matrix.expected == len(matrix.cells) + len(matrix.refused)


def test_all_holds_every_pair_of_choices_in_each_dtype(spec: ModelSpec) -> None:
    dtypes = ["float32", "bfloat16"]
    few = make_matrix(spec, dtypes, LEVELS, numerics_of, is_long=False).cells
    every = make_matrix(spec, dtypes, LEVELS, numerics_of, is_long=True).cells
    assert set(few) < set(every)
    assert len(few) < len(every) / 2
    for dtype in dtypes:
        found = [
            {
                pair
                for cell in cells
                if cell.dtype == dtype and cell.shape.tp == 1 and cell.shape.num_chunks == 1
                for pair in pairs(cell)
            }
            for cells in (few, every)
        ]
        assert found[0] == found[1]
        in_chunks = {
            (cell.shape.dispatcher, cell.shape.num_ranks, cell.shape.num_chunks)
            for cell in few
            if cell.dtype == dtype and cell.shape.num_chunks > 1
        }
        assert in_chunks == {(one, max(NUM_RANKS), CHUNKS[1]) for one in ("exchange", "shared_memory")}
        split = {
            (cell.shape.dispatcher, cell.shape.num_ranks)
            for cell in few
            if cell.dtype == dtype and cell.shape.tp == 2
        }
        assert split == {("gathered", 2), ("exchange", 4)}


def test_float32_comes_first_and_ranks_that_are_loaded_alike_together(spec: ModelSpec) -> None:
    cells = make_matrix(spec, ["float32", "bfloat16"], LEVELS, numerics_of, is_long=True).cells
    keys = [
        (
            cell.dtype,
            cell.backend,
            cell.placement,
            cell.shape.num_ranks,
            cell.shape.tp,
            cell.shape.dispatcher if cell.shape.is_fused else None,
        )
        for cell in cells
    ]
    changes = sum(a != b for a, b in pairwise(keys))
    assert changes + 1 == len(set(keys))
    assert keys[0][0] == "float32"
    assert keys[-1][0] == "bfloat16"


def test_each_kind_of_layout_that_is_not_run_has_a_reason(spec: ModelSpec) -> None:
    refused = {
        one.name: one.reason
        for one in make_matrix(spec, ["float32"], LEVELS, numerics_of, is_long=False).refused
    }
    assert set(NOT_BUILT) < set(refused)
    assert refused["remote"] == NOT_BUILT["remote"]
    assert "sends nothing, so it has one rank" in refused["local, 3 ranks"]
    assert "several nodes" in refused["two_level, 1 rank"]
    assert "is between ranks" in refused["shared_memory, 1 rank"]
    assert refused["local, subtrees"] == "nothing is returned where nothing is sent"
    assert refused["local fused, reference"] == "a fused layer is one call of native kernels"
    assert (
        refused["exchange fused"]
        == "a fused layer is one native call; what exchange sends, Python hands over"
    )
    assert refused["shared_memory fused, subtrees"] == FUSED_RETURNS
    assert refused["shared_memory fused, in chunks"] == FUSED_CHUNKS
    long = make_matrix(spec, ["float32"], LEVELS, numerics_of, is_long=True).refused
    assert {one.name: one.reason for one in long}["local, in chunks"] == LOCAL_CHUNKS


def test_without_native_kernels_no_memory_is_shared(spec: ModelSpec) -> None:
    matrix = make_matrix(
        spec, ["float32"], ["reference"], numerics_of, is_long=False, has_shared_memory=False
    )
    assert {cell.shape.dispatcher for cell in matrix.cells} == {"local", "gathered", "exchange", "two_level"}
    assert any(one.name == "shared_memory" and one.reason == NO_SHARED_MEMORY for one in matrix.refused)


def test_more_ranks_than_experts_are_refused() -> None:
    config = dict(preset("olmoe-1b-7b-0924").config) | {"num_experts": 3, "num_experts_per_tok": 2}
    matrix = make_matrix(read_config(config, name="few"), ["float32"], LEVELS, numerics_of, is_long=False)
    assert {cell.shape.num_ranks for cell in matrix.cells} == {1, 2, 3}
    assert any(one.name == "4 ranks" and "for 3 experts" in one.reason for one in matrix.refused)


@pytest.mark.parametrize("family", sorted(set(CONFIGS) - {"llama"}))
def test_every_family_runs_on_ranks_with_requests_of_their_own(family: str) -> None:
    """Whatever a mixer is: where nothing of it is split, nothing forbids to."""
    spec = read_config(CONFIGS[family](), name=family)
    for num_ranks in NUM_RANKS:
        dispatcher: Dispatcher = "local" if num_ranks == 1 else "exchange"
        shape = Shape(dispatcher=dispatcher, num_ranks=num_ranks, returns="choices", is_fused=False)
        assert find_refusal(shape, "reference", spec, numerics_of("float32", "reference", shape)) is None


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_placements_hold_every_expert(placement: Placement, num_ranks: int) -> None:
    plan = make_plan((16, 8), num_ranks, placement)
    for count, experts, ranks in zip((16, 8), plan.slot_expert, plan.slot_rank, strict=True):
        assert set(experts.tolist()) == set(range(count))
        assert len(experts) == (1.5 if placement == "replicated" else 1) * count
        assert ranks.max() < num_ranks
        sizes = np.bincount(ranks, minlength=num_ranks)
        if num_ranks > 1 and placement != "contiguous":
            assert sizes.max() > sizes.min(), "ranks of unequal size are part of it"
