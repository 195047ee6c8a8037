"""/v1/completions and /v1/chat/completions: text, counts, log probabilities, streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fakes import FakeEngine
from harness import Server

from moesaic.text.defaults import SamplingDefaults

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
"""A body that is right."""


def joined(events: list[Any], index: int = 0) -> str:
    pieces = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in pieces)


def reasons(events: list[Any], index: int = 0) -> list[str]:
    choices = [c for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index]
    return [c["finish_reason"] for c in choices if c["finish_reason"] is not None]


def test_completion_has_the_openai_shape(server: Server) -> None:
    server.saying("sat on the mat")
    answer = server.complete(max_tokens=40)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert answer["id"].startswith("cmpl-")
    assert answer["system_fingerprint"] == "fp_0123456789ab"
    (choice,) = answer["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "sat on the mat", "stop")
    assert choice["logprobs"] is None
    num_prompt = len(server.tokenizer.encode("the cat"))
    num_output = len(server.tokenizer.encode("sat on the mat", add_special_tokens=False)) + 1
    assert answer["usage"] == {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_chat_has_the_openai_shape(server: Server) -> None:
    server.saying("Hello there")
    answer = server.chat()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hello there", "refusal": None}
    assert choice["finish_reason"] == "stop"
    expected = server.tokenizer.encode("<|bos|><|user|>hi\n<|assistant|>", add_special_tokens=False)
    assert list(server.engine.submitted[0].prompt_ids) == expected


def test_max_tokens_defaults_and_clamping(server: Server) -> None:
    assert server.complete()["usage"]["completion_tokens"] == 16
    assert server.complete(max_tokens=None)["usage"]["completion_tokens"] == 16
    assert server.chat(max_tokens=None)["choices"][0]["finish_reason"] == "length"
    huge = server.complete(max_tokens=10**9, min_tokens=10**9)
    assert huge["usage"]["total_tokens"] == server.engine.max_model_len
    assert server.chat(max_completion_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.chat(max_completion_tokens=3, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_a_max_tokens_that_is_cut_says_so_in_a_header(server: Server) -> None:
    body = {"prompt": ["the cat", "the"], "max_tokens": 10**9}
    answer = server.post("/v1/completions", body)
    assert answer.headers["x-moesaic-max-tokens"] == str(256 - len(server.tokenizer.encode("the cat")))
    streamed = server.post("/v1/chat/completions", {**CHAT, "max_completion_tokens": 500, "stream": True})
    assert int(streamed.headers["x-moesaic-max-tokens"]) < 256
    fitting = server.post("/v1/completions", {"prompt": "the cat", "max_tokens": 250})
    assert "x-moesaic-max-tokens" not in fitting.headers


def test_an_empty_text_is_a_prompt_where_there_is_a_bos(server: Server) -> None:
    server.complete(prompt="", max_tokens=1)
    assert server.engine.submitted[-1].prompt_ids == (0,)


def test_defaults_of_the_model_yield_to_the_request(make_server: Callable[..., Server]) -> None:
    values = {"temperature": 0.25, "top_p": 0.5, "top_k": 7, "repetition_penalty": 1.5, "max_tokens": 9}
    server = make_server(defaults=SamplingDefaults(values=values))

    def sampled() -> dict[str, Any]:
        sampling = server.engine.submitted[-1].sampling
        return {name: getattr(sampling, name) for name in values}

    server.chat()
    assert sampled() == values
    server.complete()
    assert sampled() == values | {"max_tokens": 16}
    server.chat(temperature=None, top_p=1, top_k=-1, repetition_penalty=1, max_tokens=3)
    stated = {"top_p": 1, "top_k": None, "repetition_penalty": 1, "max_tokens": 3}
    assert sampled() == values | stated
    assert server.client.get("/v1/internal/active").json()["sampling_defaults"] == values


@pytest.mark.parametrize("is_echoed", [False, True])
def test_no_tokens_at_all(server: Server, is_echoed: bool) -> None:
    answer = server.complete(max_tokens=0, echo=is_echoed)
    assert answer["choices"][0]["text"] == ("the cat" if is_echoed else "")
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert server.engine.submitted == []
    events = server.events("/v1/completions", {"prompt": "the cat", "max_tokens": 0, "echo": is_echoed})
    assert joined(events) == ("the cat" if is_echoed else "")
    assert reasons(events) == ["length"]


def test_echo_returns_the_prompt_and_its_logprobs(server: Server) -> None:
    server.saying(" sat", ends=False)
    scored = server.complete(max_tokens=0, echo=True, logprobs=1)["choices"][0]
    assert scored["text"] == "the cat"
    assert scored["logprobs"]["token_logprobs"] == [None, -1.0, -1.0]
    assert scored["logprobs"]["top_logprobs"][0] is None
    both = server.complete(max_tokens=1, echo=True, logprobs=0)
    choice = both["choices"][0]
    assert choice["text"] == "the cat sat"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["<|bos|>", "the", " cat", " sat"]
    assert logprobs["text_offset"] == [0, 0, 3, 7]
    assert logprobs["top_logprobs"] == [None, {"the": -1.0}, {" cat": -1.0}, {" sat": -0.5}]
    assert both["usage"]["prompt_tokens"] == 3
    assert both["usage"]["completion_tokens"] == 1


def test_echo_of_token_ids_and_of_a_batch(server: Server) -> None:
    server.saying("!", ends=False)
    ids = server.tokenizer.encode("the dog", add_special_tokens=False)
    answer = server.complete(prompt=[ids, ids], max_tokens=1, echo=True, n=2)
    assert [c["text"] for c in answer["choices"]] == ["the dog!"] * 4
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2 * len(ids)
    assert answer["usage"]["completion_tokens"] == 4


def test_a_character_begun_in_the_prompt_is_completed(server: Server) -> None:
    first, *rest = server.tokenizer.encode("\u4e00", add_special_tokens=False)
    assert len(rest) == 2
    server.engine._answer = lambda request: [*rest, 1]
    assert server.complete(prompt=[first], echo=True)["choices"][0]["text"] == "\u4e00"


@pytest.mark.parametrize("prompt", ["the", ["the"], [318], [[318]]])
def test_all_forms_of_a_prompt(server: Server, prompt: Any) -> None:
    assert len(server.complete(prompt=prompt)["choices"]) == 1
    assert 318 in server.engine.submitted[0].prompt_ids


def test_bos_only_where_asked(server: Server) -> None:
    for body, count in ({}, 1), ({"add_special_tokens": False}, 0), ({"prompt": [318]}, 0):
        server.complete(**body)
        assert server.engine.submitted[-1].prompt_ids.count(0) == count
    for body, count in ({}, 1), ({"add_special_tokens": True}, 2):
        server.chat(**body)
        assert server.engine.submitted[-1].prompt_ids.count(0) == count


def test_each_of_n_choices_has_its_seed_and_usage_counts_the_prompt_once(server: Server) -> None:
    answer = server.complete(n=3, max_tokens=4, seed=7)
    assert [c["index"] for c in answer["choices"]] == [0, 1, 2]
    seeds = [request.seed for request in server.engine.submitted]
    assert seeds[0] == 7
    assert len(set(seeds)) == 3
    assert len({c["text"] for c in answer["choices"]}) == 3
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["usage"]["completion_tokens"] == 12
    again = server.complete(n=3, max_tokens=4, seed=7)
    assert again["choices"] == answer["choices"]
    alone = server.complete(max_tokens=4, seed=7)
    assert alone["choices"][0]["text"] == answer["choices"][0]["text"]


def test_without_a_seed_every_prompt_draws_its_own(server: Server) -> None:
    server.complete(prompt=["the", "the"])
    first, second = (request.seed for request in server.engine.submitted)
    assert first != second
    server.complete(prompt=["the", "the"], seed=-5)
    assert server.engine.submitted[2].seed == server.engine.submitted[3].seed


def test_fields_reach_the_engine(server: Server) -> None:
    server.complete(
        temperature=0.5,
        top_p=0.9,
        top_k=5,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1.0,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "6": 2.5},
        min_tokens=2,
        stop=["zz"],
        stop_token_ids=[9],
        ignore_eos=True,
        priority=-3,
        cache_salt="tenant",
        user="somebody",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
    )
    request = server.engine.submitted[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 5, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1.0, -1.0)
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == {5: -100.0, 6: 2.5}
    assert (sampling.min_tokens, sampling.max_tokens) == (2, 16)
    assert sampling.stop_token_ids == (9,)
    assert sampling.ignore_eos
    assert (request.priority, request.salt) == (-3, "tenant")
    assert request.eos_token_ids == (1,)
    for value in (0, -1, None):
        server.complete(top_k=value)
        assert server.engine.submitted[-1].sampling.top_k is None


def test_response_format_becomes_a_grammar(server: Server) -> None:
    server.saying("{}")
    server.chat(response_format={"type": "text"})
    assert server.engine.submitted[-1].grammar is None
    server.chat(response_format={"type": "json_object"})
    assert server.engine.submitted[-1].grammar == '{"type": "object"}'
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    server.chat(
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": schema, "strict": True},
        }
    )
    assert server.engine.submitted[-1].grammar == '{"type": "object", "properties": {"b": {}, "a": {}}}'


def test_stop_strings_end_the_sequence_in_the_engine(make_server: Callable[..., Server]) -> None:
    server = make_server(step_s=0.002)
    server.saying("the cat sat on the mat and so on" * 9, ends=False)
    answer = server.complete(stop=["on t"], max_tokens=50)
    assert answer["choices"][0]["text"] == "the cat sat "
    assert answer["choices"][0]["finish_reason"] == "stop"
    tokens = server.tokenizer.encode("the cat sat on t", add_special_tokens=False)
    assert answer["usage"]["completion_tokens"] <= len(tokens)
    assert server.engine.wait_idle()
    assert len(server.engine.cancelled) == 1
    shown = server.complete(stop="sat", include_stop_str_in_output=True, max_tokens=50)
    assert shown["choices"][0]["text"] == "the cat sat"


@pytest.mark.parametrize(
    ("stop", "is_included", "text", "tokens"),
    [
        (" on", False, "the cat sat", ["the", " cat", " sat"]),
        (" on", True, "the cat sat on", ["the", " cat", " sat", " on"]),
        ("t s", False, "the ca", ["the", " cat"]),  # the token that is cut in two stays whole
        ("the", False, "", []),
        ("at sat o", False, "the c", ["the", " cat"]),
    ],
)
def test_logprobs_end_where_the_text_does(
    server: Server, stop: str, is_included: bool, text: str, tokens: list[str]
) -> None:
    server.saying("the cat sat on the mat")
    body = {"stop": stop, "include_stop_str_in_output": is_included, "max_tokens": 20}
    choice = server.complete(logprobs=0, **body)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (text, "stop")
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == tokens
    assert logprobs["text_offset"] == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"]) == len(tokens)
    (chat,) = server.chat(logprobs=True, **body)["choices"]
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == tokens
    events = server.events("/v1/completions", {"prompt": "the cat", "logprobs": 0, **body})
    shown = ""
    for event in events[:-1]:
        (piece,) = event["choices"]
        shown += piece["text"]
        assert all(offset < len(shown) for offset in piece["logprobs"]["text_offset"])
    sent = [name for event in events[:-1] for name in event["choices"][0]["logprobs"]["tokens"]]
    assert (shown, sent) == (text, tokens)


def test_a_stop_string_that_does_not_come_is_given_back_at_the_end(server: Server) -> None:
    server.saying("the cat sa")
    assert server.complete(stop=["sat"])["choices"][0]["text"] == "the cat sa"


def test_stop_tokens_are_no_text_unless_asked_for(server: Server) -> None:
    the = server.tokenizer.encode("the", add_special_tokens=False)[0]
    server.saying("cat the")
    answer = server.complete(stop_token_ids=[the])
    assert answer["choices"][0]["finish_reason"] == "stop"
    dot = server.tokenizer.encode(".", add_special_tokens=False)[0]
    server.saying("cat. dog")
    assert server.complete(stop_token_ids=[dot])["choices"][0]["text"] == "cat"
    assert (
        server.complete(stop_token_ids=[dot], include_stop_str_in_output=True)["choices"][0]["text"] == "cat."
    )


def test_special_tokens_are_left_out_unless_asked_for(server: Server) -> None:
    server.engine._answer = lambda request: [2, *server.tokenizer.encode("x", add_special_tokens=False), 1]
    assert server.complete()["choices"][0]["text"] == "x"
    assert server.complete(skip_special_tokens=False)["choices"][0]["text"] == "<|user|>x"


def test_chat_logprobs_have_bytes(server: Server) -> None:
    server.saying("caf\u00e9 \u4e01")
    answer = server.chat(logprobs=True, top_logprobs=2)
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    data = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert data == "caf\u00e9 \u4e01<|eos|>".encode()
    plain = server.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)
    assert server.chat()["choices"][0]["logprobs"] is None


def test_completion_logprobs_name_half_characters_apart(server: Server) -> None:
    server.saying("a\u4e01", ends=False)
    logprobs = server.complete(logprobs=2, max_tokens=4)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xe4", "bytes:\\xb8", "bytes:\\x81"]
    assert logprobs["text_offset"] == [0, 1, 1, 1]
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])


def test_the_chosen_token_is_always_among_the_top(server: Server) -> None:
    logprobs = server.complete(logprobs=0, max_tokens=2)["choices"][0]["logprobs"]
    assert [list(top) for top in logprobs["top_logprobs"]] == [[name] for name in logprobs["tokens"]]


def test_minus_infinity_is_json(make_server: Callable[..., Server]) -> None:
    server = make_server(logprob=float("-inf"))
    logprobs = server.complete(logprobs=1, max_tokens=1)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    (entry,) = server.chat(logprobs=True, top_logprobs=1, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0


def test_prompt_logprobs(server: Server) -> None:
    choice = server.complete(prompt_logprobs=1, max_tokens=1)["choices"][0]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    (the,) = second
    assert second[the] == {"logprob": -1.0, "rank": 1, "decoded_token": "the"}
    assert next(iter(third.values()))["decoded_token"] == " cat"
    assert choice["logprobs"] is None
    assert "prompt_logprobs" not in server.complete()["choices"][0]
    assert "prompt_logprobs" not in server.chat()
    assert len(server.chat(prompt_logprobs=0, max_tokens=1)["prompt_logprobs"]) == 6


def test_cached_tokens_are_reported_once_per_prompt(make_server: Callable[..., Server]) -> None:
    server = make_server(num_cached_tokens=2)
    assert server.complete(n=2)["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert server.complete(prompt=["a b", "c d"])["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}


def test_a_stream_joins_to_the_whole(server: Server) -> None:
    text = "na\u00efve \u4e2d\u6587 caf\u00e9 \U0001f600 the end"
    server.saying(text)
    events = server.events("/v1/completions", {"prompt": "x", "max_tokens": 100})
    assert events[-1] == "[DONE]"
    assert joined(events) == text
    assert "\ufffd" not in str(events)
    assert reasons(events) == ["stop"]
    assert all("usage" not in event for event in events[:-1])
    assert len(events) > 8


def test_a_chat_stream_begins_with_the_role_and_ends_with_usage(server: Server) -> None:
    server.saying("Hello there")
    events = server.events("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert joined(events) == "Hello there"
    assert reasons(events) == ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert usage["choices"] == []
    assert usage["usage"] == server.chat()["usage"]
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1


def test_n_choices_stream_side_by_side(server: Server) -> None:
    body = {"prompt": ["the", "a"], "n": 2, "max_tokens": 5, "seed": 1}
    whole = server.complete(**body)
    events = server.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    for choice in whole["choices"]:
        assert joined(events, choice["index"]) == choice["text"]
        assert reasons(events, choice["index"]) == ["length"]
    assert events[-2]["usage"] == whole["usage"]


def test_streamed_logprobs_equal_the_whole(server: Server) -> None:
    server.saying("caf\u00e9 \u4e01 STOP more", ends=False)
    body = {"prompt": "x", "max_tokens": 40, "logprobs": 1, "echo": True, "stop": ["STOP"], "seed": 3}
    whole = server.complete(**body)["choices"][0]
    events = server.events("/v1/completions", body)
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [e["choices"][0]["logprobs"][key] for e in events[:-1]]
        assert [x for part in parts for x in part] == whole["logprobs"][key]
    assert joined(events) == whole["text"] == "xcaf\u00e9 \u4e01 "


def test_an_error_after_the_stream_began_is_an_event(make_server: Callable[..., Server]) -> None:
    server = make_server(fail_after=3)
    events = server.events("/v1/completions", {"prompt": "the"})
    assert events[-1]["error"]["message"].startswith("generation failed: logits are not finite")
    assert events[-1]["error"]["type"] == "server_error"
    assert "[DONE]" not in events
    assert reasons(events[:-1]) == []


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_error_before_the_answer_has_a_status(make_server: Callable[..., Server], is_stream: bool) -> None:
    server = make_server(fail_after=0)
    answer = server.post("/v1/completions", {"prompt": ["the", "cat"], "stream": is_stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "generation_failed"
    assert server.engine.wait_idle()


def test_an_engine_that_lost_a_part_says_that_another_may_answer(make_server: Callable[..., Server]) -> None:
    server = make_server(fail_after=0, is_lost=True)
    answer = server.post("/v1/completions", {"prompt": "the"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    assert int(answer.headers["Retry-After"]) >= 1


def test_continue_final_message_and_template_variables(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    server.post("/v1/chat/completions", {"messages": messages, "continue_final_message": True})
    text = server.tokenizer.decode(server.engine.submitted[0].prompt_ids, skip_special_tokens=False)
    assert text == "<|bos|><|user|>hi\n<|assistant|>Well, "
    server.post("/v1/chat/completions", {"messages": messages, "add_generation_prompt": False})
    text = server.tokenizer.decode(server.engine.submitted[1].prompt_ids, skip_special_tokens=False)
    assert text.endswith("Well, \n")


def test_content_in_parts_is_joined_by_lines(server: Server) -> None:
    server.chat([{"type": "text", "text": "one"}, {"type": "text", "text": "two"}])
    text = server.tokenizer.decode(server.engine.submitted[0].prompt_ids)
    assert text == "one\ntwo\n"


def test_tokenize_and_detokenize_are_inverse(server: Server) -> None:
    found = server.post("/tokenize", {"prompt": "the caf\u00e9"}).json()
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 256
    assert found["tokens"] == server.tokenizer.encode("the caf\u00e9")
    back = server.post("/detokenize", {"tokens": found["tokens"]}).json()
    assert back == {"prompt": "<|bos|>the caf\u00e9"}
    plain = server.post("/tokenize", {"prompt": "the", "add_special_tokens": False, "model": "tiny"}).json()
    assert plain["tokens"] == [318]
    chat = server.post("/tokenize", CHAT).json()
    server.chat()
    assert tuple(chat["tokens"]) == server.engine.submitted[-1].prompt_ids


def test_one_engine_serves_two_applications(make_server: Callable[..., Server]) -> None:
    one, two = make_server(), make_server()
    assert isinstance(one.engine, FakeEngine)
    assert one.complete()["id"] != two.complete()["id"]
