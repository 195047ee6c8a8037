"""The fused experts give the bits of the ops one by one; negative controls show that the tests can fail."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_native
from moe_cases import LAYER, TAG, Case, make_case, make_inputs, moe_spec, numerics_of, run
from torch import Tensor

from moesaic.errors import ConfigError, KernelTimeout
from moesaic.experts.blob import BlobLayout
from moesaic.experts.contract import Routing
from moesaic.experts.store import ExpertLoader
from moesaic.kernels import native
from moesaic.kernels.wire import round_to_wire
from moesaic.parallel import tree
from moesaic.parallel.dispatch import local
from moesaic.parallel.dispatch.fused import Fused
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.model import Activation
from moesaic.spec.numerics import DTYPE_BYTES, FORMATS, DType, Format, WireFormat
from moesaic.spec.quantised import QUANTISED
from moesaic.steps import DONE, drive

pytestmark = needs_native
LEVELS = native.levels()
DTYPES: tuple[DType, ...] = ("float32", "bfloat16")
ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped")


def check(case: Case, x_TD: Tensor, routing: Routing) -> Tensor:
    expected = run(case.staged(), x_TD, routing)
    found = run(case.fused(), x_TD, routing)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0, equal_nan=True)
    return found


@settings(max_examples=70, deadline=None)
@given(data=st.data())
def test_bits_are_those_of_the_ops_one_by_one(data: st.DataObject) -> None:
    draw = data.draw
    dtype, format = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(FORMATS))
    shards = draw(st.sampled_from([1, 1, 2, 4]))
    group = QUANTISED[format].group or 32 if format in QUANTISED else 1
    inner = shards * group * draw(st.integers(1, 2)) if shards > 1 else draw(st.integers(1, 150))
    num_experts = draw(st.integers(1, 12))
    activation = draw(st.sampled_from(ACTIVATIONS))
    spec = moe_spec(
        num_experts,
        draw(st.integers(1, min(num_experts, 7))),
        draw(st.integers(1, 150)),
        inner,
        activation=activation,
        is_gated=activation == "swiglu_clamped" or draw(st.booleans()),
        has_bias=draw(st.booleans()),
        activation_limit=draw(st.sampled_from([None, 1.0])),
        weight_on=draw(st.sampled_from(["output", "output", "input"])),
    )
    numerics = numerics_of(draw(st.sampled_from(LEVELS)), dtype, format, shards=shards)
    case = make_case(spec, numerics, num_threads=draw(st.integers(1, 4)))
    num_tokens = draw(st.integers(0, 64))
    check(case, *make_inputs(spec, dtype, num_tokens, seed=draw(st.integers(0, 3))))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_number_of_choices_meets_in_the_same_tree(level: str, dtype: DType) -> None:
    for num_choices in (*range(1, 14), 16, 21, 23):
        case = make_case(moe_spec(24, num_choices, 77, 8), numerics_of(level, dtype, dtype))
        check(case, *make_inputs(case.spec, dtype, 2))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_on", ["output", "input"])
def test_each_expert_may_have_a_format_of_its_own(level: str, dtype: DType, weight_on: str) -> None:
    formats: dict[int, Format] = dict(enumerate([*FORMATS, "float32", "bfloat16"]))
    spec = moe_spec(len(formats) + 1, 5, 96, 256, has_bias=True, weight_on=weight_on)
    case = make_case(spec, numerics_of(level, dtype, formats, shards=2), num_threads=2)
    for num_tokens in (1, 17):
        check(case, *make_inputs(spec, dtype, num_tokens))


def plan_of(slot_expert: list[int]) -> ExpertPlan:
    plan = contiguous_plan((len(slot_expert),), 1)
    return replace(plan, version=1, slot_expert=(np.array(slot_expert, dtype=np.int64),))


@pytest.mark.parametrize("slots", [[3, 2, 1, 0], [0, 1, 2, 3, 2, 0], [1, 1, 1, 0, 3, 2]])
def test_slots_in_any_order_and_with_copies(slots: list[int]) -> None:
    spec = moe_spec(4, 2)
    plain = make_case(spec, numerics_of(LEVELS[-1], "float32", "float32"))
    case = make_case(spec, plain.ops.numerics, plan=plan_of(slots))
    x_TD, routing = make_inputs(spec, "float32", 9)
    assert torch.equal(check(case, x_TD, routing), run(plain.fused(), x_TD, routing))


def test_another_plan_of_the_store_moves_no_bit() -> None:
    spec = moe_spec(4, 2)
    case = make_case(spec, numerics_of(LEVELS[-1], "float32", "float32"))
    x_TD, routing = make_inputs(spec, "float32", 9)
    fused = case.fused()
    expected = run(fused, x_TD, routing)
    drive([case.store.adopt(plan_of([2, 0, 3, 1, 1]))], 1.0)
    assert torch.equal(run(fused, x_TD, routing), expected)
    drive([case.store.adopt(plan_of([2, 0, 3, 2]))], 1.0)
    with pytest.raises(ConfigError, match=r"no slot to experts \[1\] of layer 3"):
        run(fused, x_TD, routing)


@pytest.mark.parametrize(
    ("dtype", "wire"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", "fp8")]
)
def test_rows_are_rounded_to_the_wire(dtype: DType, wire: WireFormat) -> None:
    spec = moe_spec()
    numerics = replace(numerics_of(LEVELS[-1], dtype, dtype), wire_format=wire)
    case = make_case(spec, numerics)
    x_TD, routing = make_inputs(spec, dtype, 9)
    found = check(case, x_TD, routing)
    unrounded = make_case(spec, replace(numerics, wire_format=dtype)).fused()
    rounded_TD = round_to_wire(x_TD, wire).unpack(x_TD.dtype)
    assert torch.equal(found, run(unrounded, rounded_TD, routing))
    assert torch.equal(found, run(unrounded, x_TD, routing)) == (wire == "float32")


def test_numbers_that_are_none_stay_in_their_token() -> None:
    spec = moe_spec(4, 4)
    for format in ("float32", "int4-g32"):
        case = make_case(spec, numerics_of(LEVELS[-1], "float32", format), num_threads=2)
        x_TD, routing = make_inputs(spec, "float32", 7)
        expected = run(case.fused(), x_TD, routing)
        x_TD[2, 5] = torch.inf
        routing.weights_TK[4, 1], routing.weights_TK[5, 0] = torch.nan, torch.inf
        found = check(case, x_TD, routing)
        kept = [0, 1, 3, 6]
        assert torch.equal(found[kept], expected[kept])
        assert not found[[2, 4, 5]].isfinite().all(-1).any()


def test_another_order_of_a_tokens_choices_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a left fold instead of neighbours."""
    spec = moe_spec(12, 7)
    case = make_case(spec, numerics_of(LEVELS[-1], "float32", "float32"))
    x_TD, routing = make_inputs(spec, "float32", 5)
    check(case, x_TD, routing)

    def left_fold(leaves: list[Tensor]) -> Tensor:
        total = leaves[0]
        for leaf in leaves[1:]:
            total = total + leaf
        return total

    monkeypatch.setattr(tree, "tree_sum", left_fold)
    assert not torch.equal(run(case.staged(), x_TD, routing), run(case.fused(), x_TD, routing))


