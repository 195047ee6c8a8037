"""Bytes in a file in memory that one process fills and others of the same user then read. No torch.

    data ... | head | record          head: whether the data is whole, how far it is, bytes of the record

Who fills holds an exclusive lock on the file, who reads a shared one; whoever gets the exclusive one without
waiting is alone with it. So nothing is left to a process that was killed: a file without a lock and with a
whole head is used, one without a head is filled by whoever comes next. The last to leave removes the file.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import ConfigError
from moesaic.kernels.huge_pages import Bytes

_HEAD = struct.Struct("<8sQQQ")  # state, done, total, bytes of the record
_FILLING, _WHOLE = b"filling.", b"complete"
_POLL_S = 0.05  # guess: how soon it shows that another process is ready
_POPULATE_WRITE = 23  # Source: linux/mman.h, MADV_POPULATE_WRITE

Wait = Callable[[int, int], None]
"""Told how much of the data another process has filled, and of how much, while this one waits for it."""


class SharedBytes:
    """One file, mapped. Who finds `record` None fills `data` and calls `finish`.

    Pages that are whole cannot be written, one's own neither: the attempt ends the process.

    Owns:    a lock on the file, until `leave`, the end of the process, or nothing refers to the bytes.
    """

    def __init__(self, path: Path, num_bytes: int, wait: Wait) -> None:
        """Open, or wait for whoever is filling it.

        Raises: ConfigError for a file of somebody else; OSError as files do.
        """
        self.path, self.num_bytes = path, num_bytes
        self._descriptor, is_whole = _open(path, num_bytes, wait)
        self._end = weakref.finalize(self, _leave, self._descriptor, path, os.getpid())
        _open_ones.add(self)
        self.record = _read_record(self._descriptor, num_bytes) if is_whole else None
        access = mmap.PROT_READ if is_whole else mmap.PROT_READ | mmap.PROT_WRITE
        self._mapping = mmap.mmap(self._descriptor, num_bytes, prot=access)
        with suppress(OSError, AttributeError):  # a file system without huge pages
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._address = np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data

    @property
    def data(self) -> Bytes:
        """All the bytes. A view of them keeps the mapping and the lock."""
        # By the address: torch warns of each tensor over memory that python knows to be read-only.
        held: Any = (ctypes.c_uint8 * self.num_bytes).from_address(self._address)
        held.owner = self
        return np.frombuffer(held, dtype=np.uint8)

    def populate(self, start: int, num_bytes: int) -> None:
        """Have memory for these bytes now: later its lack would end the process.

        Raises: OSError when the file system is full.
        """
        if not num_bytes:
            return
        try:
            self._mapping.madvise(_POPULATE_WRITE, start, num_bytes)
        except OSError:  # unknown before Linux 5.14; if it was for lack of room, this says so
            os.posix_fallocate(self._descriptor, start, num_bytes)

    def tell(self, done: int, total: int) -> None:
        """Let those who wait know how far this process is."""
        os.pwrite(self._descriptor, _HEAD.pack(_FILLING, done, total, 0), self.num_bytes)

    def finish(self, record: bytes) -> None:
        """The data is whole: let others in. `record` is what they are told of it.

        Raises: OSError when the file system is full.
        """
        self.record = record
        os.pwrite(self._descriptor, record, self.num_bytes + _HEAD.size)
        os.pwrite(self._descriptor, _HEAD.pack(_WHOLE, 0, 0, len(record)), self.num_bytes)
        libc = ctypes.CDLL(None, use_errno=True)
        address, size = ctypes.c_void_p(self._address), ctypes.c_size_t(self.num_bytes)
        if libc.mprotect(address, size, ctypes.c_int(mmap.PROT_READ)):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def leave(self) -> None:
        """Give up the lock, and the file where nobody else has it; the mapping stays usable."""
        self._end()


_open_ones: weakref.WeakSet[SharedBytes] = weakref.WeakSet()


def leave_all() -> None:
    """`leave` whatever this process has open: before it ends in a way that runs nothing else."""
    for one in list(_open_ones):
        one.leave()


def held_bytes(path: Path) -> int:
    """Memory that a file takes already; 0 where there is none."""
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def find_abandoned(folder: Path, prefix: str) -> Iterator[Path]:
    """Files named `prefix`... that no process has open."""
    for path in sorted(folder.glob(f"{prefix}*")):
        with suppress(OSError):  # gone, or of somebody else
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            is_alone = _try_lock(descriptor, fcntl.LOCK_EX)
            os.close(descriptor)
            if is_alone:
                yield path


def remove_abandoned(path: Path) -> int:
    """Remove a file that no process has open; returns its bytes, 0 if somebody has it now."""
    num_bytes = held_bytes(path)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return 0
    return num_bytes if _leave(descriptor, path, os.getpid()) else 0


def _open(path: Path, num_bytes: int, wait: Wait) -> tuple[int, bool]:
    """(descriptor, whether the data is whole), locked: shared if it is, exclusively if it is to be filled."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            _check_owner(descriptor, path)
            found = _lock(descriptor, path, num_bytes, wait)
        except BaseException:
            os.close(descriptor)
            raise
        if found is not None:
            return descriptor, found
        os.close(descriptor)


def _lock(descriptor: int, path: Path, num_bytes: int, wait: Wait) -> bool | None:
    """Whether the data is whole, once it is locked so; None: the file was removed meanwhile."""
    while True:
        is_alone = _try_lock(descriptor, fcntl.LOCK_EX)
        if is_alone or _try_lock(descriptor, fcntl.LOCK_SH):
            is_whole = _is_whole(descriptor, num_bytes)
            if is_alone and is_whole:
                fcntl.flock(descriptor, fcntl.LOCK_SH)  # may let others in, and out: look again where we are
            if not _is_at(descriptor, path):
                return None
            if is_whole:
                return True
            if is_alone:
                os.ftruncate(descriptor, 0)
                os.ftruncate(descriptor, num_bytes)
                return False
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # who was to fill it is gone
        wait(*_progress(descriptor, num_bytes))
        time.sleep(_POLL_S)


def _leave(descriptor: int, path: Path, process_id: int) -> bool:
    """Close, and remove the file if nobody else has it. A forked child has no part in its parent's lock."""
    if os.getpid() != process_id:
        return False
    try:
        is_last = _try_lock(descriptor, fcntl.LOCK_EX) and _is_at(descriptor, path)
        if is_last:
            path.unlink(missing_ok=True)
        return is_last
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether the path still names this file."""
    try:
        there = path.stat(follow_symlinks=False)
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def _check_owner(descriptor: int, path: Path) -> None:
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}, and weights are taken from one's "
            "own files only: have it removed"
        )


def _head(descriptor: int, num_bytes: int) -> tuple[bytes, int, int, int]:
    head = os.pread(descriptor, _HEAD.size, num_bytes)
    return _HEAD.unpack(head) if len(head) == _HEAD.size else (b"", 0, 0, 0)


def _is_whole(descriptor: int, num_bytes: int) -> bool:
    state, _, _, record_bytes = _head(descriptor, num_bytes)
    return state == _WHOLE and os.fstat(descriptor).st_size == num_bytes + _HEAD.size + record_bytes


def _read_record(descriptor: int, num_bytes: int) -> bytes:
    return os.pread(descriptor, _head(descriptor, num_bytes)[3], num_bytes + _HEAD.size)


def _progress(descriptor: int, num_bytes: int) -> tuple[int, int]:
    _, done, total, _ = _head(descriptor, num_bytes)
    return done, total
