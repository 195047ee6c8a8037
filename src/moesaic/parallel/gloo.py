"""Messages over gloo: for every exchange one collective of sizes and one of bytes, both asynchronous.

Sizes and bytes have groups of their own, and so has each lane: within a group the order of collectives is
that of the exchanges, whoever looks at what when.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from moesaic.parallel.mesh import Mesh
from moesaic.parallel.transport import Arrival, Purpose, Traffic, Transport


class GlooTransport(Transport):
    """One rank's end. The number of lanes is fixed at the start: groups are made by all ranks at once."""

    def __init__(self, mesh: Mesh, *, num_lanes: int, num_chunks: int = 1, name: str = "lane") -> None:
        """`name` keeps the lanes of several transports of a mesh apart."""
        self.rank = mesh.rank
        self.num_ranks = mesh.num_ranks
        self.num_chunks = num_chunks
        self.traffic = Traffic(mesh.rank, mesh.num_ranks)
        self._mesh = mesh
        self._groups = [
            (mesh.group(f"{name} {lane} sizes"), mesh.group(f"{name} {lane} bytes"))
            for lane in range(num_lanes)
        ]
        self._last: list[_GlooArrival | None] = [None] * num_lanes

    def exchange(self, parts: Sequence[Tensor], *, lane: int, purpose: Purpose) -> Arrival:
        """Start the exchange of sizes; that of bytes follows when they are known."""
        self.traffic.count(purpose.stage, parts)
        before = self._last[lane]
        arrival = _GlooArrival(self._mesh, self._groups[lane], before, parts, purpose, self.traffic)
        self._last[lane] = arrival
        return arrival


class _GlooArrival(Arrival):
    def __init__(
        self,
        mesh: Mesh,
        groups: tuple[Any, Any],
        before: _GlooArrival | None,
        parts: Sequence[Tensor],
        purpose: Purpose,
        traffic: Traffic,
    ) -> None:
        self._mesh = mesh
        self._traffic = traffic
        self._purpose = purpose
        self._before = before
        self._sizes = [part.numel() for part in parts]
        self._out = torch.cat(list(parts))
        self._in_sizes = torch.empty(len(parts), dtype=torch.int64)
        self._group = groups[1]
        self._received = torch.empty(0, dtype=torch.uint8)
        self._bytes: Any = None
        self._is_over = False
        out_sizes = torch.tensor(self._sizes)
        self._sizes_work = groups[0].alltoall_base(self._in_sizes, out_sizes, [], [])

    def ready(self) -> bool:
        if self._bytes is None:
            if not self._sizes_work.is_completed() or (self._before is not None and not self._before.ready()):
                return False
            self._start()
        return self._is_over or self._bytes.is_completed()

    def wait(self, timeout_s: float) -> None:
        if self._is_over:
            return
        if self._before is not None:  # bytes travel in the order of the exchanges
            self._before.wait(timeout_s)
        timeout, began_s = timedelta(seconds=timeout_s), time.monotonic()
        try:
            if self._bytes is None:
                self._sizes_work.wait(timeout)
                self._start()
            self._bytes.wait(timeout)
        except RuntimeError as error:
            rank = self._mesh.missing(f"{self._purpose.stage} of layer {self._purpose.layer_idx}")
            seconds = time.monotonic() - began_s
            raise self._purpose.lost(-1 if rank is None else rank, seconds) from error
        self._traffic.wait_s += time.monotonic() - began_s
        self._is_over, self._before = True, None

    def take(self) -> list[Tensor]:
        assert self._bytes is not None, "taken before it was there"
        self.wait(1.0)  # returns at once: what was ready has ended
        return list(self._received.split(self._in_sizes.tolist()))

    def _start(self) -> None:
        sizes = self._in_sizes.tolist()
        self._received = torch.empty(sum(sizes), dtype=torch.uint8)
        self._bytes = self._group.alltoall_base(self._received, self._out, sizes, self._sizes)
