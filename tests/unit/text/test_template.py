"""Chat templates: the real ones against transformers, and hostile ones against the budgets."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from moesaic.errors import CheckpointError, RequestError
from moesaic.text import template as template_module
from moesaic.text.template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": 'Hi <b>"x"</b>'}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye \u00e9"},
    ],
]
USER = CONVERSATIONS[0]


def check_against_transformers(source: str, variables: dict[str, str]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    compiled = ChatTemplate(source, special_tokens=variables)
    for messages in CONVERSATIONS:
        for has_prompt in (True, False):
            expected = render_jinja_template(
                [messages], chat_template=source, add_generation_prompt=has_prompt, **variables
            )[0][0]
            assert compiled.render(messages, add_generation_prompt=has_prompt) == expected


def test_every_public_template_renders_as_transformers_renders_it(shared_data: Path) -> None:
    paths = sorted((shared_data / "tokenizers" / "chat_templates").glob("*.jinja"))
    assert len(paths) >= 19
    for path in paths:
        check_against_transformers(path.read_text("utf-8"), SPECIAL)


def test_templates_inside_tokenizer_configs_render_too(shared_data: Path) -> None:
    rendered = 0
    for path in sorted((shared_data / "tokenizers").glob("*_tokenizer_config.json")):
        source = json.loads(path.read_text("utf-8")).get("chat_template")
        if source is not None:
            check_against_transformers(source, SPECIAL)
            rendered += 1
    assert rendered == 2


def test_load_prefers_the_file_and_takes_the_default_of_a_list(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"chat_template": "one {{ bos_token }}"}')
    loaded = ChatTemplate.load(tmp_path, special_tokens=SPECIAL)
    assert loaded is not None
    assert loaded.render(USER) == "one <s>"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render(USER) == "two"
    (tmp_path / "chat_template.jinja").write_text("three")
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None
    assert loaded.render(USER) == "three"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{"name": "rag", "template": "x"}], r"no entry named default, only \['rag'\]"),
        (7, "must be a string or a list, got int"),
        ("\n{% for %}", r"not valid Jinja: .* \(line 2\); correct it"),
        (
            "{{ x|no_such_filter }}",
            r"in \S+tokenizer_config.json is not valid Jinja: No filter named",
        ),
        ("x" * (template_module.MAX_TEMPLATE_CHARS + 1), "the limit is"),
    ],
)
def test_unusable_templates_are_refused_at_load(tmp_path: Path, value: object, message: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(CheckpointError, match=message):
        ChatTemplate.load(tmp_path)


def test_features_of_real_templates() -> None:
    source = (
        "{%- for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}"
        "{{ m | tojson }}{% break %}{% endfor %}{% generation %}g{% endgeneration %}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ extra }}"
    )
    rendered = ChatTemplate(source).render(CONVERSATIONS[1], variables={"extra": "<&>"})
    assert rendered == '{"role": "user", "content": "Hi"}g4True<&>'


def test_a_template_may_refuse_and_may_fail() -> None:
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(USER)
    for source in (
        "{{ a.b.c }}",
        "{{ 1 / 0 }}",
        "{% for x in none %}{% endfor %}",
        "{{ undefined_name | tojson }}",
    ):
        with pytest.raises(RequestError, match="fails on these messages") as caught:
            ChatTemplate(source).render(USER)
        assert caught.value.param == "messages"


def growing(start: str, step: str) -> str:
    """A template that applies `step` to a value sixty times."""
    return f"{{% set n = namespace(s={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}"


MANY = "'x' * 9999"
HOSTILE = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over text": f"{{% for a in {MANY} %}}{{% for b in {MANY} %}}{{% endfor %}}{{% endfor %}}",
    "long output": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "multiplied text": "{{ 'x' * 10 ** 10 }}",
    "power": "{{ 2 ** 2 ** 2 ** 100 }}",
    "doubling by ~": growing("'ab'", "{% set n.s = n.s ~ n.s %}"),
    "doubling by +": growing("'ab'", "{% set n.s = n.s + n.s %}"),
    "doubling lists": growing("[1]", "{% set n.s = n.s + n.s %}"),
    "doubling blocks": growing("'ab'", "{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}"),
    "doubling by repr": growing("'ab'", "{% set n.s = [n.s, n.s] | string %}"),
    "replace method": growing("'aa'", "{% set n.s = n.s.replace('a', n.s) %}"),
    "replace filter": growing("'aa'", "{% set n.s = n.s | replace('a', n.s) %}"),
    "join filter": "{{ (range(99999) | list) | join('x' * 1000) }}",
    "join method": "{{ ('x' * 1000).join(range(99999) | map('string') | list) }}",
    "padding": "{{ 'a'.ljust(10 ** 9) }}",
    "centring": "{{ 'a' | center(10 ** 9) }}",
    "indenting": "{{ 'a' | indent(10 ** 9, first=true) }}",
    "wide %": "{{ '%1000000000d' % 1 }}",
    "starred %": "{{ '%*d' % (1000000000, 1) }}",
    "wide format filter": "{{ '%1000000000d' | format(1) }}",
    "wide format method": "{{ '{:1000000000}'.format(1) }}",
    "endless macro": "{% macro f(n) %}{{ f(n - 1) }}{% endmacro %}{{ f(1) }}",
    "large range": "{{ range(10 ** 7) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_as_an_error(name: str) -> None:
    started = time.perf_counter()
    with pytest.raises(RequestError) as caught:
        ChatTemplate(HOSTILE[name]).render(USER)
    assert caught.value.param == "messages"
    assert time.perf_counter() - started < 2 * template_module.MAX_SECONDS


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "MAX_SECONDS", 0.05)
    body = "{% if n %}{% set a = f(n - 1) %}{% set a = f(n - 1) %}{% endif %}"
    source = f"{{% macro f(n) %}}{body}{{% endmacro %}}{{{{ f(40) }}}}"
    with pytest.raises(RequestError, match=r"ran for more than 0\.05 s"):
        ChatTemplate(source).render(USER)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% include 'x' %}",
        "{{ lipsum(n=9) }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(RequestError, match="fails on these messages"):
        ChatTemplate(source).render(USER)


def test_the_last_message_can_be_continued() -> None:
    chat = [*USER, {"role": "assistant", "content": "Sure, here "}]
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    assert ChatTemplate(plain).render(chat, add_generation_prompt=False, continue_final_message=True) == (
        '<user>Hi <b>"x"</b></><assistant>Sure, here '
    )
    trimming = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    assert ChatTemplate(trimming).render(chat, continue_final_message=True).endswith("<assistant>Sure, here")
    with pytest.raises(RequestError, match="drops the last message"):
        ChatTemplate("{{ messages[0].content }}").render(chat, continue_final_message=True)
    for bad in ([], [{"role": "assistant"}]):
        with pytest.raises(RequestError, match="needs a last message"):
            ChatTemplate(plain).render(bad, continue_final_message=True)
