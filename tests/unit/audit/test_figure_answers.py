"""Exercises, demonstrations, misconceptions and decision tables: each runs, and says what it should."""

from __future__ import annotations

import pytest

from moesaic.audit.figures.answers import NAMED, demo, exercise
from moesaic.audit.figures.decisions import CHECKLIST
from moesaic.audit.figures.exercises import EXERCISES
from moesaic.audit.figures.misconceptions import ON_SERVING, ON_THEORY
from moesaic.audit.figures.sheet import Sheet
from moesaic.audit.figures.table import select
from moesaic.cli.figures_view import render_sheets
from moesaic.errors import ConfigError


def check_sheets(sheets: tuple[Sheet, ...]) -> None:
    assert sheets
    for sheet in sheets:
        assert sheet.rows
        assert all(len(row) == len(sheet.columns) for row in sheet.rows)
        assert not sheet.figures or select(sheet.figures)


@pytest.mark.parametrize("number", sorted(EXERCISES))
def test_exercises(number: int) -> None:
    check_sheets(exercise(number))


@pytest.mark.parametrize("name", sorted(NAMED))
def test_demonstrations_and_tables(name: str) -> None:
    check_sheets(demo(name))


def test_exercise_7_evens_the_cards_and_exercise_4_refuses_the_formula() -> None:
    [sheet] = exercise(7)
    assert [row[1:3] for row in sheet.rows] == [(12, 5.0), (4, 5.0), (2, 5.0), (2, 5.0)]
    [sheet] = exercise(4)
    assert {row[4] for row in sheet.rows} == {"formula (5) needs equal sides"}


def test_every_belief_is_refuted() -> None:
    assert (len(ON_SERVING), len(ON_THEORY)) == (5, 9)
    for sheet in demo("misconceptions"):
        assert all(row[2] is True for row in sheet.rows)


def test_a_demonstration_that_stops_holding_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    from moesaic.audit.figures import traffic

    monkeypatch.setattr(traffic, "all_to_alls", lambda *_: 1)
    rows = {row[0]: row[2] for row in demo("misconceptions")[0].rows}
    assert rows["expert separation costs one exchange a layer"] is False


def test_prefill_is_bound_by_compute_before_decode() -> None:
    [sheet] = exercise(8)
    by_cards = {row[0]: (row[2], row[5]) for row in sheet.rows}
    assert by_cards[32] == (True, False)
    assert by_cards[144] == (True, True)


def test_the_checklist_has_nine_points() -> None:
    assert len(CHECKLIST) == 9


def test_sheets_show_their_figures() -> None:
    text = render_sheets(exercise(2))
    assert "S004-156" in text
    assert "computed: 2496 tokens" in text or "computed: 2,496 tokens" in text


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="did you mean helix"):
        demo("helx")
    with pytest.raises(ConfigError, match="no exercise 12; there are 1 to 9"):
        exercise(12)
