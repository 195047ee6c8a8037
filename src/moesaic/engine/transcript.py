"""The events of one request, written down: tokens, and their text up to a stop string."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moesaic.sched.request import FinishReason, Logprobs, Request, RequestEvent
from moesaic.spec.experts import IntArray
from moesaic.text.decoder import StreamDecoder
from moesaic.text.stop import StopMatcher
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
    _stops: StopMatcher = field(init=False)
    _decoder: StreamDecoder | None = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self._stops = StopMatcher(sampling.stop, is_included=sampling.has_stop_in_output)
        self._decoder = (
            None
            if self.tokenizer is None
            else self.tokenizer.stream_decoder(prompt_ids=self.request.prompt_ids)
        )

    def add(self, event: RequestEvent) -> str:
        """The text that this event makes safe to show. Once there is a finish reason, nothing is taken."""
        if self.finish_reason is not None:
            return ""
        self.num_cached_tokens = max(self.num_cached_tokens, event.num_cached_tokens)
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        if event.routes is not None:
            self._routes.append(event.routes)
        shown = ""
        for i, token_id in enumerate(event.token_ids):
            self._token_ids.append(token_id)
            self._logprobs.extend(event.logprobs[i : i + 1])
            if token_id == event.stop_token_id and not self.request.sampling.has_stop_in_output:
                continue
            shown += self._stops.feed(self._decoder.feed(token_id)) if self._decoder is not None else ""
            if self._stops.is_stopped:
                self.finish_reason = "stop"
                break
        if self.finish_reason is None and event.finish_reason is not None:
            self.finish_reason, self.stop_token_id = event.finish_reason, event.stop_token_id
            self.error = event.error
            shown += self._finish_text()
        self._pieces.append(shown)
        return shown

    def _finish_text(self) -> str:
        if self._decoder is None:
            return ""
        shown = self._stops.feed(self._decoder.finish())
        if self._stops.is_stopped:
            self.finish_reason, self.stop_token_id = "stop", None
            return shown
        return shown + self._stops.finish()

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
