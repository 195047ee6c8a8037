"""A cost is a tree of named terms: `Seq` adds, `Par` takes the slowest, `Repeat` multiplies.

The numbers of a term are floats, or arrays over candidates: one walk then prices thousands of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[Any]
Number = float | FloatArray

TermName = Literal[
    "embedding", "attention_projections", "attention", "attention_all_reduce", "dispatch", "experts",
    "combine", "shared_experts", "dense_ffn", "ffn_all_reduce", "head", "pipeline_send", "kv_exchange",
    "expert_load", "host",
]  # fmt: skip
"""Names of terms; each is one of `LAYER_SPANS` in `obs/names`, so predicted and measured join on it."""
TERM_NAMES: tuple[TermName, ...] = get_args(TermName)

Resource = Literal["compute", "memory", "link", "network", "host_link", "disk", "overhead"]
"""What a term waits for. `overhead`: launches and the host, which no faster device shortens."""

Source = Literal["measured", "modelled", "guessed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A number and how sure it is.

    Shapes:  floats, or arrays over candidates.
    """

    value: Number
    low: Number
    high: Number

    @staticmethod
    def exactly(value: Number) -> Interval:
        """A number without doubt."""
        return Interval(value=value, low=value, high=value)

    def __add__(self, other: Interval) -> Interval:
        return Interval(value=self.value + other.value, low=self.low + other.low, high=self.high + other.high)

    def times(self, factor: Number) -> Interval:
        """The interval scaled by a factor of at least 0."""
        return Interval(value=self.value * factor, low=self.low * factor, high=self.high * factor)

    def widened(self, low: Number, high: Number) -> Interval:
        """The same number with bounds at these factors of it."""
        return Interval(value=self.value, low=self.value * low, high=self.value * high)

    def at(self, idx: int) -> Interval:
        """The interval of one candidate, as floats."""
        return Interval(value=pick(self.value, idx), low=pick(self.low, idx), high=pick(self.high, idx))


ZERO = Interval.exactly(0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class CostTerm:
    """One operator or transfer on the slowest rank.

    Units:  seconds; flops and bytes are counts of the slowest rank.
    """

    name: TermName
    resource: Resource  # what bounds it for a single candidate; `bound` says it per candidate
    seconds: Interval
    flops: Number = 0.0
    bytes: Number = 0.0
    rank: int = 0  # the class of ranks it stands for: 0 attention, 1 expert ranks of their own
    source: Source = "modelled"
    compute_s: Number = 0.0  # parts of the seconds: they tell which resource bounds it
    memory_s: Number = 0.0
    overhead_s: Number = 0.0


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other."""

    parts: tuple[Cost, ...]


@dataclass(frozen=True, slots=True)
class Par:
    """At the same time; the slowest counts."""

    parts: tuple[Cost, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """The same cost several times in a row: layers, micro-batches."""

    times: Number
    part: Cost


Cost = CostTerm | Seq | Par | Repeat


def step_seconds(cost: Cost) -> Interval:
    """Seconds of a whole tree."""
    if isinstance(cost, CostTerm):
        return cost.seconds
    if isinstance(cost, Repeat):
        return step_seconds(cost.part).times(cost.times)
    found = [step_seconds(part) for part in cost.parts]
    total = found[0] if found else ZERO
    for one in found[1:]:
        total = total + one if isinstance(cost, Seq) else _later(total, one)
    return total


def _later(a: Interval, b: Interval) -> Interval:
    return Interval(
        value=np.maximum(a.value, b.value), low=np.maximum(a.low, b.low), high=np.maximum(a.high, b.high)
    )


def leaves(cost: Cost, times: Number = 1.0) -> Iterator[tuple[Number, CostTerm]]:
    """(how often, term) of every term."""
    if isinstance(cost, CostTerm):
        yield times, cost
    elif isinstance(cost, Repeat):
        yield from leaves(cost.part, times * cost.times)
    else:
        for part in cost.parts:
            yield from leaves(part, times)


def seconds_by_name(cost: Cost) -> dict[TermName, Number]:
    """Seconds of work by term, hidden or not: with `Par` the sum may exceed `step_seconds`."""
    found: dict[TermName, Number] = {}
    for times, term in leaves(cost):
        found[term.name] = found.get(term.name, 0.0) + times * term.seconds.value
    return found


def at(cost: Cost, idx: int) -> Cost:
    """The tree of one candidate, with floats; each term names the resource that bounds it there."""
    if isinstance(cost, CostTerm):
        memory_s, compute_s = pick(cost.memory_s, idx), pick(cost.compute_s, idx)
        overhead_s, resource = pick(cost.overhead_s, idx), cost.resource
        if resource in ("compute", "memory"):
            resource = "memory" if memory_s >= compute_s else "compute"
        if overhead_s > max(pick(cost.seconds.value, idx) - overhead_s, 0.0):
            resource = "overhead"
        return replace(
            cost, seconds=cost.seconds.at(idx), flops=pick(cost.flops, idx), bytes=pick(cost.bytes, idx),
            compute_s=compute_s, memory_s=memory_s, overhead_s=overhead_s, resource=resource,
        )  # fmt: skip
    if isinstance(cost, Repeat):
        return Repeat(pick(cost.times, idx), at(cost.part, idx))
    return type(cost)(tuple(at(part, idx) for part in cost.parts))


def pick(number: Number, idx: int) -> float:
    """The float of one candidate; a number that holds for all of them is that number."""
    array = np.asarray(number)
    return float(array if array.ndim == 0 else array[idx])
