"""Traces as rows: two layouts, what is refused and where, arrivals at a rate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesaic.errors import ConfigError
from moesaic.spec.workload import peak_rate, poisson, read_trace, sped_up

GOOD = {"timestamp": 500, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]}


def jsonl(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def azure(tmp_path: Path, *lines: str, head: str = "TIMESTAMP,ContextTokens,GeneratedTokens") -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return path


def test_json_rows_start_at_zero_and_keep_their_prefixes(tmp_path: Path) -> None:
    first, second = read_trace(jsonl(tmp_path, GOOD, "", {**GOOD, "timestamp": 1250, "hash_ids": [0, 9]}))
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.hash_ids) == (0.0, 600, 7, (0, 4))
    assert (second.at_s, second.hash_ids) == (0.75, (0, 9))


def test_csv_rows_have_seven_digits_of_a_second(tmp_path: Path) -> None:
    path = azure(tmp_path, "2023-11-16 18:15:46.6805900,374,44", "2023-11-16 18:15:50.9951690,396,109")
    first, second = read_trace(path)
    assert (first.at_s, first.prompt_tokens, first.output_tokens, first.hash_ids) == (0.0, 374, 44, ())
    assert second.at_s == pytest.approx(4.314579, abs=1e-6)


def test_times_out_of_order_are_refused_with_the_line_and_sorted_when_asked(tmp_path: Path) -> None:
    path = jsonl(tmp_path, {**GOOD, "timestamp": 2000}, {**GOOD, "timestamp": 1000, "output_length": 3})
    with pytest.raises(ConfigError, match=r"line 2: arrives 1.00 s before line 1; .*--sort"):
        read_trace(path)
    assert [(row.at_s, row.output_tokens) for row in read_trace(path, sort=True)] == [(0.0, 3), (1.0, 7)]


def test_the_first_rows_are_those_that_arrive_first(tmp_path: Path) -> None:
    rows = [{**GOOD, "timestamp": at, "output_length": at + 1} for at in (30, 10, 20)]
    assert [row.output_tokens for row in read_trace(jsonl(tmp_path, *rows), sort=True, limit=2)] == [11, 21]
    with pytest.raises(ConfigError, match="at least 1 request, got 0"):
        read_trace(jsonl(tmp_path, *rows), limit=0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**GOOD, "input_length": 0}, "line 2: input_length must be a whole number of at least 1, got 0"),
        ({**GOOD, "output_length": -4}, "output_length must be a whole number of at least 1, got -4"),
        ({**GOOD, "input_length": 1.5}, "input_length must be a whole number"),
        ({**GOOD, "input_length": True}, "input_length must be a whole number"),
        ({**GOOD, "timestamp": -1}, "timestamp must be milliseconds of at least 0"),
        ({**GOOD, "timestamp": "soon"}, "timestamp must be milliseconds"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp must be milliseconds"),
        ({**GOOD, "input_lenght": 3}, "unknown column 'input_lenght'; did you mean input_length?"),
        ({"timestamp": 1, "input_length": 1}, "has no 'output_length'"),
        ({**GOOD, "input_length": 2000}, "2000 tokens need 4 hash_ids of 512, got 2"),
        ({**GOOD, "hash_ids": ["a"]}, "hash_ids must be whole numbers"),
        ("[1]", "must be a JSON object"),
        ("{", "not JSON"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        read_trace(jsonl(tmp_path, GOOD, row))


def test_bad_columns_of_a_table_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no column 'TIMESTAMP'; its columns are when, ContextTokens"):
        read_trace(azure(tmp_path, "1,2,3", head="when,ContextTokens,GeneratedTokens"))
    with pytest.raises(ConfigError, match="unknown column 'model'"):
        read_trace(azure(tmp_path, "1,2,3,x", head="TIMESTAMP,ContextTokens,GeneratedTokens,model"))
    with pytest.raises(ConfigError, match="line 2: TIMESTAMP must be a date"):
        read_trace(azure(tmp_path, "yesterday,2,3"))
    with pytest.raises(ConfigError, match="a heading and no request"):
        read_trace(azure(tmp_path))


def test_a_trace_larger_than_memory_is_refused_unread(tmp_path: Path) -> None:
    path = jsonl(tmp_path, GOOD)
    with path.open("r+b") as stream:
        stream.truncate(10 * 2**30)  # sparse
    with pytest.raises(ConfigError, match=r"10.7 GB; a trace is held in memory, up to 1.07 GB. Cut"):
        read_trace(path)


def test_no_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        read_trace(tmp_path / "empty.jsonl")


def test_arrivals(tmp_path: Path) -> None:
    rows = read_trace(jsonl(tmp_path, *[{**GOOD, "timestamp": 1000 * at} for at in range(120)]))
    assert peak_rate(rows) == 1.0
    assert peak_rate(sped_up(rows, 2.0)) == 2.0
    made = poisson(rows, 4.0, seed=1)
    assert made == poisson(rows, 4.0, seed=1) != poisson(rows, 4.0, seed=2)
    assert made[0].at_s == 0.0
    assert made[-1].at_s / (len(made) - 1) == pytest.approx(0.25, rel=0.3)
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="above 0"):
            poisson(rows, rate, seed=0)
        with pytest.raises(ConfigError, match="above 0"):
            sped_up(rows, rate)
