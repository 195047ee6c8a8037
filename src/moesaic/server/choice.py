"""One sequence's events as text: whole characters, stop strings cut, log probabilities beside their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import MoesaicError
from moesaic.sched.request import FinishReason, Logprobs, Request, RequestEvent
from moesaic.server.problem import GenerationError
from moesaic.text.stop import StopMatcher
from moesaic.text.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # minus infinity, which JSON cannot say; as OpenAI writes it


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenScore:
    """One token with its log probability, as text and bytes."""

    token_id: int
    data: bytes
    logprob: float | None  # None: the first token of a prompt, which nothing predicts
    rank: int | None
    offset: int  # characters of the answer before this token's first byte
    top: tuple[tuple[int, bytes, float], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """What is new of one choice. `scores` go with the text; the last delta has the reason."""

    choice_idx: int
    text: str
    scores: tuple[TokenScore, ...] = ()
    finish_reason: FinishReason | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self.text and not self.scores and self.finish_reason is None


class ChoiceReader:
    """Reads the events of one choice. Deltas joined are the answer; scores are one per generated token."""

    def __init__(
        self, choice_idx: int, request: Request, tokenizer: Tokenizer, *, skip_special_tokens: bool
    ) -> None:
        self.choice_idx = choice_idx
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.prompt_scores: tuple[TokenScore, ...] | None = None
        self.first_token_s: float | None = None
        self._tokenizer = tokenizer
        self._decoder = tokenizer.stream_decoder(
            prompt_ids=request.prompt_ids, skip_special_tokens=skip_special_tokens
        )
        self._skip = skip_special_tokens
        sampling = request.sampling
        self._stops = StopMatcher(sampling.stop, is_included=sampling.has_stop_in_output)
        self._has_stop_in_output = sampling.has_stop_in_output
        self._num_chars = 0  # of the text so far, held back or not
        self._scores: list[TokenScore] = []  # not yet sent

    def read(self, event: RequestEvent, now_s: float) -> Delta:
        """What an event adds.

        Raises: GenerationError when the engine gave up on the request.
        """
        if event.finish_reason in ("error", "cancelled"):
            raise GenerationError(
                f"generation failed: {event.error or 'the engine cancelled the request'}; "
                f"{self.num_tokens} tokens were made"
            )
        if event.num_cached_tokens:
            self.num_cached_tokens = event.num_cached_tokens
        if event.prompt_logprobs is not None:
            self.prompt_scores = self._score_prompt(event.prompt_logprobs)
        if event.token_ids and self.first_token_s is None:
            self.first_token_s = now_s
        text = ""
        logprobs: Sequence[Logprobs | None] = event.logprobs or [None] * len(event.token_ids)
        for token_id, entry in zip(event.token_ids, logprobs, strict=True):
            self.num_tokens += 1
            if entry is not None:
                self._scores.append(self._score(token_id, entry, self._num_chars))
            # An end token is no text, unless it was asked for as a stop.
            if token_id != event.stop_token_id or self._has_stop_in_output:
                piece = self._decoder.feed(token_id)
                self._num_chars += len(piece)
                text += self._stops.feed(piece)
            if self._stops.is_stopped:
                return self._ended(text, "stop")
        if event.finish_reason is not None:
            text += self._stops.feed(self._decoder.finish())
            reason = "stop" if self._stops.is_stopped else event.finish_reason
            return self._ended(text + self._stops.finish(), reason)
        return self._delta(text)

    def empty_end(self) -> Delta:
        """The answer to max_tokens 0, for which the engine is not asked."""
        return self._ended("", "length")

    def _ended(self, text: str, reason: FinishReason) -> Delta:
        self.finish_reason = reason
        return self._delta(text, reason)

    def _delta(self, text: str, reason: FinishReason | None = None) -> Delta:
        scores: tuple[TokenScore, ...] = ()
        if text or reason is not None:
            scores, self._scores = tuple(self._scores), []
        return Delta(choice_idx=self.choice_idx, text=text, scores=scores, finish_reason=reason)

    def _score(self, token_id: int, entry: Logprobs | None, offset: int) -> TokenScore:
        token_bytes = self._tokenizer.token_bytes
        top = () if entry is None else tuple((i, token_bytes(i), _finite(value)) for i, value in entry.top)
        return TokenScore(
            token_id=token_id,
            data=token_bytes(token_id),
            logprob=None if entry is None else _finite(entry.logprob),
            rank=None if entry is None else entry.rank,
            offset=offset,
            top=top,
        )

    def _score_prompt(self, entries: Sequence[Logprobs | None]) -> tuple[TokenScore, ...]:
        if len(entries) != len(self.request.prompt_ids):
            raise MoesaicError(
                f"{len(entries)} prompt log probabilities for {len(self.request.prompt_ids)} tokens"
            )
        decoder = self._tokenizer.stream_decoder(skip_special_tokens=self._skip)
        found, num_chars = [], 0
        for token_id, entry in zip(self.request.prompt_ids, entries, strict=True):
            found.append(self._score(token_id, entry, num_chars))
            num_chars += len(decoder.feed(token_id))
        return tuple(found)


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)
