"""Bodies of answers, in the shape of the OpenAI API, and how they are made from deltas."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel

from moesaic.server.choice import ChoiceReader, Delta, TokenScore
from moesaic.server.job import Job


class PromptTokensDetails(BaseModel):
    """Of the prompt tokens, those found in the prefix cache."""

    cached_tokens: int


class Usage(BaseModel):
    """Tokens of one request: each prompt once, whatever n; all answers, end tokens included."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Log probabilities as parallel lists. A token that is not whole UTF-8 is written `bytes:\\\\xe4`."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChatTopLogprob(BaseModel):
    """One alternative."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(ChatTopLogprob):
    """One token and the most likely ones in its place."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(BaseModel):
    """Log probabilities of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(BaseModel):
    """One token in a prompt's log probabilities."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(BaseModel):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ChatAnswer(BaseModel):
    """The message of an answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatDelta(BaseModel):
    """What is new of a message."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str


class ChatChunkChoice(BaseModel):
    """What is new of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class Reply(BaseModel):
    """How every answer begins."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class Completion(Reply):
    """The answer of /v1/completions, and each chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatCompletion(Reply):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatChunk(Reply):
    """One chunk of a chat stream."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ReplyMaker:
    """Makes the answer to one job."""

    def __init__(
        self, job: Job, readers: Sequence[ChoiceReader], *, model_name: str, fingerprint: str
    ) -> None:
        self._job = job
        self._readers = readers
        self._head: dict[str, Any] = {
            "id": job.job_id,
            "created": job.created_s,
            "model": model_name,
            "system_fingerprint": fingerprint,
        }
        self._started: set[int] = set()  # choices whose echo or role was sent
        self._offsets = [len(job.prompt_of(i).text) if job.has_echo else 0 for i in range(len(job.requests))]

    def full(self, deltas: Iterable[Delta]) -> str:
        """The whole answer at once, as JSON; prompt_logprobs, which OpenAI has not, only when asked for."""
        reply = self._full(deltas)
        if self._job.has_prompt_logprobs:
            return reply.model_dump_json()
        hidden: dict[str, Any] = {"prompt_logprobs": True, "choices": {"__all__": {"prompt_logprobs"}}}
        return reply.model_dump_json(exclude=hidden)

    def _full(self, deltas: Iterable[Delta]) -> Completion | ChatCompletion:
        texts: list[list[str]] = [[] for _ in self._readers]
        scores: list[list[TokenScore]] = [[] for _ in self._readers]
        for delta in deltas:
            texts[delta.choice_idx].append(delta.text)
            scores[delta.choice_idx] += delta.scores
        if self._job.kind == "chat":
            return self._full_chat(texts, scores)
        choices = []
        for reader, pieces, found in zip(self._readers, texts, scores, strict=True):
            i = reader.choice_idx
            choices.append(
                CompletionChoice(
                    index=i,
                    text=self._echo(i) + "".join(pieces),
                    logprobs=self._completion_logprobs(reader, found, has_prompt=self._job.has_echo),
                    finish_reason=reader.finish_reason,
                    prompt_logprobs=self._prompt_logprobs(reader),
                )
            )
        return Completion(**self._head, choices=choices, usage=self.usage())

    def chunk(self, delta: Delta) -> Completion | ChatChunk:
        """The chunk of one delta."""
        i = delta.choice_idx
        reader, is_first = self._readers[i], i not in self._started
        self._started.add(i)
        tail: dict[str, Any] = {"usage": None} if self._job.has_stream_usage else {}
        if self._job.kind == "chat":
            said: dict[str, Any] = {"role": "assistant"} if is_first else {}
            if delta.text or is_first:
                said["content"] = delta.text
            choice = ChatChunkChoice(
                index=i,
                delta=ChatDelta(**said),
                logprobs=self._chat_logprobs(reader, delta.scores),
                finish_reason=delta.finish_reason,
            )
            return ChatChunk(**self._head, object="chat.completion.chunk", choices=[choice], **tail)
        has_prompt = is_first and self._job.has_echo
        text_choice = CompletionChoice(
            index=i,
            text=(self._echo(i) if is_first else "") + delta.text,
            logprobs=self._completion_logprobs(reader, delta.scores, has_prompt=has_prompt),
            finish_reason=delta.finish_reason,
        )
        return Completion(**self._head, object="text_completion", choices=[text_choice], **tail)

    def usage_chunk(self) -> Completion | ChatChunk:
        """The last chunk of a stream that was asked for its usage: it has no choices."""
        if self._job.kind == "chat":
            return ChatChunk(**self._head, object="chat.completion.chunk", choices=[], usage=self.usage())
        return Completion(**self._head, object="text_completion", choices=[], usage=self.usage())

    def usage(self) -> Usage:
        """Tokens so far."""
        num_prompt = sum(len(prompt.ids) for prompt in self._job.prompts)
        num_output = sum(reader.num_tokens for reader in self._readers)
        first_of_each = self._readers[:: self._job.num_choices]
        num_cached = sum(reader.num_cached_tokens for reader in first_of_each)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )

    def notes(self) -> dict[str, Any]:
        """Figures for the log."""
        usage = self.usage()
        return {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.prompt_tokens_details.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "finish": ",".join(sorted({reader.finish_reason or "cancelled" for reader in self._readers})),
        }

    def _full_chat(self, texts: list[list[str]], scores: list[list[TokenScore]]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=reader.choice_idx,
                message=ChatAnswer(content="".join(pieces)),
                logprobs=self._chat_logprobs(reader, found),
                finish_reason=str(reader.finish_reason),
            )
            for reader, pieces, found in zip(self._readers, texts, scores, strict=True)
        ]
        return ChatCompletion(
            **self._head,
            choices=choices,
            usage=self.usage(),
            prompt_logprobs=self._prompt_logprobs(self._readers[0]),
        )

    def _echo(self, choice_idx: int) -> str:
        return self._job.prompt_of(choice_idx).text if self._job.has_echo else ""

    def _completion_logprobs(
        self, reader: ChoiceReader, scores: Sequence[TokenScore], *, has_prompt: bool
    ) -> CompletionLogprobs | None:
        if reader.request.sampling.logprobs is None:
            return None
        shift = self._offsets[reader.choice_idx]
        rows = [(score, score.offset) for score in (reader.prompt_scores or () if has_prompt else ())]
        rows += [(score, score.offset + shift) for score in scores]
        num_top = reader.request.sampling.logprobs
        return CompletionLogprobs(
            tokens=[_name(score.data) for score, _ in rows],
            token_logprobs=[score.logprob for score, _ in rows],
            top_logprobs=[_named_top(score, num_top) for score, _ in rows],
            text_offset=[offset for _, offset in rows],
        )

    def _chat_logprobs(self, reader: ChoiceReader, scores: Sequence[TokenScore]) -> ChatLogprobs | None:
        if reader.request.sampling.logprobs is None:
            return None
        return ChatLogprobs(content=[_chat_entry(score) for score in scores if score.logprob is not None])

    def _prompt_logprobs(self, reader: ChoiceReader) -> PromptLogprobs | None:
        if not self._job.has_prompt_logprobs or reader.prompt_scores is None:
            return None
        return [dict(_prompt_entries(score)) or None for score in reader.prompt_scores]


