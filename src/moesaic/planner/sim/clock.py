"""Simulated time: one queue of what happens when. Knows nothing of what happens."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions in order of time, equal times in the order they were asked for: a run can be repeated."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ahead: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, time_s: float, action: Action) -> None:
        """Let something happen at a time that has not passed."""
        if not time_s >= self.now_s:
            raise ValueError(f"{time_s} s has passed: it is {self.now_s} s")
        heapq.heappush(self._ahead, (time_s, self._count, action))
        self._count += 1

    def after(self, delay_s: float, action: Action) -> None:
        """Let something happen `delay_s` from now."""
        self.at(self.now_s + delay_s, action)

    def run(self, until_s: float = math.inf) -> None:
        """Let everything up to `until_s` happen, that which is added on the way too."""
        while self._ahead and self._ahead[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._ahead)
            action()
