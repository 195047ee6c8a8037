"""The controller's end of several ranks: hands them plans, joins what they answer.

A rank that dies, or that loses another, ends the run with an error that names whom it was waited for; `close`
leaves no process behind.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any

import numpy as np

from moesaic.engine.launchers.launcher import JOIN_TIMEOUT_S, Launcher
from moesaic.engine.link import MOVE_TIMEOUT_S
from moesaic.engine.rank import Adopt, Adopted, Forget, Hello, Leave, Observe, RankPool, RankReady, RankSetup
from moesaic.engine.runner import STEP_TIMEOUT_S
from moesaic.errors import CheckpointError, KernelUnavailable, MoesaicError, PeerLost
from moesaic.log import get_logger
from moesaic.sched.step import StepPlan, StepResult
from moesaic.spec.experts import ExpertLoad, ExpertPlan, IntArray

START_TIMEOUT_S = 3600.0  # guess: a model of a terabyte is read in that time; a rank that dies shows at once
SETTLE_S = 5.0  # guess: how long after one rank's end others are heard that may name layer and stage
_log = get_logger("engine")


class Ranks:
    """Processes that a launcher started, one a rank; a `Link` once `start_pools` was called.

    Owns:    the launcher, until `close`.
    """

    def __init__(self, launcher: Launcher, num_ranks: int) -> None:
        """Start them all.

        Raises: PeerLost naming a rank that did not come; ConfigError with a next step.
        """
        self._launcher = launcher
        self._in_flight: list[StepPlan] = []
        try:
            self._ranks = launcher.start(num_ranks)
        except BaseException:
            launcher.close()
            raise

    def await_hello(self) -> list[Hello]:
        """What the ranks say first.

        Raises: PeerLost naming one that ended, or does not say it in time.
        """
        return self._gather(JOIN_TIMEOUT_S, "join")

    def set_up(self, setups: Sequence[RankSetup]) -> None:
        """Let the ranks load; returns at once."""
        self._tell(setups)

    def await_ready(self) -> list[RankReady]:
        """What the ranks say when all have loaded their share.

        Raises: what a rank raised, its number first; PeerLost for one that ended; CheckpointError and
                KernelUnavailable when two of them did not read or prove the same.
        """
        answers = self._gather(START_TIMEOUT_S, "start")
        for rank, answer in enumerate(answers):
            if isinstance(answer, MoesaicError):
                raise _told_by(rank, answer)
        _check_equal(answers)
        return answers

    def start_pools(self, pool: RankPool) -> None:
        """Let the ranks make their KV pools and wait for plans."""
        self._tell([pool] * len(self._ranks))

    def send(self, plan: StepPlan) -> None:
        """Hand a plan to every rank; returns at once."""
        self._in_flight.append(plan)
        self._tell([plan] * len(self._ranks))

    def receive(self) -> StepResult:
        """The results of the oldest plan, of all ranks as one."""
        plan = self._in_flight.pop(0)
        results = []
        for answer in self._gather(2 * STEP_TIMEOUT_S, "step"):
            if isinstance(answer, MoesaicError):
                raise answer
            results.append(answer)
        return join_results(plan, results)

    def adopt(self, plan: ExpertPlan) -> int:
        """Have all ranks go over to another plan.

        Raises: PeerLost naming rank and layer; what a rank raised, such as HostMemoryShort.
        """
        assert not self._in_flight, "a step is under way"
        self._tell([Adopt(plan=plan)] * len(self._ranks))
        sent_bytes = 0
        for rank, answer in enumerate(self._gather(2 * MOVE_TIMEOUT_S, "move")):
            if isinstance(answer, MoesaicError):
                raise _told_by(rank, answer)
            sent_bytes += answer.sent_bytes
        return sent_bytes

    def observe(self, loads: Sequence[IntArray]) -> None:
        """Tell the ranks how often experts were chosen."""
        self._tell([Observe(loads=tuple(loads))] * len(self._ranks))

    def forget(self, request_ids: Iterable[str]) -> None:
        """Tell the ranks that these requests are over.

        Raises: PeerLost naming a rank whose process has ended: a rank that has nothing to say says so.
        """
        if not self._in_flight and (ended := wait([one.pipe for one in self._ranks], 0.0)):
            rank = next(rank for rank, one in enumerate(self._ranks) if one.pipe in ended)
            raise PeerLost(rank=rank, layer_idx=-1, stage="step", seconds=0.0)
        self._tell([Forget(request_ids=tuple(request_ids))] * len(self._ranks))

    def close(self) -> None:
        """End all ranks: they are told to leave, and when they do not, to whom they belong ends them."""
        self._tell([Leave()] * len(self._ranks))
        for one in self._ranks:
            one.pipe.close()
        self._launcher.close()

    def _tell(self, messages: Sequence[Any]) -> None:
        """Send each rank its message. One that is gone shows when its answer is waited for."""
        for one, message in zip(self._ranks, messages, strict=True):
            with suppress(OSError):
                one.pipe.send(message)

    def _gather(self, timeout_s: float, stage: str) -> list[Any]:
        """One message of each rank. A rank that ends is lost, unless others tell more of it soon after.

        Raises: PeerLost naming a rank.
        """
        answers: dict[int, Any] = {}
        lost: PeerLost | None = None
        end_s = time.monotonic() + timeout_s
        waiting = dict(enumerate(self._ranks))
        while waiting and (left_s := end_s - time.monotonic()) > 0:
            heard = wait([one.pipe for one in waiting.values()], left_s)
            for rank in [rank for rank, one in waiting.items() if one.pipe in heard]:
                try:
                    answers[rank] = waiting.pop(rank).pipe.recv()
                except (EOFError, OSError):
                    lost = PeerLost(rank=rank, layer_idx=-1, stage=stage, seconds=0.0)
                    end_s = min(end_s, time.monotonic() + SETTLE_S)
        told = [
            one.lost
            for one in answers.values()
            if isinstance(one, StepResult | Adopted) and one.lost is not None
        ]
        if told or lost is not None:
            raise told[0] if told else lost  # type: ignore[misc]  # one of them is there
        if waiting:
            raise PeerLost(rank=min(waiting), layer_idx=-1, stage=stage, seconds=timeout_s)
        return [answers[rank] for rank in range(len(self._ranks))]


def join_results(plan: StepPlan, results: Sequence[StepResult]) -> StepResult:
    """What all ranks did as one: each request is on one rank, loads add up, the slowest sets the times."""
    first = results[0]

    def union(name: str) -> dict[str, Any]:
        return {key: value for one in results for key, value in getattr(one, name).items()}

    by_phase: dict[str, list[ExpertLoad]] = {}
    for one in results:
        for load in one.loads:
            by_phase.setdefault(load.phase, []).append(load)
    return StepResult(
        step_id=plan.step_id,
        loads=tuple(_add_loads(loads) for loads in by_phase.values()),
        spread={name: max(one.spread[name] for one in results) for name in first.spread},
        has_overflowed=any(one.has_overflowed for one in results),
        ranks=tuple(step for one in results for step in one.ranks),
        tokens=union("tokens"),
        logprobs=union("logprobs"),
        prompt_logprobs=union("prompt_logprobs"),
        routes=union("routes"),
        failed=union("failed"),
    )


def _add_loads(loads: Sequence[ExpertLoad]) -> ExpertLoad:
    return replace(
        loads[0],
        counts=tuple(np.sum(layer, axis=0) for layer in zip(*(load.counts for load in loads), strict=True)),
        num_tokens=sum(load.num_tokens for load in loads),
        since_s=min(load.since_s for load in loads),
        until_s=max(load.until_s for load in loads),
    )


def _told_by(rank: int, error: MoesaicError) -> MoesaicError:
    error.add_note(f"said by rank {rank}")
    return error


def _check_equal(answers: Sequence[RankReady]) -> None:
    """Whether ranks that read the same tensor read the same bytes, and multiply the same shapes alike.

    Raises: CheckpointError, KernelUnavailable.
    """
    seen: dict[str, tuple[int, str]] = {}
    for rank, answer in enumerate(answers):
        for name, digest in answer.tensor_digests.items():
            other, known = seen.setdefault(name, (rank, digest))
            if known != digest:
                raise CheckpointError(
                    f"ranks {other} and {rank} read different bytes of {name}: their checkpoints differ"
                )
    tilings: dict[Any, tuple[int, Any]] = {}
    for rank, answer in enumerate(answers):
        for shape in answer.proof.shapes:
            other, tiling = tilings.setdefault(shape.name, (rank, shape.tiling))
            if tiling != shape.tiling:
                raise KernelUnavailable(
                    f"ranks {other} and {rank} multiply {shape.name} in different ways ({tiling} and "
                    f"{shape.tiling}), so their bits could differ: use machines of one kind, or native "
                    "kernels"
                )
