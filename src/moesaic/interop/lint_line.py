"""What the lint passes around: findings, and a launch line resolved against an inventory. Values only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moesaic.interop.command import Command
from moesaic.interop.inventory import Flag, Inventory
from moesaic.spec.hardware import MAX_DEVICES

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong, and what to write instead. An error keeps the line from doing what it says."""

    flag: str  # as typed; the variable's or the program's name where it is no flag
    severity: Severity
    rule: str
    message: str
    suggestion: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A flag of a line that its engine knows, with its value as text; None for a switch."""

    flag: Flag
    word: str
    value: str | None
    is_off: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One launch line, resolved against an inventory: what rules about combinations look at."""

    command: Command
    inventory: Inventory
    settings: tuple[Setting, ...]
    json_values: Mapping[str, Any]  # of flags that take a JSON object, dotted spellings merged

    @property
    def engine(self) -> str:
        """`vllm`, `sglang`, ..."""
        return self.inventory.engine

    def get(self, name: str) -> Setting | None:
        """The last setting of a flag, by any of its names."""
        flag = self.inventory.find(name)
        if flag is None:
            return None
        return next((s for s in reversed(self.settings) if s.flag.name == flag.name), None)

    def is_on(self, name: str) -> bool:
        """Whether a switch is set and not switched off."""
        found = self.get(name)
        return found is not None and not found.is_off and found.value not in ("False", "false")

    def number(self, name: str, default: int) -> int | None:
        """A whole number; the default where the flag is absent; None where it is no literal number."""
        found = self.get(name)
        if found is None:
            return default
        text = found.value or ""
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    def size(self, name: str) -> int | None:
        """A number of ranks, 1 where the flag is absent; None where it is none that a cluster has."""
        found = self.number(name, 1)
        return found if found is not None and 1 <= found <= MAX_DEVICES else None

    def text(self, name: str) -> str | None:
        """A value, or None where the flag is absent."""
        found = self.get(name)
        return None if found is None else found.value

    def json(self, name: str) -> Mapping[str, Any]:
        """A JSON object; empty where it is absent or cannot be read."""
        flag = self.inventory.find(name)
        value = None if flag is None else self.json_values.get(flag.name)
        return value if isinstance(value, dict) else {}

    @property
    def model(self) -> str | None:
        """The model, by position or by flag."""
        named = self.text("--model") or self.text("--model-path")
        if named is not None:
            return named
        places = {("vllm", "serve"), ("trtllm", "serve"), ("kt", "run"), ("moesaic", "serve")}
        has_place = (self.engine, self.command.program) in places
        return self.command.leading[0] if has_place and self.command.leading else None


def finding(flag: str, severity: Severity, rule: str, message: str, suggestion: str | None = None) -> Finding:
    """A finding, written short: rules make many."""
    return Finding(flag=flag, severity=severity, rule=rule, message=message, suggestion=suggestion)


def listed(items: Sequence[str], word: str = "and") -> str:
    """`a, b and c`."""
    if len(items) <= 1:
        return "".join(items)
    return f"{', '.join(items[:-1])} {word} {items[-1]}"
