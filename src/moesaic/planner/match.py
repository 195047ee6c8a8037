"""Prefill instances beside whatever decodes: every pair, with the numbers of instances that suit each
other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.cost.term import Cost, FloatArray, Interval, step_seconds
from moesaic.planner.demand import Demand, unit_cost
from moesaic.planner.disaggregate import Grids
from moesaic.planner.plan import Plan, Pool, decode_tree, make_pool, prefill_tree
from moesaic.planner.pools import Rows
from moesaic.planner.price import Pricer
from moesaic.planner.space import spaced

KIND = ("tp", "dp", "kvp", "ep", "expert_tp", "pp")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Choices:
    """Comparable deployments of one kind.

    Shapes:  kind is [n, KIND] of what decodes, alone [n, 2], the others [n]; equal rows of kind are variants
             of one layout.
    """

    value: FloatArray
    prefill_ep: FloatArray
    prefill_pp: FloatArray
    kind: FloatArray
    ttft_s: FloatArray
    tpot_s: FloatArray
    in_flight: FloatArray  # requests over all instances
    alone: FloatArray  # what decodes and what prefills by itself, in the objective's currency
    make: Callable[[int], Plan]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Decoders:
    """What decodes, of any build.

    Shapes:  rate, tpot_s, count are [n]; usage [n, clusters] devices of one instance; kind [n, KIND].
    """

    rate: FloatArray
    tpot_s: FloatArray
    count: FloatArray  # 0: as many as there is room for
    usage: FloatArray
    kind: FloatArray
    build: Callable[[int, int, Demand], tuple[list[Pool], Cost]]


def of_rows(pricer: Pricer, rows: Rows, cluster_idx: int, num_clusters: int) -> Decoders:
    """Instances whose ranks have attention and experts."""
    usage = np.zeros((len(rows), num_clusters))
    usage[:, cluster_idx] = rows.devices

    def build(idx: int, count: int, demand: Demand) -> tuple[list[Pool], Cost]:
        return [make_pool(pricer, rows, idx, count, demand)], decode_tree(pricer, rows, idx, demand)

    return Decoders(
        rate=rows.rate, tpot_s=rows.tpot_s, count=rows.count, usage=usage, kind=kind_of(rows), build=build
    )


def of_grids(found: Grids, sides: tuple[int, int], num_clusters: int, demand: Demand) -> Decoders:
    """Instances of two sides: the best of every pair of sizes and number of expert ranks."""
    usage = np.zeros((len(found.batch), num_clusters))
    for side, cluster_idx in enumerate(sides):
        usage[:, cluster_idx] += found.usage[side]
    keys = np.stack([*usage.T, found.columns["ep"], found.count])
    rows = first_of_each(keys, -found.tpot_s if demand.objective == "latency" else found.rate)
    names = {"tp": "tp", "dp": "num_attention", "ep": "ep", "expert_tp": "expert_tp"}
    kind = np.ones((len(rows), len(KIND)))
    for column, name in names.items():
        kind[:, KIND.index(column)] = found.columns[name][rows]

    def build(idx: int, count: int, demand: Demand) -> tuple[list[Pool], Cost]:
        row = int(rows[idx])
        return found.pools(row, count, demand), found.tree(row, demand)

    return Decoders(
        rate=found.rate[rows], tpot_s=found.tpot_s[rows], count=found.count[rows], usage=usage[rows],
        kind=kind,
        build=build,
    )  # fmt: skip


def match(
    pricers: Sequence[Pricer], prefill_idx: int, prefill: Rows, decoders: Decoders, demand: Demand
) -> Choices:
    """Every pair of a prefill layout on one cluster and something that decodes.

    On one cluster decoding gets what prefill leaves, and all devices are charged; of several each is charged
    what is used of it.
    """
    is_one = len(pricers) == 1
    totals = np.array([float(pricer.cluster.num_devices) for pricer in pricers])
    costs = np.array([unit_cost(pricer.cluster, demand.objective) for pricer in pricers])
    own = np.eye(len(pricers))[prefill_idx]
    every, found = np.arange(len(decoders.rate)), []
    for idx in range(len(prefill)):
        size, rate = float(prefill.devices[idx]), float(prefill.rate[idx])
        n_p = np.array(spaced(int(totals[prefill_idx] // size)), np.float64)
        left = totals - n_p[:, None] * size * own  # [counts, clusters]
        with np.errstate(divide="ignore", invalid="ignore"):
            room = np.min(
                np.floor(left[:, None, :] / decoders.usage), axis=2, where=decoders.usage > 0, initial=1e9
            )
        wanted = room if is_one else np.minimum(room, np.ceil(n_p[:, None] * rate / decoders.rate))
        fixed = np.where(decoders.count <= room, decoders.count, 0.0)
        n_d = np.where(decoders.count > 0, fixed, wanted)
        tokens = np.minimum(n_p[:, None] * rate, n_d * decoders.rate) * demand.osl
        used = n_p[:, None] * size * costs[prefill_idx] + n_d * (decoders.usage @ costs)
        charged = np.full_like(used, totals[0] * costs[0]) if is_one else used
        value = value_of(tokens, charged, prefill.ttft_s[idx], decoders.tpot_s, demand) * (n_d >= 1)
        best = np.argmax(value, axis=0)
        found.append((value[best, every], n_p[best], n_d[best, every]))
    value, prefill_count, decode_count = (np.stack([one[part] for one in found]) for part in range(3))
    pairs = np.argwhere(value > 0)

    def make(idx: int) -> Plan:
        first, second = int(pairs[idx, 0]), int(pairs[idx, 1])
        counts = int(prefill_count[first, second]), int(decode_count[first, second])
        used = counts[0] * prefill.devices[first] * own + counts[1] * decoders.usage[second]
        charged = totals if is_one else used
        pools, decode = decoders.build(second, counts[1], demand)
        pool = make_pool(pricers[prefill_idx], prefill, first, counts[0], demand)
        tree = prefill_tree(pricers[prefill_idx], prefill, first, demand, float(prefill.batch[first]))
        requests = min(counts[0] * float(prefill.rate[first]), counts[1] * float(decoders.rate[second]))
        return Plan(
            pools=(pool, *pools), tokens_per_s=requests * demand.osl, tpot=step_seconds(decode),
            ttft=Interval.exactly(float(prefill.ttft_s[first])).widened(*pricers[prefill_idx].ttft_bounds),
            decode=decode, prefill=tree, prefill_share=0.0,
            value=float(value[first, second]), source=pricers[0].profile.source,
            charged=tuple(
                (one.cluster, int(many)) for one, many in zip(pricers, charged, strict=True) if many
            ),
        )  # fmt: skip

    first, second = pairs.T
    alone = np.stack([_decode_worth(decoders, costs, demand)[second],
                      _prefill_worth(prefill, costs[prefill_idx], demand)[first]], axis=1)  # fmt: skip
    held = decoders.rate * decoders.tpot_s * demand.osl  # by an instance
    return Choices(
        value=value[first, second], prefill_ep=prefill.ep[first], prefill_pp=prefill.stages[first],
        kind=decoders.kind[second], ttft_s=prefill.ttft_s[first], tpot_s=decoders.tpot_s[second],
        in_flight=decode_count[first, second] * held[second], alone=alone,
        make=make,
    )  # fmt: skip


def _decode_worth(decoders: Decoders, costs: FloatArray, demand: Demand) -> FloatArray:
    """What one instance that decodes is worth by itself."""
    if demand.objective == "latency":
        return np.asarray(1.0 / decoders.tpot_s)
    return np.asarray(decoders.rate / (decoders.usage @ costs))


def _prefill_worth(prefill: Rows, cost: float, demand: Demand) -> FloatArray:
    """What one instance that prefills is worth by itself."""
    if demand.objective == "latency":
        return np.asarray(1.0 / prefill.ttft_s)
    return np.asarray(prefill.rate / (prefill.devices * cost))


def value_of(
    tokens_per_s: FloatArray,
    cost: FloatArray,
    ttft_s: FloatArray | float,
    tpot_s: FloatArray,
    demand: Demand,
) -> FloatArray:
    """What deployments are worth by the objective; more is better."""
    if demand.objective == "latency":
        return np.asarray(1.0 / (ttft_s + demand.num_steps * tpot_s))
    return np.asarray(tokens_per_s / cost)


def kind_of(rows: Rows) -> FloatArray:
    """What makes two layouts different ones: all but redundancy and micro-batches."""
    found = np.zeros((len(rows), len(KIND)))
    for idx, block in enumerate(rows.blocks):
        mine = rows.block_idx == idx
        for column, name in enumerate(KIND):
            found[mine, column] = block.columns[name][rows.row[mine]]
    return found


def first_of_each(keys: FloatArray, merit: FloatArray) -> np.ndarray:
    """The row with the most merit of every distinct key.

    Shapes:  keys [k, n], merit [n]; returns row numbers.
    """
    order = np.lexsort((-merit, *keys))
    sorted_keys = keys[:, order]
    first = np.full(len(order), True)
    first[1:] = np.any(sorted_keys[:, 1:] != sorted_keys[:, :-1], axis=0)
    return np.asarray(order[first])
