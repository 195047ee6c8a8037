"""How the controller reaches its workers: plans go out, results come back. Knows not what a plan does."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from moesaic.sched.step import StepPlan, StepResult
from moesaic.spec.experts import ExpertPlan, IntArray
from moesaic.steps import Steps, drive

MOVE_TIMEOUT_S = 60.0  # guess: for one layer's experts to travel; a peer that is silent for so long is lost


class Shelf(Protocol):
    """The experts of a process, under one plan after another."""

    def adopt(self, plan: ExpertPlan) -> Steps[int]:
        """Go over to another plan; returns the bytes sent to other ranks."""
        ...

    def observe(self, loads: Sequence[IntArray]) -> None:
        """The tokens that chose each expert of late, per MoE layer [E]."""
        ...


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
        """Tell the workers that these requests are over, when no plan follows that would.

        Called now and then while there is nothing to do, with no requests too.

        Raises: PeerLost naming a worker that is gone.
        """
        ...

    def adopt(self, plan: ExpertPlan) -> int:
        """Have every rank go over to another expert plan; returns when all have, with the bytes that moved.

        Only while no step is under way.
        """
        ...

    def observe(self, loads: Sequence[IntArray]) -> None:
        """Tell the ranks how often experts were chosen of late: per MoE layer [E], over all ranks."""
        ...

    def close(self) -> None:
        """Let the workers go; nothing is sent after it."""
        ...


class LocalLink:
    """The worker lives in this process and computes when its result is asked for."""

    def __init__(self, worker: Executor, shelf: Shelf | None = None) -> None:
        """Without a shelf there are no routed experts."""
        self._worker = worker
        self._shelf = shelf
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

    def adopt(self, plan: ExpertPlan) -> int:
        """Go over to the plan here and now."""
        assert self._shelf is not None, "there is no plan for a model without experts"
        assert not self._plans, "a step is under way"
        return drive([self._shelf.adopt(plan)], MOVE_TIMEOUT_S)[0]

    def observe(self, loads: Sequence[IntArray]) -> None:
        """Pass on."""
        if self._shelf is not None:
            self._shelf.observe(loads)

    def close(self) -> None:
        """Nothing to let go: the worker ends with what holds it."""
