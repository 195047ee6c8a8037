"""How the controller reaches its workers: plans go out, results come back. Knows not what a plan does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from moesaic.sched.step import StepPlan, StepResult


class Executor(Protocol):
    """What stands at the far end of a link."""

    def run(self, plan: StepPlan) -> StepResult:
        """Execute one step; running the same plan again gives the same state."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """Drop what is kept for these requests."""
        ...


class Link(Protocol):
    """A way to the workers. Results come back in the order of the plans."""

    def send(self, plan: StepPlan) -> None:
        """Hand a plan over; returns at once."""
        ...

    def receive(self) -> StepResult:
        """Wait for the result of the oldest plan that has none."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """Tell the workers that these requests are over, when no plan follows that would."""
        ...

    def close(self) -> None:
        """Let the workers go; nothing is sent after it."""
        ...


class LocalLink:
    """The worker lives in this process and computes when its result is asked for."""

    def __init__(self, worker: Executor) -> None:
        self._worker = worker
        self._plans: deque[StepPlan] = deque()

    def send(self, plan: StepPlan) -> None:
        """Keep the plan until `receive`."""
        self._plans.append(plan)

    def receive(self) -> StepResult:
        """Execute the oldest plan."""
        return self._worker.run(self._plans.popleft())

    def forget(self, request_ids: Iterable[str]) -> None:
        """Pass on."""
        self._worker.forget(request_ids)

    def close(self) -> None:
        """Nothing to let go: the worker ends with what holds it."""
