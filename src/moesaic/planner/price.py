"""Step times, memory and the largest batch of a block of layouts. Which of them is best is not known here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from moesaic.cost.calibrated import Calibration, shipped
from moesaic.cost.comm import link_rate, network_rate
from moesaic.cost.correction import middle_load
from moesaic.cost.host import interference_on, profile_on
from moesaic.cost.layouts import Split, cache_bytes_per_sequence, memory_per_rank, step_cost
from moesaic.cost.load import ExpertShares
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import Profile
from moesaic.cost.serving import Interference, launched_s
from moesaic.cost.term import Cost, FloatArray, Interval, Repeat, step_seconds
from moesaic.planner.demand import Demand
from moesaic.planner.space import Block
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

PoolRole = Literal["serve", "prefill", "decode"]

_T = TypeVar("_T")

MAX_BATCH = 4096  # guess: sequences of one attention replica; engines schedule no more at a time
CHUNK_TOKENS = 8192  # guess: tokens of prompts that a serving step takes beside its sequences
PREFILL_TOKENS = 16384
"""Tokens of a replica's prefill step, where one prompt is not longer.

Source: DeepSeek's published prefill profile has 16,384 tokens a device.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pricer:
    """One model on one cluster under one profile and one load.

    Units:  ttft_bounds are factors on a time to the first token that its interval goes to.
    """

    model: ModelSpec
    cluster: Cluster
    profile: Profile
    shares: ExpertShares
    interference: Interference = field(default_factory=Interference)
    ttft_bounds: tuple[float, float] = (1.0, 1.0)
    launched_s: float = 0.0  # launches of a step, which no layout changes
    calibration: Calibration | None = None  # corrects times by what was measured; None: they are as priced
    counted: list[int] = field(default_factory=lambda: [0])  # candidates priced so far
    kept: dict[Hashable, Any] = field(default_factory=dict)  # what questions that differ in objectives share

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What `make` returned for this key the first time."""
        if key not in self.kept:
            self.kept[key] = make()
        found: _T = self.kept[key]
        return found

    def cost(self, block: Block, num_seqs: FloatArray, new_tokens: float, past: float) -> Cost:
        """The step of every layout of a block, as a tree over arrays."""
        self.counted[0] += len(block)
        return step_cost(
            self.model, self.cluster, block.split,
            Work(num_seqs=np.broadcast_to(num_seqs, (len(block),)), new_tokens=new_tokens, past=past),
            profile=self.profile, formats=block.choice.formats, shares=self.shares,
        )  # fmt: skip

    def decode_cost(self, block: Block, batch: FloatArray, demand: Demand, role: PoolRole) -> Cost:
        """A decode step, as much longer or shorter as measured ones are."""
        cost = self.cost(block, batch, 1.0, demand.mean_context)
        return Repeat(self.level_of(block, demand, role), cost)

    def decode_interval(
        self, block: Block, batch: FloatArray, demand: Demand, role: PoolRole = "decode"
    ) -> Interval:
        """Seconds of a decode step."""
        return step_seconds(self.decode_cost(block, batch, demand, role))

    def prefill_cost(self, block: Block, prompts: FloatArray, demand: Demand) -> Cost:
        """A prefill step of whole prompts."""
        return self.cost(block, prompts, float(demand.new_tokens), float(demand.isl - demand.new_tokens))

    def prefill_interval(self, block: Block, prompts: FloatArray, demand: Demand) -> Interval:
        """Its seconds."""
        return step_seconds(self.prefill_cost(block, prompts, demand))

    def level_of(self, block: Block, demand: Demand, role: PoolRole) -> float:
        """`level`, where what was measured can say it: not of experts in host memory.

        Those are priced by themselves, but never below what the same devices are known to take longer: no
        layout is to look faster for having experts elsewhere.
        """
        level = self.level(block.choice.formats, demand, role)
        return max(level, 1.0) if "num_offloaded" in block.columns else level

    def level(self, formats: Formats, demand: Demand, role: PoolRole) -> float:
        """How much longer tokens were measured to take than they are priced: one factor for all layouts.

        What was measured is of few layouts, all within a node or rack, so layouts and batches are compared by
        their prices alone. What only decodes has no prompts between its steps, as with the shortest prompts.
        """
        if self.calibration is None:
            return 1.0
        fitted, prompt = self.calibration, 1.0 if role == "decode" else float(demand.new_tokens)

        def found() -> float:
            load = middle_load(prompt=prompt, output=demand.osl)
            return float(np.exp(fitted.log_ratios("tpot", self.model, self.cluster, formats, load)[0]))

        return self.once(("level", formats, prompt, demand.osl), found)

    def memory(
        self, block: Block, batch: FloatArray, role: PoolRole, demand: Demand
    ) -> dict[str, FloatArray]:
        """Bytes of the fullest rank by component."""
        length = demand.isl if role == "prefill" else demand.length
        rows = {
            "decode": batch, "serve": batch + min(demand.new_tokens, CHUNK_TOKENS),
            "prefill": np.minimum(batch * demand.new_tokens, PREFILL_TOKENS),
        }[role]  # fmt: skip
        # A prompt's KV stays until it is handed over, while the next one is computed.
        kept = batch * 2 if role == "prefill" else batch
        parts = memory_per_rank(
            self.model, block.split, num_seqs=kept, context=float(length), max_rows=rows,
            formats=block.choice.formats,
            profile=self.profile,
        )  # fmt: skip
        return {
            name: np.broadcast_to(np.asarray(part, np.float64), (len(block),)) for name, part in parts.items()
        }

    def first_token_s(self, prefill_s: FloatArray, step_s: FloatArray | float) -> FloatArray:
        """Time to the first token without a queue: one's own prefill, what every request waits, decode
        steps."""
        own = self.interference
        fixed = own.first_s + own.eager * self.launched_s
        return np.asarray(prefill_s + fixed + max(own.first_steps, 1.0) * step_s)

    @property
    def usable_bytes(self) -> float:
        """What weights, KV and buffers may fill of one device."""
        return self.profile.usable_memory * self.cluster.machine.memory_bytes

    def largest_batch(self, block: Block, role: PoolRole, demand: Demand) -> tuple[FloatArray, FloatArray]:
        """Most sequences of a replica by memory, in whole units, and the bytes that the least of them
        needs."""
        unit = block.unit
        one, two = (sum(self.memory(block, unit * many, role, demand).values()) for many in (1.0, 2.0))
        units = 1.0 + np.floor((self.usable_bytes - one) / np.maximum(two - one, 1e-9) + 1e-9)
        units = np.where(one > self.usable_bytes, 0.0, np.maximum(units, 1.0))
        return np.minimum(units, np.floor(MAX_BATCH / unit)) * unit, np.asarray(one)

    def hand_over_s(self, block: Block, demand: Demand, is_far: bool) -> FloatArray:
        """Seconds to send a prompt's KV to another instance: each rank its part, once a request."""
        size = cache_bytes_per_sequence(self.model, block.split, float(demand.isl), block.choice.formats)
        rate = network_rate if is_far else link_rate
        seconds = size / block.columns["pp"] / rate(self.cluster, self.profile)
        return np.broadcast_to(seconds, (len(block),))


