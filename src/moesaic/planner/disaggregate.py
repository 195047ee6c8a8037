"""Attention and experts on devices of their own, of one kind or two: grids, batches, and what they cost.

The search of MegaScale-Infer (arXiv:2504.02263, algorithm 1) over every number of attention replicas, not
only the balanced one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import numpy as np

from moesaic.cost.ops import Work
from moesaic.cost.term import Cost, FloatArray, Repeat, at, step_seconds
from moesaic.cost.two_sided import Sides, TwoSides, two_sided_memory, two_sided_step
from moesaic.planner.demand import Demand
from moesaic.planner.plan import Pool
from moesaic.planner.pools import MAX_SECONDS, Refused
from moesaic.planner.price import MAX_BATCH, Pricer, largest_within
from moesaic.planner.space import FormatChoice, Knob, Limits, NearMiss, divisors, redundancies, spaced
from moesaic.units import format_bytes

MICRO_BATCHES = (1, 2, 3, 4)  # MegaScale-Infer finds no gain beyond 4
COLUMNS = ("num_attention", "tp", "ep", "expert_tp", "num_redundant", "num_micro_batches")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Grids:
    """Two-sided grids that hold their objectives, with the best batch of each.

    Shapes:  every array is [n]. batch counts sequences of one attention replica, over all its micro-batches.
    Units:   rate is finished requests per second of one instance.
    """

    pricers: tuple[Pricer, Pricer]
    choice: FormatChoice
    columns: Mapping[str, FloatArray]
    batch: FloatArray
    count: FloatArray
    rate: FloatArray
    tpot_s: FloatArray

    def grid(self, idx: int) -> TwoSides:
        """One of them as numbers."""
        return TwoSides(**{name: float(column[idx]) for name, column in self.columns.items()})

    @property
    def usage(self) -> tuple[FloatArray, FloatArray]:
        """Devices of one instance on each side."""
        columns = self.columns
        return columns["num_attention"] * columns["tp"], columns["ep"] * columns["expert_tp"]

    def pools(self, idx: int, count: int, demand: Demand) -> list[Pool]:
        """The two pools of one row."""
        grid = self.grid(idx)
        memory = two_sided_memory(
            self.pricers[0].model, grid, num_seqs=float(self.batch[idx]), context=float(demand.length),
            profile=self.pricers[0].profile, formats=self.choice.formats,
        )  # fmt: skip
        one: dict[Knob, int] = {
            "tp": 1, "dp": 1, "ep": 1, "pp": 1, "kvp": 1, "expert_tp": 1,
            "num_micro_batches": int(float(grid.num_micro_batches)), "num_redundant": 0, "num_offloaded": 0,
        }  # fmt: skip
        layouts: tuple[dict[Knob, int], dict[Knob, int]] = (
            {**one, "tp": int(float(grid.tp)), "dp": int(float(grid.num_attention))},
            {
                **one, "ep": int(float(grid.ep)), "expert_tp": int(float(grid.expert_tp)),
                "num_redundant": int(float(grid.num_redundant)),
            },
        )  # fmt: skip
        return [
            Pool(
                role="attention" if side == 0 else "experts", cluster=self.pricers[side].cluster, count=count,
                layout=layouts[side], choice=self.choice, batch=int(self.batch[idx]),
                memory={name: float(size) for name, size in memory[side].items()},
                usable_bytes=self.pricers[side].usable_bytes,
            )
            for side in (0, 1)
        ]  # fmt: skip

    def tree(self, idx: int, demand: Demand) -> Cost:
        """The decode step of one row."""
        return at(_step(self.pricers, self.grid(idx), self.batch[idx], self.choice, demand), 0)


def grids(
    pricers: tuple[Pricer, Pricer],
    choice: FormatChoice,
    demand: Demand,
    pins: Mapping[Knob, int],
    refused: Refused,
) -> Grids | None:
    """Every two-sided grid on two clusters, or on one when both are the same; None where there is none."""
    model, is_same = pricers[0].model, pricers[0] is pricers[1]
    limits = Limits.of(model, [choice])
    if (
        limits.num_experts is None
        or any(pins.get(knob, 1) > 1 for knob in ("kvp", "pp"))
        or pins.get("num_offloaded")
    ):
        return None
    rows, most, miss = pricers[0].once(
        ("grids", str(pricers[1].cluster), choice, demand.traffic, *sorted(pins.items())),
        lambda: _fitting(limits, pricers, choice, demand, pins),
    )
    if miss is not None:
        refused.count("memory", miss)
    if not len(rows):
        return None
    columns = {name: rows[:, idx] for idx, name in enumerate(COLUMNS)}
    many = columns["num_micro_batches"]
    pricers[0].counted[0] += len(rows)
    totals = [float(pricer.cluster.num_devices) for pricer in pricers]
    sides = columns["num_attention"] * columns["tp"], columns["ep"] * columns["expert_tp"]
    whole = (
        totals[0] / (sides[0] + sides[1])
        if is_same
        else np.minimum(totals[0] / sides[0], totals[1] / sides[1])
    )
    count = np.floor(whole) if demand.concurrency is not None else np.zeros(len(rows))

    def tpot(chosen: np.ndarray, batch: FloatArray) -> FloatArray:
        pricers[0].counted[0] += len(chosen)
        part = TwoSides(**{name: column[chosen] for name, column in columns.items()})
        return np.asarray(step_seconds(_step(pricers, part, batch, choice, demand)).value)

    limit = demand.tpot_s or MAX_SECONDS
    if demand.concurrency is not None:
        replicas = np.maximum(count, 1) * columns["num_attention"]
        needed = np.ceil(demand.concurrency / replicas / many) * many
        batch = np.where(needed <= most, needed, 0.0)
    elif demand.objective == "latency":
        batch = np.where(most >= many, many, 0.0)
    elif demand.tpot_s is None:
        batch = most
    else:
        batch = largest_within(tpot, most, many, limit)
    seconds = tpot(np.arange(len(rows)), np.maximum(batch, many))
    keep = np.flatnonzero((batch > 0) & (seconds <= limit))
    active = batch * columns["num_attention"]
    if demand.concurrency is not None:
        active = np.minimum(active, demand.concurrency / np.maximum(count, 1))
    return Grids(
        pricers=pricers, choice=choice, columns={name: column[keep] for name, column in columns.items()},
        batch=batch[keep], count=count[keep], rate=(active / (demand.osl * np.maximum(seconds, 1e-12)))[keep],
        tpot_s=seconds[keep],
    )  # fmt: skip


def _fitting(
    limits: Limits, pricers: tuple[Pricer, Pricer], choice: FormatChoice, demand: Demand,
    pins: Mapping[Knob, int],
) -> tuple[FloatArray, FloatArray, NearMiss | None]:  # fmt: skip
    """Rows of COLUMNS that fit the memory of both sides, the most sequences of each, and what does not
    fit."""
    rows = _rows(limits, pricers, pins)
    if not len(rows):
        return rows, np.zeros(0), None
    grid = TwoSides(**{name: rows[:, idx] for idx, name in enumerate(COLUMNS)})
    most, miss = _largest_batch(pricers, grid, choice, demand)
    fits = most > 0
    return rows[fits], most[fits], miss


def _rows(limits: Limits, pricers: tuple[Pricer, Pricer], pins: Mapping[Knob, int]) -> FloatArray:
    """Rows of COLUMNS: every legal grid, redundancy and number of micro-batches that the pins leave."""
    attention, experts = (pricer.cluster for pricer in pricers)
    is_same, num_experts = pricers[0] is pricers[1], limits.num_experts or 1
    found = []
    for tp, expert_tp in product(
        divisors(attention.devices_per_node, attention.devices_per_node),
        divisors(experts.devices_per_node, experts.devices_per_node),
    ):
        if limits.refusal("tp", tp) is not None or limits.refusal("expert_tp", expert_tp) is not None:
            continue
        for ep in divisors(num_experts, experts.num_devices // expert_tp):
            left = attention.num_devices - (ep * expert_tp if is_same else 0)
            extras = redundancies(num_experts, ep) if ep > 1 else [0]
            for dp, extra, many in product(spaced(left // tp), extras, MICRO_BATCHES):
                row: dict[Knob, int] = {
                    "dp": dp, "tp": tp, "ep": ep, "expert_tp": expert_tp, "num_redundant": extra,
                    "num_micro_batches": many,
                }  # fmt: skip
                if all(row[knob] == value for knob, value in pins.items() if knob in row):
                    found.append(tuple(row.values()))
    return np.array(found, np.float64).reshape(-1, len(COLUMNS))


def _step(
    pricers: tuple[Pricer, Pricer], grid: TwoSides, batch: FloatArray, choice: FormatChoice, demand: Demand
) -> Cost:
    sides = Sides(
        attention=pricers[0].cluster, experts=pricers[1].cluster,
        profiles=(pricers[0].profile, pricers[1].profile),
    )  # fmt: skip
    per_batch = np.asarray(batch, np.float64) / grid.num_micro_batches
    cost = two_sided_step(
        pricers[0].model, sides, grid,
        Work(num_seqs=per_batch, new_tokens=1.0, past=demand.mean_context),
        formats=choice.formats, shares=pricers[0].shares,
    )  # fmt: skip
    return Repeat(pricers[0].level(choice.formats, demand, "decode"), cost)


def _largest_batch(
    pricers: tuple[Pricer, Pricer], grid: TwoSides, choice: FormatChoice, demand: Demand
) -> tuple[FloatArray, NearMiss | None]:
    """Most sequences of an attention replica by the memory of both sides, in whole micro-batches; what has no
    room for one."""
    many = np.asarray(grid.num_micro_batches, np.float64)
    one, two = (
        two_sided_memory(
            pricers[0].model, grid, num_seqs=many * times, context=float(demand.length),
            profile=pricers[0].profile,
            formats=choice.formats,
        )
        for times in (1.0, 2.0)
    )  # fmt: skip
    units, worst, used, where = (np.full(len(many), start) for start in (np.inf, 0.0, 0.0, 0.0))
    for side, pricer in enumerate(pricers):
        first, second = (np.asarray(sum(parts[side].values())) for parts in (one, two))
        more = 1.0 + np.floor((pricer.usable_bytes - first) / np.maximum(second - first, 1e-9) + 1e-9)
        units = np.minimum(units, np.where(first > pricer.usable_bytes, 0.0, np.maximum(more, 1.0)))
        fuller = first / pricer.usable_bytes > worst
        used, where = np.where(fuller, first, used), np.where(fuller, side, where)
        worst = np.maximum(worst, first / pricer.usable_bytes)
    wrong, miss = worst > 1.0, None
    if wrong.any():
        idx = int(np.argmin(np.where(wrong, worst, np.inf)))
        side = int(where[idx])
        size, usable = (format_bytes(one) for one in (float(used[idx]), pricers[side].usable_bytes))
        nearest = f"{('attention', 'experts')[side]} apart: {size} a device of {usable} usable"
        miss = NearMiss(count=int(wrong.sum()), nearest=nearest, distance=float(worst[idx]))
    return np.asarray(np.minimum(units, np.floor(MAX_BATCH / many)) * many), miss
