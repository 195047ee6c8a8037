"""`moesaic calibrate`: measure this machine, and write what was measured as a machine file.

The measuring is done by programs of their own, one after the other (`kernels.measure`, `parallel.measure`);
here is what they are told, and the file that comes out. No torch.
"""

from __future__ import annotations

import math
import os
import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from moesaic import __version__
from moesaic.audit.child import ChildFailed, Say, run_program
from moesaic.audit.machine_facts import Reading, facts_of, fit_collectives, notes_of
from moesaic.engine.machine import Machine as HostMachine
from moesaic.engine.machine import last_level_cache_bytes, read_machine
from moesaic.errors import CapacityError, ConfigError
from moesaic.spec.hardware import REQUIRED, Fact, Machine, dump_machine, missing_facts
from moesaic.units import format_bytes

SHARES = {"memory": 0.2, "gemm": 0.45, "disk": 0.2, "collectives": 0.15}
"""guess: of the seconds, by how many cases a part has."""
MODULES = {
    "memory": "moesaic.kernels.measure.memory", "gemm": "moesaic.kernels.measure.gemm",
    "disk": "moesaic.kernels.measure.disk", "collectives": "moesaic.parallel.measure",
}  # fmt: skip
DEFAULT_SECONDS, MAX_SECONDS = 40.0, 3600.0
START_S = (
    120.0  # guess: a part's time beside its measuring (starting, importing, preparing) on a busy machine
)
CACHE_FACTOR = 4  # a buffer of so many last-level caches is read from memory but for a quarter
MIN_BUFFER_BYTES = 256 * 2**20
MEMORY_SHARE = 0.25  # of what is available: two copies and the libraries fit beside it
MIN_DISK_BYTES, MAX_DISK_BYTES = 64 * 2**20, 2**30
BUSY_LOAD = 0.25  # guess: waiting or running processes for each processor, above which a machine is not idle
SCATTER = 0.2
"""Quartile range over median above which a number is called scattered."""
UNNAMEABLE = r".*x\d+"  # `boxx2` means two of `box`


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrationAsk:
    """What to measure, and where the file goes."""

    output: Path | None = None  # None: no file
    name: str | None = None  # None: of the file, else "mine"
    seconds: float = DEFAULT_SECONDS  # of measuring; starting the programs comes on top
    disk: Path | None = None  # a folder on the drive to read; None: where the file goes, or where we are
    is_overwriting: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= MAX_SECONDS:
            raise ConfigError(
                f"--seconds must be above 0 and at most {MAX_SECONDS:.0f}, got {self.seconds:g}"
            )
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", self.machine_name) or re.fullmatch(
            UNNAMEABLE, self.machine_name
        ):
            raise ConfigError(
                f"{self.machine_name!r} cannot name a machine: lower-case letters, digits, '.', '_' and '-', "
                "and not x and a number at the end, which counts devices; choose one with --name"
            )

    @property
    def machine_name(self) -> str:
        """What --machine will call it."""
        return self.name or ("mine" if self.output is None else self.output.stem.lower())

    @property
    def folder(self) -> Path:
        """Whose drive is read."""
        return self.disk or (Path() if self.output is None else self.output.parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Everything that was measured, and the machine that it makes.

    Units:  of each reading beside it; `machine.facts` are SI.
    """

    machine: Machine
    readings: tuple[Reading, ...]
    collectives: tuple[Mapping[str, Any], ...]  # alpha and beta of each, with the error of the fit
    not_measured: Mapping[str, str]  # what, and why
    warnings: tuple[str, ...]
    versions: Mapping[str, str | None]
    date: str
    host: HostMachine
    cache_bytes: int | None
    seconds: float
    output: Path | None

    @property
    def versions_text(self) -> str:
        """The date, and what was measured with."""
        return ", ".join(
            [self.date, *(f"{name} {number}" for name, number in self.versions.items() if number)]
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "name": self.machine.name, "description": self.machine.description, "date": self.date,
            "versions": dict(self.versions), "seconds": self.seconds,
            "num_cpus": self.host.num_cpus, "cpu_source": self.host.cpu_source,
            "memory_bytes": self.host.total_bytes, "last_level_cache_bytes": self.cache_bytes,
            "readings": [one.to_json() for one in self.readings],
            "collectives": [dict(one) for one in self.collectives],
            "facts": {
                key: {"value": fact.value, "source": fact.source} for key, fact in self.machine.facts.items()
            },
            "not_measured": dict(self.not_measured), "warnings": list(self.warnings),
            "file": None if self.output is None else str(self.output),
        }  # fmt: skip


def calibrate(ask: CalibrationAsk, show: Say) -> Measured:
    """Measure in about `ask.seconds` and the time to start, and write the file if one was asked for.

    Raises: ConfigError for a file or folder that cannot be written, before anything is measured, and when
            what was measured makes no machine; CapacityError when memory or disk is too small to measure.
    """
    _check_output(ask)
    host, cache_bytes = read_machine(), last_level_cache_bytes()
    load = os.getloadavg()[0] / host.num_cpus
    buffer_bytes = size_buffer(host.available_bytes, cache_bytes)
    not_measured: dict[str, str] = {}
    if cache_bytes is None:
        not_measured["last-level cache"] = "this system does not say; it was taken to be at most 64 MiB"
    jobs = _jobs(ask, host, buffer_bytes, not_measured)
    readings: list[Reading] = []
    for part, told in jobs.items():
        readings += _run(part, told, not_measured, show)
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    versions = {
        "moesaic": __version__, "python": platform.python_version(), "numpy": np.__version__,
        "torch": _version("torch"),
    }  # fmt: skip
    fits = fit_collectives(readings)
    facts = {
        "memory_bytes": Fact(
            value=host.total_bytes, source=f"measured {date}: all that this process may use"
        ),
        **facts_of(readings, fits, f"measured {date}"),
    }
    if "disk_bytes_per_s" in facts:
        free = shutil.disk_usage(ask.folder).free
        facts["disk_bytes"] = Fact(value=free, source=f"measured {date}: free space")
    if "flops_per_s.int8" not in facts and any(one.case.get("dtype") == "int8" for one in readings):
        not_measured["flops_per_s.int8"] = (
            "products in int8 are slower than wide ones here, so no plan should use them"
        )
    machine = Machine(
        name=ask.machine_name, facts=facts,
        description=f"{host.num_cpus} cores of {cpu_model()}, {format_bytes(host.total_bytes)}, as measured",
    )  # fmt: skip
    found = Measured(
        machine=machine, readings=tuple(readings), collectives=tuple(fits), not_measured=not_measured,
        warnings=warnings_of(readings, fits, load), versions=versions, date=date, host=host,
        cache_bytes=cache_bytes, seconds=ask.seconds, output=ask.output,
    )  # fmt: skip
    if ask.output is not None:
        _write(ask.output, found)
    return found


def size_buffer(available_bytes: int, cache_bytes: int | None) -> int:
    """Bytes to read or cycle through so that caches do not serve them.

    Raises: CapacityError with the arithmetic where memory is too small for it.
    """
    wanted = max(CACHE_FACTOR * (cache_bytes or 0), MIN_BUFFER_BYTES)
    wanted = -(-wanted // 2**21) * 2**21  # whole huge pages
    if wanted > MEMORY_SHARE * available_bytes:
        raise CapacityError(
            f"measuring memory takes a buffer of {format_bytes(wanted)} ({CACHE_FACTOR} x the "
            f"{format_bytes(cache_bytes or 0)} of caches, at least {format_bytes(MIN_BUFFER_BYTES)}), but "
            f"{MEMORY_SHARE:.0%} of the {format_bytes(available_bytes)} available here is "
            f"{format_bytes(MEMORY_SHARE * available_bytes)}; free some memory and run it again"
        )
    return wanted


def warnings_of(
    readings: Sequence[Reading], fits: Sequence[Mapping[str, Any]], load: float
) -> tuple[str, ...]:
    """What speaks against believing the numbers."""
    found = []
    if load > BUSY_LOAD:
        found.append(
            f"busy machine: {load:.2g} processes a processor were running before this began; measure again "
            "when it is idle"
        )
    scattered = sorted((one.spread or 0.0, one.label) for one in readings if (one.spread or 0.0) > SCATTER)
    if scattered:
        spread, label = scattered[-1]
        found.append(
            f"{len(scattered)} of {len(readings)} numbers scatter by over {SCATTER:.0%} of their median, "
            f"most {label} by {spread:.0%}; measure again when the machine is idle, or longer with --seconds"
        )
    bent = [one["op"] for one in fits if one.get("rms_error", 0.0) > SCATTER]
    if bent:
        found.append(
            f"alpha + bytes / beta is off by more than {SCATTER:.0%} (rms) for {', '.join(bent)}: a busy "
            "machine, or sizes that take different ways"
        )
    return tuple(found)


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """What the processor calls itself."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _jobs(
    ask: CalibrationAsk, host: HostMachine, buffer_bytes: int, not_measured: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """What each program is told; what cannot be measured here is named instead."""
    threads = {"num_threads": host.num_cpus}
    jobs: dict[str, dict[str, Any]] = {
        "memory": {**threads, "buffer_bytes": buffer_bytes},
        "gemm": {**threads, "cycle_bytes": buffer_bytes},
        "disk": {"folder": str(ask.folder.resolve()), "max_bytes": _disk_bytes(ask.folder)},
        "collectives": {"worlds": sorted({2, min(8, 2 ** int(math.log2(host.num_cpus)))} - {1})},
    }
    if find_spec("torch") is None:
        not_measured["collectives"] = "torch is not installed: pip install 'moesaic[engine]'"
        del jobs["collectives"]
    elif host.num_cpus < 2:
        not_measured["collectives"] = "two processes need two processors, and this machine has 1"
        del jobs["collectives"]
    return {part: {**told, "budget_s": SHARES[part] * ask.seconds} for part, told in jobs.items()}


def _run(part: str, told: Mapping[str, Any], not_measured: dict[str, str], show: Say) -> list[Reading]:
    """The readings of one program; when it failed, none, and its end is shown and named."""
    with TemporaryDirectory(prefix="moesaic-calibrate-") as folder:
        told = {**told, "result": str(Path(folder) / f"{part}.json")}
        try:
            found = run_program(
                MODULES[part], part, Path(folder), told, show, timeout_s=START_S + 4 * float(told["budget_s"])
            )
        except ChildFailed as failed:
            for line in (Path(folder) / f"{part}.log").read_text(errors="replace").splitlines()[-12:]:
                show(f"{part}: {line}")
            not_measured[part] = str(failed)
            return []
    not_measured |= found["missing"]
    return [Reading(part=part, **row) for row in found["readings"]]


def _check_output(ask: CalibrationAsk) -> None:
    """Refuse what would fail after a minute of measuring."""
    if ask.output is not None:
        folder = ask.output.parent
        if ask.output.is_dir():
            raise ConfigError(f"{ask.output} is a folder; name a file, as in -o mine.toml")
        if ask.output.exists() and not ask.is_overwriting:
            raise ConfigError(f"{ask.output} exists; choose another file, or --force to write over it")
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise ConfigError(f"{ask.output} cannot be written: {_fault(folder)}")
    if not ask.folder.is_dir() or not os.access(ask.folder, os.W_OK):
        raise ConfigError(
            f"the disk of {ask.folder} cannot be measured: {_fault(ask.folder)}; name a folder with --disk"
        )
    _disk_bytes(ask.folder)


def _fault(folder: Path) -> str:
    return f"no permission to write to {folder}" if folder.is_dir() else f"{folder} is not a folder"


def _disk_bytes(folder: Path) -> int:
    """Bytes of the file to read: at most half of what is free.

    Raises: CapacityError when that is too small to measure.
    """
    free = shutil.disk_usage(folder).free
    if free // 2 < MIN_DISK_BYTES:
        raise CapacityError(
            f"measuring the disk of {folder.resolve()} takes {format_bytes(MIN_DISK_BYTES)}, at most half of "
            f"what is free, and {format_bytes(free)} are free; make room, or name another folder with --disk"
        )
    return min(MAX_DISK_BYTES, free // 2)


def _write(output: Path, found: Measured) -> None:
    """The machine file, whole or not at all.

    Raises: ConfigError when a number that every machine needs is not there, or the file cannot be written.
    """
    if absent := missing_facts(found.machine.facts):
        why = found.not_measured.get("memory" if absent in REQUIRED else "gemm", "it was not measured")
        raise ConfigError(
            f"{output} was not written: every machine needs {absent}, and this one has none ({why})"
        )
    half = output.with_name(f".{output.name}.part")
    try:
        notes = notes_of(found.readings, found.collectives, found.versions_text)
        half.write_text(dump_machine(found.machine, notes), "utf-8")
        half.replace(output)
    except OSError as error:
        half.unlink(missing_ok=True)
        raise ConfigError(f"{output} cannot be written: {error}") from error


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
