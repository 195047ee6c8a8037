"""One piece of /dev/shm for all ranks of a run: how large, who makes it, and that nothing of it stays behind.

    bells, a line for each rank | lane 0 | lane 1 | ...        drawn in kernels/native/wire.hpp

Rank 0 makes the file and holds a lock on it; as soon as all ranks have mapped it, it has no name any more, so
that the system takes it back when the last rank ends, however that ends. Knows no messages.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import CapacityError, ConfigError, KernelUnavailable
from moesaic.kernels import native
from moesaic.parallel.mesh import Mesh
from moesaic.units import format_bytes

FOLDER = Path("/dev/shm")
PREFIX = "moesaic-ranks-"
LINE = 64  # bytes; as in wire.hpp, and so is DEPTH
DEPTH = 2
_NAME = "name of the shared memory"
EXCHANGE = "use dispatcher exchange"  # what to do without memory that ranks share


@dataclass(frozen=True, kw_only=True, slots=True)
class LaneSize:
    """What a lane must hold: the largest message of a rank to another, and results that others write for one.

    There is a flag of 8 bytes for each result.
    """

    message_bytes: int
    num_results: int = 0
    result_bytes: int = 0  # of all

    @property
    def return_bytes(self) -> int:
        """Flags, then results, each in whole lines."""
        return _whole_lines(8 * self.num_results) + _whole_lines(self.result_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentShape:
    """Where everything lies.

    Every rank has two inboxes from each other rank on each lane, because one may be a turn ahead of another.
    """

    num_ranks: int
    lanes: tuple[LaneSize, ...]

    def places(self) -> list[tuple[int, int, int]]:
        """(start, bytes of an inbox, bytes of returns) of each lane, in whole lines."""
        places, end = [], self.num_ranks * LINE
        for lane in self.lanes:
            inbox, back = _whole_lines(lane.message_bytes), lane.return_bytes
            places.append((end, inbox, back))
            num_pairs = self.num_ranks * (self.num_ranks - 1)
            end += num_pairs * (LINE + DEPTH * (LINE + inbox)) + self.num_ranks * back
        return places

    @property
    def num_bytes(self) -> int:
        """Of the whole segment."""
        bells = self.num_ranks * LINE
        return bells + sum(
            self.num_ranks * (self.num_ranks - 1) * (LINE + DEPTH * (LINE + _whole_lines(lane.message_bytes)))
            + self.num_ranks * lane.return_bytes
            for lane in self.lanes
        )


class Segment:
    """The memory as one rank sees it, and the native end of its wires.

    Shapes:  memory [bytes] uint8.
    Owns:    the mapping: what was taken from it lives as long as it is referred to.
    """

    def __init__(
        self,
        descriptor: int,
        shape: SegmentShape,
        rank: int,
        watched: Sequence[int] = (),
        *,
        first_rank: int = 0,
    ) -> None:
        """`watched` are descriptors of the ranks' processes, -1 for one that is not watched; none: no rank.

        `first_rank` of the run is rank 0 here.

        Raises: KernelUnavailable without native kernels, whose atomics ranks talk by.
        """
        compiled = compiled_wires()
        mapping = mmap.mmap(descriptor, shape.num_bytes)
        self.shape = shape
        self.rank = rank
        self.first_rank = first_rank
        self.memory: Tensor = torch.from_numpy(np.frombuffer(mapping, dtype=np.uint8))
        self.wire = compiled.Wire(
            self.memory.data_ptr(), shape.num_bytes, rank, shape.num_ranks, shape.places(), list(watched)
        )

    @classmethod
    def join(cls, mesh: Mesh, shape: SegmentShape, *, instead: str = EXCHANGE) -> Segment:
        """The segment of all ranks of a mesh, who must be on one machine; `instead` is what errors propose.

        Raises: CapacityError on every rank when /dev/shm is too small; KernelUnavailable as `__init__`;
                PeerLost naming a rank that did not come; ConfigError for ranks that do not share /dev/shm.
        """
        compiled_wires(instead)
        path = None
        if mesh.rank == 0:
            descriptor, path = _make_or_tell(mesh, shape, instead)
        else:
            descriptor = _open(mesh.store.get(_NAME).decode(), instead)
        try:
            mesh.store.set(f"process of {mesh.rank}", str(os.getpid()))
            mesh.meet("shared memory")  # all have opened it
            processes = [int(mesh.store.get(f"process of {rank}")) for rank in range(shape.num_ranks)]
            watched = [-1 if pid == os.getpid() else os.pidfd_open(pid) for pid in processes]
            return cls(descriptor, shape, mesh.rank, watched, first_rank=mesh.first_rank)
        finally:
            if path is not None:
                path.unlink()
            os.close(descriptor)


def compiled_wires(instead: str = EXCHANGE) -> Any:
    """The native module.

    Raises: KernelUnavailable where there is none, and where the system is not Linux.
    """
    compiled = native.module()
    if compiled is None or sys.platform != "linux":
        missing = "native kernels, which are not built in this installation" if compiled is None else "Linux"
        raise KernelUnavailable(f"memory that ranks share needs {missing}; {instead}, or build them")
    return compiled


def reserve(shape: SegmentShape, instead: str = EXCHANGE) -> int:
    """Memory of the shape's size, all zeros and without a name: a descriptor.

    Owns:    the caller closes it.
    Raises:  CapacityError naming bytes, free bytes and how to enlarge.
    """
    num_bytes, free = shape.num_bytes, _free_bytes(instead)
    if num_bytes > free:
        raise _too_small(shape, free, instead)
    descriptor = os.open(FOLDER, os.O_RDWR | os.O_TMPFILE, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except OSError as error:
        os.close(descriptor)
        if error.errno == errno.ENOSPC:
            raise _too_small(shape, free, instead) from error
        raise
    return descriptor


def name(descriptor: int) -> Path:
    """A name for reserved memory, by which other processes find it; it is locked as long as it is open.

    Owns:    the caller unlinks it. What runs that were killed at their start left behind is removed.
    """
    remove_stale()
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    path = FOLDER / f"{PREFIX}{secrets.token_hex(8)}-{os.getpid()}"
    folder = os.open(FOLDER, os.O_RDONLY)
    try:
        os.link(f"/proc/self/fd/{descriptor}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)
    return path


def remove_stale() -> list[str]:
    """Names of segments whose owner has died; they are gone afterwards.

    A lock tells, not the number in the name: that may be another process by now, or one of a container.
    """
    removed = []
    for path in FOLDER.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except OSError:  # gone by now, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its run is about to start
        else:
            path.unlink(missing_ok=True)
            removed.append(path.name)
        finally:
            os.close(descriptor)
    return removed


def _make_or_tell(mesh: Mesh, shape: SegmentShape, instead: str) -> tuple[int, Path]:
    """Make the file and tell the others its name, or why there is none."""
    try:
        descriptor = reserve(shape, instead)
    except CapacityError as error:
        mesh.store.set(_NAME, str(error))
        raise
    path = name(descriptor)
    mesh.store.set(_NAME, path.name)
    return descriptor, path


def _open(name: str, instead: str) -> int:
    if not name.startswith(PREFIX):
        raise CapacityError(name)
    try:
        return os.open(FOLDER / name, os.O_RDWR)
    except OSError as error:
        raise ConfigError(
            f"{FOLDER / name}, which another rank made, cannot be opened ({error.strerror}): where ranks are "
            f"on several machines, or in containers that do not share /dev/shm, {instead}"
        ) from error


def _free_bytes(instead: str) -> int:
    if not FOLDER.is_dir():
        raise CapacityError(f"{FOLDER} is not there: mount a tmpfs on it, or {instead}")
    found = os.statvfs(FOLDER)
    return found.f_bavail * found.f_frsize


def _too_small(shape: SegmentShape, free: int, instead: str) -> CapacityError:
    need = shape.num_bytes
    mebibytes = -(-need // 2**20)
    return CapacityError(
        f"{shape.num_ranks} ranks need {need} bytes of shared memory ({format_bytes(need)}) and {FOLDER} has "
        f"{free} free ({format_bytes(free)}): enlarge it (mount -o remount,size=SIZE {FOLDER}, or "
        f"docker run --shm-size=SIZE, with {mebibytes} MiB beside what is in use), lower "
        f"max_tokens_per_step, or {instead}"
    )


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
