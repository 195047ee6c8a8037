"""Topics that drift under a placement: fixed, planned anew at intervals, or with copies that come and go.

Rules and packing are those of `placement`; here they meet traffic, and the time that moving experts takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from moesaic.errors import ConfigError
from moesaic.placement.pack import greedy_copies, pack_apart
from moesaic.placement.plan import relabel
from moesaic.placement.slots import Placement, balancedness, copies, gpu_load, num_moves
from moesaic.placement.trigger import LoadWindow, ReplicaRule, replication_reasons
from moesaic.planner.sim.traffic import TopicTraffic, check_draws
from moesaic.spec.experts import IntArray

MAX_SECONDS = 3600
RETURN_S = 60.0  # guess: a copy that is wanted again so soon after it was dropped has flapped


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftCase:
    """Traffic of one topic that becomes another, and what moving an expert takes.

    Units:  seconds; tokens in each second; fetch_s until an expert is on another GPU, of all layers together.
    Raises: ConfigError for values out of range.
    """

    num_experts: int = 64
    experts_per_token: int = 6
    num_gpus: int = 8
    num_redundant: int = 16
    num_topics: int = 3
    skew: float = 0.8
    tokens_per_s: int = 4096
    before_s: int = 120
    drift_s: int = 60  # from the first topic's traffic to the second's; 0: at once
    after_s: int = 180
    fetch_s: float = 0.25  # guess: 2.5 GB of a DeepSeek-V3 expert over all layers, by 10 GB/s beside traffic
    check_s: int = 5  # how often the rule looks
    replan_s: int = 60  # how often the one at intervals plans
    seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "num_experts", "experts_per_token", "num_gpus", "num_topics", "tokens_per_s", "before_s",
            "after_s", "check_s", "replan_s",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.experts_per_token > self.num_experts:
            raise ConfigError(f"top-k {self.experts_per_token} is more than the {self.num_experts} experts")
        slots = self.num_experts + self.num_redundant
        if self.num_redundant < 0 or slots % self.num_gpus:
            legal = -(-slots // self.num_gpus) * self.num_gpus - self.num_experts
            raise ConfigError(
                f"{self.num_experts} experts and {self.num_redundant} copies do not divide over "
                f"{self.num_gpus} GPUs; {legal} copies do"
            )
        if self.num_topics < 2:
            raise ConfigError("a drift needs two topics or more, from one to another")
        if not self.drift_s >= 0 or self.duration_s > MAX_SECONDS:
            raise ConfigError(f"before, drift and after must add up to at most {MAX_SECONDS} s")
        check_draws(
            float(self.tokens_per_s) * self.duration_s * self.num_experts, "tokens x seconds x experts",
            "seconds, tokens or --experts",
        )  # fmt: skip
        if not (math.isfinite(self.fetch_s) and self.fetch_s >= 0):
            raise ConfigError(f"fetch_s must be a finite number of at least 0, got {self.fetch_s:g}")

    @property
    def duration_s(self) -> int:
        """Of the whole."""
        return self.before_s + self.drift_s + self.after_s

    def mix(self, at_s: int) -> tuple[float, float]:
        """Shares of the first and second topic; the rest is even over all."""
        done = min(max((at_s - self.before_s) / max(self.drift_s, 1), 0.0), 1.0)
        return 0.7 * (1 - done), 0.7 * done

    def loads(self) -> list[IntArray]:
        """Counts [E] of each second."""
        rng = np.random.default_rng(self.seed)
        traffic = TopicTraffic.zipf(self.num_experts, self.skew, num_topics=self.num_topics, seed=self.seed)
        found = []
        for at_s in range(self.duration_s):
            first, second = self.mix(at_s)
            shares = np.full(self.num_topics, (1.0 - first - second) / self.num_topics)
            shares[0] += first
            shares[1] += second
            topics = rng.choice(self.num_topics, self.tokens_per_s, p=shares)
            found.append(traffic.counts(rng, topics, self.experts_per_token))
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftRow:
    """One way to place.

    Units:  balancedness is mean over busiest GPU, mean over seconds; recovered_s is from the end of the drift
            until it is within 2 % of its last value for good; moves are experts fetched. returns counts
            copies that came back within a minute of being dropped: what flapping has many of.
    """

    name: str
    before: float
    drift: float | None  # None: the topic changed at once
    after: float
    worst: float
    recovered_s: int
    num_changes: int
    num_moves: int
    num_returns: int
    series: tuple[float, ...] = field(default=())


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftReport:
    """What `moesaic simulate drift` answers."""

    case: DriftCase
    rule: ReplicaRule
    rows: tuple[DriftRow, ...]

    def row(self, name: str) -> DriftRow:
        """The row of one way."""
        return next(row for row in self.rows if row.name == name)


def study_drift(case: DriftCase, rule: ReplicaRule) -> DriftReport:
    """The same traffic under every way to place."""
    loads = case.loads()
    start = _planned(case, np.sum(loads[: case.before_s // 2], axis=0))
    rows = (
        _run("contiguous", case, loads, _contiguous(case), lambda now_s, window, ids: None, rule),
        _run("planned once", case, loads, start, lambda now_s, window, ids: None, rule),
        _run(f"every {case.replan_s} s", case, loads, start, _replanning(case), rule),
        _run("copies by rule", case, loads, start, _by_rule(case, rule), rule),
    )
    return DriftReport(case=case, rule=rule, rows=rows)


Change = Callable[[int, LoadWindow, IntArray], IntArray | None]
"""(second, window, ids [1, G, C] now) -> the ids wanted, or None."""


def _contiguous(case: DriftCase) -> IntArray:
    """Experts by id, further slots with the first ones again: no load was looked at."""
    ids = np.arange(case.num_experts + case.num_redundant) % case.num_experts
    return ids.reshape(case.num_gpus, -1)[None]


def _planned(case: DriftCase, load_E: IntArray) -> IntArray:
    """Greedy copies, largest first."""
    weights = load_E[None].astype(np.float64)
    ids = greedy_copies(weights, case.num_experts + case.num_redundant, most=case.num_gpus)
    return pack_apart(weights, ids, case.num_gpus)


def _replanning(case: DriftCase) -> Change:
    def change(now_s: int, window: LoadWindow, ids_LGC: IntArray) -> IntArray | None:
        return _planned(case, window.total()) if now_s % case.replan_s == 0 and window.is_full else None

    return change


def _by_rule(case: DriftCase, rule: ReplicaRule) -> Change:
    """Copies that the rule adds and drops, while load is uneven; free slots go to the busiest."""

    def change(now_s: int, window: LoadWindow, ids_LGC: IntArray) -> IntArray | None:
        if now_s % case.check_s or not window.is_full:
            return None
        load_E = window.total()
        have_E = copies(ids_LGC, case.num_experts)[0]
        wanted_E = rule.wanted(load_E.astype(np.float64), have_E)
        if not replication_reasons(load_E) or not wanted_E.any():
            return None
        count_E = np.maximum(have_E + wanted_E, 1)
        return _packed(case, load_E, np.minimum(count_E, case.num_gpus))

    return change


def _packed(case: DriftCase, load_E: IntArray, count_E: IntArray) -> IntArray:
    """A placement with these copies as far as slots go, the busiest first to gain and the idlest to lose."""
    num_slots, count_E = case.num_experts + case.num_redundant, count_E.copy()
    while count_E.sum() > num_slots:
        each = np.where(count_E > 1, load_E / np.maximum(count_E - 1, 1), np.inf)
        count_E[int(each.argmin())] -= 1
    while count_E.sum() < num_slots:
        each = np.where(count_E < case.num_gpus, load_E / count_E, -1.0)
        count_E[int(each.argmax())] += 1
    ids = np.repeat(np.arange(case.num_experts), count_E)[None]
    return pack_apart(load_E[None].astype(np.float64), ids, case.num_gpus)


def _run(
    name: str, case: DriftCase, loads: list[IntArray], ids_LGC: IntArray, change: Change, rule: ReplicaRule
) -> DriftRow:  # fmt: skip
    window = LoadWindow(window_s=rule.window_s)
    even: list[float] = []
    coming: tuple[float, IntArray] | None = None  # (when it is there, ids)
    num_changes = moved = returns = 0
    dropped: dict[int, int] = {}  # expert -> second of its last lost copy
    for now_s, load_E in enumerate(loads):
        if coming is not None and now_s >= coming[0]:
            ids_LGC, coming = coming[1], None
        weights = load_E[None].astype(np.float64)
        even.append(float(balancedness(gpu_load(weights, ids_LGC))[0]))
        window.add(float(now_s), load_E)
        wanted = None if coming is not None else change(now_s, window, ids_LGC)
        if wanted is not None:
            wanted = relabel(Placement(ids_LGC=wanted), ids_LGC).ids_LGC  # the same, with the fewest fetched
        if wanted is None or np.array_equal(np.sort(wanted, axis=2), np.sort(ids_LGC, axis=2)):
            continue
        fetched = int(num_moves(ids_LGC, wanted).sum())
        busiest = max(Counter(_fetchers(ids_LGC, wanted)).values(), default=0)
        coming = (now_s + 1 + busiest * case.fetch_s, wanted)
        num_changes, moved = num_changes + 1, moved + fetched
        step_E = copies(wanted, case.num_experts)[0] - copies(ids_LGC, case.num_experts)[0]
        for expert in np.flatnonzero(step_E > 0).tolist():
            returns += now_s - dropped.get(expert, -(10**9)) <= RETURN_S
        dropped |= dict.fromkeys(np.flatnonzero(step_E < 0).tolist(), now_s)
    return _row(name, case, even, (num_changes, moved, returns))


def _fetchers(before_LGC: IntArray, after_LGC: IntArray) -> list[int]:
    """The GPU of every expert that is fetched."""
    return [
        gpu
        for gpu, (old, new) in enumerate(zip(before_LGC[0].tolist(), after_LGC[0].tolist(), strict=True))
        for _ in set(new) - set(old)
    ]


def _row(name: str, case: DriftCase, even: list[float], counts: tuple[int, int, int]) -> DriftRow:
    end_s = case.before_s + case.drift_s
    smooth = np.convolve(even, np.ones(5) / 5, mode="same")[:-5]
    last = float(np.mean(even[-30:]))
    late = [at_s for at_s in range(end_s, len(smooth)) if smooth[at_s] < 0.98 * last]
    return DriftRow(
        name=name, before=float(np.mean(even[: case.before_s])),
        drift=float(np.mean(even[case.before_s : end_s])) if case.drift_s else None,
        after=float(np.mean(even[end_s:])), worst=min(even),
        recovered_s=late[-1] + 1 - end_s if late else 0,
        num_changes=counts[0], num_moves=counts[1], num_returns=counts[2], series=tuple(even),
    )  # fmt: skip
