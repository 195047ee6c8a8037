"""From the bytes of a request to a checked body, or an error that names the field."""

from __future__ import annotations

import asyncio
import json
import reprlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from moesaic.errors import RequestError, nearest
from moesaic.server.problem import ClientLeftError, HttpError, Problem
from moesaic.server.rules import rule_of

HARMLESS_QUERY = frozenset(["api-version"])
MAX_DEPTH = 64  # of nested lists and objects
_M = TypeVar("_M", bound=BaseModel)
_SHORT = reprlib.Repr()  # 30 characters of a text, a few entries of a list


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises: HttpError 415, 413 or 408; ClientLeftError.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        # Also a guard: browsers send this type from pages of other origins only when allowed to.
        got = media_type or "none"
        _fail(415, f"the Content-Type is {got}: send JSON, with the header Content-Type: application/json")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        _too_large(max_bytes)
    data = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                data += chunk
                if len(data) > max_bytes:
                    _too_large(max_bytes)
    except TimeoutError:
        _fail(408, f"the body did not arrive within {timeout_s:g} s")
    except ClientDisconnect as error:
        raise ClientLeftError("the client left while it sent the body") from error
    return bytes(data)


def parse_body(models: Mapping[str, type[_M]], data: bytes) -> _M:
    """A checked body. Of several models the first is taken whose key the body has, else the last.

    Raises: RequestError naming the field, the value and the rule.
    """
    value = parse_json(data)
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, got {_SHORT.repr(value)}")
    *_, model = models.values()
    model = next((models[key] for key in models if key in value), model)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _first_error(error, model) from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error


def parse_json(data: bytes) -> Any:
    """JSON in UTF-8, each key once, without NaN, half surrogates, numbers or nesting beyond reason.

    Raises: RequestError saying what is wrong.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_without_repeats
        )
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not valid UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    except RequestError:
        raise
    except RecursionError as error:
        raise RequestError(f"the body is nested more than {MAX_DEPTH} levels deep") from error
    except ValueError as error:
        raise RequestError("the body holds a whole number of thousands of digits") from error
    has_surrogates = b"\\ud" in data or b"\\uD" in data or b"\\Ud" in data
    if has_surrogates or data.count(b"[") + data.count(b"{") > MAX_DEPTH:
        _check_tree(value)
    return value


def _check_tree(root: Any) -> None:
    stack = [(root, 1)]
    while stack:
        value, depth = stack.pop()
        if isinstance(value, str):
            if any("\ud800" <= char <= "\udfff" for char in value):
                raise RequestError(
                    f"{_SHORT.repr(value)} holds half of a surrogate pair: it is not valid Unicode"
                )
        elif isinstance(value, dict | list):
            if depth > MAX_DEPTH:
                raise RequestError(f"the body is nested more than {MAX_DEPTH} levels deep")
            if isinstance(value, dict):
                stack += [(item, depth + 1) for pair in value.items() for item in pair]
            elif not (value and type(value[0]) is int and all(type(item) is int for item in value)):
                stack += [(item, depth + 1) for item in value]


def _refuse_constant(name: str) -> NoReturn:
    raise RequestError(f"the body is not valid JSON: {name} is no JSON number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object; of a key given twice the library would silently take the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise RequestError(f"the key {_SHORT.repr(key)} stands twice in one object: give it once", param=key)
    return found


def _first_error(error: ValidationError, model: type[BaseModel]) -> RequestError:
    known = _known_fields(model)
    found = []
    for entry in error.errors(include_url=False):
        # Union branches and discriminators put names of types between the names of fields.
        parts = [part for part in entry["loc"] if isinstance(part, int) or part in known]
        found.append(([p for i, p in enumerate(parts) if i == 0 or p != parts[i - 1]], entry))
    path, first = max(found, key=lambda item: len(item[0]))  # the first of those that point deepest
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, RequestError):
        return cause
    where = _path(path) or "the body"
    param = str(path[0]) if path else None
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        if not path:
            return RequestError(f"unknown field {name}; {nearest(name, model.model_fields)}", param=name)
        return RequestError(f"unknown field {_path([*path, name])}", param=param)
    if first["type"] == "missing":
        return RequestError(f"{where} is required", param=param)
    return RequestError(f"{where}{rule_of(first)}, got {_SHORT.repr(first['input'])}", param=param)


def check_query(request: Request, known: Collection[str]) -> None:
    """Whether the query has no parameter but those, and the one that Azure's clients send with every call.

    Raises: RequestError naming the first that it should not have: it would change nothing.
    """
    for name in request.query_params:
        if name not in known and name not in HARMLESS_QUERY:
            listed = f"{nearest(name, known)}" if known else "this path takes none"
            raise RequestError(f"unknown query parameter {_SHORT.repr(name)}; {listed}", param=name)


def query_error(error: Mapping[str, Any]) -> RequestError:
    """A complaint of FastAPI about a query parameter or a part of the path."""
    name = str(error["loc"][-1])
    return RequestError(f"{name}{rule_of(error)}, got {_SHORT.repr(error['input'])}", param=name)


@cache
def _known_fields(model: type[BaseModel]) -> frozenset[str]:
    """Names of all fields of a body and of the bodies inside it."""
    schema = model.model_json_schema()
    parts = [schema, *schema.get("$defs", {}).values()]
    return frozenset(name for part in parts for name in part.get("properties", {}))


def _path(parts: Sequence[str | int]) -> str:
    """`messages[0].content`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".")


def _too_large(max_bytes: int) -> NoReturn:
    _fail(413, f"the body is larger than the limit of {max_bytes} bytes")


def _fail(status: int, message: str) -> NoReturn:
    raise HttpError(Problem(status=status, message=message))
