from __future__ import annotations

from array import array
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_native
from torch import Tensor

from moesaic.kernels import native
from moesaic.kernels.matmul import noise
from moesaic.kernels.ops import Ops, choose
from moesaic.kernels.state_view import StatePlaces, StateRow, StateView
from moesaic.spec.model import GateSpec
from moesaic.spec.numerics import DType, preset

pytestmark = needs_native
LEVELS = native.levels()
DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CLOSE: dict[DType, dict[str, float]] = {
    "float32": {"rtol": 3e-6, "atol": 1e-6},
    "bfloat16": {"rtol": 1.6e-2, "atol": 1e-6},  # two units in the last place: rounded before and after
}
GATES = [
    GateSpec(score="softmax"),
    GateSpec(score="softmax", is_renormalised=False, scale=2.5),
    GateSpec(score="softmax", order="topk_then_score", is_renormalised=False),
    GateSpec(score="sigmoid", has_selection_bias=True, renormalise_epsilon=1e-20, scale=2.5),
    GateSpec(
        score="sigmoid", num_groups=4, groups_per_token=2, group_score="top2_sum", has_selection_bias=True
    ),
    GateSpec(score="softmax", num_groups=4, groups_per_token=3, is_renormalised=False),
    GateSpec(score="sigmoid", order="topk_then_score", renormalise_floor=0.5, has_expert_scale=True),
]


def ops_of(backend: str, dtype: DType = "float32", *, num_threads: int = 1) -> Ops:
    return choose(preset("portable", dtype=dtype, backend=backend), num_threads=num_threads)


def norms(ops: Ops, x: Tensor, weight_D: Tensor, bias_D: Tensor) -> list[Tensor]:
    return [
        ops.rms_norm(x, weight_D, 1e-5),
        ops.rms_norm(x, None, 1e-6),
        ops.l2_norm(x, 1e-6),
        ops.layer_norm(x, weight_D, bias_D, 1e-5),
        ops.layer_norm(x, weight_D, None, 1e-5),
    ]


@pytest.mark.parametrize("weights", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 7, 64, 100, 2048])
def test_norms_are_the_references_within_a_tolerance(dtype: DType, weights: DType, width: int) -> None:
    x = noise((2, 3, width), DTYPES[dtype])
    weight_D, bias_D = (noise((width,), DTYPES[weights], seed=seed) for seed in (1, 2))
    expected = norms(ops_of("reference", dtype), x, weight_D, bias_D)
    found = [norms(ops_of(f"native/{level}", dtype), x, weight_D, bias_D) for level in LEVELS]
    for of_level in found:
        for ours, theirs, first in zip(of_level, expected, found[0], strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
            coarse = "bfloat16" if torch.bfloat16 in (ours.dtype, weight_D.dtype) else "float32"
            scale = 1 if width > 1 else 1e3  # a single number less its mean is nothing but rounding
            torch.testing.assert_close(ours, theirs, rtol=CLOSE[coarse]["rtol"], atol=scale * 3e-5)
            assert torch.equal(ours, first), "all levels give equal bits"


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 64),
    width=st.integers(1, 700),
    num_threads=st.integers(1, 4),
    dtype=st.sampled_from(sorted(DTYPES)),
    data=st.data(),
)
def test_a_rows_bits_follow_that_row_alone(
    rows: int, width: int, num_threads: int, dtype: DType, data: st.DataObject
) -> None:
    level = data.draw(st.sampled_from(LEVELS))
    row = data.draw(st.integers(0, rows - 1))
    many, one = (ops_of(f"native/{level}", dtype, num_threads=n) for n in (num_threads, 1))
    x, weight_D = noise((rows, width), DTYPES[dtype]), noise((width,), DTYPES[dtype], seed=1)
    whole, alone = (
        norms(ops, part, weight_D, weight_D) for ops, part in ((many, x), (one, x[row : row + 1]))
    )
    for of_all, of_one in zip(whole, alone, strict=True):
        assert torch.equal(of_all[row : row + 1], of_one)
    gate, bias_E = data.draw(st.sampled_from(GATES)), noise((32,), seed=2)
    logits_TE = noise((rows, 32), seed=3)
    whole_gate = many.gate(logits_TE, gate, 4, bias_E, bias_E)
    alone_gate = one.gate(logits_TE[row : row + 1], gate, 4, bias_E, bias_E)
    for of_all, of_one in zip(whole_gate, alone_gate, strict=True):
        assert torch.equal(of_all[row : row + 1], of_one)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_rotation_has_the_references_bits(level: str, dtype: DType, is_interleaved: bool) -> None:
    for heads, width, half in ((4, 32, 16), (1, 24, 5), (3, 8, 0)):
        x_THC = noise((9, heads, width + 3), DTYPES[dtype])[..., :width]
        cos_TC, sin_TC = noise((9, half), seed=1), noise((9, half), seed=2)
        found = ops_of(f"native/{level}", dtype, num_threads=2).rope(x_THC, cos_TC, sin_TC, is_interleaved)
        expected = ops_of("reference", dtype).rope(x_THC, cos_TC, sin_TC, is_interleaved)
        assert found.is_contiguous()
        assert torch.equal(found, expected)
        turned = x_THC.transpose(0, 2).contiguous().transpose(0, 2)  # the last dim is not contiguous
        assert torch.equal(
            ops_of(f"native/{level}", dtype).rope(turned, cos_TC, sin_TC, is_interleaved), found
        )


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_gates_choose_as_the_reference_does(level: str, gate: GateSpec) -> None:
    for num_experts, num_chosen in ((16, 8), (64, 6), (128, 1), (4, 2)):
        logits_TE = 3.0 * noise((40, num_experts))
        bias_E = noise((num_experts,), seed=1) if gate.has_selection_bias else None
        scale_E = noise((num_experts,), seed=2) if gate.has_expert_scale else None
        arguments = (logits_TE, gate, num_chosen, bias_E, scale_E)
        if gate.group_score == "top2_sum" and num_experts == 4:
            continue  # no two experts in a group
        found, expected = (ops_of(name).gate(*arguments) for name in (f"native/{level}", "reference"))
        assert torch.equal(found[0], expected[0])
        torch.testing.assert_close(found[1], expected[1], rtol=3e-6, atol=1e-7)


