"""The sparse half of a layer in one native call has the bits of its parts; controls show it can fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_native
from moe_cases import LAYER, TAG, Case, make_case, moe_spec, numerics_of
from torch import Tensor

from moesaic.errors import KernelTimeout
from moesaic.experts.contract import Routing, SparseHalf
from moesaic.experts.router import Router
from moesaic.kernels import native
from moesaic.kernels.matmul import noise
from moesaic.kernels.panel import Weight, pack_panels
from moesaic.layers.norm import RmsNorm
from moesaic.models.decoder import FfnHalf
from moesaic.models.dense_block import DenseBlock
from moesaic.models.moe_block import MoeBlock
from moesaic.parallel.dispatch.fused import KEPT_TOKENS
from moesaic.parallel.meter import Meter
from moesaic.spec.experts import contiguous_plan
from moesaic.spec.model import DenseSpec, GateSpec
from moesaic.spec.numerics import FORMATS, DType
from moesaic.spec.quantised import QUANTISED
from moesaic.steps import drive

pytestmark = needs_native
LEVELS = native.levels()
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
NUM_EXPERTS, WIDTH, EPS = 8, 96, 1e-5
GATES = {
    "softmax": GateSpec(score="softmax"),
    "as it is": GateSpec(score="softmax", is_renormalised=False),
    "logit bias": GateSpec(score="softmax", order="topk_then_score", has_logit_bias=True),
    "groups": GateSpec(
        score="sigmoid",
        has_selection_bias=True,
        num_groups=4,
        groups_per_token=2,
        group_score="top2_sum",
        renormalise_epsilon=1e-20,
        scale=2.5,
    ),
    "floor, scale": GateSpec(score="sigmoid", renormalise_floor=0.5, has_expert_scale=True),
}


def make_router(case: Case, seed: int = 0) -> Router:
    """Weights of any size, so that choices are no ties."""
    rng = torch.Generator().manual_seed(seed)
    spec, gate = case.spec, case.spec.gate

    def draw(is_there: bool) -> Tensor | None:
        return torch.randn(spec.num_experts, generator=rng) / 4 if is_there else None

    weight_ED = torch.randn(spec.num_experts, spec.row_width, generator=rng) / 4
    return Router(
        spec,
        weight_ED,
        draw(gate.has_selection_bias),
        draw(gate.has_logit_bias),
        case.ops,
        expert_scale_E=draw(gate.has_expert_scale),
    )


def make_dense(case: Case, spec: DenseSpec, format: str | None) -> DenseBlock:
    """A shared expert, its weights in the seam's dtype or in an integer format."""
    dtype, width = getattr(torch, case.ops.numerics.seam_dtype), case.spec.row_width
    shapes = {"up": (spec.width, width), "down": (width, spec.width)}
    shapes |= {"gate": (spec.width, width)} if spec.is_gated else {}
    shapes |= {"output_gate": (1, width)} if spec.has_output_gate else {}
    weights: dict[str, Weight] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        weight = noise(shape, dtype, seed=20 + i)
        weights[name] = weight if format is None else pack_panels(weight, format)
    return DenseBlock(spec, weights, case.ops)


def make_halves(
    case: Case,
    *,
    has_weight: bool = True,
    seed: int = 0,
    meter: Meter | None = None,
    shared: DenseSpec | None = None,
    shared_format: str | None = None,
) -> tuple[FfnHalf, SparseHalf]:
    """One layer part by part and in one call, over the same weights."""
    rng = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, case.ops.numerics.seam_dtype)
    weight_D = (1 + torch.randn(case.spec.row_width, generator=rng) / 4).to(dtype) if has_weight else None
    norm, router = RmsNorm(weight_D, EPS, case.ops), make_router(case, seed)
    dense = None if shared is None else make_dense(case, shared, shared_format)
    block = MoeBlock(moe_idx=2, router=router, routed=case.staged(), shared=dense)
    native_router = router.fused(LAYER, norm.weight_D, norm.eps)
    assert native_router is not None
    native_shared = None if dense is None else dense.fused(LAYER)
    assert (native_shared is None) == (dense is None)
    half = case.fused(meter).half(block.moe_idx, native_router, native_shared)
    assert half is not None
    return FfnHalf(layer_idx=LAYER, norm=norm, ffn=block), half


