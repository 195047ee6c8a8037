"""Machines as facts: memory, rates, links, prices, each number with its source, read from TOML files.

A `Machine` is one kind of device, a `Cluster` some nodes of them. Datasheet numbers, or those that
`moesaic calibrate` measured; corrections live in `cost`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from moesaic.errors import ConfigError, nearest

FOLDER = Path(__file__).parent / "hardware"
MACHINES: tuple[str, ...] = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))

REQUIRED = ("memory_bytes", "memory_bytes_per_s")
PRODUCT_RATES = ("flops_per_s.bfloat16", "flops_per_s.float32")
"""At least one of them is required, too."""
_OPTIONAL = (
    "flops_per_s.fp8", "flops_per_s.int8", "flops_per_s.fp4", "link_bytes_per_s",
    "network_bytes_per_s", "host_link_bytes_per_s", "link_latency_s", "network_latency_s",
    "num_devices_per_node", "num_devices_per_link_domain", "power_w", "price", "host_memory_bytes",
    "host_memory_bytes_per_s", "host_flops_per_s", "disk_bytes", "disk_bytes_per_s", "operator_s",
)  # fmt: skip
CALL_S = 4e-6
"""What a processor takes to call one operator, where its file does not say.

Source: measured, torch 2.13 on two threads of an EPYC: 2 to 6 us for a product of 64 x 64 or a top-k of 64,
most of which is the call.
"""
MAX_DEVICES = 1_000_000  # of a cluster: more is a slip of the keyboard


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One number and where it is from."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """One kind of device: datasheet or measured numbers, no correction.

    Units:  SI. link (within a node), network (out of it) and host link are one direction, per device. Host
            memory, host rates and disk are of the node that the device sits in. price is relative: L20 = 1.
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

    @property
    def num_devices_per_node(self) -> int:
        """Devices of a node; 1 where the file does not say."""
        return int(self.number("num_devices_per_node", 1))

    def number(self, name: str, default: float) -> float:
        """A fact that a file may leave out, by its dotted name."""
        fact = self.facts.get(name)
        return default if fact is None else fact.value

    def has_rate(self, dtype: str) -> bool:
        """Whether the file has a rate for matrix products in a dtype."""
        return f"flops_per_s.{dtype}" in self.facts

    @property
    def is_measured(self) -> bool:
        """Whether its rates are what software reached on it, and not a datasheet's."""
        return self.facts["memory_bytes_per_s"].source.startswith("measured")

    @property
    def operator_s(self) -> float | None:
        """What calling an operator takes on a processor; None: a GPU, to which a host launches kernels.

        A processor's file says so; what `moesaic calibrate` measured is one.
        """
        fact = self.facts.get("operator_s")
        if fact is not None:
            return fact.value
        return CALL_S if self.is_measured else None

    @property
    def wide_dtype(self) -> str:
        """What products are computed in when their own dtype has no rate: bfloat16, else float32."""
        return "bfloat16" if self.has_rate("bfloat16") else "float32"

    def flops_per_s(self, dtype: str) -> float:
        """Dense peak rate of matrix products in a dtype.

        Raises: ConfigError naming the dtypes that the file has.
        """
        fact = self.facts.get(f"flops_per_s.{dtype}")
        if fact is None:
            have = [name.split(".")[1] for name in self.facts if name.startswith("flops_per_s.")]
            raise ConfigError(f"machine {self.name} has no rate for {dtype!r}; {nearest(dtype, have)}")
        return fact.value


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes of one kind of device: `h200x8x4` is 4 nodes of 8."""

    machine: Machine
    devices_per_node: int
    num_nodes: int

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.devices_per_node * self.num_nodes

    @property
    def link_domain(self) -> int:
        """Devices that reach each other over the fast link: a node, or the rack of an NVL72."""
        domain = int(self.machine.number("num_devices_per_link_domain", 1))
        return min(self.num_devices, max(self.devices_per_node, domain))

    @property
    def node(self) -> str:
        """One of its nodes, as a deployment names it: `h200x8`."""
        return f"{self.machine.name}x{self.devices_per_node}"

    def __str__(self) -> str:
        return f"{self.node}x{self.num_nodes}"


def node_devices(node: str) -> int | None:
    """Devices of a node in a deployment: of `h200x4` as it says, of `h200` by its file; None: not known.

    Raises: ConfigError for a node without a device.
    """
    match = re.fullmatch(r".+x(\d+)", node)
    if match is None:
        return machine(node).num_devices_per_node if node in MACHINES else None
    if int(match[1]) < 1:
        raise ConfigError(f"a node needs at least 1 device, and {node!r} names {match[1]}")
    return int(match[1])


def cluster(text: str, extra: Path | None = None) -> Cluster:
    """`h200` is one device, `h200x8` one node of eight, `h200x8x4` four such nodes.

    `extra` is a machine file of one's own, or a folder of them.

    Raises: ConfigError for an unknown machine (with the nearest), and for counts below 1 or absurd.
    """
    name, per_node, num_nodes = _parts(
        text.strip().lower(), MACHINES if extra is None else machine_names(extra)
    )
    found = machine(name, extra)
    if per_node < 1 or num_nodes < 1 or per_node * num_nodes > MAX_DEVICES:
        raise ConfigError(
            f"{text!r} has {per_node} x {num_nodes} devices; both must be at least 1 and their product at "
            f"most {MAX_DEVICES}"
        )
    return Cluster(machine=found, devices_per_node=per_node, num_nodes=num_nodes)


def _parts(text: str, names: Sequence[str]) -> tuple[str, int, int]:
    """(name, per node, nodes); a name may end in x, and its hyphens may be left out.

    Raises: ConfigError for no name, for counts that follow a name without the x between them, and for what is
            not counts.
    """
    for name in sorted(names, key=len, reverse=True):
        spelled = "-?".join(re.escape(part) for part in name.split("-"))
        match = re.fullmatch(rf"{spelled}(?:x(\d+))?(?:x(\d+))?", text)
        if match is not None:
            per_node, num_nodes = (int(group) if group else 1 for group in match.groups())
            return name, per_node, num_nodes
    for name in names:
        close = re.fullmatch(rf"{re.escape(name)}([1-9]\d*(?:x\d+)?)", text)
        if close is not None:
            raise ConfigError(
                f"unknown machine {text!r}; did you mean {name}x{close.group(1)}? A machine is written "
                f"device x per node x nodes, and this device is called {name}"
            )
    for name in names:
        if text.startswith(f"{name}x"):
            raise ConfigError(
                f"machine {text!r}: {text.removeprefix(name)!r} after {name} is not x8 or x8x4; a machine is "
                "written device x per node x nodes, as in h200x8x4"
            )
    match = re.fullmatch(r"(.*?)(?:x(\d+))?(?:x(\d+))?", text)
    if match is None or not match.group(1):
        raise ConfigError(f"{text!r} names no machine; write it as in h200x8x4: device x per node x nodes")
    return match.group(1), int(match.group(2) or 1), int(match.group(3) or 1)


def _known(name: str, names: Sequence[str]) -> str:
    close = nearest(name, names)
    listed = f"known: {', '.join(names)}"
    return f"{close} {listed}" if close.endswith("?") else listed


def machine_names(extra: Path) -> tuple[str, ...]:
    """Names of all machines, those of `extra` too."""
    return (*_machines_of(extra), *MACHINES)


@cache
def machine(name: str, extra: Path | None = None) -> Machine:
    """The machine called `name`, whatever its case; from the files of `extra` first.

    Raises: ConfigError naming the nearest known ones, and for an `extra` without machine files.
    """
    found = name.strip().lower()
    own = {} if extra is None else _machines_of(extra)
    if found in own:
        return own[found]
    if found not in MACHINES:
        raise ConfigError(
            f"unknown machine {name!r}; {_known(found, (*own, *MACHINES))}; one of your own is a TOML file "
            "like those in moesaic/spec/hardware"
        )
    return read_machine(FOLDER / f"{found}.toml")


def _machines_of(path: Path) -> dict[str, Machine]:
    paths = sorted(path.glob("*.toml")) if path.is_dir() else [path]
    if not paths:
        raise ConfigError(f"{path}: a folder without a machine file (*.toml)")
    machines = [read_machine(one) for one in paths]
    return {one.name.lower(): one for one in machines}


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
        known = REQUIRED + PRODUCT_RATES + _OPTIONAL
        if key not in known:
            raise ConfigError(f"{path}: {key} is unknown; {nearest(key, known)}")
    if absent := missing_facts(facts):
        raise ConfigError(
            f"{path}: {absent} is missing; every machine needs {', '.join(REQUIRED)} and that rate"
        )
    return Machine(name=name, description=description, facts=facts)


def missing_facts(facts: Iterable[str]) -> str | None:
    """The first number that every machine needs and this one lacks; None when all are there."""
    have = set(facts)
    for key in REQUIRED:
        if key not in have:
            return key
    return None if have & set(PRODUCT_RATES) else " or ".join(PRODUCT_RATES)


def dump_machine(machine: Machine, notes: Iterable[str] = ()) -> str:
    """The text that `read_machine` reads; notes become comments at its head."""
    lines = [f"# {note}".rstrip() for note in notes]
    # JSON's strings are TOML's, too.
    lines += [f"name = {json.dumps(machine.name)}", f"description = {json.dumps(machine.description)}", ""]
    lines += [
        f"{key} = {{ value = {fact.value!r}, source = {json.dumps(fact.source)} }}"
        for key, fact in machine.facts.items()
    ]
    return "\n".join(lines) + "\n"


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
