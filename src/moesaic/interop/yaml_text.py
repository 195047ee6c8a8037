"""Plain values as block YAML: enough for manifests and options files, every text quoted."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_WORDS = frozenset({"yes", "no", "on", "off", "true", "false", "null", "y", "n"})  # that are no text unquoted


def dump_yaml(*documents: Mapping[str, Any]) -> str:
    """The documents of a YAML file. Strings are written as JSON, so that none is read as something else."""
    return "---\n".join("\n".join(_lines(document, 0)) + "\n" for document in documents)


def _lines(value: Any, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _entry(f"{pad}{_key(str(key))}:", inner, depth)
    else:
        for inner in value:
            first, *rest = _lines(inner, depth + 1) if _is_nested(inner) else [_scalar(inner)]
            yield f"{pad}- {first.lstrip()}"
            yield from rest


def _entry(head: str, inner: Any, depth: int) -> Iterator[str]:
    if _is_nested(inner):
        yield head
        yield from _lines(inner, depth + 1)
    elif isinstance(inner, str) and "\n" in inner:
        yield f"{head} |"
        yield from (f"{'  ' * (depth + 1)}{line}" for line in inner.rstrip("\n").split("\n"))
    else:
        yield f"{head} {_scalar(inner)}"


def _is_nested(value: Any) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str) and bool(value)


def _key(text: str) -> str:
    is_plain = re.fullmatch(r"[A-Za-z_][\w./-]*", text) and text.lower() not in _WORDS
    return text if is_plain else json.dumps(text)


def _scalar(value: Any) -> str:
    return json.dumps(value)
