"""The events of one request as text: whole characters, up to the first stop string. Knows no vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

from moesaic.sched.request import FinishReason, RequestEvent, SamplingParams
from moesaic.text.decoder import StreamDecoder
from moesaic.text.stop import StopMatcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """What one event adds to an answer."""

    text: str  # safe to show
    offsets: tuple[
        int, ...
    ]  # per token taken: characters before its text; none for tokens after a stop string
    finish_reason: FinishReason | None
    stop_token_id: int | None  # the token that ended it; None after a stop string


class AnswerText:
    """Reads the events of one request. Additions joined are the answer."""

    def __init__(self, sampling: SamplingParams, decoder: StreamDecoder | None) -> None:
        """Start an answer; without a decoder there is no text, so no stop string is found."""
        self.num_shown = 0  # characters given out
        self._num_chars = 0  # characters of the tokens so far, shown, held back or cut off
        self._decoder = decoder
        self._stops = StopMatcher(sampling.stop, is_included=sampling.has_stop_in_output)
        self._has_stop_in_output = sampling.has_stop_in_output

    @property
    def is_cut(self) -> bool:
        """Whether a stop string ended the text: what follows `num_shown` is not part of the answer."""
        return self._stops.is_stopped

    def read(self, event: RequestEvent) -> Addition:
        """The text that this event makes safe to show; nothing may follow a finish reason."""
        text, offsets = "", []
        for token_id in event.token_ids:
            offsets.append(self._num_chars)
            # An end token is no text, unless it was asked for as a stop.
            if self._decoder is not None and (token_id != event.stop_token_id or self._has_stop_in_output):
                text += self._feed(self._decoder.feed(token_id))
            if self.is_cut:
                break
        if event.finish_reason is not None and self._decoder is not None and not self.is_cut:
            text += self._feed(self._decoder.finish()) + self._stops.finish()
        self.num_shown += len(text)
        return Addition(
            text=text,
            offsets=tuple(offsets),
            finish_reason="stop" if self.is_cut else event.finish_reason,
            stop_token_id=None if self.is_cut else event.stop_token_id,
        )

    def _feed(self, piece: str) -> str:
        self._num_chars += len(piece)
        return self._stops.feed(piece)
