"""A request as the scheduler knows it: token ids, sampling parameters, limits. No text, clock or tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from moesaic.errors import RequestError
from moesaic.spec.experts import IntArray

FinishReason = Literal["stop", "length", "cancelled", "error"]
MAX_LOGPROBS = 20
MAX_STOPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the next token is drawn; every field is checked on construction.

    Raises: RequestError naming the field, the value and the rule.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int | None = None  # None: no limit
    min_p: float = 0.0  # [0, 1]: drop tokens below min_p times the greatest probability
    presence_penalty: float = 0.0  # [-2, 2], over generated tokens
    frequency_penalty: float = 0.0  # [-2, 2], over generated tokens
    repetition_penalty: float = 1.0  # > 0, over prompt and generated tokens
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # None: drawn once when the request arrives, then fixed
    max_tokens: int | None = None  # None: up to the context limit
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()  # handled where text is, outside the loop
    has_stop_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # how many alternatives; 0: only the chosen token's
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, is_low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, is_low_open=True)
        _whole("top_k", self.top_k, 1)
        _whole("max_tokens", self.max_tokens, 0)
        _whole("min_tokens", self.min_tokens, 0)
        _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _whole("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                param="min_tokens",
            )
        if len(self.stop) > MAX_STOPS or any(not text for text in self.stop):
            raise RequestError(f"stop takes up to {MAX_STOPS} strings, none of them empty", param="stop")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed must fit in 64 bits, got {self.seed}", param="seed")
        for token_id, bias in self.logit_bias.items():
            _number(f"logit_bias[{token_id}]", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the arg max is taken, ties to the lowest id."""
        return self.temperature == 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to continue. `n` > 1 becomes n requests with seeds of their own before it gets here."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # resolved: sampling.seed, or drawn at arrival
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0  # lower runs first, as in nice(1)
    arrival_s: float = 0.0
    salt: str = ""  # separates prefix caches of tenants; part of the KV key
    grammar: str | None = None  # JSON schema text that the output must match

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise RequestError(
                "the prompt is empty: give at least one token (an empty text is one only where the tokenizer "
                "puts a BOS token before it)",
                param="prompt",
            )
        if self.grammar is None:
            return
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self.sampling, name):
                raise RequestError(
                    f"{name} and response_format exclude each other: an answer that is complete must end",
                    param=name,
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Logprobs:
    """Natural log probabilities at one position, after temperature 1 and before any filter.

    `top` is descending, ties by id; it holds the alternatives asked for and need not hold the chosen token.
    """

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RequestEvent:
    """What a commit tells the owner of a request."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] | None = None  # complete list, once
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    error: str | None = None
    is_retriable: bool = False  # the error is none of the request's: another engine may answer it
    routes: IntArray | None = None  # [T, num_moe_layers, K] for the tokens of this step, only when traced


def _number(name: str, value: float, low: float, high: float, *, is_low_open: bool = False) -> None:
    ok = math.isfinite(value) and (low < value if is_low_open else low <= value) and value <= high
    if not ok:
        rule = f"{'above' if is_low_open else 'at least'} {low:g} and at most {high:g}"
        raise RequestError(f"{name} must be {rule}, got {value}", param=name.split("[")[0])


def _whole(name: str, value: int | None, low: int, high: int | None = None) -> None:
    if value is None:
        return
    if value < low or (high is not None and value > high):
        rule = f"at least {low}" + (f" and at most {high}" if high is not None else "")
        raise RequestError(f"{name} must be {rule}, got {value}", param=name)
