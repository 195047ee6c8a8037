"""The boundary of a stack of layers: an error with the numbers or an answer, never a crash."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_native

from moesaic.kernels import native

pytestmark = needs_native
D, F, K, E, C, H, BLOCK, T = 8, 4, 2, 3, 4, 2, 4, 3
ARENA = torch.zeros(1 << 16)  # all addresses below lie inside it, with room on both sides
AT = ARENA.data_ptr() + (1 << 12)
POOL_BYTES = 4 * H * BLOCK * C * 5  # float32, four blocks and the one of zeros


def make_attention(layer_idx: int = 0, width: int = D, half: int = 2) -> Any:
    layer = native.module().GqaLayer(
        layer_idx=layer_idx, width=width, heads=H, groups=H, head_width=C, is_normed_whole=False,
        norm_eps=1e-5, head_norm_eps=1e-5, half=half, is_interleaved=False, kv_block=BLOCK, kv_lanes=1,
        window=0, is_chunked=False, softmax_scale=1.0, sinks=0, is_bfloat16=False,
    )  # fmt: skip
    for name in "qkvo":
        layer.set_matrix(name, AT, 4 * width * H * C, 1, 0, 0, False)
    return layer


def make_router(layer_idx: int = 0, chosen: int = K) -> Any:
    return native.module().RouterLayer(
        layer_idx=layer_idx, width=D, experts=E, chosen=chosen, norm=0, is_norm_bfloat16=False, norm_eps=1e-5,
        weight=AT, logit_bias=0, selection_bias=0, expert_scale=0, groups=1, groups_kept=1, is_sigmoid=False,
        is_topk_first=False, is_top2_sum=False, is_renormalised=True, epsilon=0.0, floor=0.0, scale=1.0,
        is_bfloat16=False,
    )  # fmt: skip


def make_experts(layer_idx: int = 0, num_choices: int = K) -> Any:
    layer = native.module().MoeLayer(
        layer_idx=layer_idx, width=D, inner_width=F, num_choices=num_choices, shards=1, is_gated=True,
        is_weight_on_input=False, function=0, limit=7.0, slope=1.0, is_bfloat16=False,
    )  # fmt: skip
    for _ in range(E):
        layer.add_slot(
            inner=AT, inner_bytes=2 * F * D * 4, down=AT, down_bytes=D * F * 4, inner_bias=0,
            inner_bias_bytes=0, down_bias=0, down_bias_bytes=0, is_bfloat16=False, bits=0, inner_group=0,
            down_group=0, has_zeros=False,
        )  # fmt: skip
    layer.set_slots(list(range(E)))
    return layer


@cache
def two_threads() -> Any:
    return native.module().Kernels(native.levels()[-1], 2)


def add(stack: Any, layer_idx: int = 0, **changes: Any) -> None:
    layer = {
        "attention": make_attention(layer_idx), "router": make_router(layer_idx), "shared": None,
        "experts": make_experts(layer_idx), "keys": AT, "key_bytes": POOL_BYTES, "values": AT,
        "value_bytes": POOL_BYTES, "pool_kind": 0, "places": 0, "rope": 0,
    }  # fmt: skip
    stack.add(**(layer | changes))


@cache
def make_stack() -> Any:
    """Two layers."""
    stack = native.module().Stack(two_threads(), 1, 1)
    for layer_idx in range(2):
        add(stack, layer_idx)
    return stack


class Step:
    """Three tokens of one sequence."""

    def __init__(self, positions: tuple[int, ...] = (0, 1, 2)) -> None:
        self.x, self.y = torch.ones(T, D), torch.full((T, D), 7.0)
        self.positions = torch.tensor(positions)
        self.slots, self.fresh = torch.arange(T), torch.zeros(T, dtype=torch.int64)
        self.rows = torch.tensor([0, T, 0, 0, 1, *[0] * 10])  # one sequence, and room for two
        self.ids = torch.zeros(1, dtype=torch.int32)
        self.table = torch.ones(16, 2)
        self.experts = torch.zeros(2, T, K, dtype=torch.int64)
        self.weights = torch.zeros(2, T, K)

    def call(self) -> dict[str, Any]:
        return {
            "x": self.x.data_ptr(), "num_x": self.x.numel(), "y": self.y.data_ptr(), "num_tokens": T,
            "positions": self.positions.data_ptr(),
            "places": [self.slots.data_ptr(), T, self.fresh.data_ptr(), 1, self.rows.data_ptr(), 1,
                       self.ids.data_ptr(), 1],
            "tables": [self.table.data_ptr(), self.table.data_ptr(), 16, 2],
            "experts": self.experts.data_ptr(), "weights": self.weights.data_ptr(),
            "epoch": 0, "plan_version": 0, "step_id": 0, "timeout_s": 60.0,
        }  # fmt: skip


def test_a_stack_computes_its_layers() -> None:
    """Weights of zeros: the residual stream stays, and every token chooses the first experts."""
    step = Step()
    assert make_stack().begin(**step.call()) == 2
    assert torch.equal(step.y, step.x)
    assert step.experts.tolist() == [[[0, 1]] * T] * 2
    assert step.weights.tolist() == [[[0.5, 0.5]] * T] * 2
    assert make_stack().advance(1.0) == 2, "there is nothing left to do"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"places": 1}, "experts of layer 5: places 1 of 1"),
        ({"places": -1}, "places -1 of 1"),
        ({"rope": 1}, "rotation 1 of 1, 2 pairs turn"),
        ({"rope": -2}, "rotation -2 of 1"),
        ({"rope": -1}, "rotation -1 of 1, 2 pairs turn"),
        ({"attention": make_attention(width=16)}, "layer 5: its attention has rows of 16, not 8"),
        ({"attention": make_attention(half=0)}, "rotation 0 of 1, 0 pairs turn"),
        ({"router": make_router(chosen=1)}, "layer 5: its router has rows of 8 and 1 choices, not 8 and 2"),
    ] if native.levels() else [],
)  # fmt: skip
def test_layers_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        add(native.module().Stack(two_threads(), 1, 1), 5, **changes)


def test_stacks_that_cannot_be() -> None:
    for num_places, num_ropes in ((0, 1), (1, -1), (1 << 40, 1)):
        with pytest.raises(ValueError, match="must be in"):
            native.module().Stack(two_threads(), num_places, num_ropes)
    with pytest.raises(ValueError, match="no layers: a call has one at least"):
        native.module().Stack(two_threads(), 1, 1).begin(**Step().call())
    with pytest.raises(ValueError, match="none waits for another rank"):
        make_stack().late()


def changed(call: dict[str, Any], name: str, at: int, value: int) -> dict[str, Any]:
    return call | {name: [*call[name][:at], value, *call[name][at + 1 :]]}


NUMBERS = st.one_of(st.integers(-3, 40), st.integers(-(1 << 62), 1 << 62))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_passed_there_is_an_answer_or_an_error_with_the_numbers(data: st.DataObject) -> None:
    """Counts, lengths and positions; addresses are trusted, but for those that are none."""
    draw = data.draw
    is_changed_position = draw(st.booleans())
    positions = tuple(draw(st.lists(NUMBERS, min_size=T, max_size=T))) if is_changed_position else (0, 1, 2)
    step = Step(positions)
    call = good = step.call()
    kind = draw(st.sampled_from(["none", "null", "count", "places", "tables", "length", "timeout"]))
    if kind == "null":
        call = call | {draw(st.sampled_from(["x", "y", "positions", "experts", "weights"])): 0}
    if kind == "count":
        call = call | {draw(st.sampled_from(["num_x", "num_tokens"])): draw(NUMBERS)}
    if kind == "places":
        call = changed(call, "places", draw(st.sampled_from([1, 3, 5, 7])), draw(NUMBERS))
    if kind == "tables":
        call = changed(call, "tables", draw(st.sampled_from([2, 3])), draw(st.integers(-(1 << 62), 16)))
    if kind == "length":
        name = draw(st.sampled_from(["places", "tables"]))
        call = call | {name: [*call[name], 0][: draw(st.integers(0, 9))]}
    if kind == "timeout":
        call = call | {"timeout_s": draw(st.sampled_from([-1.0, float("nan"), float("inf")]))}
    is_good = call == good and all(0 <= position < 16 for position in positions)
    may_raise: AbstractContextManager[Any] = pytest.raises(
        ValueError, match=r"layer|attention|pool|block|sequence|slot|time-out"
    )
    if not is_good and kind in ("places", "tables"):  # fewer rows of a table, say, may still be enough
        may_raise = suppress(ValueError)
    with nullcontext() if is_good else may_raise:
        assert make_stack().begin(**call) == 2


def test_the_last_position_of_a_table_is_one() -> None:
    step = Step((0, 1, 15))
    assert make_stack().begin(**step.call()) == 2
    for position in (-1, 16, 1 << 40):
        step = Step((0, position, 2))
        with pytest.raises(ValueError, match=f"layers 0 to 1: token 1 has position {position}, .* has 16"):
            make_stack().begin(**step.call())


def test_no_tokens_are_no_work() -> None:
    nothing = torch.empty(0, D)
    call = Step().call() | {
        "x": nothing.data_ptr(), "num_x": 0, "y": nothing.data_ptr(), "num_tokens": 0,
        "places": [0, 0, 0, 0, 0, 0, 0, 0],
    }  # fmt: skip
    assert make_stack().begin(**call) == 2
