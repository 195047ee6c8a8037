from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from moesaic.kernels import elementwise
from moesaic.kernels.matmul import noise
from moesaic.spec.model import Activation

KINDS: tuple[Activation, ...] = ("silu", "gelu", "gelu_tanh", "relu", "relu2")


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    num_rows=st.integers(1, 40),
    start=st.integers(0, 30),
    width=st.integers(1, 130),
    num_threads=st.sampled_from([1, 2]),
)
def test_activations_of_a_row_follow_that_row_alone(
    kind: Activation, num_rows: int, start: int, width: int, num_threads: int
) -> None:
    torch.set_num_threads(num_threads)
    try:
        gate_TF, up_TF = noise((70, width)) * 4, noise((70, width), seed=1)
        expected = elementwise.activate(gate_TF, up_TF, kind)
        rows = slice(start, start + num_rows)
        assert torch.equal(elementwise.activate(gate_TF[rows], up_TF[rows], kind), expected[rows])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("function", [torch.exp, torch.sigmoid, torch.tanh, F.silu])
def test_large_tensors_are_cut_between_vectors(function: elementwise.Elementwise) -> None:
    """Threads' shares end inside a vector for most sizes above the grain; here none does."""
    size = 3 * elementwise.GRAIN + 1000
    x = noise((size + 7,))
    torch.set_num_threads(1)
    expected = elementwise.vectorised(function, x)
    torch.set_num_threads(2)
    try:
        for cut in (size, elementwise.GRAIN, elementwise.GRAIN + 1, 2 * elementwise.GRAIN + 65):
            assert torch.equal(elementwise.vectorised(function, x[7 : 7 + cut]), expected[7 : 7 + cut])
    finally:
        torch.set_num_threads(1)


def test_plain_torch_follows_the_place() -> None:
    """The negative control: what is left over after whole vectors has other bits."""
    torch.set_num_threads(1)
    x = noise((4096,)) * 4
    whole = F.silu(x)
    if all(torch.equal(F.silu(x[:n]), whole[:n]) for n in range(1, 200)):
        pytest.skip("this machine's silu has no scalar tail")
    assert all(torch.equal(elementwise.vectorised(F.silu, x[:n]), whole[:n]) for n in range(1, 200))


def test_activations_are_what_their_names_say() -> None:
    gate, up = noise((9, 33)) * 5, noise((9, 33), seed=1) * 5
    expected = {
        "silu": F.silu(gate) * up,
        "gelu": F.gelu(gate) * up,
        "gelu_tanh": F.gelu(gate, approximate="tanh") * up,
        "relu": F.relu(gate) * up,
        "relu2": F.relu(gate).square() * up,
    }
    for kind in KINDS:
        torch.testing.assert_close(elementwise.activate(gate, up, kind), expected[kind])
    torch.testing.assert_close(elementwise.activate(gate, None, "relu2"), F.relu(gate).square())


@pytest.mark.parametrize("limit", [None, 2.0, 7.0])
def test_the_clamped_gate_is_what_its_formula_says_in_every_place(limit: float | None) -> None:
    gate, up = noise((70, 33)) * 5, noise((70, 33), seed=1) * 5
    low_gate, low_up = (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))
    whole = elementwise.swiglu_clamped(gate, up, limit=limit, slope=1.5)
    torch.testing.assert_close(whole, (low_up + 1) * low_gate * torch.sigmoid(1.5 * low_gate))
    for rows in (slice(0, 1), slice(3, 8), slice(69, 70)):
        part = elementwise.swiglu_clamped(gate[rows], up[rows], limit=limit, slope=1.5)
        assert torch.equal(part, whole[rows])


def test_a_soft_cap_is_what_its_formula_says_in_every_place() -> None:
    x = noise((70, 33)) * 50
    whole = elementwise.softcap(x, 30.0)
    torch.testing.assert_close(whole, 30 * torch.tanh(x / 30))
    for rows in (slice(0, 1), slice(3, 8), slice(69, 70), slice(5, 5)):
        assert torch.equal(elementwise.softcap(x[rows], 30.0), whole[rows])


@given(width=st.integers(1, 70), seed=st.integers(0, 3))
def test_sums_and_softmax_of_a_row_follow_that_row_alone(width: int, seed: int) -> None:
    x = noise((40, width), seed=seed)
    total, softmax = elementwise.sum_last(x), elementwise.softmax_last(x)
    torch.testing.assert_close(total, x.sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(softmax, x.softmax(-1))
    for rows in (slice(0, 1), slice(3, 8), slice(39, 40)):
        assert torch.equal(elementwise.sum_last(x[rows]), total[rows])
        assert torch.equal(elementwise.softmax_last(x[rows]), softmax[rows])


def test_sum_leaves_its_argument_alone() -> None:
    x = noise((4, 45))
    before = x.clone()
    elementwise.sum_last(x)
    assert torch.equal(x, before)


def test_empty_tensors_stay_empty() -> None:
    assert elementwise.exp(torch.empty(0, 5)).shape == (0, 5)
    assert elementwise.softmax_last(torch.empty(0, 5)).shape == (0, 5)
    assert elementwise.activate(torch.empty(0, 8), torch.empty(0, 8), "silu").shape == (0, 8)
