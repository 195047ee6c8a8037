"""Frozen dataclasses to plain JSON values and back, and their JSON schema, all from the same type hints.

Understands str, int, float, bool, None, Literal, `X | None`, unions of dataclasses told apart by their `kind`
field, tuples, frozensets, mappings and numpy arrays. A mapping whose keys are not strings is a list of [key,
value].
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np

from moesaic.errors import ConfigError, nearest

T = TypeVar("T")
_SCALARS: Mapping[type, tuple[str, str]] = {
    str: ("string", "a string"),
    bool: ("boolean", "true or false"),
    int: ("integer", "a whole number"),
    float: ("number", "a number"),
    type(None): ("null", "null"),
}


def to_plain(value: Any) -> Any:
    """JSON values of a dataclass and of everything in it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = _hints(type(value))
        return {name: _plain_field(hints[name], getattr(value, name)) for name in hints}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, frozenset):
        return sorted(to_plain(item) for item in value)
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return value


def _plain_field(hint: Any, value: Any) -> Any:
    """A mapping by the keys that its field declares, so that an empty one is written like a full one."""
    if not isinstance(value, Mapping):
        return to_plain(value)
    if _is_text(typing.get_args(hint)[0]):
        return {key: to_plain(item) for key, item in value.items()}
    return [[to_plain(key), to_plain(item)] for key, item in sorted(value.items(), key=lambda pair: pair[0])]


def from_plain(kind: type[T], data: Any, *, where: str, path: str = "") -> T:
    """A `kind` from JSON values. `where` names the file; `path` the place in it.

    Raises: ConfigError for an unknown key (with the nearest), a missing one, or a value of the wrong type.
    """
    result: T = _decode(kind, data, _Place(where, path))
    return result


class _Place(typing.NamedTuple):
    where: str
    path: str

    def at(self, key: str | int) -> _Place:
        """The place of an entry."""
        if isinstance(key, int):
            return self._replace(path=f"{self.path}[{key}]")
        return self._replace(path=f"{self.path}.{key}" if self.path else key)

    def fault(self, data: Any, rule: str) -> ConfigError:
        """The error for a value that breaks a rule."""
        text = repr(data)
        shown = text if len(text) <= 60 else f"{text[:57]}..."
        return ConfigError(f"{self.where}: {self.path or 'the document'} must be {rule}, got {shown}")


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode(hint: Any, data: Any, place: _Place) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _decode_object(hint, data, place)
    if hint in _SCALARS:
        return _decode_scalar(hint, data, place)
    if origin is Literal:
        if not isinstance(data, str) or data not in arguments:
            raise place.fault(data, f"one of {', '.join(map(repr, arguments))}")
        return data
    if origin is np.ndarray:
        return _decode_array(arguments, data, place)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(arguments, data, place)
    if origin is tuple or origin is frozenset:
        return _decode_sequence(origin, arguments, data, place)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _decode_mapping(arguments, data, place)
    raise TypeError(f"no rule for the type {hint!r} of {place.path}")


def _decode_scalar(hint: type, data: Any, place: _Place) -> Any:
    _, rule = _SCALARS[hint]
    if hint is float:
        if isinstance(data, bool) or not isinstance(data, int | float) or not math.isfinite(data):
            raise place.fault(data, "a finite number")
        return float(data)
    if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
        raise place.fault(data, rule)
    return data


def _decode_object(kind: type, data: Any, place: _Place) -> Any:
    if not isinstance(data, Mapping):
        raise place.fault(data, f"a JSON object ({kind.__name__})")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in data:
        if key not in fields:
            raise ConfigError(
                f"{place.where}: unknown key {place.at(str(key)).path}; {nearest(str(key), fields)}"
            )
    hints, values = _hints(kind), {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], place.at(name))
        elif not _has_default(field):
            raise ConfigError(f"{place.where}: {place.at(name).path} is missing; a {kind.__name__} needs it")
    try:
        return kind(**values)
    except ConfigError as error:
        raise ConfigError(f"{place.where}: {place.path or 'the document'}: {error}") from error


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def _decode_union(arguments: tuple[Any, ...], data: Any, place: _Place) -> Any:
    rest = tuple(argument for argument in arguments if argument is not type(None))
    if data is None and len(rest) < len(arguments):
        return None
    if len(rest) == 1:
        return _decode(rest[0], data, place)
    kinds = {_tag(kind): kind for kind in rest}
    if not isinstance(data, Mapping):
        raise place.fault(data, "a JSON object with a kind")
    tag = data.get("kind")
    if not isinstance(tag, str) or tag not in kinds:
        rule = f"one of {', '.join(map(repr, kinds))}"
        raise place.at("kind").fault(tag, rule)
    return _decode(kinds[tag], data, place)


