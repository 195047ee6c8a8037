"""Masks: whatever is drawn from them parses and fits the schema, and ends only where it may."""

from __future__ import annotations

import json
from functools import cache

import jsonschema_rs
import numpy as np
import pytest
from fakes import train_tokenizer

from moesaic.errors import ConfigError, RequestError
from moesaic.text.grammar import MAX_SCHEMA_CHARS, UNUSABLE, GrammarCompiler
from moesaic.text.tokenizer import Tokenizer

NUM_LOGITS = 400
EOS = 1
SCHEMAS = {
    "any object": None,
    "record": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "list": {"type": "array", "items": {"enum": ["red", "blue", 3]}, "minItems": 2, "maxItems": 4},
    "nested": {
        "type": "object",
        "properties": {"next": {"$ref": "#"}, "ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    },
    "pattern": {"type": "string", "pattern": "^[a-c]{2}-[0-9]+$", "maxLength": 8},
    "one of": {"anyOf": [{"type": "null"}, {"type": "number"}]},
}


@cache
def compiler() -> GrammarCompiler:
    tokenizer = Tokenizer(train_tokenizer().to_str(), config={"eos_token": "<|eos|>"})
    return GrammarCompiler(tokenizer, num_logits=NUM_LOGITS)


def draw(schema: dict[str, object] | None, seed: int) -> str | None:
    """A random output; None when it did not end in time (a string may go on for long)."""
    tokenizer = compiler()._tokenizer
    matcher = compiler().compile(None if schema is None else json.dumps(schema))
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    for _ in range(300):
        allowed = matcher.mask()
        assert allowed.shape == (NUM_LOGITS,)
        assert allowed.dtype == np.bool_
        assert allowed[EOS] == matcher.is_accepting
        assert not allowed[tokenizer.vocab_size :].any()
        if matcher.is_accepting and (matcher.is_finished or rng.random() < 0.3):
            matcher.advance(EOS)
            return tokenizer.decode(ids)
        choices = [i for i in np.flatnonzero(allowed).tolist() if i != EOS]
        closing = [i for i in choices if tokenizer.token_bytes(i)[:1] in b'"}]']
        token_id = int(rng.choice(closing if closing and rng.random() < 0.3 else choices))
        matcher.advance(token_id)
        ids.append(token_id)
    return None


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_is_drawn_parses_and_fits(name: str) -> None:
    schema = SCHEMAS[name]
    texts = [text for text in (draw(schema, seed) for seed in range(12)) if text is not None]
    assert len(texts) >= 8
    validator = jsonschema_rs.validator_for(schema or {"type": "object"})
    for text in texts:
        assert validator.is_valid(json.loads(text)), text


def test_the_end_is_forbidden_before_the_output_is_complete() -> None:
    matcher = compiler().compile('{"enum": ["a"]}')
    tokenizer = compiler()._tokenizer
    for char in '"a"':
        assert not matcher.is_accepting
        assert not matcher.is_finished
        assert not matcher.mask()[EOS]
        matcher.advance(tokenizer.encode(char, add_special_tokens=False)[0])
    assert matcher.is_accepting
    assert matcher.is_finished
    assert np.flatnonzero(matcher.mask()).tolist() == [EOS]


def test_a_token_outside_the_mask_is_an_error() -> None:
    matcher = compiler().compile(None)
    with pytest.raises(RequestError, match="response_format"):
        matcher.advance(EOS)
    with pytest.raises(RequestError, match="response_format"):
        matcher.mask()


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("false", "must be a JSON object"),
        ('{"enum": []}', "Unsatisfiable"),
        ('{"type": "nope"}', "Invalid type: nope"),
        ('{"not": {"type": "string"}}', 'Unimplemented keys: \\["not"\\]'),
        ('{"x-guidance": {"lenient": true}, "not": {}}', "set by the server"),
        ('{"properties": {"a": {"x-guidance": {"lenient": true}, "if": {}}}}', "Unimplemented keys"),
        ('{"$ref": "http://127.0.0.1/x.json"}', "does not fetch"),
        ('{"type": "string", "pattern": "(?=a)b"}', "look-around"),
        ('{"oneOf": [{"type": "integer"}, {"type": "number"}]}', "oneOf"),
        (" " * (MAX_SCHEMA_CHARS + 1), "the limit is"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(schema: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        compiler().check(schema)
    assert caught.value.param == "response_format"
    with pytest.raises(RequestError):
        compiler().compile(schema)


@pytest.mark.parametrize(
    "schema", ['{"$ref": "#"}', '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}']
)
def test_a_schema_that_is_nothing_but_itself_is_refused_before_a_token_is_drawn(schema: str) -> None:
    with pytest.raises(RequestError, match=rf"{UNUSABLE}: .* simplify the schema"):
        compiler().check(schema)


def test_the_vocabulary_must_fit() -> None:
    tokenizer = Tokenizer(train_tokenizer().to_str(), config={"eos_token": "<|eos|>"})
    with pytest.raises(ConfigError, match="380 ids, the model only 379 logits"):
        GrammarCompiler(tokenizer, num_logits=379)
    with pytest.raises(ConfigError, match="needs an end token"):
        GrammarCompiler(Tokenizer(train_tokenizer().to_str(), config={}))
