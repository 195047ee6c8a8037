"""What a benchmark sends, and when: token ids or texts, with lengths and arrivals fixed by a seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import ConfigError
from moesaic.spec.workload import TRACE_BLOCK, TraceRow, read_trace

UNIFORM = "uniform random tokens: routing is not realistic (give --prompts FILE for a MoE load that is)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One request to send."""

    prompt: tuple[int, ...] | str
    output_len: int
    at_s: float | None = None  # after the start of the run; None: as soon as a place is free


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests in order, and what they are like."""

    items: tuple[Item, ...]
    name: str
    routing: str  # how realistic the expert load is
    num_dropped: int = 0  # items of the source that were left out


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomLoad:
    """Prompts of one length, of tokens drawn uniformly. Each run has its own: none reads another's cache."""

    num_prompts: int
    input_len: int
    output_len: int
    vocab: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len", "vocab"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")

    def workload(self, run_idx: int) -> Workload:
        """The requests of one run."""
        generator = np.random.default_rng([self.seed, run_idx])
        ids = generator.integers(0, self.vocab, size=(self.num_prompts, self.input_len))
        return Workload(
            items=tuple(Item(prompt=tuple(row), output_len=self.output_len) for row in ids.tolist()),
            name=f"{self.num_prompts} prompts of {self.input_len} tokens, {self.output_len} output tokens",
            routing=UNIFORM,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLoad:
    """Prompts from a file, repeated when there are fewer than asked for."""

    path: Path
    texts: tuple[str, ...]
    num_prompts: int
    output_len: int

    @classmethod
    def read(cls, path: Path, *, num_prompts: int, output_len: int) -> PromptLoad:
        """One prompt a line; lines of a .jsonl file are objects with a `prompt`.

        Raises: ConfigError naming the file and line.
        """
        texts = []
        for number, line in enumerate(_lines(path), 1):
            if path.suffix == ".jsonl":
                text = _object(path, number, line).get("prompt")
                if not isinstance(text, str) or not text:
                    raise ConfigError(f"{path}, line {number}: needs a text `prompt`")
                texts.append(text)
            else:
                texts.append(line)
        return cls(path=path, texts=tuple(texts), num_prompts=num_prompts, output_len=output_len)

    def workload(self, run_idx: int) -> Workload:
        """The requests of one run: the same in each."""
        picked = [self.texts[i % len(self.texts)] for i in range(self.num_prompts)]
        return Workload(
            items=tuple(Item(prompt=text, output_len=self.output_len) for text in picked),
            name=f"{self.num_prompts} prompts from {self.path.name}, {self.output_len} output tokens each",
            routing=f"prompts of {self.path.name}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceLoad:
    """Arrivals, lengths and shared prefixes of a recorded trace; the tokens themselves are random.

    Equal leading hash ids mean equal leading tokens; prompts of a trace without them share nothing.
    """

    path: Path
    rows: tuple[TraceRow, ...]
    vocab: int
    max_model_len: int | None = None  # rows that are longer are left out, and counted
    length_scale: float = 1.0  # lengths and blocks times this
    speed: float = 1.0  # arrivals so many times faster
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("length_scale", "speed"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")

    @classmethod
    def read(cls, path: Path, *, num_prompts: int, **settings: Any) -> TraceLoad:
        """The first `num_prompts` rows of a file.

        Raises: ConfigError naming the file, the line and the field.
        """
        return cls(path=path, rows=read_trace(path, limit=num_prompts), **settings)

    def workload(self, run_idx: int) -> Workload:
        """The requests of one run: arrivals and lengths are the same in each, tokens are not."""
        items = []
        for idx, row in enumerate(self.rows):
            input_len = max(1, round(row.prompt_tokens * self.length_scale))
            output_len = max(1, round(row.output_tokens * self.length_scale))
            if self.max_model_len is not None and input_len + output_len > self.max_model_len:
                continue
            ids = row.hash_ids or tuple(-1 - idx for _ in range(-(-row.prompt_tokens // TRACE_BLOCK)))
            items.append(
                Item(
                    prompt=self._tokens(ids, input_len, run_idx), output_len=output_len,
                    at_s=row.at_s / self.speed,
                )
            )  # fmt: skip
        if not items:
            raise ConfigError(
                f"every row of {self.path.name} is longer than the context of {self.max_model_len} tokens: "
                "give --trace-scale below 1"
            )
        scale = f", lengths times {self.length_scale:g}" if self.length_scale != 1 else ""
        return Workload(
            items=tuple(items),
            name=f"{len(items)} requests of {self.path.name}{scale}, arrivals {self.speed:g} times as fast",
            routing=UNIFORM,
            num_dropped=len(self.rows) - len(items),
        )

    def _tokens(self, hash_ids: Sequence[int], input_len: int, run_idx: int) -> tuple[int, ...]:
        block = max(1, round(TRACE_BLOCK * self.length_scale))
        tokens: list[int] = []
        for hash_id in hash_ids:
            if len(tokens) >= input_len:
                break
            # A prompt without ids has negative ones: its blocks are drawn on from one generator of its own.
            key = [hash_id] if hash_id >= 0 else [-hash_id, len(tokens)]
            generator = np.random.default_rng([self.seed, run_idx, *key])
            tokens += generator.integers(0, self.vocab, size=block).tolist()
        while len(tokens) < input_len:  # rounding of a scaled block
            tokens.append(tokens[len(tokens) % block])
        return tuple(tokens[:input_len])


Load = RandomLoad | PromptLoad | TraceLoad


def with_arrivals(workload: Workload, request_rate: float, seed: int) -> Workload:
    """The same requests, arriving as a Poisson process of `request_rate` per second."""
    if not 0 < request_rate < float("inf"):
        raise ConfigError(f"request-rate must be above 0, got {request_rate}")
    gaps_s = np.random.default_rng(seed).exponential(1 / request_rate, size=len(workload.items))
    times_s = np.cumsum(gaps_s) - gaps_s[0]
    items = tuple(
        Item(prompt=item.prompt, output_len=item.output_len, at_s=float(at_s))
        for item, at_s in zip(workload.items, times_s, strict=True)
    )
    return Workload(
        items=items,
        name=f"{workload.name}, {request_rate:g} requests/s",
        routing=workload.routing,
        num_dropped=workload.num_dropped,
    )


def _lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"{path} is empty: give one prompt or one request a line")
    return lines


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}, line {number}: must be a JSON object")
    return value
