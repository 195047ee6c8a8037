"""Requests over time: the rows of a recorded trace, and arrivals at a rate. No token, engine or price.

Two published layouts are read, told apart by their first line: JSON lines with `hash_ids` (Mooncake), and CSV
with TIMESTAMP, ContextTokens, GeneratedTokens (Azure).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import ConfigError, nearest
from moesaic.units import format_bytes, format_seconds

TRACE_BLOCK = 512
"""Tokens of one hash id in a trace. Source: kvcache-ai/Mooncake, FAST25-release/README.md."""

JSON_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
CSV_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TRACE_BYTES = 2**30  # guess: some million requests, which are held in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRow:
    """One request: when it arrives, how long prompt and answer are, which prompts begin alike.

    Equal leading `hash_ids` mean equal leading tokens, `TRACE_BLOCK` each. Empty: no prompt is like another.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, *, limit: int | None = None, sort: bool = False) -> tuple[TraceRow, ...]:
    """The rows of a trace, in order of arrival, the first at 0 s; `limit` keeps the first ones.

    Raises: ConfigError naming file, line and field: unknown or missing columns, lengths below 1, times that
            are not numbers, and times out of order unless `sort` says to put them in order; a file that is
            too large, before it is read.
    """
    try:
        size = path.stat().st_size
        if size > MAX_TRACE_BYTES:
            raise ConfigError(
                f"{path}: {format_bytes(size)}; a trace is held in memory, up to "
                f"{format_bytes(MAX_TRACE_BYTES)}. Cut a stretch out of it (head -n 1000000)"
            )
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} cannot be read: not UTF-8 text: {error}") from error
    first = next((line for line in lines if line.strip()), "")
    if not first:
        raise ConfigError(f"{path} is empty: a trace has one request a line")
    if limit is not None and limit < 1:
        raise ConfigError(f"a trace is cut to at least 1 request, got {limit}")
    found: list[tuple[int, TraceRow]] = []
    reader = _json_rows if first.lstrip()[:1] in "{[" else _csv_rows
    for number, row in reader(path, lines):
        if found and not sort:
            if row.at_s < found[-1][1].at_s:
                raise ConfigError(
                    f"{path}, line {number}: arrives {format_seconds(found[-1][1].at_s - row.at_s)} before "
                    f"line {found[-1][0]}; sort the trace, or give --sort"
                )
            if limit is not None and len(found) == limit:
                break
        found.append((number, row))
    if not found:
        raise ConfigError(f"{path} has a heading and no request")
    rows = [row for _, row in found]
    if sort:
        rows.sort(key=lambda row: row.at_s)
    start_s = rows[0].at_s
    return tuple(replace(row, at_s=row.at_s - start_s) for row in rows[:limit])


def poisson(rows: Iterable[TraceRow], rate: float, seed: int) -> tuple[TraceRow, ...]:
    """The same requests, arriving as a Poisson process of `rate` per second.

    Raises: ConfigError for a rate that is not a number above 0.
    """
    if not 0.0 < rate < math.inf:
        raise ConfigError(f"a rate must be a finite number above 0 requests per second, got {rate:g}")
    rows = tuple(rows)
    gaps_s = np.random.default_rng(seed).exponential(1.0 / rate, size=len(rows))
    times_s = np.cumsum(gaps_s) - (gaps_s[0] if len(gaps_s) else 0.0)
    return tuple(replace(row, at_s=float(at_s)) for row, at_s in zip(rows, times_s, strict=True))


def sped_up(rows: Sequence[TraceRow], speed: float) -> tuple[TraceRow, ...]:
    """The same requests, arriving `speed` times as fast.

    Raises: ConfigError for a speed that is not a number above 0.
    """
    if not 0.0 < speed < math.inf:
        raise ConfigError(f"a speed must be a finite number above 0, got {speed:g}")
    return tuple(replace(row, at_s=row.at_s / speed) for row in rows)


def peak_rate(rows: Sequence[TraceRow], window_s: float = 60.0) -> float:
    """Requests per second in the busiest window (of `window_s` from the first arrival on)."""
    counts: dict[int, int] = {}
    for row in rows:
        idx = int(row.at_s // window_s)
        counts[idx] = counts.get(idx, 0) + 1
    return max(counts.values(), default=0) / window_s


def _json_rows(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, TraceRow]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{where}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: must be a JSON object")
        for name in JSON_FIELDS[:3]:
            if name not in value:
                raise ConfigError(f"{where}: has no {name!r}; {nearest(name, map(str, value))}")
        unknown = sorted(set(value) - set(JSON_FIELDS))
        if unknown:
            raise ConfigError(f"{where}: unknown column {unknown[0]!r}; {nearest(unknown[0], JSON_FIELDS)}")
        ids = value.get("hash_ids", [])
        if not isinstance(ids, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in ids):
            raise ConfigError(f"{where}: hash_ids must be whole numbers")
        prompt = _length(value["input_length"], "input_length", where)
        if ids and len(ids) * TRACE_BLOCK < prompt:
            raise ConfigError(
                f"{where}: {prompt} tokens need {-(-prompt // TRACE_BLOCK)} hash_ids of {TRACE_BLOCK}, "
                f"got {len(ids)}"
            )
        yield number, TraceRow(
            at_s=_milliseconds(value["timestamp"], where), prompt_tokens=prompt,
            output_tokens=_length(value["output_length"], "output_length", where), hash_ids=tuple(ids),
        )  # fmt: skip


def _csv_rows(path: Path, lines: Sequence[str]) -> Iterator[tuple[int, TraceRow]]:
    reader = csv.DictReader(lines)
    names = reader.fieldnames or []
    for name in CSV_FIELDS:
        if name not in names:
            raise ConfigError(
                f"{path}: no column {name!r}; its columns are {', '.join(names)}. A trace is JSON lines with "
                f"{', '.join(JSON_FIELDS)}, or CSV with {', '.join(CSV_FIELDS)}"
            )
    unknown = sorted(set(names) - set(CSV_FIELDS))
    if unknown:
        raise ConfigError(f"{path}: unknown column {unknown[0]!r}; {nearest(unknown[0], CSV_FIELDS)}")
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        prompt, output = (_length(row[name], name, where) for name in CSV_FIELDS[1:])
        yield (
            reader.line_num,
            TraceRow(at_s=_date(row["TIMESTAMP"], where), prompt_tokens=prompt, output_tokens=output),
        )


def _length(value: Any, name: str, where: str) -> int:
    try:
        number = -1 if isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        number = -1
    if number < 1 or (isinstance(value, float) and value != number):
        raise ConfigError(f"{where}: {name} must be a whole number of at least 1, got {value!r}")
    return number


def _milliseconds(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ConfigError(f"{where}: timestamp must be milliseconds of at least 0, got {value!r}")
    return value / 1000.0


def _date(text: str | None, where: str) -> float:
    # Seven digits of a second are more than `fromisoformat` takes on Python 3.11.
    head, dot, digits = (text or "").partition(".")
    try:
        whole = datetime.fromisoformat(head)
        part = float(f"0.{digits}") if dot else 0.0
    except ValueError as error:
        raise ConfigError(
            f"{where}: TIMESTAMP must be a date as in 2023-11-16 18:15:46.6805900, got {text!r}"
        ) from error
    return (whole - datetime(1970, 1, 1)).total_seconds() + part
