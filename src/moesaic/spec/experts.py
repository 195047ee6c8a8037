"""Facts about experts: which copy lives where, how often each was chosen. Algorithms live in `placement`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moesaic.errors import ConfigError

Phase = Literal["prefill", "decode"]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

MAX_VERSION = (
    2**30
)  # of a plan that is given: versions travel in 32 bits, and rise with every stage of a swap


_SHOWN = 6  # slices in one error message


class ExpertKey(NamedTuple):
    """One logical expert, or one slice of it, of one layer."""

    layer_idx: int
    logical_id: int
    slice_idx: int = 0

    def part_id(self, num_slices: int) -> int:
        """Its number among the slices of its layer; the expert's where it is whole."""
        return self.logical_id * num_slices + self.slice_idx


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertPlan:
    """Which physical slot of which rank holds which logical expert, per MoE layer (in ascending layer order).

    Shapes:  per layer arrays over physical slots [P]; ranks may hold different numbers of slots.
    """

    version: int
    slot_rank: tuple[IntArray, ...]
    slot_expert: tuple[IntArray, ...]
    slot_slice: tuple[IntArray, ...]
    slot_share: tuple[
        FloatArray, ...
    ]  # part of the expert's tokens that this copy takes; sums to 1 an expert

    @property
    def num_ranks(self) -> int:
        """Ranks that hold at least one slot, counted from 0."""
        return 1 + max((int(ranks.max(initial=-1)) for ranks in self.slot_rank), default=-1)

    @property
    def num_slices(self) -> int:
        """Parts that every expert is cut into along its inner width; a token needs them all."""
        return 1 + max((int(parts.max(initial=0)) for parts in self.slot_slice), default=0)

    @property
    def part_ids(self) -> tuple[IntArray, ...]:
        """[P] a layer: expert * num_slices + slice, which is the expert where it is whole."""
        count = self.num_slices
        return tuple(
            ids * count + parts for ids, parts in zip(self.slot_expert, self.slot_slice, strict=True)
        )


def name_parts(part_ids: Sequence[int], num_slices: int) -> str:
    """`experts [3, 4]`, or where they are cut `slices [1 of expert 3, 0 of expert 4]`."""
    if num_slices == 1:
        return f"experts {list(part_ids)}"
    shown = [f"{i % num_slices} of expert {i // num_slices}" for i in part_ids[:_SHOWN]]
    more = [f"{len(part_ids) - _SHOWN} more"] if len(part_ids) > _SHOWN else []
    return f"slices [{', '.join(shown + more)}]"


def contiguous_plan(num_experts: tuple[int, ...], num_ranks: int, num_slices: int = 1) -> ExpertPlan:
    """The plan in which rank r holds the r-th contiguous run of experts, as even as integers allow.

    With slices so many ranks that follow each other share a run: each has one slice of all its experts.

    Raises: ConfigError when num_ranks is below 1, or no multiple of the slices.
    """
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, got {num_ranks}")
    if num_slices < 1 or num_ranks % num_slices:
        raise ConfigError(
            f"{num_ranks} ranks are no groups of {num_slices}, one rank for each slice of an expert"
        )
    experts = [np.arange(count, dtype=np.int64) for count in num_experts]
    parts = [np.tile(np.arange(num_slices, dtype=np.int64), count) for count in num_experts]
    groups = [ids * (num_ranks // num_slices) // max(len(ids), 1) for ids in experts]
    return ExpertPlan(
        version=0,
        slot_rank=tuple(
            np.repeat(of_group, num_slices) * num_slices + part
            for of_group, part in zip(groups, parts, strict=True)
        ),
        slot_expert=tuple(np.repeat(ids, num_slices) for ids in experts),
        slot_slice=tuple(parts),
        slot_share=tuple(np.ones(len(part), dtype=np.float64) for part in parts),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertLoad:
    """How often each expert was chosen: the only load record of engine, importers, simulator and balancer.

    Shapes:  counts, per MoE layer in ascending order: [E] int64, logical ids; real tokens, each once, of
             committed steps only.
    """

    counts: tuple[IntArray, ...]
    phase: Phase
    num_tokens: int
    num_steps: int
    since_s: float
    until_s: float
    plan_version: int
    source: str
