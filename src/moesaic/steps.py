"""A forward that may wait is a generator; overlap is a matter of who drives it.

Knows nothing of tensors, ranks or transports. `drive` with one generator is normal running; with two it is
dual micro-batch, ping-pong, HOP-B or offload overlap, whatever the generators are.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Wait(Protocol):
    """Something a forward waits for."""

    def ready(self) -> bool:
        """Whether `wait` would return at once. May make progress (relay, start a second collective)."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Sleep until ready; never spin long.

        Raises: PeerLost naming rank, layer_idx, stage and seconds when `timeout_s` passes.
        """
        ...


Steps = Generator[Wait, None, T]


class Done:
    """A wait that is already over: what a local forward yields."""

    def ready(self) -> bool:
        """Always."""
        return True

    def wait(self, timeout_s: float) -> None:
        """Return at once."""


DONE = Done()

IDLE_ROUNDS = 3
"""In which no generator moves and there is no deadlock: waits that are looked at may bring each other on, as
ranks do that send, compute for others, and combine what returned."""


def drive(steps: Sequence[Steps[T]], timeout_s: float) -> list[T]:
    """Run generators to their ends, taking turns in strict order so that collectives match on all ranks.

    Units:  timeout_s bounds each single wait, not the whole run.
    Raises: PeerLost from a wait; whatever a generator raises.
    """
    results: dict[int, T] = {}
    waits: dict[int, Wait] = {}
    while len(results) < len(steps):
        for i, step in enumerate(steps):
            if i in results:
                continue
            if i in waits:
                waits[i].wait(timeout_s)
            try:
                waits[i] = next(step)
            except StopIteration as end:
                results[i] = end.value
    return [results[i] for i in range(len(steps))]


def drive_ready(steps: Sequence[Steps[T]], max_turns: int = 1_000_000) -> list[T]:
    """Run N ranks' generators in one thread over in-memory waits, whichever is ready.

    For tests of dispatchers and for peer-to-peer transports only: readiness must not decide the order of
    collectives.

    Raises: RuntimeError when no generator can move (a deadlock in the protocol under test).
    """
    results: dict[int, T] = {}
    waits: dict[int, Wait] = {}
    num_idle = 0
    for _ in range(max_turns):
        has_moved = False
        for i, step in enumerate(steps):
            if i in results or (i in waits and not waits[i].ready()):
                continue
            has_moved = True
            try:
                waits[i] = next(step)
            except StopIteration as end:
                results[i] = end.value
        if len(results) == len(steps):
            return [results[i] for i in range(len(steps))]
        num_idle = 0 if has_moved else num_idle + 1
        if num_idle > IDLE_ROUNDS:
            stuck = [i for i in range(len(steps)) if i not in results]
            raise RuntimeError(f"deadlock: steps {stuck} wait and none can move")
    raise RuntimeError(f"steps did not finish within {max_turns} turns")
