"""The table of combinations: what it refuses, `Layout` and `not_runnable` refuse in the same words."""

from __future__ import annotations

import pytest

from moesaic.errors import ConfigError
from moesaic.spec.deployment import Grid, Layout
from moesaic.spec.layout_rules import (
    DISPATCHERS,
    FUSED_CHUNKS,
    FUSED_SLICES,
    LOCAL_CHUNKS,
    LOCAL_SLICES,
    NOT_BUILT,
    SLICE_RETURNS,
    Dispatcher,
    LayoutCell,
    refusals,
)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_a_dispatcher_runs_or_says_what_is_missing(dispatcher: Dispatcher) -> None:
    found = refusals(LayoutCell(dispatcher=dispatcher, num_micro_batches=2))
    expected = [NOT_BUILT[dispatcher]] if dispatcher in NOT_BUILT else []
    assert [one.reason for one in found] == expected


def test_a_fused_layer_is_one_native_call_on_each_rank() -> None:
    assert not refusals(LayoutCell(dispatcher="local", is_fused=True))
    assert not refusals(LayoutCell(dispatcher="shared_memory", is_fused=True, num_micro_batches=2))
    (slow,) = refusals(LayoutCell(dispatcher="local", is_fused=True, is_native=False))
    assert not slow.is_contradiction
    (sent,) = refusals(LayoutCell(dispatcher="exchange", is_fused=True))
    assert sent.is_contradiction
    ranks = Grid(axes={"dp": 2}, ranks=(0, 1))
    experts = Grid(axes={"ep": 2}, ranks=(0, 1))
    with pytest.raises(ConfigError, match=sent.reason):
        Layout(attention=ranks, experts=experts, dispatcher="exchange", is_fused=True)


@pytest.mark.parametrize("dispatcher", [one for one in DISPATCHERS if one not in NOT_BUILT])
def test_rows_go_in_chunks_where_rows_are_sent_by_python(dispatcher: Dispatcher) -> None:
    found = refusals(LayoutCell(dispatcher=dispatcher, num_chunks=2))
    assert [one.reason for one in found] == ([LOCAL_CHUNKS] if dispatcher == "local" else [])
    if dispatcher == "shared_memory":
        (fused,) = refusals(LayoutCell(dispatcher=dispatcher, num_chunks=2, is_fused=True))
        assert (fused.field, fused.reason, fused.is_contradiction) == ("num_chunks", FUSED_CHUNKS, True)


def test_slices_of_experts_are_joined_choice_by_choice_in_python() -> None:
    for dispatcher in ("gathered", "exchange", "two_level", "shared_memory"):
        assert not refusals(LayoutCell(dispatcher=dispatcher, has_slices=True))
    cases = (
        (LayoutCell(dispatcher="local", is_fused=True, has_slices=True), "has_slices", LOCAL_SLICES),
        (LayoutCell(dispatcher="shared_memory", is_fused=True, has_slices=True), "is_fused", FUSED_SLICES),
        (LayoutCell(dispatcher="exchange", has_slices=True, returns="subtrees"), "returns", SLICE_RETURNS),
    )
    for cell, field, reason in cases:
        (found,) = refusals(cell)
        assert (found.field, found.reason, found.is_contradiction) == (field, reason, False)


def test_every_reason_is_given_at_once() -> None:
    cell = LayoutCell(dispatcher="remote", is_fused=True, has_expert_tiers=True, has_graph=True)
    assert [one.field for one in refusals(cell)] == [
        "dispatcher",
        "is_fused",
        "has_expert_tiers",
        "has_graph",
    ]
