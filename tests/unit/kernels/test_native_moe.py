"""The boundary of the fused experts: an error with the numbers or an answer, never a crash."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from marks import needs_native
from torch import Tensor

from moesaic.kernels import native

pytestmark = needs_native
D, F, K, E = 8, 4, 2, 3
ARENA = torch.zeros(1 << 16)  # all addresses below lie inside it, with room on both sides
AT = ARENA.data_ptr() + (1 << 12)

LAYER: dict[str, Any] = {
    "layer_idx": 5, "width": D, "inner_width": F, "num_choices": K, "shards": 1, "is_gated": True,
    "is_weight_on_input": False, "function": 0, "limit": 7.0, "slope": 1.0, "is_bfloat16": False,
}  # fmt: skip
SLOT: dict[str, Any] = {
    "inner": AT, "inner_bytes": 2 * F * D * 4, "down": AT, "down_bytes": D * F * 4, "inner_bias": AT,
    "inner_bias_bytes": 2 * F * 4, "down_bias": AT, "down_bias_bytes": D * 4, "is_bfloat16": False,
    "bits": 0, "inner_group": 0, "down_group": 0, "has_zeros": False,
}  # fmt: skip


def make_layer(num_slots: int = E, **changes: Any) -> Any:
    layer = native.module().MoeLayer(**(LAYER | changes))
    for _ in range(num_slots):
        layer.add_slot(**SLOT)
    return layer


@cache
def two_threads() -> Any:
    return native.module().Kernels(native.levels()[-1], 2)


def call_of(x: Tensor, experts: Tensor, weights: Tensor, y: Tensor) -> dict[str, Any]:
    return {
        "x": x.data_ptr(), "num_x": x.numel(), "experts": experts.data_ptr(), "num_experts": experts.numel(),
        "weights": weights.data_ptr(), "num_weights": weights.numel(), "y": y.data_ptr(),
        "num_tokens": len(x), "timeout_s": 60.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("width", 0, "width must be in 1 to"),
        ("width", 1 << 40, "got 1099511627776"),
        ("inner_width", -1, "inner width must be in 1"),
        ("num_choices", 0, "choices must be in 1"),
        ("function", 9, "no function 9"),
        ("function", -1, "no function -1"),
    ],
)
def test_layers_that_cannot_be(name: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"experts of layer 5.*{message}"):
        make_layer(**{name: value})


def test_the_clamped_activation_needs_a_gate() -> None:
    with pytest.raises(ValueError, match="gate and an up"):
        make_layer(function=5, is_gated=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner_bytes": 255}, "has 255 bytes, its shape needs 256"),
        ({"down_bytes": 0}, "has 0 bytes, its shape needs 128"),
        ({"inner": 0}, "no storage"),
        ({"down": 0}, "no storage"),
        ({"inner_bias_bytes": 16}, "a bias of 8 numbers has 16 bytes, not 32"),
        ({"down_bias_bytes": 33}, "a bias of 8 numbers has 33 bytes, not 32"),
        ({"is_bfloat16": True}, "has 256 bytes, its shape needs 128"),
        ({"bits": 3}, "8 or 4 bits, not 3"),
        ({"bits": 8, "inner_group": 31, "down_group": 32}, "a group of 31 is no multiple of 32"),
        ({"bits": 8, "inner_group": 0, "down_group": 32}, "a group of 0 is no multiple of 32"),
        ({"bits": 8, "inner_group": 32, "down_group": 32, "has_zeros": True}, "zero points belong to"),
        ({"has_zeros": True}, "zero points belong to"),
        ({"bits": 4, "inner_group": 32, "down_group": 32}, "its shape needs 576"),
    ],
)
def test_slots_that_do_not_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"layer 5, slot 0.*{message}"):
        make_layer(0).add_slot(**(SLOT | changes))
    with pytest.raises(ValueError, match=r"3 shards must be a power of two that divides"):
        make_layer(1, shards=3)


def test_slots_that_do_not_exist() -> None:
    for slots in ([0, 1, 3], [-1, 0, 1]):
        with pytest.raises(ValueError, match=r"layer 5: expert \d has slot -?\d of 3"):
            make_layer().set_slots(slots)


@settings(max_examples=120, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from(["x", "experts", "weights", "y"]), st.just(0), max_size=1
    ).flatmap(
        lambda nulls: st.dictionaries(
            st.sampled_from(["num_x", "num_experts", "num_weights", "num_tokens"]),
            st.one_of(st.integers(-3, 80), st.integers(-(1 << 62), 1 << 62)),
            max_size=2,
        ).map(lambda sizes: nulls | sizes)
    ),
    timeout_s=st.sampled_from([60.0, 60.0, -1.0, float("nan"), float("inf")]),
    ids=st.lists(st.one_of(st.integers(0, E - 1), st.integers(-(1 << 62), 1 << 62)), min_size=6, max_size=6),
    has_slots=st.sampled_from([True, True, True, False]),
)
def test_whatever_is_passed_there_is_an_answer_or_an_error_with_the_numbers(
    changes: dict[str, int], timeout_s: float, ids: list[int], has_slots: bool
) -> None:
    num_tokens = 3
    x, weights = torch.ones(num_tokens, D), torch.full((num_tokens, K), torch.nan)
    experts = torch.tensor(ids).view(num_tokens, K)
    y = torch.full((num_tokens, D), 7.0)
    layer = make_layer()
    if has_slots:
        layer.set_slots([2, 0, 1])
    kernels = two_threads()
    call = call_of(x, experts, weights, y) | {"timeout_s": timeout_s}
    good = dict(call)
    call |= changes
    is_good = call == good and timeout_s == 60.0 and has_slots and all(0 <= one < E for one in ids)
    is_empty = call["num_tokens"] == 0 and all(
        call[name] == 0 for name in ("num_x", "num_experts", "num_weights")
    )
    if is_good or (is_empty and timeout_s == 60.0 and has_slots):
        kernels.moe(layer, **call)
        assert y.isnan().all() == is_good
        return
    with pytest.raises(ValueError, match=r"experts of layer 5: .*\d"):
        kernels.moe(layer, **call)
    assert (y == 7.0).all(), "nothing is written before all is checked"


def test_no_tokens_are_no_work() -> None:
    layer, kernels = make_layer(), native.module().Kernels(native.levels()[-1], 2)
    layer.set_slots([0, 1, 2])
    nothing = torch.empty(0, D)
    kernels.moe(layer, **call_of(nothing, torch.empty(0, K, dtype=torch.int64), nothing, nothing))
    assert kernels.moe_counts() == (1, 0, 0)