@pytest.mark.parametrize("mutation", ["seam", "fold of leaves"])
def test_another_rounding_or_order_inside_shows(mutation: str) -> None:
    """The same for roundings between the stages and for the leaves of down."""
    spec = moe_spec(4, 2, 64, 128, has_bias=True)
    dtype: DType = "bfloat16" if mutation == "seam" else "float32"
    format: Format = "int8-g32" if mutation == "seam" else "float32"
    case = make_case(spec, numerics_of(LEVELS[-1], dtype, format, shards=4))
    x_TD, routing = make_inputs(spec, dtype, 9)
    found = check(case, x_TD, routing).float()
    # No rounding of what lies between the matmuls, or one leaf where four were asked for.
    other = make_case(spec, numerics_of(LEVELS[-1], "float32", format, shards=4 if mutation == "seam" else 1))
    wide = run(other.staged(), x_TD.float(), routing).to(x_TD.dtype).float()
    assert not torch.equal(found, wide)
    torch.testing.assert_close(found, wide, rtol=0.05, atol=0.2)


@pytest.mark.parametrize("level", LEVELS)
def test_products_and_sums_of_the_combine_are_rounded_apart(level: str) -> None:
    # Experts without weights give their bias: 1 + 2^-12 squared has a tail that a separate rounding drops.
    spec = moe_spec(2, 2, 8, 8, has_bias=True)
    numerics = numerics_of(level, "float32", "float32")
    case = make_case(spec, numerics)
    loader = ExpertLoader(((LAYER, spec),), numerics.formats)
    outputs = (1.0 + 2.0**-11, 1.0 + 2.0**-12)
    for part, place in BlobLayout.of(spec, "float32").places.items():
        for expert in range(2):
            loader.put(LAYER, expert, part, torch.full(place.shape, outputs[expert] * (part == "down_bias")))
    fused = Fused(LAYER, spec, loader.finish(), case.ops)
    routing = Routing(experts_TK=torch.tensor([[0, 1]]), weights_TK=torch.tensor([[-1.0, 1.0 + 2.0**-12]]))
    assert torch.equal(run(fused, torch.ones(1, 8), routing), torch.zeros(1, 8))


