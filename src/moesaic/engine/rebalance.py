"""The expert plan in force, and the way from it to another: what is refused, and stage after stage.

Decides and counts; sends nothing and has no lock. Whoever turns the loop takes a stage, has it done, and says
so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from moesaic.engine.layout import check_placement, count_slices
from moesaic.errors import ConfigError, HostMemoryShort, SwapRunning
from moesaic.placement.choice import ReplicaChoice
from moesaic.placement.plan import fetched, stages
from moesaic.spec.experts import ExpertLoad, ExpertPlan, IntArray
from moesaic.spec.model import ModelSpec
from moesaic.units import format_bytes

STAGE_BYTES = 2**28  # guess: of experts that travel between two steps; a quarter of a second at 1 GB/s
LOAD_STEPS = 16  # guess: how often ranks hear of loads; they then make their tables anew


@dataclass(frozen=True, kw_only=True, slots=True)
class Swapped:
    """A plan that came into force."""

    version: int
    num_stages: int
    moved_bytes: int
    seconds: float  # from the question on, steps in between included


@dataclass(slots=True, eq=False)
class _Swap:
    stages: list[ExpertPlan]
    began_s: float
    answer: Future[Swapped]
    num_done: int = 0
    moved_bytes: int = 0


class Rebalance:
    """Which plan the ranks follow.

    Owns:    the answers of swaps under way: each is given exactly once, by `done` or `fail`.
    """

    def __init__(
        self,
        plan: ExpertPlan,
        spec: ModelSpec,
        *,
        num_ranks: int,
        expert_bytes: Sequence[int],
        available_bytes: Callable[[], int],
        replica_choice: ReplicaChoice = "turns",
        stage_bytes: int = STAGE_BYTES,
    ) -> None:
        """`expert_bytes` are of an expert, or a slice, of each MoE layer; `available_bytes` says what the
        ranks' machine has now."""
        self.plan = plan
        self.moved_bytes_total = 0
        self._spec = spec
        self._num_ranks = num_ranks
        self._expert_bytes = tuple(expert_bytes)
        self._available_bytes = available_bytes
        self._needs_loads = replica_choice == "least-loaded" and num_ranks > 1
        self._stage_bytes = stage_bytes
        self._start_bytes = self._bytes_of(plan)
        self._swap: _Swap | None = None
        self._load_counts: list[IntArray] | None = None
        self._num_load_steps = 0

    @property
    def is_swapping(self) -> bool:
        """Whether stages are left to do."""
        return self._swap is not None

    @property
    def grown_bytes(self) -> int:
        """Memory of experts beyond that of the plan that the engine started with; below zero: less."""
        return sum(self._bytes_of(self.plan)) - sum(self._start_bytes)

    def num_held(self, rank: int) -> int:
        """Experts in memory of a rank, or slices of such, of all layers."""
        pairs = zip(self.plan.slot_rank, self.plan.part_ids, strict=True)
        return sum(len(np.unique(ids[ranks == rank])) for ranks, ids in pairs)

    def ask(self, target: ExpertPlan, now_s: float) -> Future[Swapped]:
        """Begin to go over to a plan; its version is replaced by those that follow the present one.

        Raises: ConfigError for a plan that does not fit the model or the ranks; SwapRunning; HostMemoryShort
                with the arithmetic when there is no room for it.
        """
        if not self._spec.moe_layers:
            raise ConfigError("the model has no routed experts: there is nothing to place")
        check_placement(target, self._num_ranks, self._spec, where="the plan")
        if target.num_slices != self.plan.num_slices:
            raise ConfigError(
                f"the plan: it has {count_slices(target.num_slices)}, and in memory are "
                f"{count_slices(self.plan.num_slices)}: balance for such, or start anew with --placement"
            )
        if self._swap is not None:
            raise SwapRunning(
                f"{len(self._swap.stages)} stages of another plan are left to do, the next has version "
                f"{self._swap.stages[0].version}; send this one again when it is in force"
            )
        sizes = dict(enumerate(self._expert_bytes))
        todo = list(stages(self.plan, target, self._stage_bytes, sizes))
        self._check_room(todo)
        self._swap = _Swap(todo, now_s, Future())
        return self._swap.answer

    def next_stage(self) -> ExpertPlan | None:
        """The plan that the ranks are to follow next, before the next step; None: the present one."""
        return None if self._swap is None else self._swap.stages[0]

    def done(self, stage: ExpertPlan, moved_bytes: int, now_s: float) -> None:
        """All ranks follow this stage."""
        swap = self._swap
        assert swap is not None, "a stage that nobody asked for"
        assert stage is swap.stages[0], "a stage out of turn"
        self.plan = swap.stages.pop(0)
        self.moved_bytes_total += moved_bytes
        swap.moved_bytes += moved_bytes
        swap.num_done += 1
        if not swap.stages:
            self._swap = None
            swap.answer.set_result(
                Swapped(
                    version=stage.version,
                    num_stages=swap.num_done,
                    moved_bytes=swap.moved_bytes,
                    seconds=now_s - swap.began_s,
                )
            )

    def fail(self, error: Exception) -> None:
        """The ranks are gone: whoever waits for a plan hears it."""
        swap, self._swap = self._swap, None
        if swap is not None:
            swap.answer.set_exception(error)

    def take_loads(self, loads: Iterable[ExpertLoad]) -> tuple[IntArray, ...] | None:
        """Add the loads of a committed step; now and then what they came to, for ranks that go by it."""
        if not self._needs_loads:
            return None
        for load in loads:
            if self._load_counts is None:
                self._load_counts = [counts_E * 0 for counts_E in load.counts]
            for total_E, counts_E in zip(self._load_counts, load.counts, strict=True):
                total_E += counts_E
        self._num_load_steps += 1
        if self._load_counts is None or self._num_load_steps < LOAD_STEPS:
            return None
        found = tuple(self._load_counts)
        self._load_counts, self._num_load_steps = None, 0
        return found

    def _check_room(self, todo: Sequence[ExpertPlan]) -> None:
        """Whether the fullest moment of a swap fits, layers being exchanged one by one on all ranks at once.

        Beside the experts of the layers before and after, a layer is there twice while it is filled, and its
        blobs that travel are there as sent, on the way, and received.
        """
        grown = most = 0
        before = self.plan
        for after in todo:
            moving = fetched(before, after)
            old, new = self._bytes_of(before), self._bytes_of(after)
            for at, size in enumerate(self._expert_bytes):
                if not moving[at] and old[at] == new[at]:
                    continue
                most = max(most, grown + new[at] + 3 * len(moving[at]) * size)
                grown += new[at] - old[at]
            before = after
        available = self._available_bytes()
        if most > available:
            now, then = (format_bytes(sum(self._bytes_of(plan))) for plan in (self.plan, before))
            raise HostMemoryShort(
                f"the plan needs {format_bytes(most)} more at its fullest moment (experts grow from {now} to "
                f"{then} over all ranks, and the layer that is exchanged is there twice, with what travels), "
                f"and {format_bytes(available)} are available; use fewer copies, or free memory"
            )

    def _bytes_of(self, plan: ExpertPlan) -> list[int]:
        """Memory of each layer's experts over all ranks: a second slot on a rank costs nothing."""
        return [
            size * len({*zip(ranks.tolist(), ids.tolist(), strict=True)})
            for size, ranks, ids in zip(self._expert_bytes, plan.slot_rank, plan.part_ids, strict=True)
        ]