def _name(data: bytes) -> str:
    """A token as text, so that different bytes have different names."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _named_top(score: TokenScore, num_top: int) -> dict[str, float] | None:
    """The most likely tokens by name, and the chosen one in any case."""
    if score.logprob is None:
        return None
    found = {_name(data): value for _, data, value in reversed(score.top[:num_top])}
    return {**dict(reversed(found.items())), _name(score.data): score.logprob}


def _chat_entry(score: TokenScore) -> ChatTokenLogprob:
    top = [
        ChatTopLogprob(token=data.decode("utf-8", "replace"), logprob=value, bytes=list(data))
        for _, data, value in score.top
    ]
    return ChatTokenLogprob(
        token=score.data.decode("utf-8", "replace"),
        logprob=score.logprob or 0.0,
        bytes=list(score.data),
        top_logprobs=top,
    )


def _prompt_entries(score: TokenScore) -> Iterator[tuple[str, PromptLogprob]]:
    if score.logprob is None or score.rank is None:
        return
    ranked = [(score.token_id, score.data, score.logprob, score.rank)]
    ranked += [(i, data, value, rank) for rank, (i, data, value) in enumerate(score.top, 1)]
    for token_id, data, value, rank in ranked:
        text = data.decode("utf-8", "replace")
        yield str(token_id), PromptLogprob(logprob=value, rank=rank, decoded_token=text)
