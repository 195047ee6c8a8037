"""From a checked body to the sequences that the engine runs: text to tokens, defaults, limits, seeds."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moesaic.engine.philox import sibling_seed
from moesaic.errors import RequestError
from moesaic.sched.request import Request, SamplingParams
from moesaic.server.problem import HttpError, Problem
from moesaic.server.protocol import (
    ChatBody,
    ChatInput,
    ChatMessage,
    CompletionBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    Prompt,
    Sampling,
)
from moesaic.text.defaults import SamplingDefaults
from moesaic.text.grammar import ANY_OBJECT
from moesaic.text.template import ChatTemplate
from moesaic.text.tokenizer import Tokenizer

COMPLETION_TOKENS = 16  # the OpenAI API's default for /v1/completions; a chat answer may fill the context
_SAME_NAMES = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "min_tokens", "ignore_eos",
)  # fmt: skip
_RESERVED = frozenset(["messages", "add_generation_prompt", "tools"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Arrival:
    """Identity and arrival of one HTTP request."""

    request_id: str
    monotonic_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedPrompt:
    """One prompt as text and as tokens."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    """One HTTP request, ready to run. Choice c continues prompt c // num_choices."""

    job_id: str
    kind: Literal["completion", "chat"]
    created_s: int  # Unix time
    arrival_s: float  # on time.monotonic()
    prompts: tuple[EncodedPrompt, ...]
    num_choices: int  # per prompt
    requests: tuple[Request, ...]  # one per choice
    cut_to: int | None = (
        None  # tokens that the context leaves after the longest prompt, if max_tokens is more
    )
    has_echo: bool = False
    has_prompt_logprobs: bool = False  # asked for by their own field, not by echo
    skip_special_tokens: bool = True
    is_stream: bool = False
    has_stream_usage: bool = False

    def prompt_of(self, choice_idx: int) -> EncodedPrompt:
        """The prompt that a choice continues."""
        return self.prompts[choice_idx // self.num_choices]


class JobMaker:
    """Makes jobs for one model. Thread-safe."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        defaults: SamplingDefaults,
        model_name: str,
        max_model_len: int,
        vocab: int,
        max_sequences: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._defaults = defaults
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._vocab = vocab
        self._max_sequences = max_sequences

    def completion(self, body: CompletionBody, arrival: Arrival) -> Job:
        """The job of a body of /v1/completions.

        Raises: RequestError naming the field; HttpError 404 for another model.
        """
        self.check_model(body.model)
        num_choices = body.n or 1
        if body.best_of not in (None, num_choices):
            raise RequestError(
                f"best_of is {body.best_of} and n {num_choices}: making more answers than are returned is "
                "not built yet",
                param="best_of",
            )
        prompts = [self.encode(prompt, add_special_tokens=body.add_special_tokens) for prompt in body.prompt]
        max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        prompt_logprobs = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
        sampling = self._defaults.params(
            **_given(body), max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=prompt_logprobs
        )
        return self._job(body, arrival, prompts, sampling, has_echo=bool(body.echo))

    def chat(self, body: ChatBody, arrival: Arrival) -> Job:
        """The job of a body of /v1/chat/completions.

        Raises: RequestError naming the field; HttpError 404 for another model.
        """
        self.check_model(body.model)
        if body.top_logprobs is not None and not body.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        asked = {body.max_tokens, body.max_completion_tokens} - {None}
        if len(asked) > 1:
            raise RequestError(
                f"max_tokens ({body.max_tokens}) and max_completion_tokens ({body.max_completion_tokens}) "
                "mean the same: give one",
                param="max_completion_tokens",
            )
        sampling = self._defaults.params(
            **_given(body),
            **({"max_tokens": asked.pop()} if asked else {}),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
        )
        return self._job(body, arrival, [self.encode_chat(body)], sampling)

    def encode(self, prompt: Prompt, *, add_special_tokens: bool | None) -> EncodedPrompt:
        """A prompt given as text or as token ids."""
        if isinstance(prompt, str):
            with_special = True if add_special_tokens is None else add_special_tokens
            ids = tuple(self._tokenizer.encode(prompt, add_special_tokens=with_special))
            return EncodedPrompt(text=prompt, ids=ids)
        self.check_ids(prompt, "prompt")
        # Half a character at the end stays out: the answer may complete it.
        decoder = self._tokenizer.stream_decoder()
        return EncodedPrompt(text="".join(map(decoder.feed, prompt)), ids=tuple(prompt))

    def encode_chat(self, body: ChatInput) -> EncodedPrompt:
        """Messages through the model's template.

        Raises: RequestError when there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise RequestError(
                f"the model {self._model_name} has no chat template: use /v1/completions, or put a "
                "chat_template.jinja into the model's folder",
                param="messages",
            )
        is_continued = bool(body.continue_final_message)
        if is_continued and body.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        variables = body.chat_template_kwargs or {}
        taken = sorted(_RESERVED & variables.keys())
        if taken:
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(taken)}", param="chat_template_kwargs"
            )
        wants_prompt = not is_continued if body.add_generation_prompt is None else body.add_generation_prompt
        text = self._template.render(
            [_message(message) for message in body.messages],
            add_generation_prompt=wants_prompt,
            continue_final_message=is_continued,
            variables=variables,
        )
        # The template writes BOS itself where the model wants one.
        ids = self._tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))
        return EncodedPrompt(text=text, ids=tuple(ids))

    def check_model(self, name: str | None) -> None:
        """Whether `name` is the model served; None stands for it.

        Raises: HttpError 404.
        """
        if name is not None and name != self._model_name:
            raise HttpError(
                Problem(
                    status=404,
                    message=f"the model {name[:200]!r} is not served here, only {self._model_name!r}",
                    param="model",
                    code="model_not_found",
                )
            )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        """Whether all ids are the model's.

        Raises: RequestError naming one that is not.
        """
        if ids and not (min(ids) >= 0 and max(ids) < self._vocab):
            wrong = next(i for i in ids if not 0 <= i < self._vocab)
            raise RequestError(f"token id {wrong} in {param} is not in 0 to {self._vocab - 1}", param=param)

    def _job(
        self,
        body: Sampling,
        arrival: Arrival,
        prompts: list[EncodedPrompt],
        sampling: SamplingParams,
        *,
        has_echo: bool = False,
    ) -> Job:
        is_chat = isinstance(body, ChatBody)
        job_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{arrival.request_id}"
        num_choices = body.n or 1
        self._check_fields(body, sampling, num_prompts=len(prompts), num_choices=num_choices)
        grammar = _grammar(body)
        requests: list[Request] = []
        rooms: list[int] = []
        for prompt in prompts:
            rooms.append(self._room(prompt, sampling))
            base = secrets.randbits(63) if body.seed is None else body.seed
            for i in range(num_choices):
                requests.append(
                    Request(
                        request_id=f"{job_id}-{len(requests)}",
                        prompt_ids=prompt.ids,
                        sampling=sampling,
                        seed=sibling_seed(base, i),
                        eos_token_ids=self._tokenizer.eos_token_ids,
                        priority=body.priority or 0,
                        arrival_s=arrival.monotonic_s,
                        salt=body.cache_salt or "",
                        grammar=grammar,
                    )
                )
        skips = body.skip_special_tokens
        return Job(
            job_id=job_id,
            kind="chat" if is_chat else "completion",
            created_s=int(time.time()),
            arrival_s=arrival.monotonic_s,
            prompts=tuple(prompts),
            num_choices=num_choices,
            requests=tuple(requests),
            cut_to=None if sampling.max_tokens is None or min(rooms) >= sampling.max_tokens else min(rooms),
            has_echo=has_echo,
            has_prompt_logprobs=body.prompt_logprobs is not None,
            skip_special_tokens=True if skips is None else skips,
            is_stream=bool(body.stream),
            has_stream_usage=bool(body.stream_options and body.stream_options.include_usage),
        )

    def _check_fields(
        self, body: Sampling, sampling: SamplingParams, *, num_prompts: int, num_choices: int
    ) -> None:
        if num_prompts * num_choices > self._max_sequences:
            raise RequestError(
                f"n is {num_choices} and the number of prompts {num_prompts}: that is more than the limit of "
                f"{self._max_sequences} sequences in one request",
                param="n" if num_choices > 1 else "prompt",
            )
        self.check_ids(sampling.stop_token_ids, "stop_token_ids")
        self.check_ids(tuple(sampling.logit_bias), "logit_bias")
        if body.stream and body.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        if body.stream_options is not None and not body.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")

    def _room(self, prompt: EncodedPrompt, sampling: SamplingParams) -> int:
        """How many tokens the context leaves after a prompt; the engine makes no more of them."""
        room = self._max_model_len - len(prompt.ids)
        if room < (0 if sampling.max_tokens == 0 else 1):
            raise RequestError(
                f"the prompt has {len(prompt.ids)} tokens, the context {self._max_model_len} with the "
                "answer: shorten the prompt",
                param="prompt",
                code="context_length_exceeded",
            )
        return room


