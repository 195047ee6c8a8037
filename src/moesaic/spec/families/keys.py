"""Typed, checked access to one JSON object of a config. Every complaint names file, key, value and rule.

Knows JSON types, aliases and class defaults; nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from moesaic.errors import ConfigError, nearest

MAX_WHOLE = 1_000_000_000
"""No width, vocabulary or position of a real model comes near it; a damaged number does."""


def shorten(value: object) -> str:
    """`repr` of a value, cut to what fits in an error message."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**18:
        return f"a whole number of about {value.bit_length() * 301 // 1000 + 1} digits"
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'JSON object'} of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class Keys:
    """One JSON object and the defaults of its config class. A null key is None, whatever the default."""

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        where: str,
        prefix: str = "",
        defaults: Mapping[str, Any] | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.config = config
        self.where = where
        self.prefix = prefix
        self.defaults = defaults or {}
        self.aliases = aliases or {}

    def path(self, key: str) -> str:
        """The key as a reader of the file finds it: text_config.num_experts."""
        return f"{self.prefix}{key}"

    def fault(self, key: str, value: object, rule: str) -> ConfigError:
        """The error to raise for a key whose value breaks a rule."""
        return ConfigError(f"{self.where}: {self.path(key)} must be {rule}, got {shorten(value)}")

    def missing(self, key: str, why: str = "") -> ConfigError:
        """The error to raise for a key that has no default; `why` is the rule, where it is another."""
        rule = why or "there is no default for it: write the model's own value there"
        return ConfigError(f"{self.where}: {self.path(key)} is missing; {rule}")

    def has(self, key: str) -> bool:
        """Whether the file itself sets the key or an alias of it."""
        return self.given(key) is not None

    def given(self, key: str) -> Any:
        """The file's own value under the key or its aliases.

        Raises: ConfigError when two aliases disagree.
        """
        names = (key, *self.aliases.get(key, ()))
        found = [(name, self.config[name]) for name in names if self.config.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise ConfigError(
                    f"{self.where}: {self.path(found[0][0])} is {shorten(found[0][1])} but "
                    f"{self.path(name)}, "
                    f"another name for it, is {shorten(value)}; remove one"
                )
        return found[0][1] if found else None

    def value(self, key: str) -> Any:
        """The file's value, else the class default; a null of the file is None and not the default."""
        given = self.given(key)
        if given is not None or any(name in self.config for name in (key, *self.aliases.get(key, ()))):
            return given
        return self.defaults.get(key)

    def whole_or_none(self, key: str, *, low: int = 1, high: int = MAX_WHOLE) -> int | None:
        """A whole number in [low, high]."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fault(key, value, "a whole number")
        if not low <= value <= high:
            raise self.fault(key, value, f"between {low} and {high}")
        return value

    def whole(self, key: str, *, low: int = 1, high: int = MAX_WHOLE) -> int:
        """A whole number in [low, high] that has to be there."""
        value = self.whole_or_none(key, low=low, high=high)
        if value is None:
            raise self.missing(key)
        return value

    def number_or_none(
        self, key: str, *, low: float = -math.inf, high: float = math.inf, is_open: bool = False
    ) -> float | None:
        """A finite number from `low` (above it when `is_open`) to `high`."""
        value = self.value(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(key, value, "a number")
        if isinstance(value, int) and abs(value) > 10**300:
            raise self.fault(key, value, "a number that a float can hold")
        if not math.isfinite(value):
            raise self.fault(key, value, "finite")
        if value < low or (is_open and value == low):
            raise self.fault(key, value, f"{'above' if is_open else 'at least'} {low:g}")
        if value > high:
            raise self.fault(key, value, f"at most {high:g}")
        return float(value)

    def number(
        self, key: str, *, low: float = -math.inf, high: float = math.inf, is_open: bool = False
    ) -> float:
        """A finite number that has to be there."""
        value = self.number_or_none(key, low=low, high=high, is_open=is_open)
        if value is None:
            raise self.missing(key)
        return value

    def flag(self, key: str) -> bool:
        """True or false; absent without a default is false."""
        value = self.value(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.fault(key, value, "true or false")
        return value

    def text_or_none(self, key: str, choices: Collection[str] | None = None) -> str | None:
        """A string, one of `choices` where given."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, str):
            raise self.fault(key, value, "a string")
        if choices is not None and value not in choices:
            raise ConfigError(
                f"{self.where}: {self.path(key)} is {shorten(value)}, which is unknown; "
                f"{nearest(value, choices)}"
            )
        return value

    def text(self, key: str, choices: Collection[str] | None = None) -> str:
        """A string that has to be there."""
        value = self.text_or_none(key, choices)
        if value is None:
            raise self.missing(key)
        return value

    def names_or_none(
        self, key: str, choices: Mapping[str, str], *, length: int | None = None
    ) -> tuple[str, ...] | None:
        """A list of strings, each translated by `choices`; exactly `length` of them where given."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.fault(key, value, "a list of names")
        if length is not None and len(value) != length:
            raise ConfigError(
                f"{self.where}: {self.path(key)} has {len(value)} entries for {length} layers; it needs "
                "one a layer"
            )
        for i, name in enumerate(value):
            if not isinstance(name, str):
                raise self.fault(f"{key}[{i}]", name, "a string")
            if name not in choices:
                raise ConfigError(
                    f"{self.where}: {self.path(key)}[{i}] is {shorten(name)}, which is unknown; "
                    f"{nearest(name, choices)}"
                )
        return tuple(choices[name] for name in value)

    def indexes(self, key: str, *, end: int) -> tuple[int, ...] | None:
        """A list of positions in [0, end)."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.fault(key, value, "a list of layer numbers")
        for i, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < end:
                raise self.fault(f"{key}[{i}]", item, f"a layer number between 0 and {end - 1}")
        return tuple(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of finite numbers; absent is empty."""
        value = self.value(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.fault(key, value, "a list of numbers")
        for i, item in enumerate(value):
            if isinstance(item, bool) or not isinstance(item, int | float) or not math.isfinite(item):
                raise self.fault(f"{key}[{i}]", item, "a finite number")
        return tuple(float(item) for item in value)

    def below(self, key: str, *, defaults: Mapping[str, Any] | None = None) -> Keys | None:
        """The JSON object under a key, with defaults of its own."""
        value = self.value(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.fault(key, value, "a JSON object")
        return Keys(value, where=self.where, prefix=f"{self.prefix}{key}.", defaults=defaults)


def divide(keys: Keys, total_key: str, total: int, part_key: str, part: int) -> int:
    """total / part.

    Raises: ConfigError with the arithmetic when it does not come out whole.
    """
    if total % part:
        raise ConfigError(
            f"{keys.where}: {keys.path(total_key)} ({total}) must be a multiple of {keys.path(part_key)} "
            f"({part}); "
            f"{total} mod {part} = {total % part}"
        )
    return total // part
