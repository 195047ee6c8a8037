"""NUMA nodes: which of them this process may use, and pages that are bound to them. No torch."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from moesaic.kernels.huge_pages import Bytes

_MBIND = {"x86_64": 237, "aarch64": 235}  # Source: the kernel's tables of system calls
_BIND, _INTERLEAVE = 2, 3  # Source: linux/mempolicy.h
_MASK_BITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A node with processors and memory that this process may use.

    Units:  available_bytes counts the page cache as free.
    """

    node_id: int
    available_bytes: int


def read_nodes(
    *,
    sys: Path = Path("/sys/devices/system/node"),
    proc: Path = Path("/proc"),
    cpus: AbstractSet[int] | None = None,
) -> tuple[Node, ...]:
    """The nodes, ascending; none where the system does not say. Roots are parameters for tests.

    `cpus` None: those of this process's affinity mask. Nodes without processors are slower memory, and left
    out.
    """
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else frozenset()
    allowed = _allowed(proc / "self" / "status")
    nodes = []
    for folder in sys.glob("node[0-9]*"):
        node_id = int(folder.name.removeprefix("node"))
        total, available = _memory(folder / "meminfo")
        is_allowed = allowed is None or node_id in allowed
        if total and is_allowed and _numbers(_text(folder / "cpulist")) & cpus:
            nodes.append(Node(node_id=node_id, available_bytes=available))
    return tuple(sorted(nodes, key=lambda node: node.node_id))


def bind(data: Bytes, node_ids: Sequence[int]) -> None:
    """Let the pages of `data`, none of them written yet, come from one node, or from several in turn.

    Shapes:  data begins at a page.
    Raises:  OSError when the system refuses, as containers do that lack the right to it.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"no pages are bound on {platform.machine()}")
    words = (ctypes.c_ulong * (max(node_ids) // _MASK_BITS + 1))()
    for node_id in node_ids:
        words[node_id // _MASK_BITS] |= 1 << node_id % _MASK_BITS
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(data.ctypes.data),
        ctypes.c_ulong(data.nbytes),
        ctypes.c_long(_BIND if len(node_ids) == 1 else _INTERLEAVE),
        words,
        ctypes.c_ulong(len(words) * _MASK_BITS + 1),
        ctypes.c_ulong(0),
    )
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _allowed(status: Path) -> frozenset[int] | None:
    """The nodes that the cpuset allows; None: it is not said."""
    for line in _text(status).splitlines():
        name, _, value = line.partition(":")
        if name == "Mems_allowed_list":
            return _numbers(value)
    return None


def _memory(meminfo: Path) -> tuple[int, int]:
    """(bytes, available bytes) of a node."""
    fields = {}
    for line in _text(meminfo).splitlines():
        words = line.split()  # Node 0 MemFree: 123 kB
        if len(words) > 3 and words[3].isdigit():
            fields[words[2].removesuffix(":")] = 1024 * int(words[3])
    free = ("MemFree", "Active(file)", "Inactive(file)")
    return fields.get("MemTotal", 0), sum(fields.get(name, 0) for name in free)


def _numbers(text: str) -> frozenset[int]:
    """Of a list as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
