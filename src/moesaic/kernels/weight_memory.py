"""Where weights are put: memory of this process, or bytes that it shares; on one NUMA node or on several.

Knows sizes and nodes, and nothing of what a weight is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from moesaic.errors import HostMemoryShort
from moesaic.kernels import nodes
from moesaic.kernels.huge_pages import HUGE_BYTES, Bytes, map_bytes
from moesaic.kernels.shared_bytes import SharedBytes
from moesaic.units import format_bytes

Bind = Callable[[Bytes, Sequence[int]], None]


class WeightMemory:
    """Memory of this process alone, in huge pages."""

    is_filled = False
    """Whether what is taken holds its weights already, and must not be written."""

    def __init__(self, node_ids: Sequence[int] = (), *, bind: Bind = nodes.bind) -> None:
        """With two nodes or more, what is taken is spread over them."""
        self.node_ids = tuple(node_ids) if len(node_ids) > 1 else ()
        self.refusal: str | None = None
        """What the system said when pages could not be bound: they lie where they were first written."""
        self._bind = bind

    @property
    def num_runs(self) -> int:
        """In how many runs experts are put: one for each node."""
        return max(1, len(self.node_ids))

    def private(self) -> WeightMemory:
        """Memory of this process alone, on the same nodes."""
        return WeightMemory(self.node_ids, bind=self._bind)

    def take(self, num_bytes: int, run_starts: Sequence[int] = ()) -> Bytes:
        """Zeroed bytes that begin at a huge page, or filled ones.

        With several nodes, the bytes from each of `run_starts` on lie on one of them; without starts, pages
        take turns.

        Shapes:  run_starts are multiples of HUGE_BYTES, one for each node.
        Raises:  OSError when the machine refuses.
        """
        data = map_bytes(num_bytes)
        self._spread(data, run_starts)
        return data

    def tell(self, done: int, total: int) -> None:
        """How much of the checkpoint was read: for processes that wait for this one."""

    def finish(self, digests: Mapping[str, str]) -> Mapping[str, str]:
        """All is filled, from tensors with these digests; returns those of whoever filled it."""
        return digests

    def _spread(self, data: Bytes, run_starts: Sequence[int]) -> None:
        if not self.node_ids:
            return
        places: list[tuple[Bytes, tuple[int, ...]]] = [(data, self.node_ids)]
        if run_starts:
            stops = [*run_starts[1:], data.nbytes]
            runs = zip(run_starts, stops, self.node_ids, strict=True)
            places = [(data[start:stop], (node_id,)) for start, stop, node_id in runs]
        try:
            for run, node_ids in places:
                if run.nbytes:
                    self._bind(run, node_ids)
        except OSError as error:
            self.refusal = error.strerror or str(error)


class SharedMemory(WeightMemory):
    """Bytes of a file that several processes map, given out in a fixed order: the same in each of them."""

    def __init__(self, shared: SharedBytes, node_ids: Sequence[int] = (), *, bind: Bind = nodes.bind) -> None:
        super().__init__(node_ids, bind=bind)
        self.shared = shared
        self.is_filled = shared.record is not None
        self._end = 0

    def take(self, num_bytes: int, run_starts: Sequence[int] = ()) -> Bytes:
        """As of a private memory, but no more in all than the file has.

        Raises:  HostMemoryShort when the file system is full.
        """
        start, self._end = self._end, self._end + in_huge_pages(num_bytes)
        assert self._end <= self.shared.data.nbytes, "the file is as large as all that is taken"
        data = self.shared.data[start : start + num_bytes]
        if not self.is_filled:
            self._spread(data, run_starts)
            try:
                self.shared.populate(start, num_bytes)
            except OSError as error:
                raise self._is_full(num_bytes, error) from error
        return data

    def tell(self, done: int, total: int) -> None:
        """As a private memory."""
        if not self.is_filled:
            self.shared.tell(done, total)

    def finish(self, digests: Mapping[str, str]) -> Mapping[str, str]:
        """Also lets other processes in.

        Raises:  HostMemoryShort when the file system is full.
        """
        if self.shared.record is not None:
            return json.loads(self.shared.record)
        record = json.dumps(dict(digests)).encode()
        try:
            self.shared.finish(record)
        except OSError as error:
            raise self._is_full(len(record), error) from error
        return digests

    def _is_full(self, num_bytes: int, error: OSError) -> HostMemoryShort:
        return HostMemoryShort(
            f"{self.shared.path} needs {format_bytes(num_bytes)} more and cannot have it ({error.strerror}): "
            f"something else fills {self.shared.path.parent}, so free it, enlarge it, or do not share weights"
        )


def in_huge_pages(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole huge pages."""
    return -(-num_bytes // HUGE_BYTES) * HUGE_BYTES
