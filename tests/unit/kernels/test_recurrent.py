"""The delta rule and the convolution against plain loops in float64; bits that follow nothing but a row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moesaic.kernels import recurrent
from moesaic.kernels.recurrent import causal_conv, delta_rule
from moesaic.kernels.state_view import StatePlaces, StateRow, StateView

GROUPS, HEADS, KEY, VALUE = 2, 6, 7, 5
CHANNELS, TAPS = 9, 4
LENGTHS = {"a": 11, "b": 1, "c": 6}


class Case:
    """Random inputs of some sequences, and a pool whose slots hold NaN until they are written."""

    def __init__(self, *, num_slots: int = 8, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(3)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.inputs = {
            name: (
                draw(length, GROUPS, KEY),
                draw(length, GROUPS, KEY) * 0.4,
                draw(length, HEADS, VALUE),
                -draw(length, HEADS).exp() * 0.3,
                draw(length, HEADS).sigmoid(),
                draw(length, CHANNELS).to(dtype),
            )
            for name, length in LENGTHS.items()
        }
        self.weight_FX = draw(CHANNELS, TAPS)
        self.states = torch.full((num_slots, HEADS, KEY, VALUE), float("nan"))
        self.tails = torch.full((num_slots, TAPS - 1, CHANNELS), float("nan"), dtype=dtype)

    def view(self, *rows: StateRow) -> StateView:
        return StateView(states=self.states, tails=self.tails, places=StatePlaces.of(rows))

    def step(self, *parts: tuple[str, int, int, int | None, int]) -> dict[str, tuple[Tensor, Tensor]]:
        """Compute (name, start, count, slot read, slot written) of some sequences in one batch, by name."""
        rows, first = [], 0
        for _, _, count, slot_from, slot_to in parts:
            rows.append(StateRow(first_row=first, num_tokens=count, slot_from=slot_from, slot_to=slot_to))
            first += count
        view = self.view(*rows)
        laid = [
            torch.cat([self.inputs[name][i][start : start + count] for name, start, count, _, _ in parts])
            for i in range(6)
        ]
        read = delta_rule(*laid[:5], view)
        mixed = causal_conv(laid[5], self.weight_FX, view)
        sizes = [count for _, _, count, _, _ in parts]
        names = [name for name, *_ in parts]
        return dict(zip(names, zip(read.split(sizes), mixed.split(sizes), strict=True), strict=True))

    def alone(self, name: str) -> tuple[Tensor, Tensor]:
        """One whole sequence with the pool for itself."""
        return Case(dtype=self.tails.dtype).step((name, 0, LENGTHS[name], None, 5))[name]


def plain(case: Case, name: str) -> tuple[Tensor, Tensor]:
    """Both operations as their definitions say, in float64."""
    q, k, v, log_decay, beta, x = (part.double() for part in case.inputs[name])
    q, k = (part.repeat_interleave(HEADS // GROUPS, dim=1) for part in (q, k))
    state, read = torch.zeros(HEADS, KEY, VALUE, dtype=torch.float64), []
    for t in range(len(q)):
        state = state * log_decay[t].exp()[:, None, None]
        change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        read.append(torch.einsum("hkv,hk->hv", state, q[t]))
    padded = torch.cat((torch.zeros(TAPS - 1, CHANNELS, dtype=torch.float64), x))
    weight = case.weight_FX.double()
    mixed = [sum(padded[t + j] * weight[:, j] for j in range(TAPS)) for t in range(len(x))]
    return torch.stack(read), torch.stack(mixed)


@pytest.mark.parametrize("name", LENGTHS)
def test_both_are_what_their_definitions_say(name: str) -> None:
    case = Case()
    for found, expected in zip(case.alone(name), plain(case, name), strict=True):
        assert torch.allclose(found.double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scan_bytes", [1, 2 * 4 * HEADS * KEY * VALUE, 1 << 20])
def test_neighbours_and_their_number_change_no_bit(
    monkeypatch: pytest.MonkeyPatch, scan_bytes: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(recurrent, "SCAN_BYTES", scan_bytes)
    case = Case(dtype=dtype)
    found = case.step(("b", 0, 1, None, 0), ("a", 0, 11, None, 1), ("c", 0, 6, None, 2))
    for name in LENGTHS:
        for ours, alone in zip(found[name], case.alone(name), strict=True):
            assert torch.equal(ours, alone), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(1,) * 11, (2, 9), (3, 1, 7), (10, 1)])
def test_chunks_change_no_bit(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    case = Case(dtype=dtype)
    found: list[tuple[Tensor, Tensor]] = []
    at, slots = 0, (3, 6)
    for count in cuts:
        part = ("a", at, count, slots[0] if at else None, slots[1])
        other = ("c", 0, 6, None, 1)  # a neighbour of another length in each step
        found.append(case.step(*((part, other) if at % 2 else (other, part)))["a"])
        at, slots = at + count, slots[::-1]
    for ours, alone in zip(zip(*found, strict=True), case.alone("a"), strict=True):
        assert torch.equal(torch.cat(ours), alone)


def test_a_step_can_be_run_twice() -> None:
    case = Case()
    case.step(("a", 0, 4, None, 0))
    runs = []
    for _ in range(2):
        found = case.step(("a", 4, 3, 0, 1), ("c", 0, 6, None, 2))
        runs.append((*found["a"], *found["c"], case.states.clone(), case.tails.clone()))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(*runs, strict=True))


def test_only_the_written_slots_change() -> None:
    case = Case()
    case.step(("a", 0, 11, None, 4), ("b", 0, 1, None, 2))
    written = ~case.states.isnan().flatten(1).any(1)
    assert written.nonzero().flatten().tolist() == [2, 4]
    assert torch.equal(written, ~case.tails.isnan().flatten(1).any(1))


def test_a_state_is_never_updated_in_place() -> None:
    with pytest.raises(AssertionError, match="never updated in place"):
        Case().step(("a", 0, 2, 3, 3))


def test_no_rows_are_no_work() -> None:
    case = Case()
    view = case.view()
    empty = [part[:0] for part in case.inputs["a"]]
    assert delta_rule(*empty[:5], view).shape == (0, HEADS, VALUE)
    assert causal_conv(empty[5], case.weight_FX, view).shape == (0, CHANNELS)
    assert case.states.isnan().all()


def test_one_tap_needs_no_tail() -> None:
    case = Case()
    case.tails = torch.zeros(8, 0, CHANNELS)
    view = case.view(StateRow(first_row=0, num_tokens=11, slot_from=None, slot_to=1))
    x_TF = case.inputs["a"][5]
    assert torch.equal(causal_conv(x_TF, case.weight_FX[:, :1], view), x_TF * case.weight_FX[:, 0])
