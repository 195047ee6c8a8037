from __future__ import annotations

import json
from typing import Any

import pytest

from moesaic.errors import ConfigError
from moesaic.text.stability import Stability, hit_rate, measure, read_prompt

RULES = "Rule: be brief and kind to everyone you meet. " * 20


def chat(system: str, user: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"messages": messages, **more}


def of(requests: list[Any]) -> Stability:
    return measure([read_prompt(one, f"line {idx}") for idx, one in enumerate(requests)])


def test_stable_prompts_have_no_finding():
    found = of([chat(RULES, f"question {i * 7} about things, of which there are {i}") for i in range(6)])
    assert found.findings == ()
    assert found.hit_rate == found.hit_rate_after > 0.7


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("date", "2026-11-{:02d}"), ("date", "November {}, 2026"), ("timestamp", "2026-11-29T10:{:02d}:00Z"),
        ("time", "10:{:02d}"), ("uuid", "123e4567-e89b-12d3-a456-4266141740{:02d}"),
        ("id", "req-a{:02d}bc9"), ("id", "f00dfeedbead{:02d}"), ("epoch", "17643840{:02d}"),
        ("counter", "{}"),
    ],
)  # fmt: skip
def test_what_changes_before_what_is_shared_is_named(kind, value):
    texts = [f"You help at ACME. Now: {value.format(i)}. {RULES}" for i in range(10, 16)]
    found = of([chat(text, f"what about {i}?") for i, text in enumerate(texts)])
    assert [one.kind for one in found.findings] == [kind]
    one = found.findings[0]
    assert (one.path, one.num_prompts, one.severity) == ("messages[0].content", 5, "error")
    assert value.format(10) in one.before
    assert one.lost_share > 0.8
    assert one.position == len("system: You help at ACME. Now: ")
    assert found.hit_rate < 0.1 < 0.7 < found.hit_rate_after


def test_tools_in_changing_order():
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "abcd"]
    orders = [tools, tools[::-1], tools[1:] + tools[:1], tools[2:] + tools[:2]]
    found = of([chat(RULES, f"q{i}", tools=order) for i, order in enumerate(orders)])
    assert [one.kind for one in found.findings] == ["tool order"]
    assert found.findings[0].before.startswith("a, b")
    assert "sorted by name" in found.findings[0].suggestion
    assert found.hit_rate_after > found.hit_rate + 0.5
    again = of([chat(RULES, f"q{i}", tools=tools) for i in range(4)])
    assert again.findings == ()


def test_blanks_that_change():
    requests = [{"prompt": f"Instructions:{' ' if i % 2 else ''}\n{RULES}Q: {i}"} for i in range(6)]
    found = of(requests)
    assert [one.kind for one in found.findings] == ["whitespace"]
    assert found.hit_rate_after > found.hit_rate


def test_changes_without_anything_shared_behind_them_are_no_fault():
    assert of([f"{i} is a number and nothing else" for i in range(5)]).findings == ()
    assert of([f"{word} " * 50 for word in ("one", "two", "three")]).findings == ()


def test_hit_rate_counts_whole_blocks_from_the_start():
    ids = list(range(64))
    assert hit_rate([ids, ids]) == 0.5
    assert hit_rate([ids, [*ids[:40], -1, *ids[41:]]]) == pytest.approx(32 / 128)
    assert hit_rate([ids, [-1, *ids[1:]]]) == 0.0


def test_a_tokenizer_counts_tokens():
    prompts = [read_prompt(chat(RULES, f"q{i}"), "x") for i in range(3)]
    found = measure(prompts, encode=lambda text: [len(word) for word in text.split()])
    assert found.unit == "tokens"
    assert measure(prompts).unit == "characters"


def test_requests_are_read_in_their_usual_forms():
    body = chat("s", "u")
    for data in (body, body["messages"], {"body": body}):
        assert read_prompt(data, "x").text == "system: s\nuser: u\n"
    assert read_prompt("text", "x").text == read_prompt({"prompt": "text"}, "x").text == "text"
    parts = {"messages": [{"role": "user", "content": [{"type": "text", "text": "u"}]}]}
    assert json.dumps(parts["messages"][0]["content"]) in read_prompt(parts, "x").text
    with pytest.raises(ConfigError, match="line 3: neither a text nor a request"):
        read_prompt({"question": 1}, "line 3")
    with pytest.raises(ConfigError, match="nothing to compare"):
        of(["one"])
