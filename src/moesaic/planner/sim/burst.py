"""Static and adaptive capacity factors under a burst of one topic: overflows and step times.

A step runs in buffers of factor x an even share per expert; one that overflows runs again without them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moesaic.errors import ConfigError
from moesaic.planner.sim.serve import Percentiles
from moesaic.planner.sim.traffic import TopicTraffic, check_draws, max_mean
from moesaic.sched.buffer import FactorPolicy, captured

CAPTURED = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0)  # factors that buffers of several sizes are captured for
NUM_LOADS = 64  # of steps that are drawn, of each part
HOT_SHARE = 0.6  # of a burst's tokens that are of the hot topic
SWING = 0.25  # of the factor, up and down again, that counts as one: a buffer of another size


@dataclass(frozen=True, kw_only=True, slots=True)
class BurstCase:
    """Traffic with a burst, and what steps cost.

    Units:  seconds and tokens per step. A step takes fixed_s and row_s for each place of its buffers, used or
            not; on the dynamic path slow times as much for the rows themselves.
    Raises: ConfigError for values out of range.
    """

    num_experts: int = 64
    experts_per_token: int = 6
    tokens: int = 1024
    burst: float = 3.0
    before_s: float = 10.0
    burst_s: float = 10.0
    after_s: float = 20.0
    skew: float = 0.02  # Zipf exponent of the quiet traffic
    hot_skew: float = 0.25  # and of the hot topic
    fixed_s: float = 0.008  # guess: of a step of a large model, attention and launches
    row_s: float = 1e-6  # guess: of a row's way to an expert and back
    slow: float = 1.5  # guess: rows without captured buffers, by rows with them
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(f"top-k {self.experts_per_token} is more than the {self.num_experts} experts")
        for name in ("burst", "before_s", "burst_s", "after_s", "fixed_s", "row_s", "slow"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a finite number above 0, got {getattr(self, name):g}")
        if self.burst < 1.0:
            raise ConfigError(f"a burst is at least 1 times the traffic, got {self.burst:g}")
        check_draws(
            float(self.tokens) * (1.0 + self.burst) * self.num_experts * NUM_LOADS,
            f"{NUM_LOADS} steps x tokens x experts, quiet and in the burst", "--tokens or a smaller --burst",
        )  # fmt: skip
        if self.before_s + self.burst_s + self.after_s > 600.0:
            raise ConfigError("before, burst and after are more than the 600 s that are simulated; give less")

    def tokens_at(self, now_s: float) -> tuple[int, bool]:
        """(tokens of a step, whether the burst is on)."""
        is_on = self.before_s <= now_s < self.before_s + self.burst_s
        return round(self.tokens * (self.burst if is_on else 1.0)), is_on

    @property
    def duration_s(self) -> float:
        """Of the whole."""
        return self.before_s + self.burst_s + self.after_s


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorRow:
    """One way to set the factor.

    Units:  overflow shares are of steps, by part of the run; step times are over tokens, so a large step
            counts more.
    """

    name: str
    step_s: Percentiles
    burst_step_s: Percentiles
    overflow: Mapping[str, float]  # before, burst, after
    num_overflowed: int  # steps that ran again without buffers: no token was dropped
    num_steps: int
    mean_factor: float
    num_swings: int  # changes of direction of a factor that moved by SWING: what flapping has many of
    factors: tuple[tuple[float, float], ...] = field(default=())  # (at_s, factor), a row per window


@dataclass(frozen=True, kw_only=True, slots=True)
class BurstReport:
    """What `moesaic simulate capacity` answers.

    Units:  needed is the factor that no step of this part would overflow: busiest expert by the mean.
    """

    case: BurstCase
    policy: FactorPolicy
    needed: Mapping[str, float]
    rows: tuple[FactorRow, ...]

    def row(self, name: str) -> FactorRow:
        """The row of one way."""
        return next(row for row in self.rows if row.name == name)


def study_burst(case: BurstCase, policy: FactorPolicy, static: tuple[float, ...] = (1.2, 1.5)) -> BurstReport:
    """The same traffic under static factors, without buffers, by the last step's need, by the controller."""
    draws = _Draws(case)
    rows = [_run(case, draws, f"static {factor:g}", factor, "static") for factor in static]
    rows.append(_run(case, draws, "no buffers", None, "static"))
    rows.append(_run(case, draws, "by the last step", CAPTURED[0], "last"))
    rows.append(_run(case, draws, "adaptive", policy.start, policy))
    needed = {part: max(map(max_mean, loads)) for part, loads in draws.by_part().items()}
    return BurstReport(case=case, policy=policy, needed=needed, rows=tuple(rows))


