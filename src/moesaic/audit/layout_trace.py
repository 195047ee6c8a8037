"""What the ranks of one thread compute over a few steps of prefill and decode: every hidden state and logit.

Knows no dispatcher: the models were given theirs. Rows are put in one order whoever computed them, so that
two traces can be compared bit by bit.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.audit.probe import tapped
from moesaic.experts.contract import Tag
from moesaic.kv.pool import BatchLayout, KvPool
from moesaic.models.build import LoadedModel
from moesaic.sched.ledger import cache_groups
from moesaic.sched.step import RowPlan
from moesaic.spec.model import ModelSpec
from moesaic.steps import Steps, drive_ready

MIN_ROWS = 256
LENGTHS = (90, 61, 40, 33, 17, 9, 5, 1)  # tokens of the prompts, as far as the model has positions
CHUNK = 50  # tokens of the first prompt in the first step
DECODES = 1  # tokens after a prompt
IDLE_RANK = 1  # of three and more it has no request
LOGIT_ROWS = 64  # whose logits are computed at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Tokens [start, stop) of one request, computed in one step."""

    request: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Requests by their token ids, and what is computed of them step by step."""

    token_ids: tuple[tuple[int, ...], ...]
    steps: tuple[tuple[Turn, ...], ...]

    @property
    def num_rows(self) -> int:
        """Tokens of all steps."""
        return sum(turn.stop - turn.start for step in self.steps for turn in step)


def make_work(spec: ModelSpec) -> Work:
    """Prompts whole and in chunks, prompts beside tokens that follow, and at last one token alone."""
    longest = max(1, spec.max_position - DECODES)
    lengths = [min(length, longest) for length in LENGTHS]
    while sum(lengths) < MIN_ROWS:
        lengths.append(min(longest, MIN_ROWS - sum(lengths)))
    chunk = min(CHUNK, max(1, lengths[0] - 1))
    others = range(1, len(lengths))
    steps = (
        (Turn(request=0, start=0, stop=chunk), *(Turn(request=i, start=0, stop=lengths[i]) for i in others)),
        (
            Turn(request=0, start=chunk, stop=lengths[0]),
            *(Turn(request=i, start=lengths[i], stop=lengths[i] + 1) for i in others[:-1]),
        ),
        (Turn(request=others[-1], start=lengths[-1], stop=lengths[-1] + 1),),
    )
    draw = random.Random(0)
    return Work(
        token_ids=tuple(tuple(draw.choices(range(spec.vocab), k=length + DECODES)) for length in lengths),
        steps=steps,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trace:
    """All rows in the order of steps, requests and positions.

    Shapes:  hidden_ATD [layers + 1, T, D] in the seam dtype: before each layer and after the last;
             logits_TV [T, V] float32.
    """

    hidden_ATD: Tensor
    logits_TV: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Where two traces part; `first` is embedding, layer 3 or head, None where every bit is equal."""

    first: str | None
    max_abs_logit_diff: float


def compare(found: Trace, expected: Trace) -> Difference:
    """Every element's bits: -0.0 is not 0.0, and a number that is none is itself."""
    first = None
    for at, (ours, theirs) in enumerate(zip(found.hidden_ATD, expected.hidden_ATD, strict=True)):
        if not _is_same(ours, theirs):
            first = f"layer {at - 1}" if at else "embedding"
            break
    if first is None and not _is_same(found.logits_TV, expected.logits_TV):
        first = "head"
    if first is None:
        return Difference(first=None, max_abs_logit_diff=0.0)
    apart = (found.logits_TV - expected.logits_TV).abs().max().item()
    return Difference(first=first, max_abs_logit_diff=min(apart, torch.finfo(torch.float32).max))


