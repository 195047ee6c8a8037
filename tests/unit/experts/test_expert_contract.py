"""The values that cross the seam keep their fields: what a dispatcher needs beyond them is private to it."""

from __future__ import annotations

import dataclasses
import inspect
import typing

import pytest

from moesaic.experts import contract
from moesaic.experts.blob import ExpertBlob

FIELDS = {
    contract.Tag: ["epoch", "plan_version", "step_id", "micro_batch", "chunk", "layer_idx"],
    contract.Routing: ["experts_TK", "weights_TK"],
    contract.ExpertBatch: ["tag", "x_RD", "row_J", "offsets_L1", "weight_J", "num_jobs", "hint_L"],
    contract.Wave: ["ready", "slots", "table", "site"],
    ExpertBlob: ["key", "format", "data", "digest"],
}

VERBS = {
    contract.TokenSide: ["send", "collect"],
    contract.ExpertSide: ["next", "receive", "reply"],
    contract.RoutedExperts: ["forward"],
    contract.ExpertStore: ["adopt", "waves", "prefetch"],
}


@pytest.mark.parametrize("value", FIELDS, ids=lambda value: value.__name__)
def test_values_have_these_fields_and_no_defaults(value: type) -> None:
    fields = dataclasses.fields(value)
    assert [field.name for field in fields] == FIELDS[value]
    assert all(field.default is dataclasses.MISSING for field in fields), "a default is an option that hides"
    assert all(field.default_factory is dataclasses.MISSING for field in fields)


def test_a_ticket_shows_only_what_it_waits_for() -> None:
    assert list(typing.get_type_hints(contract.Ticket)) == ["returned"]


@pytest.mark.parametrize("protocol", VERBS, ids=lambda protocol: protocol.__name__)
def test_protocols_have_these_verbs(protocol: type) -> None:
    verbs = [name for name, _ in inspect.getmembers(protocol, inspect.isfunction) if not name.startswith("_")]
    assert sorted(verbs) == sorted(VERBS[protocol])
