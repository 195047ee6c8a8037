"""Machines as facts: memory, rates, links, each number with its source, read from TOML files."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.errors import ConfigError, nearest

FOLDER = Path(__file__).parent / "hardware"
MACHINES: tuple[str, ...] = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))

_REQUIRED = ("memory_bytes", "memory_bytes_per_s", "flops_per_s.bfloat16")
_OPTIONAL = (
    "flops_per_s.float32", "flops_per_s.fp8", "flops_per_s.int8", "link_bytes_per_s", "network_bytes_per_s",
    "host_link_bytes_per_s", "num_devices_per_node", "power_w",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One number and where it is from."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One kind of device: datasheet numbers, no correction.

    Units:  SI. link (within a node), network (out of it) and host link are one direction, per device.
    """

    name: str
    description: str
    facts: Mapping[str, Fact]  # by dotted name, as in the file

    @property
    def memory_bytes(self) -> int:
        """Memory of one device."""
        return int(self.facts["memory_bytes"].value)

    @property
    def memory_bytes_per_s(self) -> float:
        """Bandwidth of that memory."""
        return self.facts["memory_bytes_per_s"].value

    @property
    def link_bytes_per_s(self) -> float | None:
        """To another device of the node; None where there is none."""
        fact = self.facts.get("link_bytes_per_s")
        return None if fact is None else fact.value

    def has_rate(self, dtype: str) -> bool:
        """Whether the file has a rate for matrix products in a dtype."""
        return f"flops_per_s.{dtype}" in self.facts

    def flops_per_s(self, dtype: str) -> float:
        """Dense peak rate of matrix products in a dtype.

        Raises: ConfigError naming the dtypes that the file has.
        """
        fact = self.facts.get(f"flops_per_s.{dtype}")
        if fact is None:
            have = [name.split(".")[1] for name in self.facts if name.startswith("flops_per_s.")]
            raise ConfigError(f"machine {self.name} has no rate for {dtype!r}; {nearest(dtype, have)}")
        return fact.value


@cache
def machine(name: str) -> Machine:
    """The machine called `name`, whatever its case.

    Raises: ConfigError naming the nearest known ones.
    """
    found = name.strip().lower()
    if found not in MACHINES:
        raise ConfigError(f"unknown machine {name!r}; {nearest(found, MACHINES)}")
    return read_machine(FOLDER / f"{found}.toml")


def read_machine(path: Path) -> Machine:
    """A machine from a TOML file in which every number is a table with `value` and `source`.

    Raises: ConfigError for a missing or unknown entry, a number without a source or not above zero.
    """
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a readable machine file: {error}") from error
    name, description = data.pop("name", None), data.pop("description", None)
    if not isinstance(name, str) or not isinstance(description, str):
        raise ConfigError(f"{path}: name and description must be strings")
    facts = dict(_facts(path, "", data))
    for key in facts:
        if key not in _REQUIRED + _OPTIONAL:
            raise ConfigError(f"{path}: {key} is unknown; {nearest(key, _REQUIRED + _OPTIONAL)}")
    for key in _REQUIRED:
        if key not in facts:
            raise ConfigError(f"{path}: {key} is missing; every machine needs {', '.join(_REQUIRED)}")
    return Machine(name=name, description=description, facts=facts)


def _facts(path: Path, prefix: str, table: Mapping[str, Any]) -> list[tuple[str, Fact]]:
    found: list[tuple[str, Fact]] = []
    for key, entry in table.items():
        dotted = f"{prefix}{key}"
        if not isinstance(entry, dict):
            raise ConfigError(f"{path}: {dotted} must be a table with value and source, got {entry!r}")
        if "value" not in entry:
            found += _facts(path, f"{dotted}.", entry)
            continue
        value, source = entry["value"], entry.get("source")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ConfigError(f"{path}: {dotted}.value must be a number above 0, got {value!r}")
        if not isinstance(source, str) or not source.strip():
            raise ConfigError(f"{path}: {dotted} has no source; say where {value!r} is from")
        found.append((dotted, Fact(value=float(value), source=source)))
    return found
