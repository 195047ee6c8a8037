"""Expert loads added up: since the start, and over the last seconds. Takes times, reads no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from moesaic.spec.experts import ExpertLoad, IntArray, Phase

KEPT_S = 300  # guess: five minutes; 58 layers of 256 experts and two phases then take 71 MB


@dataclass(slots=True, eq=False)
class _Sum:
    """Loads of one phase under addition."""

    counts: list[IntArray]
    num_tokens: int = 0
    num_steps: int = 0
    since_s: float = float("inf")
    until_s: float = float("-inf")
    plan_version: int = 0
    source: str = ""

    @classmethod
    def like(cls, load: ExpertLoad) -> _Sum:
        return cls(counts=[counts_E * 0 for counts_E in load.counts])

    def add(self, load: ExpertLoad) -> None:
        for total_E, counts_E in zip(self.counts, load.counts, strict=True):
            total_E += counts_E
        self.num_tokens += load.num_tokens
        self.num_steps += load.num_steps
        self.since_s = min(self.since_s, load.since_s)
        self.until_s = max(self.until_s, load.until_s)
        self.plan_version, self.source = load.plan_version, load.source

    def value(self, phase: Phase) -> ExpertLoad:
        return ExpertLoad(
            counts=tuple(counts_E.copy() for counts_E in self.counts),
            phase=phase,
            num_tokens=self.num_tokens,
            num_steps=self.num_steps,
            since_s=self.since_s,
            until_s=self.until_s,
            plan_version=self.plan_version,
            source=self.source,
        )


@dataclass(slots=True, eq=False)
class _Second:
    second: int
    sums: dict[Phase, _Sum] = field(default_factory=dict)


class LoadWindow:
    """What was added, by phase; single seconds are kept for `KEPT_S`."""

    def __init__(self) -> None:
        self._all = _Second(0)
        self._seconds: deque[_Second] = deque()

    def add(self, loads: Iterable[ExpertLoad]) -> None:
        """Take in the loads of one step, at the time they ended."""
        for load in loads:
            second = int(load.until_s)
            if not self._seconds or self._seconds[-1].second < second:
                self._seconds.append(_Second(second))
            while self._seconds[0].second < second - KEPT_S:
                self._seconds.popleft()
            for bucket in (self._all, self._seconds[-1]):
                _sum_of(bucket.sums, load).add(load)

    def since_start(self) -> tuple[ExpertLoad, ...]:
        """Everything, one load per phase that occurred."""
        return tuple(total.value(phase) for phase, total in self._all.sums.items())

    def since(self, time_s: float) -> tuple[ExpertLoad, ...]:
        """Whole seconds from the one that holds `time_s` on; at most the last `KEPT_S`."""
        sums: dict[Phase, _Sum] = {}
        for bucket in self._seconds:
            if bucket.second >= int(time_s):
                for phase, part in bucket.sums.items():
                    load = part.value(phase)
                    _sum_of(sums, load).add(load)
        return tuple(total.value(phase) for phase, total in sums.items())


def _sum_of(sums: dict[Phase, _Sum], load: ExpertLoad) -> _Sum:
    if load.phase not in sums:
        sums[load.phase] = _Sum.like(load)
    return sums[load.phase]
