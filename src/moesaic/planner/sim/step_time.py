"""How long a step of an engine takes, by the cost model: tables over batch, context and prompt tokens.

A step of a simulation is looked up in microseconds; pricing its tree takes milliseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from moesaic.cost.layouts import Split, step_cost
from moesaic.cost.load import ExpertShares
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import Profile
from moesaic.cost.serving import Interference, prefill_beside_decode
from moesaic.cost.term import Cost, FloatArray, leaves, step_seconds
from moesaic.sched.step import BatchPlan, StepPlan
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

POINTS_PER_OCTAVE = 2  # of the tables' axes: a step is then within a percent of its own tree


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """What is priced: one engine's model, devices, layout, formats and load."""

    model: ModelSpec
    cluster: Cluster
    split: Split
    profile: Profile
    formats: Formats
    shares: ExpertShares
    interference: Interference = field(default_factory=Interference)

    def cost(self, work: Work) -> Cost:
        """The tree of a step."""
        return step_cost(
            self.model, self.cluster, self.split, work, profile=self.profile, formats=self.formats,
            shares=self.shares,
        )  # fmt: skip


class StepTimes:
    """Seconds of steps of up to `max_batch` sequences, `max_new` prompt tokens and `max_past` positions.

    A step with prompts is priced as one prompt of all their tokens with as much attention; of several
    replicas the slowest counts, as if all were as busy.
    """

    def __init__(self, case: StepCase, *, max_batch: int, max_new: int, max_past: int) -> None:
        self.case = case
        self._batch = _axis(1, max_batch)
        self._new = _axis(1, max_new)
        self._past = [0.0, *_axis(64, max(max_past, 64))]
        batch, past = np.meshgrid(self._batch, self._past, indexing="ij")
        decode = case.cost(Work(num_seqs=batch.ravel(), new_tokens=np.ones(batch.size), past=past.ravel()))
        new, past = np.meshgrid(self._new, self._past, indexing="ij")
        prefill = case.cost(Work(num_seqs=np.ones(new.size), new_tokens=new.ravel(), past=past.ravel()))
        self._decode = _rows(step_seconds(decode).value, batch.shape)
        self._alone = _rows(step_seconds(prefill).value, new.shape)
        self._beside = [
            _rows(prefill_beside_decode(prefill, many, case.interference), new.shape) for many in self._batch
        ]
        self._exchange = tuple(
            _rows(_exchange_share(cost), shape)
            for cost, shape in ((decode, batch.shape), (prefill, new.shape))
        )

    def decode_s(self, batch: float, past: float) -> float:
        """A step of `batch` sequences with `past` positions each."""
        return _between(self._decode, self._batch, batch, self._past, past)

    def alone_s(self, new: float, past: float) -> float:
        """A step of one prompt's `new` tokens."""
        return _between(self._alone, self._new, new, self._past, past)

    def beside_s(self, new: float, past: float, batch: float) -> float:
        """What these tokens add to a step of `batch` sequences."""
        idx, part = _place(self._batch, batch)
        low = _between(self._beside[idx], self._new, new, self._past, past)
        if part == 0.0:
            return low
        return low + part * (_between(self._beside[idx + 1], self._new, new, self._past, past) - low)

    def exchange_share(self, batch: float, past: float) -> float:
        """Part of a decode step's work that is transfers, hidden or not."""
        return _between(self._exchange[0], self._batch, batch, self._past, past)

    def prefill_exchange_share(self, new: float, past: float) -> float:
        """The same of a step of prompt tokens."""
        return _between(self._exchange[1], self._new, new, self._past, past)

    def step_s(self, plan: StepPlan) -> float:
        """The step of a plan: that of its slowest replica."""
        return max(self.batch_s(batch) for batch in plan.batches)

    def batch_s(self, batch: BatchPlan) -> float:
        """The step of one replica."""
        num_decode, decode_past, new, past = parts_of(batch)
        if not num_decode:
            return self.alone_s(new, past) if new else 0.0
        return self.decode_s(num_decode, decode_past) + (self.beside_s(new, past, num_decode) if new else 0.0)

    def exchange_s(self, plan: StepPlan) -> tuple[float, float]:
        """(seconds of transfers, seconds of all work) of the slowest replica."""
        batch = max(plan.batches, key=self.batch_s)
        num_decode, decode_past, new, past = parts_of(batch)
        decode_s = self.decode_s(num_decode, decode_past) if num_decode else 0.0
        prefill_s = self.batch_s(batch) - decode_s
        sent = self.exchange_share(num_decode, decode_past) * decode_s if num_decode else 0.0
        sent += self.prefill_exchange_share(new, past) * prefill_s if new else 0.0
        return sent, decode_s + prefill_s


def parts_of(batch: BatchPlan) -> tuple[int, float, int, float]:
    """(sequences in decode, their mean context, prompt tokens, context of one prompt of all of them).

    That context gives the same number of positions seen as the prompts have together, or 0 where they are
    short: then the one prompt sees more.
    """
    num_decode, positions, new, seen = 0, 0, 0, 0.0
    for row in batch.rows:
        if row.num_tokens == 1 and row.is_sampled and row.start_idx > 0:
            num_decode += 1
            positions += row.start_idx
        else:
            new += row.num_tokens
            seen += row.num_tokens * (row.start_idx + row.num_tokens / 2)
    past = max(seen / new - new / 2, 0.0) if new else 0.0
    return num_decode, positions / num_decode if num_decode else 0.0, new, past


def _axis(least: int, most: int) -> list[float]:
    """Whole numbers from `least` to `most`, a few per factor of two."""
    count = int(np.ceil(np.log2(max(most / least, 1.0)) * POINTS_PER_OCTAVE)) + 1
    return sorted(
        {float(round(x)) for x in np.geomspace(least, max(most, least), max(count, 1))} | {float(most)}
    )


def _rows(values: FloatArray | float, shape: tuple[int, ...]) -> list[list[float]]:
    found: list[list[float]] = (
        np.broadcast_to(np.asarray(values, np.float64), (shape[0] * shape[1],)).reshape(shape).tolist()
    )
    return found


def _exchange_share(cost: Cost) -> FloatArray:
    sent: FloatArray | float = 0.0
    total: FloatArray | float = 0.0
    for times, term in leaves(cost):
        seconds = times * term.seconds.value
        total = total + seconds
        if term.resource in ("link", "network"):
            sent = sent + seconds
    return np.asarray(sent / np.maximum(total, 1e-30))


def _place(axis: Sequence[float], value: float) -> tuple[int, float]:
    """The interval that a value lies in, and how far; values outside count as the end."""
    if value <= axis[0]:
        return 0, 0.0
    idx = bisect_right(axis, value) - 1
    if idx >= len(axis) - 1:
        return len(axis) - 1, 0.0
    return idx, (value - axis[idx]) / (axis[idx + 1] - axis[idx])


def _between(
    table: Sequence[Sequence[float]], xs: Sequence[float], x: float, ys: Sequence[float], y: float
) -> float:
    i, a = _place(xs, x)
    j, b = _place(ys, y)
    row = table[i]
    low = row[j] if b == 0.0 else row[j] + b * (row[j + 1] - row[j])
    if a == 0.0:
        return low
    row = table[i + 1]
    high = row[j] if b == 0.0 else row[j] + b * (row[j + 1] - row[j])
    return low + a * (high - low)