def test_the_callers_turn_comes_before_the_work_and_each_expert_is_read_once() -> None:
    for format in ("bfloat16", "int8", "int4-g64-zp"):
        spec = moe_spec(8, 3, 64, 128, has_bias=True)
        case = make_case(spec, numerics_of(LEVELS[-1], "bfloat16", format), num_threads=2)
        x_TD, routing = make_inputs(spec, "bfloat16", 30)
        steps = case.fused().forward(x_TD, routing, TAG, None)
        assert next(steps) is DONE
        assert case.ops.moe_counts.launches == 0
        with pytest.raises(StopIteration):
            next(steps)
        layout = BlobLayout.of(spec, format)
        one = layout.num_bytes - sum(stop - start for start, stop in layout.gaps)
        counts = case.ops.moe_counts
        num_distinct = routing.experts_TK.unique().numel()
        assert (counts.launches, counts.jobs, counts.weight_bytes) == (1, 90, num_distinct * one)
        assert one >= 3 * 64 * 128 * (0.5 if format.startswith("int4") else DTYPE_BYTES.get(format, 1))


def test_refused_with_the_numbers() -> None:
    spec = moe_spec(4, 2)
    case = make_case(spec, numerics_of(LEVELS[-1], "float32", "float32"))
    fused = case.fused()
    x_TD, routing = make_inputs(spec, "float32", 3)
    for expert in (4, -1, 1 << 40):
        experts_TK = routing.experts_TK.clone()
        experts_TK[1, 1] = expert
        with pytest.raises(ValueError, match=rf"layer 3: choice 1 of token 1 is expert {expert}.* 0 to 3"):
            run(fused, x_TD, replace(routing, experts_TK=experts_TK))
    with pytest.raises(ValueError, match="x has 192 numbers, 2 tokens of 64 need 128"):
        case.fused()._layer._kernels.moe(
            fused._layer.native, x_TD.data_ptr(), x_TD.numel(), routing.experts_TK.data_ptr(), 4,
            routing.weights_TK.data_ptr(), 4, x_TD.data_ptr(), 2, 1.0,
        )  # fmt: skip
    with pytest.raises(ConfigError, match="matmul_shards = 64 does not divide"):
        make_case(moe_spec(inner=33), numerics_of(LEVELS[-1], "float32", "float32", shards=64)).fused()


def test_a_call_that_does_not_end_stops_its_kernels() -> None:
    spec = moe_spec(64, 8, 256, 256)
    case = make_case(spec, numerics_of("portable", "float32", "float32"), num_threads=4)
    x_TD, routing = make_inputs(spec, "float32", 16)
    layer = case.fused()._layer
    expected = layer(x_TD, routing.experts_TK, routing.weights_TK)

    def without_patience() -> None:
        for _ in range(200):  # by luck the others are done when the caller is
            layer(x_TD, routing.experts_TK, routing.weights_TK, timeout_s=0.0)

    with pytest.raises(KernelTimeout, match=r"layer 3: stage (rows|inner|down|combine) did not end within 0"):
        without_patience()
    for call in (
        lambda: layer(x_TD, routing.experts_TK, routing.weights_TK),
        lambda: case.ops.linear(x_TD, x_TD),
        lambda: case.ops.sigmoid(x_TD),
    ):
        with pytest.raises(RuntimeError, match="did not end in time"):
            call()
    other = make_case(spec, case.ops.numerics, num_threads=4)
    assert torch.equal(run(other.fused(), x_TD, routing), expected)
    assert local.combine_choices is tree.combine_choices
