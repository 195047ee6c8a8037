"""Messages over memory that ranks share: one-sided writes into the receivers' inboxes.

A message is copied once, into the inbox of whom it is for, and read where it lies.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from moesaic.parallel.segment import LaneSize, Segment, SegmentShape, compiled_wires, reserve
from moesaic.parallel.transport import Arrival, Purpose, Traffic, Transport


class SharedMemoryTransport(Transport):
    """One rank's end. Messages are at most as large as the segment's lanes say.

    What an arrival took is valid until the next one of its lane is taken.
    """

    def __init__(self, segment: Segment, *, num_chunks: int = 1) -> None:
        self.rank = segment.rank
        self.num_ranks = segment.shape.num_ranks
        self.num_chunks = num_chunks
        self.traffic = Traffic(self.rank, self.num_ranks)
        self.segment = segment
        self._messenger = compiled_wires().Messenger(segment.wire)
        self._turns = [0] * len(segment.shape.lanes)

    def exchange(self, parts: Sequence[Tensor], *, lane: int, purpose: Purpose) -> Arrival:
        """Write each message into its inbox, or when that is free again."""
        self.traffic.count(purpose.stage, parts)
        turn = self._turns[lane]
        self._turns[lane] = turn + 1
        parts = [part.contiguous() for part in parts]
        self._messenger.put(lane, turn, [part.data_ptr() for part in parts], [part.numel() for part in parts])
        return _SharedArrival(self._messenger, self.segment, (lane, turn), parts, purpose, self.traffic)


class _SharedArrival(Arrival):
    def __init__(
        self,
        messenger: Any,
        segment: Segment,
        key: tuple[int, int],
        parts: list[Tensor],
        purpose: Purpose,
        traffic: Traffic,
    ) -> None:
        self._messenger = messenger
        self._segment = segment
        self._key = key
        self._parts = parts  # some may not have left
        self._purpose = purpose
        self._traffic = traffic

    def ready(self) -> bool:
        is_ready: bool = self._messenger.ready(*self._key)
        return is_ready

    def wait(self, timeout_s: float) -> None:
        began_s = time.monotonic()
        late = self._messenger.wait(*self._key, timeout_s)
        waited_s = time.monotonic() - began_s
        self._traffic.wait_s += waited_s
        if late >= 0:
            seconds = waited_s if waited_s >= timeout_s else 0.0  # before that time: its process has ended
            raise self._purpose.lost(self._segment.first_rank + late, seconds)

    def take(self) -> list[Tensor]:
        found = self._messenger.take(*self._key)
        memory, rank = self._segment.memory, self._segment.rank
        messages = [memory[start : start + num_bytes] for start, num_bytes in found]
        messages[rank] = self._parts[rank]
        return messages


def segments_in_one_process(num_ranks: int, lanes: Sequence[LaneSize]) -> list[Segment]:
    """All ranks' ends in this process: for ranks that take turns in one thread.

    Raises: as `segment.reserve` and `Segment`.
    """
    shape = SegmentShape(num_ranks=num_ranks, lanes=tuple(lanes))
    compiled_wires()
    descriptor = reserve(shape)
    try:
        return [Segment(descriptor, shape, rank) for rank in range(num_ranks)]
    finally:
        os.close(descriptor)
