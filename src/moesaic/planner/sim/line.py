"""Jobs that pass through stations in turn, one at a time in each: what waits for what, and for how long.

Micro-batches between attention and experts, and chunks of a dispatch, are both this.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from moesaic.planner.sim.clock import Clock

Visit = tuple[str, float]  # station, seconds there


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One visit of a job at a station.

    Units:  seconds, in whatever unit the visits were given.
    """

    station: str
    job: int
    visit_idx: int  # of the job's way
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All visits, in order of their start."""

    stations: tuple[str, ...]
    spans: tuple[Span, ...]

    @property
    def total_s(self) -> float:
        """When the last job is done."""
        return max((span.end_s for span in self.spans), default=0.0)

    @property
    def busy(self) -> Mapping[str, float]:
        """Part of the total time that each station works."""
        total = self.total_s or 1.0
        work = dict.fromkeys(self.stations, 0.0)
        for span in self.spans:
            work[span.station] += span.end_s - span.start_s
        return {name: seconds / total for name, seconds in work.items()}


def run_line(stations: Sequence[str], ways: Sequence[Sequence[Visit]]) -> Timeline:
    """The timeline of jobs that all start at 0, each on its way; a station serves in order of arrival."""
    clock = Clock()
    waiting: dict[str, deque[tuple[int, int]]] = {name: deque() for name in stations}
    is_busy = dict.fromkeys(stations, False)
    spans: list[Span] = []

    def arrive(job: int, idx: int) -> None:
        if idx < len(ways[job]):
            waiting[ways[job][idx][0]].append((job, idx))
            serve(ways[job][idx][0])

    def serve(station: str) -> None:
        if is_busy[station] or not waiting[station]:
            return
        job, idx = waiting[station].popleft()
        seconds, is_busy[station] = ways[job][idx][1], True
        spans.append(
            Span(
                station=station, job=job, visit_idx=idx, start_s=clock.now_s, end_s=clock.now_s + seconds
            )
        )  # fmt: skip

        def leave() -> None:
            is_busy[station] = False
            arrive(job, idx + 1)
            serve(station)

        clock.after(seconds, leave)

    for job in range(len(ways)):
        arrive(job, 0)
    clock.run()
    return Timeline(stations=tuple(stations), spans=tuple(spans))
