"""How fast a drive is read past the page cache: in a run, and in pieces of an expert's size at random.

Writes a file of random bytes that has lost its name by then, so nothing is left behind. No torch.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.kernels.measure.child import Say, reading, seconds_of, serve

BLOCK_BYTES = 8 * 2**20
PIECES: Mapping[str, int] = {"olmoe-1b-7b": 12 * 2**20, "qwen3-30b-a3b": 9 * 2**20}
"""Bytes of one expert in bfloat16: 3 * D * F * 2."""
READERS = (1, 4)
IN_MEMORY = ("tmpfs", "ramfs")


class Store:
    """A file without a name to read pieces of: the system takes it back however this program ends."""

    def __init__(self, folder: str, max_bytes: int, budget_s: float) -> None:
        """Writes whole blocks until `max_bytes` or until the budget is spent, two blocks at least.

        Raises: OSError when the folder cannot be written or is full.
        """
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".moesaic-calibrate-") as file:
            writer, plain = os.open(file.name, os.O_WRONLY), os.open(file.name, os.O_RDONLY)
            direct = _open_direct(file.name)
        self.num_bytes = _fill(writer, max_bytes, budget_s)
        os.close(writer)
        self.fd, self.way = plain, "posix_fadvise(DONTNEED)"
        if direct is not None and _can_read(direct):
            self.fd, self.way = direct, "O_DIRECT"
        self._opened = [fd for fd in (plain, direct) if fd is not None]

    def read(self, start: int, into: mmap.mmap) -> None:
        """Fill a buffer from a place that is a multiple of the page size.

        Raises: OSError for a read that ends early.
        """
        with memoryview(into) as view:
            done = 0
            while done < len(view):
                with view[done:] as rest:
                    got = os.preadv(self.fd, [rest], start + done)
                if got <= 0:
                    raise OSError(errno.EIO, f"a read at {start + done} gave nothing")
                done += got

    def forget(self) -> None:
        """Drop the file from the page cache, where reads go through it."""
        if self.way != "O_DIRECT":
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Give the space back."""
        for fd in self._opened:
            os.close(fd)


def measure(told: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Rates of sequential and random reads in `folder`, with 1 and 4 readers."""
    folder, budget_s = told["folder"], float(told["budget_s"])
    if not hasattr(os, "posix_fadvise") or not hasattr(os, "preadv"):
        return {"readings": [], "missing": {"disk": "this system has no way to read past its page cache"}}
    kind = file_system(Path(folder))
    if kind in IN_MEMORY:
        why = f"{folder} is on {kind}, which is memory; name a folder on a drive with --disk"
        return {"readings": [], "missing": {"disk": why}}
    say(f"writing up to {int(told['max_bytes']) // 2**20} MiB to {folder}")
    store = Store(folder, int(told["max_bytes"]), budget_s / 3)
    say("reading the disk")
    cases: list[tuple[str, str, int, int]] = [
        ("random", name, size, num_readers) for name, size in PIECES.items() for num_readers in READERS
    ]
    cases.insert(0, ("sequential", "-", BLOCK_BYTES, 1))
    try:
        readings = [
            reading(
                "bytes/s", num_bytes, samples, order=order, expert=expert, piece_bytes=size,
                readers=num_readers, way=store.way, file_bytes=store.num_bytes,
            )
            for order, expert, size, num_readers in cases
            if (size <= store.num_bytes)
            for num_bytes, samples in [_passes(store, order, size, num_readers, budget_s / 2 / len(cases))]
        ]  # fmt: skip
    finally:
        store.close()
    return {"readings": readings, "missing": {}}


def file_system(folder: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """The kind of file system that a folder is on; None where the system does not say."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    real, best, kind = folder.resolve(), -1, None
    for line in lines:
        _, point, found, *_ = line.split()
        point = point.replace("\\040", " ")
        if real.is_relative_to(point) and len(point) >= best:
            best, kind = len(point), found
    return kind


def _passes(
    store: Store, order: str, size: int, num_readers: int, budget_s: float
) -> tuple[int, list[float]]:
    """Bytes of a round of one piece a reader, and seconds of rounds. All pieces are read before one again."""
    buffers = [mmap.mmap(-1, size) for _ in range(num_readers)]
    places = np.arange(store.num_bytes // size) * size
    if order == "random":
        places = np.random.default_rng(0).permutation(places)
    turn = 0
    with ThreadPoolExecutor(num_readers) as pool:

        def read_round() -> None:
            nonlocal turn
            starts = [int(places[(turn + i) % len(places)]) for i in range(num_readers)]
            turn += num_readers
            list(pool.map(store.read, starts, buffers))

        store.forget()
        samples: list[float] = []
        while len(samples) < 2 or sum(samples) < budget_s:
            if turn + num_readers > len(places):
                store.forget()
                turn = 0
            samples.append(seconds_of(read_round))
    for buffer in buffers:
        buffer.close()
    return num_readers * size, samples


def _fill(fd: int, max_bytes: int, budget_s: float) -> int:
    rng, num_bytes, start = np.random.default_rng(0), 0, time.perf_counter()
    while num_bytes < max_bytes and (num_bytes < 2 * BLOCK_BYTES or time.perf_counter() - start < budget_s):
        block = memoryview(rng.bytes(BLOCK_BYTES))
        while block:
            block = block[os.write(fd, block) :]
        num_bytes += BLOCK_BYTES
        if num_bytes % (8 * BLOCK_BYTES) == 0:
            os.fsync(fd)  # else the budget would be spent on filling memory
    os.fsync(fd)
    return num_bytes


def _open_direct(name: str) -> int | None:
    """A descriptor that reads past the page cache; None where the system or the file system has none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(name, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return None


def _can_read(fd: int) -> bool:
    """Whether reads through a descriptor work too: some file systems refuse them and not the opening."""
    with mmap.mmap(-1, mmap.PAGESIZE) as probe:
        try:
            return os.preadv(fd, [probe], 0) > 0
        except OSError:
            return False


if __name__ == "__main__":
    serve(measure)