def pricer_of(model: ModelSpec, cluster: Cluster, profile: str, shares: ExpertShares) -> Pricer:
    """What prices a model on a cluster under the profile called `profile`.

    Raises: ConfigError for an unknown profile.
    """
    found = profile_on(profile, cluster)
    if profile == "paper":
        return Pricer(model=model, cluster=cluster, profile=found, shares=shares)
    fitted, formats = shipped(), Formats()
    one = step_cost(
        model, cluster, Split(), Work(num_seqs=1.0, new_tokens=1.0, past=0.0), profile=found, shares=shares
    )
    low, high = fitted.factors("tpot", model, cluster, formats, sort="plan")
    return Pricer(
        model=model, cluster=cluster, profile=replace(found, low=low, high=high), shares=shares,
        interference=interference_on(cluster), launched_s=float(launched_s(one)),
        ttft_bounds=fitted.factors("ttft", model, cluster, formats, sort="plan"),
        calibration=None if cluster.machine.operator_s is not None else fitted,  # of GPUs alone
    )  # fmt: skip


def largest_within(
    seconds: Callable[[np.ndarray, FloatArray], FloatArray],
    most: FloatArray,
    unit: FloatArray,
    limit_s: float,
) -> FloatArray:
    """Largest batch up to `most`, in whole units, whose step takes at most `limit_s`; 0 when not one unit
    does.

    The step may only get longer with the batch; then bisection finds what a scan over every batch finds.
    `seconds(rows, batch)` prices some of the rows.
    """
    low = np.zeros(len(most))  # known to be fast enough
    high = np.floor(most / unit)  # the answer is at most this
    rows = np.flatnonzero(high >= 1)
    tried = high.copy()  # the most first: often it is allowed
    while len(rows):
        fast = seconds(rows, tried[rows] * unit[rows]) <= limit_s
        low[rows[fast]] = tried[rows[fast]]
        high[rows[~fast]] = tried[rows[~fast]] - 1
        tried = np.ceil((low + high) / 2)
        rows = rows[low[rows] < high[rows]]
    return low * unit
