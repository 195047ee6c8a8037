"""Facts about experts: which copy lives where, how often each was chosen. Algorithms live in `placement`."""

from __future__ import annotations

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


class ExpertKey(NamedTuple):
    """One logical expert, or one slice of it, of one layer."""

    layer_idx: int
    logical_id: int
    slice_idx: int = 0


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


def contiguous_plan(num_experts: tuple[int, ...], num_ranks: int) -> ExpertPlan:
    """The plan in which rank r holds the r-th contiguous run of experts, as even as integers allow.

    Raises: ConfigError when num_ranks is below 1.
    """
    if num_ranks < 1:
        raise ConfigError(f"num_ranks must be at least 1, got {num_ranks}")
    slot_expert = tuple(np.arange(count, dtype=np.int64) for count in num_experts)
    return ExpertPlan(
        version=0,
        slot_rank=tuple(
            np.arange(count, dtype=np.int64) * num_ranks // max(count, 1) for count in num_experts
        ),
        slot_expert=slot_expert,
        slot_slice=tuple(np.zeros_like(ids) for ids in slot_expert),
        slot_share=tuple(np.ones(len(ids), dtype=np.float64) for ids in slot_expert),
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
