"""One sequence's events as text: whole characters, stop strings cut, log probabilities beside their text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import MoesaicError, RequestError
from moesaic.sched.request import FinishReason, Logprobs, Request, RequestEvent
from moesaic.server.problem import EngineLost, GenerationError
from moesaic.text.answer import AnswerText
from moesaic.text.grammar import UNUSABLE
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
    """Reads the events of one choice. Deltas joined are the answer, and their scores those of its tokens.

    A token that a stop string cuts in two has a score, those behind it have none.
    """

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
        decoder = tokenizer.stream_decoder(
            prompt_ids=request.prompt_ids, skip_special_tokens=skip_special_tokens
        )
        self._skip = skip_special_tokens
        self._text = AnswerText(request.sampling, decoder)
        self._scores: list[TokenScore] = []  # not yet sent

    def read(self, event: RequestEvent, now_s: float) -> Delta:
        """What an event adds.

        Raises: GenerationError when the engine gave up on the request; RequestError when it did because the
                schema turned out to be too complex to follow.
        """
        if event.finish_reason in ("error", "cancelled"):
            self.finish_reason = event.finish_reason
            reason = event.error or "the engine cancelled the request"
            if reason.startswith(UNUSABLE):
                raise RequestError(f"{reason} (tokens made: {self.num_tokens})", param="response_format")
            kind = EngineLost if event.is_retriable else GenerationError
            raise kind(f"generation failed: {reason} (tokens made: {self.num_tokens})")
        if event.num_cached_tokens:
            self.num_cached_tokens = event.num_cached_tokens
        if event.prompt_logprobs is not None:
            self.prompt_scores = self._score_prompt(event.prompt_logprobs)
        if event.token_ids and self.first_token_s is None:
            self.first_token_s = now_s
        added = self._text.read(event)
        self.num_tokens += len(added.offsets)
        self._scores += map(self._score, event.token_ids, event.logprobs, added.offsets)
        self.finish_reason = added.finish_reason
        return self._delta(added.text)

    def empty_end(self) -> Delta:
        """The answer to max_tokens 0, for which the engine is not asked."""
        self.finish_reason = "length"
        return self._delta("")

    def _delta(self, text: str) -> Delta:
        """New text with the scores of its tokens: those that begin in what is shown.

        At the end the rest goes too, such as an end token's, unless a stop string cut it off.
        """
        num_due = len(self._scores)
        if self.finish_reason is None or self._text.is_cut:
            num_due = sum(score.offset < self._text.num_shown for score in self._scores)
        due, self._scores = tuple(self._scores[:num_due]), self._scores[num_due:]
        return Delta(choice_idx=self.choice_idx, text=text, scores=due, finish_reason=self.finish_reason)

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
