"""Where in this machine's memory the weights of a model go: private or shared between processes, on which
NUMA nodes, and whether they fit there. Knows sizes and names, not how a weight is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moesaic import __version__
from moesaic.errors import ConfigError, HostMemoryShort
from moesaic.hashing import digest
from moesaic.kernels import huge_pages
from moesaic.kernels.nodes import Node, bind
from moesaic.kernels.shared_bytes import SharedBytes, find_abandoned, held_bytes, remove_abandoned
from moesaic.kernels.weight_memory import Bind, SharedMemory, WeightMemory, in_huge_pages
from moesaic.log import get_logger
from moesaic.models.checkpoint import Checkpoint
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import Numerics
from moesaic.spec.tensor_split import TensorSplit
from moesaic.units import format_bytes

SHARED_FOLDER = Path("/dev/shm")
PACKING = 1
"""Of the order and the bytes of weights in a file. Raised with every change of blobs, panels or places."""

Half = Literal["experts", "rest"]
Progress = Callable[[int, int], None]

_log = get_logger("models")


@dataclass(frozen=True, kw_only=True, slots=True)
class Home:
    """What is wished of the memory for weights."""

    nodes: tuple[Node, ...] = ()  # two or more: weights are spread over them
    shared_in: Path | None = None  # folder in memory, of the files of weights; None: memory of each process
    num_ranks: int = (
        1  # of this machine that load together; where weights are shared, so is what is no expert
    )
    bind: Bind = bind  # how pages get onto nodes


def identity(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    numerics: Numerics,
    num_nodes: int,
    held: Mapping[int, Any],
    split: TensorSplit | None = None,
    num_slices: int = 1,
) -> dict[Half, str]:
    """Names of both halves of a model in memory: equal ones hold equal bytes at equal places.

    The headers of two trainings of one model are equal, so the files themselves count: which they are and
    when they were written. Whatever makes the weights of one rank differ from another's belongs in here.
    """
    files = sorted({tensor.file for tensor in checkpoint.tensors.values()})
    stats = [(file.name, file.stat()) for file in files]
    written = [[name, one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns] for name, one in stats]
    packing = [__version__, PACKING]
    model = digest([packing, written, checkpoint.header_digest(), spec, numerics.digest(), num_nodes, split])
    return {"experts": f"{model}-{digest([held, num_slices])[:16]}", "rest": model}


class Rooms:
    """The memory of a model's two halves: its experts, and the rest."""

    def __init__(
        self, home: Home, names: Mapping[Half, str], expert_runs: list[list[int]], rest_bytes: int
    ) -> None:
        """`expert_runs` are the bytes of each layer on each node."""
        self._home, self._expert_runs = home, expert_runs
        self._bytes: dict[Half, int] = {
            "experts": sum(sum(layer) for layer in expert_runs),
            "rest": in_huge_pages(rest_bytes),
        }
        self._names = {half: f"{_prefix()}{name}" for half, name in names.items()}
        self._opened: list[WeightMemory] = []

    @property
    def rest_chunk_bytes(self) -> int | None:
        """What has to be taken at once for the rest; None: as one likes."""
        return None if self._home.shared_in is None else self._bytes["rest"]

    def missing_bytes(self) -> dict[Half, int]:
        """What is not in memory yet, of all that this process will map."""
        folder = self._home.shared_in
        if folder is None:
            return dict(self._bytes)
        return {
            half: max(0, size - held_bytes(folder / self._names[half])) for half, size in self._bytes.items()
        }

    def check(self, path: Path) -> None:
        """Say where weights will lie, and refuse what cannot hold them; removes files that nobody uses.

        Raises: HostMemoryShort, naming the folder or the node, with what is needed and what there is.
        """
        if self._home.shared_in is not None:
            self._check_folder(self._home.shared_in)
        if len(self._home.nodes) > 1:
            self._check_nodes(path)

    def open(self, half: Half, progress: Progress | None = None) -> WeightMemory:
        """The memory of one half; where it is shared, first waits for a process that is filling it.

        Raises: ConfigError for a file that cannot be opened.
        """
        node_ids = [node.node_id for node in self._home.nodes]
        folder, size = self._home.shared_in, self._bytes[half]
        if folder is None or not size:
            memory = WeightMemory(node_ids, bind=self._home.bind)
        else:
            memory = SharedMemory(
                _share(folder / self._names[half], size, progress), node_ids, bind=self._home.bind
            )
        self._opened.append(memory)
        return memory

    def shared_note(self) -> str | None:
        """What of the weights is shared, once both halves are loaded; None: nothing is to be."""
        folder, shared = self._home.shared_in, [one for one in self._opened if isinstance(one, SharedMemory)]
        if folder is None:
            return None
        found = sum(one.shared.num_bytes for one in shared if one.is_filled)
        read = sum(one.shared.num_bytes for one in shared if not one.is_filled)
        return (
            f"shared weights: {format_bytes(found)} were found in {folder} and {format_bytes(read)} put there"
        )

    def lacks(self) -> tuple[str, ...]:
        """What was wished of the memory and is not so, once both halves are loaded."""
        lacks = []
        folder = self._home.shared_in
        if folder is not None and (reason := huge_pages.why_none_in(folder)) is not None:
            lacks.append(f"huge pages: none for shared weights, which are read more slowly: {reason}")
        for refusal in {one.refusal for one in self._opened if one.refusal is not None}:
            lacks.append(
                f"NUMA: the system binds no pages ({refusal}), so weights lie on the node of the thread that "
                "loaded them, while it had room; a container needs CAP_SYS_NICE"
            )
        return tuple(lacks)

    def _check_folder(self, folder: Path) -> None:
        model = self._names["rest"]
        try:
            for path in find_abandoned(folder, _prefix()):
                if not path.name.startswith(model) and (num_bytes := remove_abandoned(path)):
                    _log.info("removed %s, which no process used: %s", path, format_bytes(num_bytes))
            found = os.statvfs(folder)
        except OSError as error:
            raise ConfigError(
                f"{folder} cannot be read ({error.strerror}): weights are shared there, so mount a tmpfs on "
                "it, or do not share them"
            ) from error
        need, have = sum(self.missing_bytes().values()), found.f_bavail * found.f_frsize
        if need > have:
            whole = format_bytes(found.f_blocks * found.f_frsize)
            raise HostMemoryShort(
                f"{folder} has {format_bytes(have)} free of {whole}, and weights that are shared need "
                f"{format_bytes(need)} there: enlarge it (as root, mount -o remount,size=... {folder}; "
                "docker run --shm-size=...), or do not share weights"
            )

    def _check_nodes(self, path: Path) -> None:
        missing, nodes = self.missing_bytes(), self._home.nodes
        stated = []
        for idx, node in enumerate(nodes):
            experts = sum(layer[idx] for layer in self._expert_runs) if missing["experts"] else 0
            rest = missing["rest"] // len(nodes)
            what = (
                f"{format_bytes(experts + rest)} on node {node.node_id}, which has "
                f"{format_bytes(node.available_bytes)}"
            )
            if experts + rest > node.available_bytes:
                raise HostMemoryShort(
                    f"{path}, spread over {len(nodes)} NUMA nodes, needs {what} available "
                    f"({format_bytes(experts)} of experts, {format_bytes(rest)} of the rest): free memory "
                    "there, or put weights wherever there is room with --numa off"
                )
            stated.append(what)
        _log.info("weights by NUMA node: %s", "; ".join(stated))


def abandoned_weights(folder: Path = SHARED_FOLDER) -> list[tuple[Path, int]]:
    """Files of weights, with their bytes, that runs have left that were killed."""
    return [(path, held_bytes(path)) for path in find_abandoned(folder, _prefix())]


def _prefix() -> str:
    return f"moesaic-weights-{os.geteuid()}-"


def _share(path: Path, num_bytes: int, progress: Progress | None) -> SharedBytes:
    """The file, once this process may use or fill it."""
    is_told = False

    def wait(done: int, total: int) -> None:
        nonlocal is_told
        if not is_told:
            _log.info("another process is loading these weights into %s: waiting for it", path)
            is_told = True
        if progress is not None and total:
            progress(done, total)

    try:
        return SharedBytes(path, num_bytes, wait)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be opened ({error.strerror}): weights are shared in such files, so make its "
            "folder writable, or do not share weights"
        ) from error
