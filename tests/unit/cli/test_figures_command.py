"""`moesaic figures`: what it prints, as text and JSON, and when it fails."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from moesaic.audit.figures import table
from moesaic.cli.main import build_app
from moesaic.errors import ConfigError

RUNNER = CliRunner()


def run(*arguments: str) -> tuple[int, str]:
    done = RUNNER.invoke(build_app("figures"), ["figures", *arguments])
    if isinstance(done.exception, ConfigError):
        raise done.exception
    return done.exit_code, done.stdout


def test_one_figure_as_text() -> None:
    code, text = run("S004-036")
    assert code == 0
    assert "S004, 2.4" in text
    assert "says 156 tokens; computed: 156 tokens" in text
    assert "1 figure, 1 computed here" in text


def test_wrong_ones_have_the_right_value_and_why() -> None:
    code, text = run("--wrong", "S003")
    assert code == 0
    assert "S003-017" in text
    assert "right: 131.42 GiB" in text
    assert "two units mixed" in text
    assert "S003-002" not in text


def test_json_keys() -> None:
    code, text = run("S002-010", "S002-104", "S004-011", "--json")
    found = json.loads(text)
    assert code == 0
    keys = ["id", "verdict", "basis", "seed_value", "value", "ok"]
    assert [list(one)[:6] for one in found] == [keys] * 3
    computed, stated, paper = found
    assert (computed["value"], computed["ok"]) == (6144, True)
    assert stated["value"].startswith("A. Q. Jiang")
    assert stated["ok"] is None
    assert (paper["value"], paper["ok"]) == (None, None)


def test_a_value_that_disagrees_ends_with_3(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(
        replace(row, recomputed_value=157) if row.id == "S004-036" else row for row in table.figures()
    )
    monkeypatch.setattr(table, "figures", lambda: rows)
    code, text = run("S004-036")
    assert code == 3
    assert "DISAGREES" in text


def test_one_thing_at_a_time() -> None:
    with pytest.raises(ConfigError, match="one of them"):
        run("S004", "--exercise", "1")
    with pytest.raises(ConfigError, match="no exercise 0"):
        run("--exercise", "0")


def test_an_exercise_as_json() -> None:
    code, text = run("--exercise", "1", "--json")
    assert code == 0
    assert json.loads(text)[0]["rows"][0] == {"batch": 1, "experts touched": 4.0, "tokens per expert": 0.0625}


def test_a_demonstration_shows_its_table_and_its_figures() -> None:
    _, text = run("--demo", "cost")
    assert "Mixtral 8x22B ms" in text
    assert "S004-029" in text
