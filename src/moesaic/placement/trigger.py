"""When to place anew: windows, thresholds with hysteresis, whether a move pays. Pure functions and values."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moesaic.errors import ConfigError
from moesaic.spec.experts import FloatArray, IntArray

MIN_SAMPLES = 10_000  # choices of a layer before a skew counts as one


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaRule:
    """When an expert gets a copy and when it loses one. Loads are in units of the mean load of a slot.

    The gap between the thresholds is the hysteresis: a copy goes once the others could carry its part and
    still be well below what would bring it back.
    """

    window_s: float = 30.0
    add_above: float = 2.0  # load of a copy
    drop_below: float = 1.3  # load of a copy, were there one fewer

    def __post_init__(self) -> None:
        if self.window_s <= 0:
            raise ConfigError(f"window_s must be above 0, got {self.window_s}")
        if not 0 < self.drop_below < self.add_above:
            raise ConfigError(
                f"drop_below ({self.drop_below}) must be above 0 and below add_above ({self.add_above}), "
                "or a copy "
                "would come and go"
            )

    def wanted(self, load_E: FloatArray, copies_E: IntArray) -> IntArray:
        """Change in copies of each expert: 1, 0 or -1.

        Shapes:  load_E [E], any unit; copies_E [E], at least 1; returns [E] int64.
        """
        total = load_E.sum()
        if total == 0:
            return np.zeros(len(load_E), dtype=np.int64)
        slot = total / copies_E.sum()
        change: IntArray = (load_E / copies_E > self.add_above * slot).astype(np.int64)
        fewer = load_E / np.maximum(copies_E - 1, 1)
        change[(copies_E > 1) & (fewer < self.drop_below * slot)] = -1
        return change


@dataclass(kw_only=True, slots=True)
class LoadWindow:
    """Counts of the last seconds, kept by step.

    Owns:    its entries; `add` times must not go back.
    """

    window_s: float
    _steps: deque[tuple[float, IntArray]] = field(default_factory=deque)

    def add(self, now_s: float, counts_E: IntArray) -> None:
        """Counts of a step."""
        if self._steps and now_s < self._steps[-1][0]:
            raise ConfigError(f"times must not go back: {now_s} after {self._steps[-1][0]}")
        self._steps.append((now_s, counts_E))
        while self._steps[0][0] <= now_s - self.window_s:
            self._steps.popleft()

    def total(self) -> IntArray:
        """Counts within the window.

        Raises: ConfigError when nothing was added.
        """
        if not self._steps:
            raise ConfigError("the window holds no step yet; add one first")
        found: IntArray = np.sum([counts for _, counts in self._steps], axis=0)
        return found

    @property
    def is_full(self) -> bool:
        """Whether the steps cover the window, to one step."""
        if len(self._steps) < 2:
            return False
        span, step = self._steps[-1][0] - self._steps[0][0], self._steps[-1][0] - self._steps[-2][0]
        return span + step >= self.window_s


Reason = Literal["skew", "idle_gpu"]


def replication_reasons(
    counts_E: IntArray,
    gpu_use: FloatArray | None = None,
    *,
    skew: float = 2.0,
    idle: float = 0.6,
    full: float = 0.95,
) -> tuple[Reason, ...]:
    """Why copies would help now; empty when they would not.

    skew: the hottest expert is chosen at least `skew` times as often as the coldest, over at least 10,000
    choices. idle_gpu: one GPU is used below `idle` while another is at `full`.

    A standard deviation above half the mean says less: shares of 17, 17, 8.5, 8.5 and four times 12.25 % are
    2 : 1 and have a variation of 0.24.

    Shapes:  counts_E [E]; gpu_use [G], from 0 to 1.
    """
    reasons: list[Reason] = []
    total = int(counts_E.sum())
    if total >= MIN_SAMPLES and counts_E.max() >= skew * counts_E.min():
        reasons.append("skew")
    if gpu_use is not None and gpu_use.min() < idle and gpu_use.max() >= full:
        reasons.append("idle_gpu")
    return tuple(reasons)


def net_gain_s(
    *,
    now: float,
    after: float,
    expert_s_per_s: float,
    interval_s: float,
    move_bytes: float,
    bytes_per_s: float,
) -> float:
    """Seconds that placing anew saves until the next time, less the seconds that the move takes.

    Units:  now, after: balancedness (mean over max) before and after; expert_s_per_s is the share of wall
             time
            that waits for experts, at the balance of now; move_bytes of the rank that fetches most.
    Raises: ConfigError for a balancedness outside (0, 1], or a rate that is not above 0.
    """
    if not (0 < now <= 1 and 0 < after <= 1) or bytes_per_s <= 0:
        raise ConfigError(
            f"balancedness is in (0, 1] and bytes_per_s above 0, got {now}, {after} and {bytes_per_s}"
        )
    return interval_s * expert_s_per_s * (1.0 - now / after) - move_bytes / bytes_per_s


def best_interval_s(*, loss_per_s: float, move_s: float) -> float:
    """How often to place anew when balance is lost linearly in time: what loses least in all.

    Source: an interval T loses loss_per_s * T / 2 of the time to drift and move_s / T to moves; least at
            T = sqrt(2 * move_s / loss_per_s). Decode drifts slowly, prefill fast.
    Raises: ConfigError unless both are above 0.
    """
    if loss_per_s <= 0 or move_s <= 0:
        raise ConfigError(f"loss_per_s and move_s must be above 0, got {loss_per_s} and {move_s}")
    return float(np.sqrt(2.0 * move_s / loss_per_s))