def _tag(kind: type) -> str:
    tags: tuple[str, ...] = typing.get_args(_hints(kind)["kind"])
    return tags[0]


def _decode_sequence(origin: type, arguments: tuple[Any, ...], data: Any, place: _Place) -> Any:
    if not isinstance(data, list | tuple):
        raise place.fault(data, "a list")
    if origin is tuple and arguments[-1] is not Ellipsis:
        if len(data) != len(arguments):
            raise place.fault(data, f"a list of {len(arguments)}")
        return tuple(
            _decode(hint, item, place.at(i))
            for i, (hint, item) in enumerate(zip(arguments, data, strict=True))
        )
    return origin(_decode(arguments[0], item, place.at(i)) for i, item in enumerate(data))


def _decode_mapping(arguments: tuple[Any, ...], data: Any, place: _Place) -> Any:
    key_hint, value_hint = arguments
    if _is_text(key_hint):
        if not isinstance(data, Mapping):
            raise place.fault(data, "a JSON object")
        return {
            _decode(key_hint, key, place.at(str(key))): _decode(value_hint, item, place.at(str(key)))
            for key, item in data.items()
        }
    if not isinstance(data, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in data):
        raise place.fault(data, "a list of [key, value]")
    return {
        _decode(key_hint, key, place.at(i)): _decode(value_hint, item, place.at(i))
        for i, (key, item) in enumerate(data)
    }


def _is_text(hint: Any) -> bool:
    return hint is str or typing.get_origin(hint) is Literal


def _decode_array(arguments: tuple[Any, ...], data: Any, place: _Place) -> Any:
    dtype = typing.get_args(arguments[1])[0]
    is_whole = issubclass(dtype, np.integer)
    if not isinstance(data, list):
        raise place.fault(data, "a list of numbers")
    for i, item in enumerate(data):
        _decode_scalar(int if is_whole else float, item, place.at(i))
        if is_whole and not -(2**63) <= item < 2**63:
            raise place.at(i).fault(item, "a whole number of 64 bits")
    return np.asarray(data, dtype=dtype)


def json_schema(kind: type) -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of what `from_plain` takes for a dataclass."""
    definitions: dict[str, Any] = {}
    root = _schema(kind, definitions)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **root, "$defs": definitions}


def _schema(hint: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _object_schema(hint, definitions)
    if hint in _SCALARS:
        return {"type": _SCALARS[hint][0]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is np.ndarray:
        whole = issubclass(typing.get_args(arguments[1])[0], np.integer)
        return {"type": "array", "items": {"type": "integer" if whole else "number"}}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(argument, definitions) for argument in arguments]}
    if origin is tuple and arguments[-1] is not Ellipsis:
        items = [_schema(argument, definitions) for argument in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin is tuple or origin is frozenset:
        return {"type": "array", "items": _schema(arguments[0], definitions)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        value = _schema(arguments[1], definitions)
        if _is_text(arguments[0]):
            names = _schema(arguments[0], definitions)
            return {"type": "object", "propertyNames": names, "additionalProperties": value}
        pair = [_schema(arguments[0], definitions), value]
        return {
            "type": "array",
            "items": {"type": "array", "prefixItems": pair, "minItems": 2, "maxItems": 2},
        }
    raise TypeError(f"no schema for the type {hint!r}")


def _object_schema(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    name = kind.__name__
    if name not in definitions:
        definitions[name] = {}
        fields, hints = dataclasses.fields(kind), _hints(kind)
        definitions[name] = {
            "description": (kind.__doc__ or "").split("\n")[0],
            "type": "object",
            "properties": {field.name: _schema(hints[field.name], definitions) for field in fields},
            "required": [field.name for field in fields if not _has_default(field)],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}
