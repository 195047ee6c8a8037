"""The events of one request, written down: tokens, and their text up to a stop string."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moesaic.sched.request import FinishReason, Logprobs, Request, RequestEvent
from moesaic.spec.experts import IntArray
from moesaic.text.answer import AnswerText
from moesaic.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Completion:
    """One answer to one prompt."""

    prompt_idx: int
    choice_idx: int  # 0 .. n - 1
    prompt_ids: tuple[int, ...]
    text: str  # empty without a tokenizer
    token_ids: tuple[int, ...]  # a stop token included
    finish_reason: FinishReason
    stop_token_id: int | None  # the token that ended it; None after a stop string
    logprobs: tuple[Logprobs, ...]  # one per token, when asked for
    prompt_logprobs: tuple[Logprobs | None, ...] | None
    num_cached_tokens: int
    routes: IntArray | None  # [T, num_moe_layers, K] of every token computed, when the engine traces
    error: str | None


@dataclass(slots=True, eq=False)
class Transcript:
    """Takes a request's events. Without a tokenizer there is no text, so no stop string is found."""

    request: Request
    prompt_idx: int
    choice_idx: int
    tokenizer: Tokenizer | None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    _pieces: list[str] = field(default_factory=list)
    _token_ids: list[int] = field(default_factory=list)
    _logprobs: list[Logprobs] = field(default_factory=list)
    _prompt_logprobs: tuple[Logprobs | None, ...] | None = None
    _routes: list[IntArray] = field(default_factory=list)
    _text: AnswerText = field(init=False)

    def __post_init__(self) -> None:
        request, tokenizer = self.request, self.tokenizer
        decoder = None if tokenizer is None else tokenizer.stream_decoder(prompt_ids=request.prompt_ids)
        self._text = AnswerText(request.sampling, decoder)

    def add(self, event: RequestEvent) -> str:
        """The text that this event makes safe to show. Once there is a finish reason, nothing is taken."""
        if self.finish_reason is not None:
            return ""
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        if event.routes is not None:
            self._routes.append(event.routes)
        added = self._text.read(event)
        num_taken = len(added.offsets)
        self._token_ids += event.token_ids[:num_taken]
        self._logprobs += event.logprobs[:num_taken]
        self.finish_reason, self.stop_token_id = added.finish_reason, added.stop_token_id
        self.error = event.error
        self._pieces.append(added.text)
        return added.text

    def completion(self) -> Completion:
        """The whole; its finish reason must have come."""
        assert self.finish_reason is not None, f"request {self.request.request_id} is not finished"
        return Completion(
            prompt_idx=self.prompt_idx,
            choice_idx=self.choice_idx,
            prompt_ids=self.request.prompt_ids,
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason,
            stop_token_id=self.stop_token_id,
            logprobs=tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            routes=np.concatenate(self._routes) if self._routes else None,
            error=self.error,
        )
