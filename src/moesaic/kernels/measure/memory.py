"""How fast all of a buffer is read, by number of threads, in normal and in huge pages.

The native loop reads each byte once and does next to nothing with it; without it, numpy's maximum of int64
does the same, one thread per part. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.kernels import native
from moesaic.kernels.huge_pages import Bytes, Pages, map_bytes
from moesaic.kernels.measure.child import Say, reading, serve, timed


def measure(told: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Rates of reading `buffer_bytes` (a multiple of 2 MiB) with 1, 2, 4, ... `num_threads` threads."""
    num_bytes, counts = int(told["buffer_bytes"]), thread_counts(int(told["num_threads"]))
    budget_s = float(told["budget_s"]) / (2 * len(counts))
    say(f"reading memory with 1 to {counts[-1]} threads")
    readings, missing = [], {}
    for pages in ("normal", "huge"):
        buffer, why_not = allocate(num_bytes, pages, counts[-1])
        if why_not:
            missing["memory in huge pages"] = why_not
            continue
        for num_threads in counts:
            read, by = reader(buffer, num_threads)
            samples = timed(read, budget_s)
            readings.append(reading("bytes/s", num_bytes, samples, threads=num_threads, pages=pages, by=by))
        del buffer, read  # before the next one is allocated
    return {"readings": readings, "missing": missing}


def thread_counts(num_threads: int) -> list[int]:
    """1, 2, 4, ... and the last: all."""
    powers = [2**i for i in range(num_threads.bit_length()) if 2**i < num_threads]
    return [*powers, num_threads]


def allocate(num_bytes: int, pages: Pages, num_threads: int) -> tuple[Bytes, str | None]:
    """A written buffer that begins at a huge page, and why its pages are not huge though they should be.

    All threads write it, where they can: on several sockets its pages then lie on all of them.
    """
    buffer = map_bytes(num_bytes, pages)
    compiled = native.module()
    if compiled is None:
        buffer[:] = 1
    else:
        compiled.Reader(buffer.ctypes.data, num_bytes, num_threads).touch()
    if pages == "huge" and huge_bytes_at(buffer.ctypes.data) < num_bytes // 2:
        return buffer, "the kernel gave none (see /sys/kernel/mm/transparent_hugepage/enabled)"
    return buffer, None


def reader(buffer: Bytes, num_threads: int) -> tuple[Callable[[], object], str]:
    """A call that reads the whole buffer once, and the name of what does it."""
    compiled = native.module()
    if compiled is not None:
        return compiled.Reader(buffer.ctypes.data, buffer.nbytes, num_threads).read, "native"
    parts = np.array_split(buffer.view(np.int64), num_threads)
    pool = ThreadPoolExecutor(num_threads)
    return lambda: list(pool.map(np.max, parts)), "numpy"


def huge_bytes_at(address: int) -> int:
    """Bytes in huge pages of the mapping that holds an address; 0 where the system does not say."""
    is_inside = False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif is_inside and line.startswith("AnonHugePages:"):
            return 1024 * int(line.split()[1])
    return 0


if __name__ == "__main__":
    serve(measure)
