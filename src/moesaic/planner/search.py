"""The best deployment under objectives: every candidate is priced, none is sampled; and what was ruled
out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moesaic.cost.load import ExpertShares
from moesaic.cost.profile import Profile
from moesaic.cost.term import FloatArray
from moesaic.errors import CapacityError
from moesaic.planner.concurrency import Band, bands
from moesaic.planner.demand import Demand, unit_cost
from moesaic.planner.plan import Plan, serve_plan, split_plan
from moesaic.planner.pools import Refused, Rows, decode_rows, prefill_rows, serve_rows
from moesaic.planner.price import Pricer
from moesaic.planner.space import Block, FormatChoice, Knob, NearMiss, blocks, check_pins, instance_sizes
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

CLOSE = 0.02
"""Plans this near to the best are equal; of them the one with fewest pipeline stages, then fewest expert
ranks, is taken: it is the smaller unit to lose, to fill and to grow by."""

KIND = ("tp", "dp", "kvp", "ep", "expert_tp", "pp")
MAX_COUNTS = (
    48  # numbers of prefill instances tried: all of them up to here, spread evenly in the logarithm beyond
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Everything a search depends on."""

    model: ModelSpec
    clusters: tuple[Cluster, ...]
    demand: Demand
    profile: Profile
    shares: ExpertShares
    choices: tuple[FormatChoice, ...]
    pins: Mapping[Knob, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a search found.

    `missed` names the objectives that no layout meets; `best` is then the best without them.
    """

    best: Plan
    runner_up: Plan | None
    ruled_out: Mapping[str, NearMiss]
    num_candidates: int
    search_s: float
    missed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choices:
    """Comparable deployments of one kind.

    Shapes:  value and prefill_ep are [n]; kind is [n, KIND] of what decodes: equal rows are variants of one
             layout.
    """

    value: FloatArray
    prefill_ep: FloatArray
    kind: FloatArray
    make: Callable[[int], Plan]


def search(question: Question) -> Answer:
    """The best plan and the runner-up.

    Raises: ConfigError for a layout or an objective that cannot be; CapacityError when no layout fits the
            memory.
    """
    start = time.perf_counter()
    for cluster in question.clusters:
        check_pins(question.model, cluster, question.pins)
    refused, pricers, spaces = Refused({}), [], []
    for cluster in question.clusters:
        pricers.append(
            Pricer(model=question.model, cluster=cluster, profile=question.profile, shares=question.shares)
        )
        found, misses = blocks(question.model, cluster, question.choices, question.pins)
        spaces.append(found)
        refused = Refused({**refused.misses, **misses})
    missed: tuple[str, ...] = ()
    demand = question.demand
    choices = collect(pricers, spaces, demand, refused)
    for dropped in _relaxations(demand):
        if choices:
            break
        missed, demand = dropped, question.demand.without(dropped)
        choices = collect(pricers, spaces, demand, Refused({}))
    if not choices:
        raise CapacityError(_nothing_fits(question, refused))
    best, runner_up = pick(choices)
    return Answer(
        best=best, runner_up=runner_up, ruled_out=refused.misses,
        num_candidates=sum(pricer.counted[0] for pricer in pricers), search_s=time.perf_counter() - start,
        missed=missed,
    )  # fmt: skip


def ep_bands(question: Question) -> tuple[Band, ...]:
    """Expert parallelism or not by concurrency, on the first of the clusters."""
    cluster = question.clusters[0]
    pricer = Pricer(model=question.model, cluster=cluster, profile=question.profile, shares=question.shares)
    space, _ = blocks(question.model, cluster, question.choices, {})
    return bands(pricer, space, question.demand)


def collect(
    pricers: Sequence[Pricer], spaces: Sequence[Sequence[Block]], demand: Demand, refused: Refused
) -> list[Choices]:
    """Every deployment that holds the objectives: servers of both phases, and prefill beside decode."""
    found: list[Choices] = []
    is_one = len(pricers) == 1
    prefills, decodes = [], []
    for pricer, space in zip(pricers, spaces, strict=True):
        if not space:
            continue
        served = serve_rows(pricer, space, demand, refused)
        found.append(_serve_choices(pricer, served, demand, is_one))
        if pricer.cluster.num_devices > 1 or not is_one:
            prefills.append((pricer, _best_of_size(prefill_rows(pricer, space, demand, refused), demand)))
            counts = _counts(pricer.cluster.num_devices)
            decodes.append(
                (pricer, _best_of_size(decode_rows(pricer, space, demand, refused, counts), demand))
            )
    for one, prefill in prefills:
        for other, decode in decodes:
            if len(prefill) and len(decode):
                found.append(_split_choices((one, other), (prefill, decode), demand, is_one))
    return [choices for choices in found if len(choices.value)]


def pick(choices: Sequence[Choices]) -> tuple[Plan, Plan | None]:
    """The best, with the fewest expert ranks among equals, and the best of another kind."""
    value, prefill_ep, kind = (
        np.concatenate([getattr(one, name) for one in choices]) for name in ("value", "prefill_ep", "kind")
    )
    owner = np.concatenate([np.full(len(one.value), idx) for idx, one in enumerate(choices)])
    inner = np.concatenate([np.arange(len(one.value)) for one in choices])
    equal = np.flatnonzero(value >= value.max() * (1.0 - CLOSE))
    ep, pp = (kind[equal, KIND.index(name)] for name in ("ep", "pp"))
    best = int(equal[np.lexsort((-value[equal], prefill_ep[equal], ep, pp))[0]])  # the last key decides first
    differs = (owner != owner[best]) | np.any(kind != kind[best], axis=1)
    second = int(np.argmax(np.where(differs, value, -np.inf)))
    return (
        choices[owner[best]].make(int(inner[best])),
        choices[owner[second]].make(int(inner[second])) if differs.any() else None,
    )


def _relaxations(demand: Demand) -> list[tuple[str, ...]]:
    """Sets of objectives to drop when all together cannot be met: one alone, then all."""
    asked = tuple(name for name in ("ttft_s", "concurrency", "tpot_s") if getattr(demand, name) is not None)
    return [*((name,) for name in asked), *([asked] if len(asked) > 1 else [])]


def _serve_choices(pricer: Pricer, rows: Rows, demand: Demand, is_one: bool) -> Choices:
    total = pricer.cluster.num_devices
    charged = np.full(len(rows), float(total)) if is_one else rows.count * rows.devices
    value = _value(
        rows.rate * rows.count * demand.osl, charged * unit_cost(pricer.cluster, demand.objective),
        rows.ttft_s,
        rows.tpot_s, demand,
    )  # fmt: skip

    def make(idx: int) -> Plan:
        return serve_plan(pricer, rows, idx, demand, int(charged[idx]), float(value[idx]))

    return Choices(value=value, prefill_ep=rows.ep, kind=_kind(rows), make=make)


def _value(
    tokens_per_s: FloatArray, cost: FloatArray, ttft_s: FloatArray, tpot_s: FloatArray, demand: Demand
) -> FloatArray:
    if demand.objective == "latency":
        return np.asarray(1.0 / (ttft_s + demand.osl * tpot_s))
    return np.asarray(tokens_per_s / cost)


def _kind(rows: Rows) -> FloatArray:
    """What makes two layouts different ones: all but redundancy and micro-batches."""
    found = np.zeros((len(rows), len(KIND)))
    for idx, block in enumerate(rows.blocks):
        mine = rows.block_idx == idx
        for column, name in enumerate(KIND):
            found[mine, column] = block.columns[name][rows.row[mine]]
    return found


def _best_of_size(rows: Rows, demand: Demand) -> Rows:
    """The best layout of every number of devices, expert ranks and instances: no other can be in a best
    pair."""
    is_latency = demand.objective == "latency"
    merit = -(rows.ttft_s + demand.osl * rows.tpot_s) if is_latency else rows.rate
    keys = np.stack([rows.devices, rows.ep, rows.count])
    order = np.lexsort((-merit, *keys))
    sorted_keys = keys[:, order]
    first = np.full(len(order), True)
    first[1:] = np.any(sorted_keys[:, 1:] != sorted_keys[:, :-1], axis=0)
    return rows.take(order[first])


def _counts(most: int) -> list[int]:
    if most <= MAX_COUNTS:
        return list(range(1, most + 1))
    counts: list[int] = np.unique(np.geomspace(1, most, MAX_COUNTS).round().astype(int)).tolist()
    return counts


def _split_choices(
    pricers: tuple[Pricer, Pricer], rows: tuple[Rows, Rows], demand: Demand, is_one: bool
) -> Choices:
    """Every pair of a prefill and a decode layout, with the numbers of instances that suit them best.

    On one cluster decode gets what prefill leaves, and all devices are charged; on two each is charged what
    it uses.
    """
    prefill, decode = rows
    totals = [pricer.cluster.num_devices for pricer in pricers]
    costs = [unit_cost(pricer.cluster, demand.objective) for pricer in pricers]
    same = pricers[0] is pricers[1]
    found = []
    for idx in range(len(prefill)):
        size, rate = float(prefill.devices[idx]), float(prefill.rate[idx])
        n_p = np.array(_counts(int(totals[0] // size)), np.float64)[:, None]
        room = np.floor((totals[1] - n_p * size * same) / decode.devices)
        fixed = decode.count > 0
        if is_one:
            n_d = np.where(fixed, np.where(decode.count <= room, decode.count, 0.0), room)
        else:
            wanted = np.ceil(n_p * rate / decode.rate)
            n_d = np.where(fixed, np.where(decode.count <= room, decode.count, 0.0), np.minimum(room, wanted))
        tokens = np.minimum(n_p * rate, n_d * decode.rate) * demand.osl
        used = n_p * size * costs[0] + n_d * decode.devices * costs[1]
        charged = np.full_like(used, totals[0] * costs[0]) if is_one else used
        value = _value(tokens, charged, prefill.ttft_s[idx], decode.tpot_s, demand) * (n_d >= 1)
        best = np.argmax(value, axis=0)
        every = np.arange(len(decode))
        found.append((value[best, every], n_p[best, 0], n_d[best, every]))
    value, n_p, n_d = (np.stack([one[part] for one in found]) for part in range(3))
    pairs = np.argwhere(value > 0)
    at = pairs[:, 0], pairs[:, 1]

    def make(idx: int) -> Plan:
        first, second = int(pairs[idx, 0]), int(pairs[idx, 1])
        counts = int(n_p[first, second]), int(n_d[first, second])
        used = [counts[0] * int(prefill.devices[first]), counts[1] * int(decode.devices[second])]
        if is_one:
            used = [totals[0] - used[1], used[1]]
        return split_plan(pricers, rows, (first, second), counts, demand, used, float(value[first, second]))

    return Choices(
        value=value[at], prefill_ep=prefill.ep[pairs[:, 0]], kind=_kind(decode)[pairs[:, 1]],
        make=make,
    )  # fmt: skip


def _nothing_fits(question: Question, refused: Refused) -> str:
    shown = " or ".join(str(cluster) for cluster in question.clusters)
    miss = refused.misses.get("memory")
    if miss is None:
        sizes = ", ".join(str(size) for size in instance_sizes(question.clusters[0]))
        pins = " ".join(f"{knob} {value}" for knob, value in question.pins.items())
        return (
            f"no layout has {pins} on {shown}: instances have {sizes} devices, and dp x kvp x tp = ep x "
            f"expert_tp; give "
            "fewer of the numbers"
        )
    return (
        f"no layout fits {shown}: the nearest is {miss.nearest}; take more devices, fewer tokens, or "
        f"narrower --weights "
        "and --kv"
    )
