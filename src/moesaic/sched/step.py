"""WHEN things are computed: a plan is all that the ranks do in a step, a result all that happened.

Running a plan twice gives the same state: KV places are named by the plan, recurrent state is read from one
slot and written to another, random numbers come from (seed, position), counters count on commit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moesaic.errors import PeerLost
from moesaic.sched.request import Logprobs, Request
from moesaic.spec.experts import ExpertLoad, IntArray

BlockIds = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlan:
    """The tokens [start_idx, start_idx + num_tokens) of one request, computed in this step.

    `blocks` has one tuple per cache group (in the ledger's group order): the ids of the blocks that hold
    positions 0 .. start_idx + num_tokens; a window group's entries below its window are -1 once freed.
    """

    request_id: str
    start_idx: int
    num_tokens: int
    is_sampled: bool  # the last of these tokens yields a new one
    token_ids: tuple[int, ...]  # the num_tokens inputs
    blocks: tuple[BlockIds, ...]
    state_from: int | None  # states are never updated in place; None: start from the zero state
    state_to: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchPlan:
    """The rows of one attention replica. No rows: an idle rank that still takes part."""

    rows: tuple[RowPlan, ...]
    micro_batches: tuple[slice, ...]  # over rows
    bucket: int | None  # padded size under graph capture; None: exact


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """All that the ranks do in one step."""

    step_id: int
    epoch: int
    plan_version: int
    batches: tuple[BatchPlan, ...]  # one per attention replica, always all of them
    admitted: tuple[Request, ...] = ()  # requests that the ranks see for the first time
    retired: tuple[str, ...] = ()  # requests that the ranks may forget

    @property
    def num_tokens(self) -> int:
        """Tokens computed over all replicas."""
        return sum(row.num_tokens for batch in self.batches for row in batch.rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """What one rank did in a step, beside its answers.

    Units:   seconds of its computing thread, which add up to the step: transfer is packing, handing over and
             unpacking messages, wait is for others. Where layers are one native call, all of it is compute.
    """

    rank: int
    num_jobs: int  # choices that its experts computed
    sent_bytes: tuple[int, ...]  # in messages, to each rank
    compute_s: float
    transfer_s: float
    wait_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """All that happened in one step."""

    step_id: int
    tokens: Mapping[str, tuple[int, ...]]  # request id -> tokens sampled (none for an unfinished prefill)
    logprobs: Mapping[str, tuple[Logprobs, ...]]  # request id -> one entry per sampled token, where asked for
    prompt_logprobs: Mapping[
        str, tuple[Logprobs | None, ...]
    ]  # for the prompt positions computed in this step
    loads: tuple[ExpertLoad, ...]  # one per phase present
    spread: Mapping[str, float]  # seconds by span name, for predicted beside measured
    ranks: tuple[RankStep, ...] = ()  # one per rank that tells
    routes: Mapping[str, IntArray] = field(default_factory=dict)  # [T, num_moe_layers, K], only when traced
    has_overflowed: bool = False
    lost: PeerLost | None = None
    failed: Mapping[str, str] = field(
        default_factory=dict
    )  # request id -> why this request alone failed (non-finite logits)