def _message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates read it: text parts joined by line breaks, absent fields absent."""
    content = message.content
    found: dict[str, Any] = {"role": message.role}
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    if content is None:
        if message.reasoning_content is None:
            raise RequestError(f"a message of the role {message.role} has no content", param="messages")
        content = ""
    found["content"] = content
    for name in ("name", "reasoning_content"):
        if getattr(message, name) is not None:
            found[name] = getattr(message, name)
    return found


def _token_bias(bias: dict[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}: keys must be token ids", param="logit_bias"
            )
        if int(key) in found:
            raise RequestError(
                f"logit_bias names the token {int(key)} twice, once as {key!r}: give each once",
                param="logit_bias",
            )
        found[int(key)] = value
    return found


def _given(body: Sampling) -> dict[str, Any]:
    """The sampling parameters that a body states; those that it leaves out are not in it."""
    found = {name: getattr(body, name) for name in _SAME_NAMES if getattr(body, name) is not None}
    if body.top_k is not None:
        found["top_k"] = body.top_k if body.top_k > 0 else None
    return found | {
        "logit_bias": _token_bias(body.logit_bias or {}),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "stop": tuple(body.stop or ()),
        "has_stop_in_output": bool(body.include_stop_str_in_output),
    }


def _grammar(body: Sampling) -> str | None:
    """The schema that the output must match."""
    match body.response_format:
        case JsonObjectFormat():
            return ANY_OBJECT
        case JsonSchemaFormat(json_schema=schema):
            return json.dumps(schema.schema_, ensure_ascii=False)
        case _:
            return None
