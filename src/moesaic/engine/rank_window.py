"""What every rank did, added up: since the start, and as skew over the last seconds. Reads no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from moesaic.obs.names import WINDOW_S
from moesaic.sched.step import RankStep
from moesaic.spec.experts import FloatArray

RANK_COLUMNS = ("num_jobs", "sent_bytes", "received_bytes", "compute_s", "transfer_s", "wait_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFigures:
    """By rank, as a label; totals over the steps committed. Skews are None while nothing was done."""

    num_jobs: Mapping[str, float] = field(default_factory=dict)
    sent_bytes: Mapping[str, float] = field(default_factory=dict)
    received_bytes: Mapping[str, float] = field(default_factory=dict)
    compute_s: Mapping[str, float] = field(default_factory=dict)
    transfer_s: Mapping[str, float] = field(default_factory=dict)
    wait_s: Mapping[str, float] = field(default_factory=dict)
    compute_skew: float | None = None  # of jobs: most by mean over the ranks
    communication_skew: float | None = None  # of bytes sent and received, likewise


class RankWindow:
    """The steps of ranks 0 to num_ranks - 1; totals at each of the last seconds are kept."""

    def __init__(self, num_ranks: int) -> None:
        self._totals_RC = np.zeros((num_ranks, len(RANK_COLUMNS)))
        self._marks: deque[tuple[int, FloatArray]] = deque()  # totals before what that second brought

    def add(self, ranks: Iterable[RankStep], now_s: float) -> None:
        """Take in one step."""
        if not self._marks or self._marks[-1][0] < int(now_s):
            self._marks.append((int(now_s), self._totals_RC.copy()))
        while self._marks[0][0] < int(now_s) - WINDOW_S:
            self._marks.popleft()
        for step in ranks:
            times = step.compute_s, step.transfer_s, step.wait_s
            self._totals_RC[step.rank] += [step.num_jobs, sum(step.sent_bytes), 0.0, *times]
            self._totals_RC[:, RANK_COLUMNS.index("received_bytes")] += step.sent_bytes

    def figures(self) -> RankFigures:
        """Totals now, and skews of the window up to the last step."""
        columns = {
            name: {str(rank): float(value) for rank, value in enumerate(self._totals_RC[:, at])}
            for at, name in enumerate(RANK_COLUMNS)
        }
        recent_RC = self._totals_RC - self._marks[0][1] if self._marks else self._totals_RC
        recent = dict(zip(RANK_COLUMNS, recent_RC.T, strict=True))
        return RankFigures(
            **columns,
            compute_skew=_max_mean(recent["num_jobs"]),
            communication_skew=_max_mean(recent["sent_bytes"] + recent["received_bytes"]),
        )


def _max_mean(values_R: FloatArray) -> float | None:
    return float(values_R.max() / values_R.mean()) if values_R.any() else None
