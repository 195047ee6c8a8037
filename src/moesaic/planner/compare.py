"""Deployments beside each other: the best, the best of every other kind, with expert parallelism and
without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from moesaic.cost.term import FloatArray
from moesaic.planner.match import KIND, Choices
from moesaic.planner.plan import Plan

CLOSE = 0.02
"""Plans this near to the best are equal, as are pools by themselves and times per token this near to it."""

Way = Literal["in one node", "over nodes", "prefill apart", "attention and experts apart"]
WAYS: tuple[Way, ...] = get_args(Way)

TRADES: Mapping[Way, str] = {
    "in one node": "grows by a node or less, which is also what a failure takes",
    "over nodes": "grows by an instance, which is also what a failure takes",
    "prefill apart": "both pools grow by themselves; KV goes to the other pool once a request",
    "attention and experts apart": "both sides grow by themselves; rows go to the other in every layer, and "
    "a lost expert device stops its instance",
}  # fmt: skip


def best_of_each(choices: Sequence[Choices]) -> dict[Way, Plan]:
    """The best plan of each way that there is."""
    found: dict[Way, Plan] = {}
    for one in choices:
        plan = one.make(int(np.argmax(one.value)))
        way = way_of(plan)
        if way not in found or plan.value > found[way].value:
            found[way] = plan
    return {way: found[way] for way in WAYS if way in found}


def way_of(plan: Plan) -> Way:
    """Which way a plan is."""
    roles = {pool.role for pool in plan.pools}
    if "attention" in roles:
        return "attention and experts apart"
    if "prefill" in roles:
        return "prefill apart"
    pool = plan.decoder
    return "in one node" if pool.devices <= pool.cluster.devices_per_node else "over nodes"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ranking:
    """All choices in one row of numbers.

    Shapes:  value and owner, inner (which row of which choices) are [n]; kind is [n, KIND].
    """

    choices: Sequence[Choices]
    value: FloatArray
    kind: FloatArray
    owner: np.ndarray
    inner: np.ndarray
    best: int  # the smallest among equals

    @staticmethod
    def of(choices: Sequence[Choices], missed: Sequence[str] = ()) -> Ranking:
        """The choices with the best of them: where one objective is missed, what comes nearest to it."""
        value, prefill_ep, prefill_pp, kind = (
            np.concatenate([getattr(one, name) for one in choices])
            for name in ("value", "prefill_ep", "prefill_pp", "kind")
        )
        owner = np.concatenate([np.full(len(one.value), idx) for idx, one in enumerate(choices)])
        alone, tpot_s = (
            np.concatenate([getattr(one, name) for one in choices]) for name in ("alone", "tpot_s")
        )
        equal = _equals(value, alone, owner)
        ep, pp = (kind[equal, KIND.index(name)] for name in ("ep", "pp"))
        best = int(
            equal[
                _smallest(
                    np.stack([pp, ep, prefill_pp[equal], prefill_ep[equal]]), tpot_s[equal], value[equal]
                )
            ]
        )
        if len(missed) == 1:
            name, sign = ("in_flight", -1.0) if missed[0] == "concurrency" else (missed[0], 1.0)
            far = sign * np.concatenate([getattr(one, name) for one in choices])
            best = int(np.lexsort((-value, far))[0])
        return Ranking(
            choices=choices, value=value, kind=kind, best=best,
            owner=owner,
            inner=np.concatenate([np.arange(len(one.value)) for one in choices]),
        )  # fmt: skip

    def plan(self, idx: int) -> Plan:
        """One of them, in full."""
        return self.choices[int(self.owner[idx])].make(int(self.inner[idx]))

    @property
    def runner_up(self) -> int | None:
        """The best of another kind."""
        is_other = (self.owner != self.owner[self.best]) | np.any(self.kind != self.kind[self.best], axis=1)
        return self._most(is_other)

    @property
    def use_ep(self) -> bool:
        """Whether the best spreads experts over ranks of what decodes."""
        return bool(self.kind[self.best, KIND.index("ep")] > 1)

    @property
    def other_way(self) -> int | None:
        """The best without expert parallelism if the best has it, and with it if not."""
        return self._most((self.kind[:, KIND.index("ep")] > 1) != self.use_ep)

    def _most(self, chosen: np.ndarray) -> int | None:
        return int(np.argmax(np.where(chosen, self.value, -np.inf))) if chosen.any() else None


def _equals(value: FloatArray, alone: FloatArray, owner: np.ndarray) -> np.ndarray:
    """Rows as good as the best: by what they are worth together, and of each build by its pools one by one.

    Where one phase takes nearly all devices, the whole hardly depends on the other's layout: that pool, too,
    is to be one that a larger service would be made of. What decodes is judged first.
    """
    equal = np.flatnonzero(value >= value.max() * (1.0 - CLOSE))
    found = []
    for build in np.unique(owner[equal]):
        rows = equal[owner[equal] == build]
        for phase in range(alone.shape[1]):
            worth = alone[rows, phase]
            rows = rows[worth >= worth.max() * (1.0 - CLOSE)]
        found.append(rows)
    return np.concatenate(found)


def _smallest(sizes: FloatArray, tpot_s: FloatArray, value: FloatArray) -> int:
    """The row that is the smallest by the first of `sizes`, then the next; of those as large as it the one
    with the shortest time per token, and of those as fast the one worth most.

    A smaller unit is less to lose, to fill and to grow by.
    """
    least = sizes[:, np.lexsort(sizes[::-1])[0]]
    rows = np.flatnonzero(np.all(sizes == least[:, None], axis=0))
    rows = rows[tpot_s[rows] <= tpot_s[rows].min() * (1.0 + CLOSE)]
    return int(rows[np.argmax(value[rows])])


def why_taken(best: Plan, other: Plan) -> str:
    """What speaks for a plan that is worth no more than another, within `CLOSE` of it."""
    sizes = [
        tuple(pool.layout[knob] for pool in reversed(one.pools) for knob in ("pp", "ep"))
        for one in (best, other)
    ]
    if sizes[0] < sizes[1]:
        return "the smaller unit is taken"
    if sizes[0] == sizes[1] and best.token_s < other.token_s:
        return "the shorter time per token is taken"
    return "what is better by its pools one by one is taken"
