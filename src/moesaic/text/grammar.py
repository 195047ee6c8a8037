"""Output that must match a JSON schema: masks over the vocabulary, from the `llguidance` library."""

from __future__ import annotations

import json
from functools import partial
from threading import Lock
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt

from moesaic.errors import ConfigError, RequestError, UnsupportedModelError
from moesaic.text.tokenizer import Tokenizer

BoolArray = npt.NDArray[np.bool_]
UNUSABLE = "the schema in response_format cannot be used"  # how every message about one begins
ANY_OBJECT = '{"type": "object"}'
MAX_SCHEMA_CHARS = 1 << 18  # guess: the largest schemas of public collections are near 100,000 characters
# Between two JSON tokens: a space, or a new line and its indent. With free white space a weak model can
# answer with blank lines for ever and still match.
_OPTIONS: dict[str, Any] = {
    "lenient": False,  # a keyword that is not enforced is an error, not a warning
    "coerce_one_of": False,
    "whitespace_pattern": r"\x20|\r?\n[\x20\t]{0,32}",
}


class GrammarCompiler:
    """Turns JSON schemas into matchers over one vocabulary. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, num_logits: int | None = None) -> None:
        """`num_logits` is the width of the model's logits, which is often padded beyond the tokenizer's ids.

        Raises: ConfigError when there is no end token or num_logits is too small.
        """
        self._num_logits = num_logits or tokenizer.vocab_size
        if not tokenizer.eos_token_ids:
            raise ConfigError("structured output needs an end token: set eos_token_id in config.json")
        if self._num_logits < tokenizer.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} ids, the model only {self._num_logits} logits"
            )
        self._tokenizer = tokenizer
        self._table: llguidance.LLTokenizer | None = None
        self._lock = Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as what it is made of: every rank that samples has a compiler of its own."""
        return partial(GrammarCompiler, self._tokenizer, num_logits=self._num_logits), ()

    def check(self, schema: str) -> None:
        """Whether `compile` would take this schema, and a first token could be chosen.

        Raises: RequestError saying what is wrong with it.
        """
        self.compile(schema).mask()

    def compile(self, schema: str | None) -> Matcher:
        """A matcher at the start of its output; None is any JSON object.

        Raises: RequestError for a schema that is invalid, or uses a keyword that cannot be enforced.
        """
        grammar = self._grammar(ANY_OBJECT if schema is None else schema)
        return Matcher(llguidance.LLMatcher(self._get_table(), grammar, log_level=0), self._num_logits)

    def _grammar(self, schema: str) -> str:
        if len(schema) > MAX_SCHEMA_CHARS:
            raise _refusal(f"it has {len(schema)} characters, the limit is {MAX_SCHEMA_CHARS}")
        try:
            value = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise _refusal(f"it is not valid JSON: {error}") from error
        if not isinstance(value, dict):
            raise _refusal(f"it must be a JSON object, got {schema[:40]!r}")
        if "x-guidance" in value:
            raise _refusal("x-guidance is set by the server")
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)  # type: ignore[arg-type]
        except ValueError as error:
            raise _refusal(str(error)) from error
        _, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._get_table())
        if messages:
            raise _refusal("; ".join(messages))
        return grammar

    def _get_table(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._table is None:
                try:
                    self._table = llguidance.LLTokenizer(
                        self._tokenizer.to_json(),
                        n_vocab=self._num_logits,
                        eos_token=list(self._tokenizer.eos_token_ids),
                    )
                except (ValueError, RuntimeError) as error:
                    raise UnsupportedModelError(
                        f"structured output cannot use this tokenizer: {error}"
                    ) from error
            return self._table


class Matcher:
    """Where one output stands in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, num_logits: int) -> None:
        self._matcher = matcher
        self._num_logits = num_logits

    def mask(self) -> BoolArray:
        """Which tokens may come next. End tokens are among them exactly when the output is complete as it is.

        Shapes:  [V] bool.
        Raises:  RequestError when the grammar has become too complex to follow.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, count=self._num_logits, bitorder="little").astype(np.bool_)

    def advance(self, token_id: int) -> None:
        """Take the token that was chosen.

        Raises: RequestError when it does not match, or the grammar has become too complex to follow.
        """
        self._matcher.consume_token(token_id)
        self._check()

    @property
    def is_accepting(self) -> bool:
        """Whether the output may end here."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether nothing but an end token can follow."""
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error().splitlines()[0]
            raise _refusal(f"the grammar library gave up on it ({reason}); simplify the schema")


def _refusal(reason: str) -> RequestError:
    return RequestError(f"{UNUSABLE}: {reason}", param="response_format")
