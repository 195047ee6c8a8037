"""Every wrong body gets a 4xx that names the field, and the server lives on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import FakeEngine
from harness import Server

from moesaic.server.app import create_app
from moesaic.server.protocol import REFUSED, Ignored
from moesaic.server.settings import ServerSettings
from moesaic.text.grammar import UNUSABLE
from moesaic.text.template import ChatTemplate
from moesaic.text.tokenizer import Tokenizer

PROMPT = {"prompt": "the"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def shared_server(tokenizer: Tokenizer, template: ChatTemplate) -> Iterator[Server]:
    engine = FakeEngine(vocab=tokenizer.vocab_size)
    app = create_app(engine, tokenizer, ServerSettings(model_name="tiny"), template=template)
    server = Server(app, engine, tokenizer)
    yield server
    server.close()


@pytest.fixture
def server(shared_server: Server) -> Server:
    """One server for all of these: a refusal leaves nothing behind."""
    shared_server.engine.submitted.clear()
    return shared_server


def refused(server: Server, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a request that must be refused."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = server.client.post(path, content=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert server.engine.submitted == []
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 101}, "temperature"),
        ({"temperature": 10**400}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a"] * 65}, "stop"),
        ({"stop": "a" * 2000}, "stop"),
        ({"stop_token_ids": [380]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"380": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {"1": "1"}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include": True}}, "stream_options"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 1}, "best_of"),
        ({"priority": 0.5}, "priority"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"model": 5}, "model"),
        ({"response_format": 5}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "min_tokens"),
        ({"max_token": 5}, "max_token"),
        ({"messages": []}, "messages"),
    ],
    ids=str,
)
def test_wrong_fields_of_a_completion(server: Server, fields: dict[str, Any], param: str) -> None:
    error = refused(server, "/v1/completions", PROMPT | fields)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert server.complete()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, got -0.1"),
        ({"top_p": 0}, "top_p must be above 0, got 0"),
        ({"logprobs": 21}, "logprobs must be at most 20, got 21"),
        ({"max_tokens": "5"}, "max_tokens must be a whole number, got '5'"),
        ({"n": 1.5}, "n must be a whole number, got 1.5"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"stream": "true"}, "stream must be true or false, got 'true'"),
        ({"stop": [""]}, "stop[0] must be a text of at least 1 characters, got ''"),
        ({"stop": [1]}, "stop[0] must be a text, got 1"),
        ({"stop": ["a"] * 65}, "stop must be a list of at most 64, got ["),
        ({"logit_bias": [1]}, "logit_bias must be a JSON object, got [1]"),
        ({"stream_options": 5}, "stream_options must be a JSON object, got 5"),
        ({"response_format": {}}, "response_format must be an object with the key 'type', got {}"),
        (
            {"response_format": {"type": "xml"}},
            "object whose 'type' is one of 'text', 'json_object', 'json_sch",
        ),
        ({"temperature": 10**400}, "temperature must be a number, got 1"),
    ],
    ids=str,
)
def test_a_wrong_field_is_told_with_its_rule(server: Server, fields: dict[str, Any], message: str) -> None:
    assert message in refused(server, "/v1/completions", PROMPT | fields)["message"]


def test_a_wrong_role_and_a_wrong_query_are_told_with_their_rules(server: Server) -> None:
    error = refused(server, "/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]})
    expected = "messages[0].role must be 'system', 'developer', 'user' or 'assistant', got 'robot'"
    assert error["message"] == expected
    for value, rule in (("x", "a number"), ("0", "above 0"), ("nan", "a finite number")):
        answer = server.client.get("/v1/internal/experts", params={"window_s": value})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"window_s must be {rule}, got '{value}'"


def test_unknown_query_parameters_are_refused_by_name(server: Server) -> None:
    answer = server.client.get("/v1/internal/experts", params={"window": 5})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "unknown query parameter 'window'; did you mean window_s?"
    error = refused(server, "/v1/completions?stream=true", PROMPT)
    assert error["message"] == "unknown query parameter 'stream'; this path takes none"
    assert error["param"] == "stream"
    for path in ("/health?probe=1", "/ready?x=y", "/v1/models?api-version=2024-10-21", "/metrics?x=y"):
        assert server.client.get(path).status_code == 200


@pytest.mark.parametrize(
    "prompt",
    [None, 5, {}, [], [[]], [""] * 129, ["a", 1], [True], [1.0], [-1], [380], [[5], [380]], [1, [2]]],
)
def test_wrong_prompts(server: Server, prompt: Any) -> None:
    assert refused(server, "/v1/completions", {"prompt": prompt})["param"] == "prompt"


def test_a_missing_prompt_and_an_empty_one(server: Server) -> None:
    assert refused(server, "/v1/completions", {})["message"] == "prompt is required"
    error = refused(server, "/v1/completions", {"prompt": "", "add_special_tokens": False})
    assert "the prompt is empty" in error["message"]


def test_a_prompt_beyond_the_context(server: Server) -> None:
    error = refused(server, "/v1/completions", {"prompt": [5] * 256})
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"]
    refused(server, "/v1/completions", {"prompt": [5] * 257, "max_tokens": 0})
    answer = server.complete(prompt=[5] * 256, max_tokens=0, echo=True, logprobs=0)
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 256
    assert server.complete(prompt=[5] * 255)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [5]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
    ],
    ids=str,
)
def test_wrong_fields_of_a_chat(server: Server, fields: dict[str, Any], param: str) -> None:
    assert refused(server, "/v1/chat/completions", CHAT | fields)["param"] == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_content_that_is_no_text_is_refused_by_name(server: Server, kind: str) -> None:
    content = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "data:,"}}]
    error = refused(server, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
    assert f"messages[0].content[1]: content of type '{kind}' is not supported" in error["message"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_built_is_refused_by_name_unless_it_asks_for_nothing(server: Server, name: str) -> None:
    for path, body in (("/v1/completions", PROMPT), ("/v1/chat/completions", CHAT)):
        error = refused(server, path, body | {name: ["something"]})
        assert error["param"] == name
        assert error["message"].startswith(f"{name} is not supported: ")
        for nothing in (None, False, "", [], {}):
            server.engine.submitted.clear()
            assert server.post(path, body | {name: nothing}).status_code == 200
        server.engine.submitted.clear()


def test_neutral_values_pass(server: Server) -> None:
    server.chat(tool_choice="none", modalities=["text"], tools=[], parallel_tool_calls=False)
    server.complete(n=2, best_of=2)
    message = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "audio": None}
    copied = {"messages": [{**message, "function_call": None, "tool_calls": None}]}
    assert server.post("/v1/chat/completions", copied).status_code == 200


def test_tool_calls_in_a_message_are_refused(server: Server) -> None:
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}
    error = refused(server, "/v1/chat/completions", {"messages": [message]})
    assert error["message"] == "tool_calls is not supported: tool calls are not built yet"


@pytest.mark.parametrize("name", Ignored.model_fields)
def test_harmless_fields_are_ignored(server: Server, name: str) -> None:
    assert server.post("/v1/completions", PROMPT | {name: {"any": ["thing"]}}).status_code == 200


def test_unknown_fields_name_the_nearest(server: Server) -> None:
    error = refused(server, "/v1/completions", PROMPT | {"temprature": 1})
    assert error["message"] == "unknown field temprature; did you mean temperature?"


BAD_BYTES = {
    "nothing": b"",
    "half an object": b'{"prompt": "a"',
    "a list": b"[1]",
    "a text": b'"a"',
    "no UTF-8": b'{"prompt": "\xff"}',
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "a"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "10,000 nested lists": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "10,000 nested objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "500 nested lists in an ignored field": b'{"prompt": "a", "metadata": ' + b"[" * 500 + b"]" * 500 + b"}",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "Infinity": b'{"prompt": "a", "temperature": Infinity}',
    "minus Infinity": b'{"prompt": "a", "top_p": -Infinity}',
    "a number beyond doubles": b'{"prompt": "a", "temperature": 1e999}',
    "5,000 digits": b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
    "half a surrogate": b'{"prompt": "\\ud800"}',
    "half a surrogate in a list": b'{"prompt": ["a", "\\uDC00"]}',
    "half a surrogate in a key": b'{"prompt": "a", "metadata": {"\\ud800": 1}}',
    "half a surrogate in a stop": b'{"prompt": "a", "stop": "\\ud83d"}',
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_bytes_that_are_no_usable_json(server: Server, name: str) -> None:
    refused(server, "/v1/completions", BAD_BYTES[name])
    refused(server, "/v1/chat/completions", BAD_BYTES[name])
    refused(server, "/tokenize", BAD_BYTES[name])


def test_a_key_given_twice_is_named(server: Server) -> None:
    error = refused(server, "/v1/completions", b'{"prompt": "a", "seed": 1, "seed": 2}')
    assert error["message"] == "the key 'seed' stands twice in one object: give it once"
    assert error["param"] == "seed"
    error = refused(server, "/v1/completions", b'{"prompt": "a", "logit_bias": {"5": 1, "5": 2}}')
    assert "the key '5' stands twice" in error["message"]
    error = refused(server, "/v1/completions", PROMPT | {"logit_bias": {"5": 1, "05": 2}})
    assert error["message"].startswith("logit_bias names the token 5 twice, once as '05'")


def test_whole_surrogate_pairs_are_text(server: Server) -> None:
    answer = server.client.post(
        "/tokenize",
        content=b'{"prompt": "\\ud83d\\ude00"}',
        headers={"Content-Type": "application/json; charset=utf-8"},
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("media_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_other_media_types(server: Server, media_type: str | None) -> None:
    headers = {} if media_type is None else {"Content-Type": media_type}
    answer = server.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 415
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_another_model(server: Server) -> None:
    for path, body in (
        ("/v1/completions", PROMPT),
        ("/v1/chat/completions", CHAT),
        ("/tokenize", PROMPT),
        ("/detokenize", {"tokens": [5]}),
    ):
        error = refused(server, path, body | {"model": "gpt-5"}, status=404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_a_model_without_a_template_points_to_completions(make_server: Callable[..., Server]) -> None:
    server = make_server(has_template=False)
    error = refused(server, "/v1/chat/completions", CHAT)
    assert "tiny has no chat template: use /v1/completions" in error["message"]
    refused(server, "/tokenize", CHAT)
    server.complete()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": ["a"]}),
        ("/tokenize", {"prompt": "a", "echo": True}),
        ("/tokenize", {"messages": []}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": "a"}),
        ("/detokenize", {"tokens": [380]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [True]}),
    ],
)
def test_wrong_bodies_of_the_tokenizer(server: Server, path: str, body: Any) -> None:
    refused(server, path, body)


def test_large_bodies(make_server: Callable[..., Server]) -> None:
    server = make_server(settings={"max_body_bytes": 1000})
    answer = server.post("/v1/completions", {"prompt": "a" * 1000})
    assert answer.status_code == 413
    assert "larger than the limit of 1000 bytes" in answer.json()["error"]["message"]

    def chunks() -> Any:
        yield b'{"prompt": "'
        for _ in range(10):
            yield b"a" * 200

    streamed = server.client.post(
        "/v1/completions", content=chunks(), headers={"Content-Type": "application/json"}
    )
    assert streamed.status_code == 413
    assert server.complete(prompt="a")


def test_a_large_good_body_is_parsed_off_the_loop(server: Server) -> None:
    ids = [5] * 100_000
    answer = server.post("/detokenize", {"tokens": ids})
    assert answer.json()["prompt"] == server.tokenizer.decode(ids)


def test_a_schema_that_becomes_too_complex_is_the_requests_fault(make_server: Callable[..., Server]) -> None:
    server = make_server(fail_after=1, failure=f"{UNUSABLE}: too many items")
    answer = server.post("/v1/completions", PROMPT | {"response_format": {"type": "json_object"}})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == (
        "response_format",
        f"{UNUSABLE}: too many items (tokens made: 1)",
    )


def test_a_full_queue_is_429_and_nothing_stays_behind(make_server: Callable[..., Server]) -> None:
    server = make_server(max_waiting=2)
    answer = server.post("/v1/completions", {"prompt": "a", "n": 5, "max_tokens": 200})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "3"
    assert answer.json()["error"]["code"] == "overloaded"
    assert server.engine.wait_idle()
    server.complete(n=2)