class _Draws:
    """Loads of steps, drawn once and used by every way alike: so many of each part, in turn."""

    def __init__(self, case: BurstCase) -> None:
        rng = np.random.default_rng(case.seed)
        quiet = TopicTraffic.zipf(case.num_experts, case.skew, seed=case.seed)
        hot = TopicTraffic.zipf(case.num_experts, case.hot_skew, seed=case.seed + 1)
        both = TopicTraffic(popularity_ZE=np.concatenate([quiet.popularity_ZE, hot.popularity_ZE]))
        self._loads: dict[bool, list[np.ndarray]] = {}
        for is_on, count in ((False, case.tokens), (True, round(case.tokens * case.burst))):
            self._loads[is_on] = [
                both.counts(
                    rng, (rng.random(count) < HOT_SHARE * is_on).astype(np.int64), case.experts_per_token
                )
                for _ in range(NUM_LOADS)
            ]

    def load(self, step_idx: int, is_on: bool) -> np.ndarray:
        """The load [E] of a step."""
        return self._loads[is_on][step_idx % NUM_LOADS]

    def by_part(self) -> dict[str, list[np.ndarray]]:
        """Loads outside the burst and in it."""
        return {"quiet": self._loads[False], "burst": self._loads[True]}


def swings(values: Sequence[float], least: float = SWING) -> int:
    """How often a series turns round after it moved by `least`; noise below that is none.

    Shapes:  values in order.
    """
    count, direction = 0, 0
    low = high = values[0] if values else 0.0
    for value in values:
        low, high = min(low, value), max(high, value)
        if value >= low + least and direction <= 0:
            count, direction, high, low = count + (direction < 0), 1, value, value
        elif value <= high - least and direction >= 0:
            count, direction, high, low = count + (direction > 0), -1, value, value
        elif direction > 0:
            low = high
        elif direction < 0:
            high = low
    return count


def _run(
    case: BurstCase,
    draws: _Draws,
    name: str,
    factor: float | None,
    rule: FactorPolicy | Literal["static", "last"],
) -> FactorRow:
    """One way through the whole traffic, step after step. A factor of None has no buffers at all."""
    now_s, step_idx = 0.0, 0
    window_end_s = rule.window_s if isinstance(rule, FactorPolicy) else math.inf
    times: list[tuple[float, int, bool]] = []
    runs = {"before": [0, 0], "burst": [0, 0], "after": [0, 0]}
    window: list[tuple[float, bool]] = []
    trail: list[tuple[float, float]] = [] if factor is None else [(0.0, factor)]
    while now_s < case.duration_s:
        tokens, is_on = case.tokens_at(now_s)
        load_E = draws.load(step_idx, is_on)
        step_s, fill, has_overflowed = _step(case, load_E, factor)
        part = "burst" if is_on else "before" if now_s < case.before_s else "after"
        runs[part][0] += has_overflowed
        runs[part][1] += 1
        times.append((step_s, tokens, is_on))
        window.append((fill, has_overflowed))
        now_s, step_idx = now_s + step_s, step_idx + 1
        if rule == "last":
            factor = captured(max_mean(load_E), CAPTURED)
            trail.append((now_s, factor or 0.0))
        if isinstance(rule, FactorPolicy) and factor is not None and now_s >= window_end_s:
            fills, overflows = zip(*window, strict=True)
            factor = rule.after(factor, fill=float(np.mean(fills)), overflow=float(np.mean(overflows)))
            trail.append((now_s, factor))
            window, window_end_s = [], now_s + rule.window_s
    values = [value for _, value in trail]
    return FactorRow(
        name=name, step_s=_over_tokens(times), burst_step_s=_over_tokens([t for t in times if t[2]]),
        overflow={part: bad / max(count, 1) for part, (bad, count) in runs.items()},
        num_overflowed=sum(bad for bad, _ in runs.values()), num_steps=len(times),
        mean_factor=float(np.mean(values)) if values else 0.0, num_swings=swings(values),
        factors=tuple(trail[:: max(len(trail) // 400, 1)]),
    )  # fmt: skip


def _step(case: BurstCase, load_E: np.ndarray, factor: float | None) -> tuple[float, float, bool]:
    """(seconds, fill of the places, whether it ran again)."""
    rows = int(load_E.sum())
    dynamic_s = case.fixed_s + case.row_s * case.slow * rows
    if factor is None:
        return dynamic_s, 1.0, False
    places = math.ceil(round(factor * rows / case.num_experts, 9))
    static_s = case.fixed_s + case.row_s * places * case.num_experts
    kept = int(np.minimum(load_E, places).sum())
    has_overflowed = kept < rows
    return static_s + dynamic_s * has_overflowed, kept / (places * case.num_experts), has_overflowed


def _over_tokens(times: list[tuple[float, int, bool]]) -> Percentiles:
    weights = [one[1] // 64 + 1 for one in times]  # a value for every 64 tokens says as much
    return Percentiles.of(np.repeat([one[0] for one in times], weights).tolist())
