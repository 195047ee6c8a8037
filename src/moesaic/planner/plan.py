"""A chosen deployment with its numbers, built from one row of the search. How it was chosen is not known
here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesaic.cost.term import Cost, CostTerm, Interval, Par, Repeat, Source, at, step_seconds
from moesaic.planner.demand import Demand
from moesaic.planner.pools import Rows, layout_name
from moesaic.planner.price import Pricer
from moesaic.planner.residency import Residency, residency
from moesaic.planner.space import Block, FormatChoice, Knob
from moesaic.spec.hardware import Cluster

Role = Literal["serve", "prefill", "decode", "attention", "experts"]

RESOURCE_WORDS: Mapping[str, str] = {
    "compute": "computing", "memory": "reading memory", "link": "the link inside the node", "network": "the "
    "network",
    "host_link": "the link to the host", "disk": "the disk", "overhead": "launches and latency",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """Equal instances with one job; attention and experts are the two sides of one instance.

    Units:  batch counts sequences (prefill: prompts) of one attention replica; memory is bytes of the
            fullest rank.
    """

    role: Role
    cluster: Cluster
    count: int
    layout: Mapping[Knob, int]
    choice: FormatChoice
    batch: int
    memory: Mapping[str, float]
    usable_bytes: float
    residency: Residency | None = None  # None: every expert is on a device

    @property
    def devices(self) -> int:
        """Devices of one instance."""
        layout = self.layout
        attention = layout["dp"] * layout["kvp"] * layout["tp"]
        return max(attention, layout["ep"] * layout["expert_tp"]) * layout["pp"]

    @property
    def num_devices(self) -> int:
        """Devices of all instances."""
        return self.devices * self.count

    def __str__(self) -> str:
        return f"{self.count} x {self.devices} {self.cluster.machine.name}: {layout_name(self.layout)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Pools, and what they do together.

    Units:  tokens_per_s are answer tokens of all instances; price and power_w those of all devices charged,
            None where a machine's file does not say.
    """

    pools: tuple[Pool, ...]
    tokens_per_s: float
    charged: tuple[tuple[Cluster, int], ...]  # devices that the plan pays for, idle ones too
    tpot: Interval | None  # None: a request has one token
    ttft: Interval
    decode: Cost  # the step of the pool that decodes; of prefill where that gives the only token
    prefill: Cost
    prefill_share: float  # of the time per token that goes to neighbours' prefills
    value: float  # in the currency of the objective; more is better
    source: Source

    @property
    def tokens_per_s_per_gpu(self) -> float:
        """Answer tokens a second and device."""
        return self.tokens_per_s / sum(count for _, count in self.charged)

    @property
    def price(self) -> float | None:
        """Of all devices charged."""
        return self._total("price")

    @property
    def power_w(self) -> float | None:
        """Of all devices charged."""
        return self._total("power_w")

    def _total(self, name: str) -> float | None:
        facts = [(cluster.machine.facts.get(name), count) for cluster, count in self.charged]
        known = [fact.value * count for fact, count in facts if fact is not None]
        return sum(known) if len(known) == len(facts) else None

    @property
    def decoder(self) -> Pool:
        """The pool that holds the sequences while they are decoded."""
        return next(pool for pool in self.pools if pool.role in ("serve", "decode", "attention"))

    @property
    def token_s(self) -> float:
        """Seconds that the next token of a request takes; its prompt's where that gives the only one."""
        return float((step_seconds(self.decode) if self.tpot is None else self.tpot).value)

    @property
    def num_sequences(self) -> int:
        """Requests in decoding at the same time, over all devices."""
        return self.decoder.batch * self.decoder.layout["dp"] * self.decoder.count

    @property
    def use_ep(self) -> bool:
        """Whether the experts that decode are spread over ranks."""
        return any(pool.layout["ep"] > 1 for pool in self.pools if pool.role != "prefill")

    def breakdown(self) -> list[tuple[str, str, float]]:
        """(term, what it waits for, seconds) of one token's time, the longest first; hidden work is left
        out."""
        found: dict[tuple[str, str], float] = {}
        for seconds, term in critical(self.decode):
            key = (term.name, term.resource)
            found[key] = found.get(key, 0.0) + seconds
        total = float(step_seconds(self.decode).value)
        if self.prefill_share > 0:
            found["prefill", "compute"] = total * self.prefill_share / (1 - self.prefill_share)
        return sorted(
            ((name, res, seconds) for (name, res), seconds in found.items()), key=lambda part: -part[2]
        )

    @property
    def bottleneck(self) -> str:
        """The longest part of a token's time, in words."""
        parts = self.breakdown()
        name, resource, seconds = parts[0]
        share = seconds / sum(part[2] for part in parts)
        if name == "prefill":
            return f"prefill of other prompts between the steps, {share:.0%} of the time per token"
        bound = RESOURCE_WORDS[resource]
        return f"{name.replace('_', ' ')}, bound by {bound}, {share:.0%} of the time per token"


