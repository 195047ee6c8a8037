"""How bytes move between the ranks of a mesh: each hands in one message a peer and gets one from every peer.

Knows no rows, experts or layers; those who use it say what an exchange is about, for the error's sake.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from torch import Tensor

from moesaic.errors import PeerLost
from moesaic.steps import Wait

Stage = Literal["send", "collect", "sum", "move"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Purpose:
    """What an exchange is for."""

    layer_idx: int
    stage: Stage

    def lost(self, rank: int, seconds: float) -> PeerLost:
        """The error for a rank that stays away."""
        return PeerLost(rank=rank, layer_idx=self.layer_idx, stage=self.stage, seconds=seconds)


class Arrival(Wait, Protocol):
    """One exchange under way; over when a message of every rank is here."""

    def take(self) -> list[Tensor]:
        """The messages by source rank, [bytes] uint8 each. Once, when ready."""
        ...


class Traffic:
    """Bytes handed over since the start, by stage and receiving rank; nothing counts to oneself.

    Experts that move and sums have transports of their own, and count as sent.

    Shapes:  send_bytes and collect_bytes [N] int64.
    Units:   wait_s is the time that arrivals were waited for.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank = rank
        self.send_bytes = np.zeros(num_ranks, dtype=np.int64)
        self.collect_bytes = np.zeros(num_ranks, dtype=np.int64)
        self.wait_s = 0.0

    def count(self, stage: Stage, parts: Sequence[Tensor]) -> None:
        """Add the messages of one exchange."""
        counts = self.collect_bytes if stage == "collect" else self.send_bytes
        for peer, part in enumerate(parts):
            if peer != self._rank:
                counts[peer] += part.numel()


class Transport(Protocol):
    """One rank's end of the wires.

    Exchanges on one lane follow each other in the same order on every rank; lanes know nothing of each other.
    The rows of a layer travel in `num_chunks` parts, which have lanes of their own.
    """

    rank: int
    num_ranks: int
    num_chunks: int
    traffic: Traffic

    def exchange(self, parts: Sequence[Tensor], *, lane: int, purpose: Purpose) -> Arrival:
        """Hand in one message for each rank ([bytes] uint8, any size, valid until the arrival); returns at
        once."""
        ...


@dataclass(slots=True, eq=False)
class _Box:
    """What was handed in at one turn, by source, and how many ranks have taken theirs."""

    parts: dict[int, list[Tensor]] = field(default_factory=dict)
    num_taken: int = 0


class MemoryWires:
    """All ranks in one thread: a message is a tensor in a box, and nothing arrives while one sleeps."""

    def __init__(self, num_ranks: int, *, num_chunks: int = 1) -> None:
        self.num_ranks = num_ranks
        self.num_chunks = num_chunks
        self.boxes: dict[tuple[int, int], _Box] = {}  # by lane and turn

    def transport(self, rank: int) -> MemoryTransport:
        """The end of one rank."""
        return MemoryTransport(self, rank)


class MemoryTransport(Transport):
    """One rank of `MemoryWires`."""

    def __init__(self, wires: MemoryWires, rank: int) -> None:
        self.rank = rank
        self.num_ranks = wires.num_ranks
        self.num_chunks = wires.num_chunks
        self.traffic = Traffic(rank, wires.num_ranks)
        self._wires = wires
        self._turns: dict[int, int] = {}

    def exchange(self, parts: Sequence[Tensor], *, lane: int, purpose: Purpose) -> Arrival:
        """Put the messages into the box of this lane's next turn."""
        assert len(parts) == self.num_ranks, f"{self.num_ranks} ranks, {len(parts)} messages"
        turn = self._turns[lane] = self._turns.get(lane, -1) + 1
        box = self._wires.boxes.setdefault((lane, turn), _Box())
        box.parts[self.rank] = list(parts)
        self.traffic.count(purpose.stage, parts)
        return _MemoryArrival(self._wires, self.rank, (lane, turn), purpose)


@dataclass(frozen=True, slots=True, eq=False)
class _MemoryArrival(Arrival):
    wires: MemoryWires
    rank: int
    key: tuple[int, int]
    purpose: Purpose

    def ready(self) -> bool:
        return len(self._parts()) == self.wires.num_ranks

    def wait(self, timeout_s: float) -> None:
        parts = self._parts()
        for rank in range(self.wires.num_ranks):
            if rank not in parts:
                raise self.purpose.lost(rank, timeout_s)

    def take(self) -> list[Tensor]:
        assert self.ready(), "taken before it was there"
        box = self.wires.boxes[self.key]
        box.num_taken += 1
        if box.num_taken == self.wires.num_ranks:
            del self.wires.boxes[self.key]
        return [box.parts[source][self.rank] for source in range(self.wires.num_ranks)]

    def _parts(self) -> dict[int, list[Tensor]]:
        box = self.wires.boxes.get(self.key)
        assert box is not None, "waited for after it was taken"
        return box.parts
