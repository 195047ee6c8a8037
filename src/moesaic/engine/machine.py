"""What this process may use of the machine: processors and memory, as the kernel and the container allow.

Facts are read once, by `read_machine`; nothing here decides anything.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number near 2**63


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Processors and memory of this process, with the source of each number.

    Units:  total_bytes and available_bytes are of this process's container; available counts what the kernel
            could reclaim (page cache) as free.
    """

    num_cpus: int
    cpu_source: str
    total_bytes: int
    available_bytes: int
    memory_source: str


def read_machine(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> Machine:
    """The machine now. Roots are parameters for tests; outside Linux, memory comes from sysconf."""
    num_cpus, cpu_source = _read_cpus(proc, cgroup)
    total, available, source = _read_meminfo(proc)
    for folder in _folders(proc, cgroup, "memory"):
        limit, free = _read_memory_limit(folder)
        if limit is not None and limit < total:
            total, source = limit, f"the memory limit in {folder}"
        if free is not None and free < available:
            available, source = free, f"the memory limit in {folder}"
    return Machine(
        num_cpus=num_cpus,
        cpu_source=cpu_source,
        total_bytes=total,
        available_bytes=max(available, 0),
        memory_source=source,
    )


def host_key(proc: Path = Path("/proc"), shm: Path = Path("/dev/shm")) -> str:
    """The same for processes that share a kernel and its shared memory, which containers of one may not."""
    boot = _text(proc / "sys/kernel/random/boot_id") or platform.node()
    return f"{boot}/{shm.stat().st_dev if shm.is_dir() else 'none'}"


def last_level_cache_bytes(sys: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """All caches of the last level together: what a measurement of memory has to exceed; None: unknown."""
    found: dict[tuple[int, str], int] = {}
    for folder in sys.glob("cpu[0-9]*/cache/index[0-9]*"):
        level, size = _number(_text(folder / "level")), _text(folder / "size")
        if level is not None and size.endswith("K") and _text(folder / "type") != "Instruction":
            found[level, _text(folder / "shared_cpu_list")] = 1024 * int(size[:-1])
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or None


def _read_cpus(proc: Path, cgroup: Path) -> tuple[int, str]:
    if hasattr(os, "sched_getaffinity"):
        num, source = len(os.sched_getaffinity(0)), "processor affinity"
    else:
        num, source = os.cpu_count() or 1, "processor count"
    for folder in _folders(proc, cgroup, "cpu"):
        quota = _read_quota(folder)
        if quota is not None and max(1, int(quota)) < num:
            num, source = max(1, int(quota)), f"the CPU quota of {quota:g} in {folder}"
    return num, source


def _read_quota(folder: Path) -> float | None:
    """Processors allowed by one cgroup; None: as many as there are."""
    both = _text(folder / "cpu.max").split()
    if not both:
        both = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
    quota, period = (_number(word) for word in both[:2]) if len(both) > 1 else (None, None)
    return quota / period if quota is not None and period and quota > 0 else None


def _read_meminfo(proc: Path) -> tuple[int, int, str]:
    fields = {}
    for line in _text(proc / "meminfo").splitlines():
        name, _, value = line.partition(":")
        fields[name] = 1024 * int(value.split()[0])
    if "MemTotal" in fields:
        free = fields.get("MemAvailable", fields.get("MemFree", 0))
        return fields["MemTotal"], free, f"MemAvailable in {proc / 'meminfo'}"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # guess: half, where the system does not say what is free
    return total, total // 2, "half of the physical memory"


def _read_memory_limit(folder: Path) -> tuple[int | None, int | None]:
    """(limit, what is left of it) of one cgroup of either version; page cache is left, as in MemAvailable.

    Also what was used lately: of a checkpoint that was read twice nothing has to stay.
    """
    limit = _number(_text(folder / "memory.max")) or _number(_text(folder / "memory.limit_in_bytes"))
    if limit is None or limit >= _UNLIMITED_BYTES:
        return None, None
    used = _number(_text(folder / "memory.current")) or _number(_text(folder / "memory.usage_in_bytes")) or 0
    stat = dict(line.split() for line in _text(folder / "memory.stat").splitlines())
    cache = sum(
        int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("inactive_file", "active_file")
    )
    return limit, limit - max(used - cache, 0)


def _folders(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """This process's cgroup and its parents, in every hierarchy there is: a limit of a parent binds too.

    Inside a container the path may be written as seen from outside; then only the root exists here.
    """
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            folder = root.joinpath(*parts[:depth])
            if folder.is_dir():
                yield folder


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None
