"""The bytes of a token, and a stream decoder that never emits half a character. Knows no vocabulary."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moesaic.errors import UnsupportedModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = "ByteLevel, ByteFallback, Metaspace, Replace of a string, Fuse, Strip of leading characters"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rules:
    """How a tokenizer.json's `decoder` turns tokens into text, as one value."""

    is_byte_level: bool = False
    has_byte_fallback: bool = False
    replacements: tuple[tuple[str, str], ...] = ()
    metaspace: str | None = None  # the character that stands for a space
    is_first_space_dropped: bool = False  # metaspace: in the first token it stands for nothing
    separator: str = ""  # between tokens; a file without a decoder joins them with a space
    strip: str = ""  # character removed from the start of the text ...
    num_stripped: int = 0  # ... up to so many times


class TokenBytes:
    """The bytes of every token id, looked up once each."""

    def __init__(
        self,
        name_of: Callable[[int], str | None],
        decoder: Mapping[str, Any] | None,
        special_ids: Collection[int],
    ) -> None:
        """Build from the names of ids and the `decoder` of a tokenizer.json.

        Raises: UnsupportedModelError naming a decoder that this cannot stream.
        """
        self._name_of = name_of
        self.rules = _read_rules(decoder)
        self.special_ids = frozenset(special_ids)
        self._cache: dict[tuple[int, bool], bytes] = {}

    def of(self, token_id: int, *, is_first: bool) -> bytes:
        """What a token adds to a text, at its start or later; nothing for an id that names no token."""
        key = (token_id, is_first)
        found = self._cache.get(key)
        if found is None:
            name = self._name_of(token_id) if 0 <= token_id < 2**32 else None
            if name is None:
                return b""  # not cached: such ids have no end
            found = self._cache[key] = self._render(name, is_first)
        return found

    def join(self, ids: Iterable[int], *, skip_special_tokens: bool) -> str:
        """The text of all these ids at once."""
        parts: list[bytes] = []
        for token_id in ids:
            if skip_special_tokens and token_id in self.special_ids:
                continue
            parts.append(self.of(token_id, is_first=not parts))
        text = b"".join(parts).decode("utf-8", "replace")
        return text[_leading(text, self.rules.strip, self.rules.num_stripped) :]

    def _render(self, name: str, is_first: bool) -> bytes:
        rules = self.rules
        if rules.is_byte_level:
            # A token with a character outside the byte alphabet, such as an added one, is its own UTF-8.
            mapped = [_BYTE_OF.get(char) for char in name]
            return name.encode() if None in mapped else bytes(b for b in mapped if b is not None)
        for old, new in rules.replacements:
            name = name.replace(old, new)
        if rules.metaspace is not None:
            name = name.replace(rules.metaspace, "" if is_first and rules.is_first_space_dropped else " ")
        if rules.has_byte_fallback and (match := _BYTE_TOKEN.fullmatch(name)):
            return bytes([int(match.group(1), 16)])
        return (name if is_first else rules.separator + name).encode()


class StreamDecoder:
    """Text of a growing list of tokens: the pieces joined are what decoding all of them gives.

    A character is emitted when its last byte is there. Work per token does not grow with the text.
    """

    def __init__(self, table: TokenBytes, *, skip_special_tokens: bool) -> None:
        self._table = table
        self._is_skipping = skip_special_tokens
        self._is_first = True
        self._to_strip = table.rules.num_stripped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        if self._is_skipping and token_id in self._table.special_ids:
            return ""
        text = self._utf8.decode(self._table.of(token_id, is_first=self._is_first))
        self._is_first = False
        return self._stripped(text)

    def finish(self) -> str:
        """What is left: U+FFFD for a character whose last bytes never came. The decoder is spent."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if self._to_strip and text:
            count = _leading(text, self._table.rules.strip, self._to_strip)
            self._to_strip = self._to_strip - count if count == len(text) else 0
            text = text[count:]
        return text


def _leading(text: str, char: str, limit: int) -> int:
    count = 0
    while count < limit and count < len(text) and text[count] == char:
        count += 1
    return count


def _read_rules(decoder: Mapping[str, Any] | None) -> _Rules:
    if decoder is None:
        return _Rules(separator=" ")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    fields: dict[str, Any] = {}
    replacements: list[tuple[str, str]] = []
    for step in steps:
        match step:
            case {"type": "ByteLevel"}:
                fields["is_byte_level"] = True
            case {"type": "ByteFallback"}:
                fields["has_byte_fallback"] = True
            case {"type": "Fuse"}:
                fields["is_fused"] = True
            case {"type": "Replace", "pattern": {"String": old}, "content": new} if "is_fused" not in fields:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": char}:
                fields["metaspace"] = char
                fields["is_first_space_dropped"] = step.get("prepend_scheme", "always") != "never"
            case {"type": "Strip", "content": char, "start": start, "stop": 0} if "is_fused" in fields:
                fields["strip"], fields["num_stripped"] = char, start
            case _:
                raise UnsupportedModelError(
                    f"tokenizer.json has the decoder {step}, which is not supported; known: {_SUPPORTED}"
                )
    fields.pop("is_fused", None)
    if fields.get("is_byte_level") and (len(fields) > 1 or replacements):
        raise UnsupportedModelError(f"tokenizer.json mixes ByteLevel with other decoders: {steps}")
    return _Rules(replacements=tuple(replacements), **fields)


def _byte_alphabet() -> dict[str, int]:
    """The 256 printable characters by which byte-level BPE writes bytes.

    Printable Latin-1 stands for itself; the other 68 bytes, in order, are the characters from U+0100 on.

    Source: Radford et al. 2019 (GPT-2), sec. 2.2.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
