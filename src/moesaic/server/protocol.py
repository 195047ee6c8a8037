"""Bodies of requests, in the shape of the OpenAI API with the usual sampling extensions.

Strict: a number in quotes is an error, and so is a field that nobody here knows. Fields that would change the
answer and are not built are refused by name; `Ignored` lists those that change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from moesaic.errors import RequestError
from moesaic.sched.request import MAX_LOGPROBS, MAX_STOPS
from moesaic.spec.experts import MAX_VERSION, ExpertPlan

MAX_STOP_CHARS = 1024
MAX_BIASES = 1024
_TOOLS = "tool calls are not built yet"
_GUIDED = "use response_format"
REFUSED: Mapping[str, str] = {
    "tools": _TOOLS,
    "tool_choice": _TOOLS,
    "functions": _TOOLS,
    "function_call": _TOOLS,
    "tool_calls": _TOOLS,
    "audio": "audio is not built yet",
    "modalities": "this server answers with text only",
    "prediction": "predicted outputs are not built yet",
    "web_search_options": "web search is not built yet",
    "reasoning_effort": "give it in chat_template_kwargs if the model's template reads it",
    "verbosity": "give it in chat_template_kwargs if the model's template reads it",
    "suffix": "infilling is not built yet",
    "lora": "LoRA adapters are not built yet",
    "lora_request": "LoRA adapters are not built yet",
    "speculative": "speculative decoding is not built yet",
    "use_beam_search": "beam search is not built yet",
    "length_penalty": "beam search is not built yet",
    "guided_json": _GUIDED,
    "guided_regex": _GUIDED,
    "guided_choice": _GUIDED,
    "guided_grammar": _GUIDED,
    "structured_outputs": _GUIDED,
    "chat_template": "the template is the model's own",
    "documents": "give them in chat_template_kwargs if the model's template reads them",
}
"""Fields that would change the answer, and why they are refused. Null, false and empty values pass."""
_NEUTRAL: Mapping[str, object] = {"tool_choice": "none", "modalities": ["text"], "length_penalty": 1.0}


def _refuse_unbuilt(value: Any) -> Any:
    """Drop refused fields that say nothing; refuse the others by name."""
    if not isinstance(value, dict):
        return value
    for name in REFUSED.keys() & value.keys():
        asked = value[name]
        if not (asked is None or asked is False or asked in ("", [], {}) or asked == _NEUTRAL.get(name)):
            raise RequestError(f"{name} is not supported: {REFUSED[name]}", param=name)
    return {name: item for name, item in value.items() if name not in REFUSED}


class Body(BaseModel):
    """What every body has in common: strict types, no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    _refuse = model_validator(mode="before")(_refuse_unbuilt)


class Ignored(Body):
    """Fields of the OpenAI API that are accepted and change nothing here."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None


Prompt = str | list[int]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


def _read_prompts(value: Any) -> list[Prompt]:
    """One list of prompts from the four forms a prompt may have."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in value):
            return list(value)
    raise ValueError("must be a text, a list of texts, a list of token ids, or a list of lists of token ids")


Prompts = Annotated[
    list[Prompt],
    PlainValidator(
        _read_prompts,
        json_schema_input_type=str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[int], Field(min_length=1)]
        | Annotated[list[Annotated[list[int], Field(min_length=1)]], Field(min_length=1)],
    ),
]


def _as_list(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a text or a list of texts")
    return [value] if isinstance(value, str) else value


StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    list[StopText],
    Field(max_length=MAX_STOPS, fail_fast=True),
    BeforeValidator(_as_list, json_schema_input_type=StopText | list[StopText]),
]


def _check_bias_count(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"holds {len(value)} entries, the limit is {MAX_BIASES}")
    return value


LogitBias = Annotated[dict[str, float], BeforeValidator(_check_bias_count)]  # keys: token ids, in quotes
_CUT = (
    "More than the context leaves after the prompt is cut to that, and the answer then ends with the reason "
    "length; the response header x-moesaic-max-tokens says to how many."
)
MaxTokens = Annotated[int, Field(ge=0, description=_CUT)]
LogprobCount = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(Body):
    """What a stream has beside the text."""

    include_usage: bool | None = None
    include_obfuscation: Any = None  # ignored: pads chunks against traffic analysis


class JsonSchema(Body):
    """A named schema. `strict` is ignored: the output always matches."""

    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Body):
    """Free text, the default."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Sampling(Ignored):
    """How to answer; null means the default, as does leaving a field out.

    Temperature, top_p, top_k, min_p and repetition_penalty default to the model's generation_config.json, and
    so does max_tokens of a chat (max_new_tokens there); else nothing is filtered or penalised, and a chat
    answer may fill the context.
    """

    model: str | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1: no limit, as other servers write it
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: LogitBias | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    max_tokens: MaxTokens | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None  # default true
    prompt_logprobs: LogprobCount | None = None
    response_format: ResponseFormat | None = None
    priority: int | None = None  # lower runs first
    cache_salt: str | None = None  # requests with different salts share no prefix cache
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(Sampling):
    """POST /v1/completions."""

    prompt: Prompts
    logprobs: LogprobCount | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None  # must equal n
    add_special_tokens: bool | None = None  # default true


class TextPart(Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


def _check_part(value: Any) -> Any:
    """Name the kinds of content that other servers know and this one does not."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"content of type {kind!r} is not supported: this server reads text only")
    return value


def _check_role(value: Any) -> Any:
    if value in ("tool", "function"):
        raise ValueError(f"the role {value!r} is not supported: {_TOOLS}")
    return value


Part = Annotated[TextPart, BeforeValidator(_check_part)]


class ChatMessage(Body):
    """One message. Null fields that clients copy from earlier answers are accepted."""

    role: Annotated[Literal["system", "developer", "user", "assistant"], BeforeValidator(_check_role)]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None  # reaches the template
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None


class ChatInput(Body):
    """How messages become a prompt."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool | None = None  # default: unless the final message is continued
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None  # default false: templates write their own
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template


class ChatBody(ChatInput, Sampling):
    """POST /v1/chat/completions."""

    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None


Counts = list[list[Annotated[int, Field(ge=0, lt=2**31)]]]
"""Whole numbers, by sparse layer and slot."""


class PlacementBody(Body):
    """An expert plan, as `moesaic balance -o` writes it: per sparse layer, what each slot holds and where."""

    version: Annotated[int, Field(ge=0, le=MAX_VERSION)]
    slot_rank: Counts
    slot_expert: Counts
    slot_slice: Counts
    slot_share: list[list[Annotated[float, Field(ge=0)]]]

    def plan(self) -> ExpertPlan:
        """As the engine knows it."""
        return ExpertPlan(
            version=self.version,
            slot_rank=tuple(np.array(row, dtype=np.int64) for row in self.slot_rank),
            slot_expert=tuple(np.array(row, dtype=np.int64) for row in self.slot_expert),
            slot_slice=tuple(np.array(row, dtype=np.int64) for row in self.slot_slice),
            slot_share=tuple(np.array(row, dtype=np.float64) for row in self.slot_share),
        )


class TokenizeBody(Body):
    """POST /tokenize with a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool | None = None


class TokenizeChatBody(ChatInput):
    """POST /tokenize with messages."""

    model: str | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds
    skip_special_tokens: bool | None = None  # default false: the inverse of /tokenize
