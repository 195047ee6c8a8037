"""The table of figures: what is computed agrees with it, is a function of its inputs, and could disagree."""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesaic.audit.figures.check import Checked, check, is_within, tidy
from moesaic.audit.figures.page import page
from moesaic.audit.figures.registry import computations
from moesaic.audit.figures.table import Figure, figures, select
from moesaic.errors import ConfigError

ROOT = Path(__file__).resolve().parents[3]
BY_ID = {row.id: row for row in figures()}
MUST = [row.id for row in figures() if row.verdict == "right" and row.basis in ("recomputed", "simulated")]


@pytest.fixture(scope="module")
def checked() -> dict[str, Checked]:
    return {one.figure.id: one for one in check(figures())}


def test_counts() -> None:
    of = Counter(row.verdict for row in figures())
    assert of == {"right": 204, "wrong": 57, "underspecified": 45, "unverifiable": 23, "paper-reported": 25}
    assert len(BY_ID) == len(figures()) == 354
    assert len(MUST) == 157


def test_every_right_figure_that_follows_from_inputs_is_computed(checked: dict[str, Checked]) -> None:
    assert [name for name in MUST if not checked[name].is_computed] == []


def test_nothing_computed_disagrees(checked: dict[str, Checked]) -> None:
    assert {name: one.value for name, one in checked.items() if one.ok is False} == {}
    assert all((one.ok is None) == (not one.is_computed) for one in checked.values())


def test_every_wrong_figure_has_the_right_value_and_a_reason(checked: dict[str, Checked]) -> None:
    wrong = [one for one in checked.values() if one.figure.verdict == "wrong"]
    assert all(one.value is not None and one.figure.note for one in wrong)
    recomputed = [one for one in wrong if one.figure.basis == "recomputed"]
    assert len(recomputed) == 21
    assert all(one.ok for one in recomputed)
    numeric = [one for one in recomputed if one.figure.tolerance is not None]
    assert numeric
    for one in numeric:  # a wrong value would not have passed for the right one
        assert one.figure.tolerance is not None
        assert not is_within(one.figure.seed_value, one.value, one.figure.tolerance), one.figure.id


def test_what_is_not_computed_says_where_it_is_from(checked: dict[str, Checked]) -> None:
    stated = [one.figure for one in checked.values() if not one.is_computed and one.figure.verdict == "right"]
    assert [row.id for row in stated if row.basis in ("looked-up", "recalled") and not row.note] == []


def test_numbers_without_a_tolerance_are_near_the_table(checked: dict[str, Checked]) -> None:
    """The relation is what counts there; being far off would still be a slip. Not so for rounding errors."""
    far = []
    for one in checked.values():
        row, rounding = one.figure, ("S004-083", "S004-116")
        is_open = row.tolerance is None and row.id not in rounding
        if is_open and _is_flat(one.value) and _is_flat(row.recomputed_value):
            ours, theirs = _flat(one.value), _flat(row.recomputed_value)
            is_near = len(ours) == len(theirs) and is_within(ours, theirs, {"rel": 0.15})
            if not is_near:
                far.append((row.id, ours, theirs))
    assert far == []


def _flat(value: Any) -> list[float]:
    return list(value) if isinstance(value, list) else [value]


def _is_flat(value: Any) -> bool:
    return all(isinstance(one, int | float) and not isinstance(one, bool) for one in _flat(value))


# -- a function of its inputs, not a constant ---------------------------------------------------------------

FIXED = {
    "S002-096": "a count of this project's own list",
    "S004-001": "that two orders agree, whatever the sizes",
}
"""Figures whose value no input moves, and why."""


def test_inputs_are_the_functions_arguments() -> None:
    for name, computation in computations().items():
        signature = inspect.signature(computation.compute)
        signature.bind(**BY_ID[name].inputs)


SLOW = (
    "S004-013", "S004-014", "S004-015", "S004-064", "S004-065", "S004-067", "S004-072", "S004-076",
    "S004-083", "S004-101", "S004-106", "S004-116", "S004-129", "S004-130",
)  # fmt: skip
"""Figures that take longest; their inputs are changed in the long tests."""


@pytest.mark.parametrize("is_slow", [False, pytest.param(True, marks=pytest.mark.long)])
def test_other_inputs_give_other_values(checked: dict[str, Checked], is_slow: bool) -> None:
    """Over every figure that must be computed: some change of an input moves the value."""
    names = [name for name in MUST if (name in SLOW) == is_slow]
    unmoved = {name for name in names if not _moves(BY_ID[name], checked[name].value)}
    assert unmoved == (set() if is_slow else set(FIXED))


def _moves(row: Figure, value: Any) -> bool:
    compute = computations()[row.id].compute
    for inputs in _changed(dict(row.inputs)):
        try:
            if tidy(compute(**inputs)) != value:
                return True
        except ConfigError:
            continue  # the change made no sense, which the code noticed
    return False