@pytest.mark.parametrize("level", LEVELS)
def test_ties_go_to_the_lowest_id(level: str) -> None:
    ops = ops_of(f"native/{level}")
    flat_TE = torch.zeros(2, 12)
    flat_TE[1, [3, 7, 11]] = 1.0
    experts_TK, weights_TK = ops.gate(flat_TE, GateSpec(score="softmax"), 4, None, None)
    assert experts_TK.tolist() == [[0, 1, 2, 3], [0, 3, 7, 11]]
    assert torch.equal(weights_TK[0], torch.full((4,), 0.25))
    grouped = GateSpec(score="sigmoid", num_groups=4, groups_per_token=2)
    assert ops.gate(flat_TE[:1], grouped, 4, None, None)[0].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_a_row_of_nans_has_ids_and_no_weights(gate: GateSpec) -> None:
    logits_TE = noise((3, 16))
    logits_TE[1] = float("nan")
    bias_E = torch.zeros(16)
    experts_TK, weights_TK = ops_of(f"native/{LEVELS[-1]}").gate(logits_TE, gate, 4, bias_E, bias_E + 1.0)
    assert ((experts_TK >= 0) & (experts_TK < 16)).all()
    assert weights_TK[1].isnan().all()
    assert weights_TK[[0, 2]].isfinite().all()


def state_of(rows: tuple[StateRow, ...], seed: int, dtype: torch.dtype) -> StateView:
    """6 slots of 4 value heads over keys of 8 and values of 20, and tails of 24 channels."""
    states, tails = noise((6, 4, 8, 20), seed=seed), noise((6, 3, 24), dtype, seed=seed + 1)
    return StateView(states=states, tails=tails, places=StatePlaces.of(rows))