def run(half: FfnHalf | SparseHalf, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream after it, and a copy of what it told."""
    told: list[Tensor] = []

    def observe(moe_idx: int, routing: Routing) -> None:
        assert moe_idx == 2
        told.extend((routing.experts_TK.clone(), routing.weights_TK.clone()))

    before_TD = x_TD.clone()
    [y_TD] = drive([half.forward(x_TD, TAG, observe)], 1.0)
    assert torch.equal(x_TD.view(torch.uint8), before_TD.view(torch.uint8))
    experts_TK, weights_TK = told
    return y_TD, experts_TK, weights_TK


def check(halves: tuple[FfnHalf, SparseHalf], x_TD: Tensor) -> None:
    for found, expected in zip(*(run(half, x_TD) for half in halves), strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def rows(num_tokens: int, dtype: str, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn((num_tokens, WIDTH), generator=rng).to(getattr(torch, dtype))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bits_are_those_of_the_parts(data: st.DataObject) -> None:
    draw = data.draw
    dtype, format = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(FORMATS))
    shards = draw(st.sampled_from([1, 2]))
    group = QUANTISED[format].group or 32 if format in QUANTISED else 32
    spec = replace(
        moe_spec(NUM_EXPERTS, draw(st.integers(1, 4)), WIDTH, shards * group),
        gate=GATES[draw(st.sampled_from(sorted(GATES)))],
        weight_on=draw(st.sampled_from(["output", "input"])),
    )
    numerics = numerics_of(draw(st.sampled_from(LEVELS)), dtype, format, shards=shards)
    case = make_case(spec, numerics, num_threads=draw(st.integers(1, 3)))
    shared = DenseSpec(
        width=shards * group,
        activation=draw(st.sampled_from(["silu", "gelu_tanh"])),
        is_gated=draw(st.booleans()),
        has_output_gate=draw(st.booleans()),
    )
    halves = make_halves(
        case,
        has_weight=draw(st.booleans()),
        seed=draw(st.integers(0, 3)),
        shared=draw(st.sampled_from([None, shared])),
        shared_format=format if format in QUANTISED else None,
    )
    for num_tokens in draw(st.lists(st.sampled_from([0, 1, 1, 2, 16, 17, 64]), min_size=1, max_size=3)):
        check(halves, rows(num_tokens, dtype, seed=num_tokens))


@pytest.mark.parametrize("gate", sorted(GATES))
def test_every_gate_on_many_rows(gate: str) -> None:
    """Enough for every step of the call to be shared by threads."""
    spec = replace(moe_spec(NUM_EXPERTS, 3, WIDTH, 32), gate=GATES[gate])
    case = make_case(spec, numerics_of(LEVELS[-1], "bfloat16", "bfloat16"), num_threads=2)
    check(make_halves(case), rows(700, "bfloat16"))
    shared = DenseSpec(width=64, has_output_gate=True)
    check(make_halves(case, shared=shared), rows(700, "bfloat16"))


def test_another_norm_or_router_gives_other_bits() -> None:
    """The negative controls."""
    case = make_case(moe_spec(NUM_EXPERTS, 3, WIDTH, 32), numerics_of(LEVELS[-1], "float32", "float32"))
    x_TD = rows(5, "float32")
    parts, _ = make_halves(case)
    expected = run(parts, x_TD)[0]
    for other in (make_halves(case, has_weight=False), make_halves(case, seed=1)):
        assert not torch.equal(run(other[1], x_TD)[0], expected)


def test_numbers_that_are_none_stay_in_their_token() -> None:
    case = make_case(moe_spec(NUM_EXPERTS, 3, WIDTH, 32), numerics_of(LEVELS[-1], "float32", "int4-g32"))
    halves, x_TD = make_halves(case), rows(6, "float32")
    expected = run(halves[1], x_TD)[0]
    x_TD[2, 5], x_TD[4, 0] = torch.nan, torch.inf
    found, of_parts = (run(half, x_TD)[0] for half in reversed(halves))
    torch.testing.assert_close(found, of_parts, rtol=0.0, atol=0.0, equal_nan=True)
    kept = [0, 1, 3, 5]
    assert torch.equal(found[kept], expected[kept])


def test_each_call_is_one_launch_and_counts_its_jobs() -> None:
    case = make_case(moe_spec(NUM_EXPERTS, 3, WIDTH, 32), numerics_of(LEVELS[-1], "bfloat16", "int8-g32"))
    meter = Meter()
    _, half = make_halves(case, meter=meter)
    before = case.ops.moe_counts
    for num_tokens in (4, 1, 0):
        run(half, rows(num_tokens, "bfloat16"))
    after = case.ops.moe_counts
    assert (after.launches - before.launches, after.jobs - before.jobs) == (3, 15)
    assert meter.read().num_jobs == 15


def test_another_plan_of_the_store_moves_no_bit_and_takes_effect() -> None:
    case = make_case(moe_spec(4, 2, WIDTH, 32), numerics_of(LEVELS[-1], "float32", "float32"))
    (_, half), x_TD = make_halves(case), rows(9, "float32")
    expected = run(half, x_TD)[0]
    plan = contiguous_plan((4,), 1)
    swapped = replace(plan, version=1, slot_expert=(plan.slot_expert[0][::-1].copy(),))
    drive([case.store.adopt(swapped)], 1.0)
    assert torch.equal(run(half, x_TD)[0], expected)
    assert half.experts._table is case.store.table(LAYER)  # type: ignore[attr-defined]
    case.store._tables[LAYER] = replace(case.store.table(LAYER), part_ids=(0, 1, 2, 3))
    assert not torch.equal(run(half, x_TD)[0], expected), "the control: names of experts exchanged"


def test_what_was_told_is_written_again_only_by_a_step_of_equal_size() -> None:
    case = make_case(moe_spec(NUM_EXPERTS, 3, WIDTH, 32), numerics_of(LEVELS[-1], "float32", "float32"))
    _, half = make_halves(case)
    told: list[Routing] = []

    def step(num_tokens: int, micro_batch: int = 0) -> Tensor:
        tag = replace(TAG, micro_batch=micro_batch)
        drive([half.forward(rows(num_tokens, "float32"), tag, lambda _, routing: told.append(routing))], 1.0)
        return told[-1].experts_TK

    first = step(5)
    assert step(5) is first
    assert step(5, micro_batch=1) is not first
    assert step(4) is not first
    long = step(KEPT_TOKENS + 1)
    assert step(KEPT_TOKENS + 1) is not long


@pytest.mark.parametrize(
    "changes",
    [
        {"gate": GateSpec(score="sparsemixer")},
        {"row_width": 64},
    ],
)
def test_gates_that_the_call_does_not_do_stay_in_parts(changes: dict[str, Any]) -> None:
    case = make_case(moe_spec(NUM_EXPERTS, 2, WIDTH, 32), numerics_of(LEVELS[-1], "float32", "float32"))
    spec = replace(case.spec, **changes)
    router = Router(spec, torch.zeros(NUM_EXPERTS, WIDTH), None, None, case.ops)
    assert router.fused(LAYER, None, EPS) is None


def test_a_shared_expert_that_the_call_does_not_do_stays_in_parts() -> None:
    case = make_case(moe_spec(NUM_EXPERTS, 2, WIDTH, 32), numerics_of(LEVELS[-1], "bfloat16", "bfloat16"))
    weights = {"up": noise((32, WIDTH)), "down": noise((WIDTH, 32)), "gate": noise((32, WIDTH))}
    assert DenseBlock(DenseSpec(width=32), weights, case.ops).fused(LAYER) is None, "floats of another kind"
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    assert DenseBlock(DenseSpec(width=32), weights, case.ops).fused(LAYER) is not None
    biases = {f"{name}_bias": noise((1, len(weight)), torch.bfloat16)[0] for name, weight in weights.items()}
    assert DenseBlock(DenseSpec(width=32, has_bias=True), weights | biases, case.ops).fused(LAYER) is None


def test_rows_that_are_rounded_on_their_way_stay_in_parts() -> None:
    numerics = replace(numerics_of(LEVELS[-1], "bfloat16", "bfloat16"), wire_format="fp8")
    case = make_case(moe_spec(NUM_EXPERTS, 2, WIDTH, 32), numerics)
    router = make_router(case).fused(LAYER, None, EPS)
    assert router is not None
    assert case.fused().half(0, router) is None


def test_the_boundary_checks_the_call() -> None:
    """Addresses are trusted, all else is not."""
    spec, numerics = moe_spec(NUM_EXPERTS, 3, WIDTH, 32), numerics_of(LEVELS[-1], "float32", "float32")
    case = make_case(spec, numerics)
    router = make_router(case).fused(LAYER, None, EPS)
    assert router is not None
    experts, x_TD = case.fused()._layer, rows(2, "float32")
    at = x_TD.data_ptr()
    for told, message in {
        (at, 191, at, at, at, 2, 1.0): "layer 3: x has 191 numbers, 2 tokens of 96 need 192",
        (0, 192, at, at, at, 2, 1.0): "layer 3: a tensor of 2 tokens has no storage",
        (at, 192, at, at, at, 2, -1.0): "layer 3: a time-out must be in 0 to 1e6 s",
        (at, 192, at, at, at, -2, 1.0): "layer 3: tokens must be in 0",
    }.items():
        with pytest.raises(ValueError, match=message):
            experts._kernels.moe_half(router.native, None, experts.native, *told)
    other = make_case(replace(spec, experts_per_token=2), numerics).fused()._layer
    with pytest.raises(ValueError, match="layer 3: its router has rows of 96 and 3 choices, not 96 and 2"):
        experts._kernels.moe_half(router.native, None, other.native, at, 192, at, at, at, 2, 1.0)
    wide = make_dense(make_case(replace(spec, row_width=64), numerics), DenseSpec(width=32), None).fused(
        LAYER
    )
    assert wide is not None
    with pytest.raises(ValueError, match="layer 3: the shared expert has rows of 64, not 96"):
        experts._kernels.moe_half(router.native, wide.native, experts.native, at, 192, at, at, at, 2, 1.0)
    with pytest.raises(ValueError, match="shared expert of layer 3, weight up: the weight has 12 bytes"):
        wide.native.set_matrix("up", 64, 12, 1, 0, 0, False)
    with pytest.raises(ValueError, match="weights are gate, up, down and open"):
        wide.native.set_matrix("z", 64, 12, 1, 0, 0, False)
    with pytest.raises(ValueError, match="gate: 3 groups do not divide 8 experts"):
        make_router_of(case, GateSpec(score="softmax", num_groups=3))


def make_router_of(case: Case, gate: GateSpec) -> None:
    case.ops.router_layer(
        LAYER,
        replace(case.spec, gate=gate),
        torch.zeros(NUM_EXPERTS, WIDTH),
        norm_D=None,
        norm_eps=EPS,
        logit_bias_E=None,
        selection_bias_E=None,
        expert_scale_E=None,
    )


def test_a_call_that_does_not_end_stops_its_kernels() -> None:
    case = make_case(
        moe_spec(64, 8, WIDTH, 256), numerics_of("portable", "float32", "float32"), num_threads=4
    )
    router = make_router(case).fused(LAYER, None, EPS)
    assert router is not None
    experts, x_TD = case.fused()._layer, rows(16, "float32")
    experts_TK, weights_TK = torch.empty((16, 8), dtype=torch.int64), torch.empty(16, 8)

    def tries() -> Iterator[Tensor]:
        for _ in range(200):  # by luck the others are done when the caller is
            yield experts.half(router, None, x_TD, experts_TK, weights_TK, timeout_s=0.0)

    with pytest.raises(KernelTimeout, match=r"layer 3: stage (rows|inner|down|combine) did not end within 0"):
        list(tries())
    with pytest.raises(RuntimeError, match="did not end in time"):
        experts.half(router, None, x_TD, experts_TK, weights_TK)