OTHERS = {
    "mixtral-8x7b": "qwen3-30b-a3b", "mixtral-8x22b": "qwen3-30b-a3b", "llama-3-70b": "llama-3.1-8b",
    "deepseek-v3": "deepseek-v2", "h100": "a100", "a100": "h20", "h800": "h100", "gb200": "b200",
}  # fmt: skip


def _changed(inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in inputs.items():
        if (other := _other(value)) != value:
            yield {**inputs, name: other}


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 2 * value if value else 1
    if isinstance(value, float):
        return 1.5 * value if value else 0.5
    if isinstance(value, str):
        return OTHERS.get(value, value)
    if isinstance(value, list):
        return [_other(value[0]), *value[1:]]
    if isinstance(value, dict):
        return {key: _other(one) if key != "model" else one for key, one in value.items()}
    return value


# -- what could fail, does ------------------------------------------------------------------------------


def test_another_table_would_be_noticed(checked: dict[str, Checked]) -> None:
    """Every figure with a tolerance disagrees when the table's value is another."""
    for name in MUST:
        row, one = BY_ID[name], checked[name]
        if row.tolerance is None:
            continue
        slack = row.tolerance.get("abs", 0.0)
        moved = _moved(row.recomputed_value, slack)
        assert not is_within(one.value, moved, row.tolerance), name


def _moved(value: Any, slack: float) -> Any:
    if isinstance(value, list):
        return [_moved(one, slack) for one in value]
    if isinstance(value, bool):
        return not value
    return 1.5 * value + 3 * slack + 1e-3


def test_every_relation_can_fail(checked: dict[str, Checked]) -> None:
    """For each relation there is a wrong value of the same kind that it refuses."""
    known = computations()
    never = [
        name
        for name, one in checked.items()
        if one.is_computed and known[name].holds is not None and not _can_fail(known[name].holds, one.value)
    ]
    assert never == []


def _can_fail(holds: Any, value: Any) -> bool:
    return any(_refuses(holds, wrong) for wrong in _wrong(value))


def _refuses(holds: Any, value: Any) -> bool:
    try:
        return not holds(value)
    except (IndexError, TypeError, ValueError):  # not even of the right shape
        return False


def _wrong(value: Any) -> Iterator[Any]:
    if isinstance(value, str):
        yield ""
        return
    if isinstance(value, list):
        yield []
    for factor in (-1e6, 0.0, 1e6):
        if isinstance(value, bool):
            yield not value
        elif isinstance(value, int | float):
            yield value * factor + factor
            yield value * factor + 1
        elif isinstance(value, list):
            yield [next(_wrong(one)) if factor < 0 else one * factor for one in value]
            yield value[::-1]
        elif isinstance(value, dict):
            for changed, one in value.items():
                if isinstance(one, dict):
                    yield {**value, changed: next(_wrong(one))}
                    continue
                yield {**value, changed: not one}
                yield {**value, changed: one * factor}


def test_tolerances() -> None:
    assert is_within(105.75, 106, {"rel": 0.005})
    assert not is_within(105.75, 107, {"rel": 0.005})
    assert is_within(3.2 + 1e-12, 3.2, {"rel": 0})
    assert not is_within([1.0, 2.0], [1.0, 2.1], {"abs": 0.05})
    assert not is_within([1.0], [1.0, 1.0], {"abs": 1})
    assert not is_within("3", 3, {"rel": 0.1})


def test_a_figure_that_disagrees_is_reported() -> None:
    row = BY_ID["S004-036"]
    [one] = check([replace(row, recomputed_value=157)])
    assert one.ok is False
    assert one.to_json()["value"] == 156.0
    assert not math.isclose(one.value, 157)


# -- the table -------------------------------------------------------------------------------------------


def test_names_stand_for_figures() -> None:
    assert [row.id for row in select(["s004-036"])] == ["S004-036"]
    assert len(select(["exercise 1"])) == 7
    assert {row.id[:4] for row in select(["S000"])} == {"S000"}
    assert select(["S004 2.3"]) == select(["2.3"])
    with pytest.raises(ConfigError, match="did you mean S004-036"):
        select(["S004-0036"])


def test_it_is_the_reference_table(shared_data: Path) -> None:
    """Verdicts, what the texts say, tolerances and right numbers are those of the reference."""
    reference = shared_data.parent / "mission" / "figures.json"
    if not reference.is_file():
        pytest.skip(f"{reference} is not there")
    theirs = {row["id"]: row for row in json.loads(reference.read_text())}
    assert set(theirs) == set(BY_ID)
    for name, row in BY_ID.items():
        for key in ("verdict", "basis", "seed_value", "tolerance", "section"):
            assert getattr(row, key) == theirs[name][key], (name, key)
        if row.recomputed_value is not None:
            assert row.recomputed_value == theirs[name]["recomputed_value"], name


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/figures.md").read_text().endswith(page())