def run_state(ops: Ops, view: StateView, first: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    now = slice(first, first + count)

    def part(shape: tuple[int, ...], seed: int, kind: torch.dtype = torch.float32) -> Tensor:
        return noise((40, *shape), kind, seed=seed)[now]

    conv = ops.causal_conv(part((24,), 10, dtype), noise((24, 4), dtype, seed=11), view)
    decay, beta = -part((4,), 14).abs(), noise((40, 4), seed=15).sigmoid()[now]
    reading = ops.delta_rule(part((2, 8), 12), part((2, 8), 13), part((4, 20), 16, dtype), decay, beta, view)
    return conv, reading


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
def test_states_move_on_as_the_references_do(level: str, dtype: DType) -> None:
    rows = (
        StateRow(first_row=0, num_tokens=5, slot_from=None, slot_to=1),
        StateRow(first_row=5, num_tokens=1, slot_from=0, slot_to=3),
        StateRow(first_row=6, num_tokens=2, slot_from=2, slot_to=5),
    )
    found = []
    for backend in (f"native/{level}", "reference"):
        view = state_of(rows, 20, DTYPES[dtype])
        view.states[1], view.states[4], view.tails[1] = float("nan"), float("inf"), float("nan")
        outputs = run_state(ops_of(backend, dtype, num_threads=2), view, 0, 8, DTYPES[dtype])
        found.append((*outputs, view.states[[1, 3, 5]], view.tails[[1, 3, 5]]))
    ours, theirs = found
    for i in (0, 3):
        assert torch.equal(ours[i], theirs[i]), "the convolution has the reference's bits"
    for i in (1, 2):
        torch.testing.assert_close(ours[i], theirs[i], **CLOSE[dtype if i == 1 else "float32"])


@pytest.mark.parametrize("level", LEVELS)
def test_states_do_not_follow_chunks_or_neighbours(level: str) -> None:
    def rows(*parts: tuple[int, int | None, int]) -> tuple[StateRow, ...]:
        found, at = [], 0
        for count, slot_from, slot_to in parts:
            found.append(StateRow(first_row=at, num_tokens=count, slot_from=slot_from, slot_to=slot_to))
            at += count
        return tuple(found)

    ops = ops_of(f"native/{level}", num_threads=3)
    whole = state_of(rows((30, None, 0)), 20, torch.float32)
    expected = run_state(ops, whole, 0, 30, torch.float32)
    chunked = state_of((), 30, torch.float32)
    found, slot_from, slot_to, at = [], None, 4, 0
    for count in (1, 2, 20, 7):
        view = StateView(
            states=chunked.states,
            tails=chunked.tails,
            places=StatePlaces.of(rows((count, slot_from, slot_to), (3, None, 2))),
        )
        parts = run_state(ops, view, at, count + 3, torch.float32)
        found.append([part[:count] for part in parts])
        slot_from, slot_to, at = slot_to, 5 if slot_to == 4 else 4, at + count
    for i in range(2):
        assert torch.equal(torch.cat([part[i] for part in found]), expected[i])
    assert torch.equal(chunked.states[slot_from], whole.states[0])
    assert not torch.equal(chunked.states[slot_to], whole.states[0]), "the state before the last chunk"


@pytest.mark.parametrize("level", LEVELS)
def test_a_poisoned_row_harms_no_neighbour(level: str) -> None:
    ops = ops_of(f"native/{level}", num_threads=2)
    x = noise((5, 64))
    expected = norms(ops, x, x[0], x[1])
    poisoned = x.clone()
    poisoned[2] = float("nan")
    for ours, theirs in zip(norms(ops, poisoned, x[0], x[1]), expected, strict=True):
        assert torch.equal(ours[[0, 1, 3, 4]], theirs[[0, 1, 3, 4]])
        assert ours[2].isnan().all()


def test_no_rows_give_no_rows() -> None:
    ops = ops_of(f"native/{LEVELS[-1]}")
    assert ops.rms_norm(torch.empty(0, 4, 8), None, 1e-6).shape == (0, 4, 8)
    assert ops.rope(torch.empty(0, 2, 8), torch.empty(0, 4), torch.empty(0, 4), False).shape == (0, 2, 8)
    assert [len(x) for x in ops.gate(torch.empty(0, 8), GATES[0], 2, None, None)] == [0, 0]
    view = state_of((), 0, torch.float32)
    assert [len(x) for x in run_state(ops, view, 0, 0, torch.float32)] == [0, 0]


X = torch.zeros(64)
ROWS = array("q", [0, 2, -1, 1])
IDS = torch.zeros(64, dtype=torch.int64)
GOOD: dict[str, dict[str, Any]] = {
    "norm": {
        "x": X.data_ptr(), "weight": 0, "bias": 0, "y": X.data_ptr(), "rows": 2, "width": 4, "eps": 1e-6,
        "kind": 0, "is_bfloat16": False, "is_weight_bfloat16": False, "is_bfloat16_out": False,
    },
    "rotate": {
        "x": X.data_ptr(), "cosines": X.data_ptr(), "sines": X.data_ptr(), "y": X.data_ptr(), "tokens": 2,
        "heads": 2, "width": 8, "half": 4, "token_stride": 16, "head_stride": 8, "is_interleaved": False,
        "is_bfloat16": False,
    },
    "gate": {
        "logits": X.data_ptr(), "selection_bias": 0, "expert_scale": 0, "ids": IDS.data_ptr(),
        "weights": X.data_ptr(), "rows": 2, "experts": 8, "chosen": 2, "groups": 2, "groups_kept": 1,
        "is_sigmoid": False, "is_topk_first": False, "is_top2_sum": False, "is_renormalised": True,
        "epsilon": 0.0, "floor": 0.0, "scale": 1.0,
    },
    "causal_conv": {
        "x": X.data_ptr(), "weight": X.data_ptr(), "tails": X.data_ptr(), "y": X.data_ptr(),
        "rows": ROWS.buffer_info()[0], "num_rows": 1, "num_tokens": 2, "num_slots": 2, "channels": 4,
        "taps": 3, "is_bfloat16": False, "is_weight_bfloat16": False, "is_tail_bfloat16": False,
        "is_bfloat16_out": False,
    },
    "delta_rule": {
        "q": X.data_ptr(), "k": X.data_ptr(), "v": X.data_ptr(), "log_decay": X.data_ptr(),
        "beta": X.data_ptr(), "states": X.data_ptr(), "y": X.data_ptr(), "rows": ROWS.buffer_info()[0],
        "num_rows": 1, "num_tokens": 2, "num_slots": 2, "heads": 2, "groups": 1, "key_width": 2,
        "value_width": 2, "is_bfloat16_out": False,
    },
}  # fmt: skip
BAD: dict[str, dict[str, tuple[int, ...]]] = {
    "norm": {"x": (0,), "y": (0,), "rows": (-1, 2**40), "width": (0, -1, 2**40), "kind": (-1, 3)},
    "rotate": {
        "x": (0,), "cosines": (0,), "sines": (0,), "y": (0,), "tokens": (-1,), "heads": (-1,),
        "width": (0, 7), "half": (-1, 5), "token_stride": (-1,), "head_stride": (-1,),
    },
    "gate": {
        "logits": (0,), "ids": (0,), "weights": (0,), "rows": (-1,), "experts": (0, 7), "chosen": (0, 5, 9),
        "groups": (0, 3, 9), "groups_kept": (0, 3),
    },
    "causal_conv": {
        "x": (0,), "weight": (0,), "tails": (0,), "y": (0,), "rows": (0,), "num_rows": (-1, 0, 3),
        "num_tokens": (-1, 1, 3), "num_slots": (-1, 1), "channels": (0,), "taps": (0, 65),
    },
    "delta_rule": {
        "q": (0,), "k": (0,), "v": (0,), "log_decay": (0,), "beta": (0,), "states": (0,), "y": (0,),
        "rows": (0,), "num_rows": (-1, 0, 3), "num_tokens": (-1, 1, 3), "num_slots": (-1, 1), "heads": (0,),
        "groups": (0, 3), "key_width": (0, 2**20), "value_width": (0, 2**20),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_the_boundary_checks_its_calls(name: str) -> None:
    call = getattr(native.module().Kernels(LEVELS[-1], 2), name)
    call(**GOOD[name])
    for argument, values in BAD[name].items():
        for value in values:
            with pytest.raises(ValueError, match=r"norm|rotation|gate|convolution|delta rule"):
                call(**(GOOD[name] | {argument: value}))


@pytest.mark.parametrize("name", ["causal_conv", "delta_rule"])
def test_the_boundary_checks_slots(name: str) -> None:
    call = getattr(native.module().Kernels(LEVELS[-1], 1), name)
    for rows in ([1, 2, -1, 1], [0, 3, -1, 1], [0, 0, -1, 1], [0, 2, 5, 1], [0, 2, -2, 1], [0, 2, 1, 1]):
        table = array("q", rows)
        with pytest.raises(ValueError, match=r"slot|follow"):
            call(**(GOOD[name] | {"rows": table.buffer_info()[0]}))