def critical(cost: Cost, times: float = 1.0) -> Iterator[tuple[float, CostTerm]]:
    """(seconds, term) of what a step waits for: of parts at the same time only the slowest."""
    if isinstance(cost, CostTerm):
        yield times * float(cost.seconds.value), cost
    elif isinstance(cost, Repeat):
        yield from critical(cost.part, times * float(cost.times))
    elif isinstance(cost, Par):
        yield from critical(max(cost.parts, key=lambda part: float(step_seconds(part).value)), times)
    else:
        for part in cost.parts:
            yield from critical(part, times)


def make_pool(pricer: Pricer, rows: Rows, idx: int, count: int, demand: Demand) -> Pool:
    """The pool of one row."""
    block = rows.blocks[rows.block_idx[idx]]
    one = block.take(np.array([rows.row[idx]]))
    memory = pricer.memory(one, rows.batch[idx : idx + 1], rows.role, demand)
    return Pool(
        role=rows.role, cluster=pricer.cluster, count=count, layout=one.row(0), choice=block.choice,
        batch=int(rows.batch[idx]), memory={name: float(size[0]) for name, size in memory.items()},
        usable_bytes=pricer.usable_bytes,
        residency=_residency(pricer, one),
    )  # fmt: skip


def _residency(pricer: Pricer, one: Block) -> Residency | None:
    num_offloaded = one.row(0)["num_offloaded"]
    if not num_offloaded:
        return None
    return residency(
        pricer.model, pricer.cluster, num_offloaded, int(one.devices[0]), one.choice.formats.experts,
        pricer.shares,
    )  # fmt: skip


def decode_tree(pricer: Pricer, rows: Rows, idx: int, demand: Demand) -> Cost:
    """The decode step of one row."""
    block = rows.blocks[rows.block_idx[idx]].take(np.array([rows.row[idx]]))
    return at(pricer.decode_cost(block, rows.batch[idx : idx + 1], demand, rows.role), 0)


def prefill_tree(pricer: Pricer, rows: Rows, idx: int, demand: Demand, prompts: float) -> Cost:
    """A prefill step of one row."""
    block = rows.blocks[rows.block_idx[idx]].take(np.array([rows.row[idx]]))
    return at(pricer.prefill_cost(block, np.array([prompts]), demand), 0)


def serve_plan(pricer: Pricer, rows: Rows, idx: int, demand: Demand, charged: int, value: float) -> Plan:
    """The plan of instances that do both."""
    count = int(rows.count[idx])
    pool = make_pool(pricer, rows, idx, count, demand)
    stages = float(pool.layout["pp"])
    prefill = prefill_tree(pricer, rows, idx, demand, stages)
    decode = decode_tree(pricer, rows, idx, demand) if demand.num_steps else prefill
    step, first = step_seconds(decode), step_seconds(prefill)
    between = first.times(max(float(rows.tpot_s[idx] - step.value), 0.0) / float(first.value))
    tpot = step + between if demand.num_steps else None
    share = float(between.value) / float((step + between).value)
    return Plan(
        pools=(pool,), tokens_per_s=float(rows.rate[idx]) * count * demand.osl, tpot=tpot,
        ttft=Interval.exactly(float(rows.ttft_s[idx])).widened(*pricer.ttft_bounds),
        decode=decode, prefill=prefill, prefill_share=share if demand.num_steps else 0.0, value=value,
        source=pricer.profile.source,
        charged=((pricer.cluster, charged),),
    )  # fmt: skip