def _is_same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@torch.inference_mode()
def run_ranks(models: Sequence[LoadedModel], work: Work, *, num_micro_batches: int, tp: int = 1) -> Trace:
    """The work with its requests dealt out to replicas of `tp` ranks, each one's in so many micro-batches.

    A replica or a micro-batch without requests takes part in every step. Where ranks of a replica do not
    agree, the trace has what one that differs from the first has computed.
    """
    num_replicas = len(models) // tp
    busy = [replica for replica in range(num_replicas) if num_replicas < 3 or replica != IDLE_RANK]
    desks = [_Desk(model, work) for model in models]
    hidden, logits = [], []
    for step_id, step in enumerate(work.steps):
        parts: dict[tuple[int, int], list[Turn]] = {
            (rank, micro_batch): [] for rank in range(len(models)) for micro_batch in range(num_micro_batches)
        }
        for turn in step:
            place = turn.request // len(busy)  # on its rank
            replica = busy[turn.request % len(busy)]
            for rank in range(replica * tp, (replica + 1) * tp):
                parts[rank, place % num_micro_batches].append(turn)
        taps: list[list[Tensor]] = [[] for _ in parts]
        last = drive_ready(
            [
                desks[rank].forward(turns, step_id, micro_batch, tap)
                for ((rank, micro_batch), turns), tap in zip(parts.items(), taps, strict=True)
            ]
        )
        seen = {
            part: (torch.stack(tap), rows_TD) for part, tap, rows_TD in zip(parts, taps, last, strict=True)
        }
        shown = [
            _who_differs([(rank, micro_batch) for rank in range(first, first + tp)], seen)
            for first in range(0, len(models), tp)
            for micro_batch in range(num_micro_batches)
        ]
        logits_TV = torch.cat([desks[part[0]].logits(seen[part][1]) for part in shown])
        hidden_ATD = torch.cat([seen[part][0] for part in shown], dim=1)
        row_T = _rows_in_order(step, [turn for part in shown for turn in parts[part]])
        hidden.append(torch.empty_like(hidden_ATD).index_copy_(1, row_T, hidden_ATD))
        logits.append(torch.empty_like(logits_TV).index_copy_(0, row_T, logits_TV))
    return Trace(hidden_ATD=torch.cat(hidden, dim=1), logits_TV=torch.cat(logits))


def _who_differs(
    ranks: Sequence[tuple[int, int]], seen: Mapping[tuple[int, int], tuple[Tensor, Tensor]]
) -> tuple[int, int]:
    """The first of some that has other bits than the first of all; that one, where none has."""
    first = seen[ranks[0]]
    for other in ranks[1:]:
        if not all(_is_same(a, b) for a, b in zip(seen[other], first, strict=True)):
            return other
    return ranks[0]


def _rows_in_order(step: Sequence[Turn], computed: Sequence[Turn]) -> Tensor:
    """[T] int64: where rows that were computed turn after turn stand in the order of the step."""
    starts, start = {}, 0
    for turn in step:
        starts[turn.request], start = start, start + turn.stop - turn.start
    return torch.cat([torch.arange(turn.stop - turn.start) + starts[turn.request] for turn in computed])


class _Desk:
    """One rank's model with a KV pool, in which every request has a place of its own."""

    def __init__(self, model: LoadedModel, work: Work) -> None:
        numerics = model.numerics
        self._model = model
        self._work = work
        self._groups = cache_groups(model.local_spec, numerics.kv_format, numerics.kv_block)
        counts = [-(-len(ids) // numerics.kv_block) for ids in work.token_ids]
        starts = [sum(counts[:i]) for i in range(len(counts))]
        self._blocks = [
            tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True)
        ]
        self._pool = KvPool(
            model.local_spec,
            numerics,
            tuple(2 * len(counts) if group.kind == "state" else sum(counts) for group in self._groups),
        )
        self._state_of: dict[int, int] = {}  # the slot that a request's state is in

    def forward(
        self, turns: Sequence[Turn], step_id: int, micro_batch: int, tap: list[Tensor]
    ) -> Steps[Tensor]:
        """Hidden states after the last norm; those before each layer and before the norm go to `tap`."""
        rows = [self._row(turn) for turn in turns]
        tag = Tag(epoch=0, plan_version=0, step_id=step_id, micro_batch=micro_batch, chunk=0, layer_idx=0)
        tokens_T = torch.tensor([i for row in rows for i in row.token_ids], dtype=torch.int64)
        decoder = tapped(self._model.decoder, tap.append)
        return decoder.forward(tokens_T, BatchLayout.of(rows, self._pool), self._pool, tag)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """logits_TV of all rows."""
        parts = [self._model.decoder.logits(rows_TD) for rows_TD in hidden_TD.split(LOGIT_ROWS)]
        return torch.cat(parts)

    def _row(self, turn: Turn) -> RowPlan:
        has_state = any(group.kind == "state" for group in self._groups)
        before = self._state_of.get(turn.request)
        after = 2 * turn.request + (before == 2 * turn.request)
        self._state_of[turn.request] = after
        return RowPlan(
            request_id=str(turn.request),
            start_idx=turn.start,
            num_tokens=turn.stop - turn.start,
            is_sampled=True,
            token_ids=self._work.token_ids[turn.request][turn.start : turn.stop],
            blocks=tuple(self._blocks[turn.request] for _ in self._groups),
            state_from=before if has_state else None,
            state_to=after if has_state else None,
        )
