"""Measured rows with what each would take at the datasheet's rates, and their times under given numbers.

The arithmetic of `cost.serving.phases` over all rows at once, for `fit_cost.py`; fits nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from moesaic.audit.accuracy import cases_of, group_of
from moesaic.audit.perf_rows import PerfRow, spec_of
from moesaic.cost.calibrated import (
    BACKENDS,
    FULL_RATE_ROWS,
    NUMBERS,
    is_blackwell,
    load_of,
    setting_of,
)
from moesaic.cost.layouts import step_cost
from moesaic.cost.load import assumed_shares
from moesaic.cost.ops import Work
from moesaic.cost.profile import KINDS, LAUNCHES, PAPER, Profile
from moesaic.cost.serving import active_seqs
from moesaic.cost.term import leaves

SKEW = 0.9  # exponent of expert popularity
START = {
    "compute.matrices": 1.4, "compute.attention": 1.4, "compute.experts": 1.6, "memory.matrices": 1.3,
    "memory.attention": 1.3, "memory.experts": 1.3, "link": 1.9, "collective": 5.0, "launch.gqa": 8.0,
    "launch.mla": 15.0, "launch.index": 10.0, "launch.linear": 10.0, "launch.experts": 15.0,
    "launch.shared_experts": 4.0, "launch.dense_ffn": 4.0, "launch.quantise": 8.0, "step": 1000.0,
    "launch_power": 1.3, "prefill_in_decode": 1.0, "first": 20e3, "eager": 5.0, "queue_share": 0.1,
    "queue_power": 0.5, "backlog": 0.5, "first_steps": 1.0, "slot_share": 0.7,
}  # fmt: skip
DENSE_WEIGHT = 0.35  # dense models help with attention and links, but are not what is judged
TERMS = ("attention_projections", "attention", "experts", "shared_experts", "dense_ffn", "head")
TRANSFERS = ("attention_all_reduce", "ffn_all_reduce", "dispatch", "combine", "head")
CORRECTION_DENSE_WEIGHT = 0.5


@dataclass
class Data:
    """Rows and their unit times: what each would take at the datasheet's rates, by operator."""

    rows: tuple[PerfRow, ...]
    unit: dict[tuple[str, str, str], np.ndarray] = field(default_factory=dict)
    launched: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)  # by term and launch: how many

    def __post_init__(self) -> None:
        rows, n = self.rows, len(self.rows)
        column = lambda name: np.array([getattr(row, name) for row in rows], dtype=np.float64)  # noqa: E731
        self.batch, self.prompt, self.output = column("batch"), column("prompt"), column("output")
        self.measured = {"tpot": column("tpot_s"), "ttft": column("ttft_s")}
        self.group = np.array([group_of(row) for row in rows])
        self.is_sparse = np.array([bool(spec_of(row.model).moe_layers) for row in rows])
        sizes = Counter(self.group.tolist())
        size = np.array([sizes[name] for name in self.group.tolist()])
        self.weight = (40 / np.maximum(size, 15)) ** 0.25 * np.where(self.is_sparse, 1.0, DENSE_WEIGHT)
        repeats = Counter(rows_key(row) for row in rows)
        self.correction_weight = (40 / np.maximum(size, 20)) ** 0.25 * np.where(
            self.is_sparse, 1.0, CORRECTION_DENSE_WEIGHT
        )
        self.correction_weight /= np.array([repeats[rows_key(row)] for row in rows])
        self.active, self.settings, self.load = np.zeros(n), [None] * n, None
        self.is_in = [np.array([row.backend == name for row in rows]) for name in BACKENDS]
        self._extract()

    def _extract(self) -> None:
        """Walks the rows once for operators and transfers, and once for each launch."""
        found: dict[tuple[str, str, str], np.ndarray] = defaultdict(lambda: np.zeros(len(self.rows)))
        counts: dict[tuple[str, str], np.ndarray] = defaultdict(lambda: np.zeros(len(self.rows)))
        new = np.zeros(len(self.rows), dtype=bool)
        loads: dict[int, np.ndarray] = {}
        for ids, case in cases_of(self.rows):
            traffic, ones = case.traffic, np.ones(len(ids))
            new[ids] = is_blackwell(case.cluster)
            setting = setting_of(case.model, case.cluster, case.formats, case.backend)
            for idx, line in zip(ids, load_of(case.split, traffic), strict=True):
                self.settings[idx], loads[idx] = setting, line
            self.active[ids] = active_seqs(case.model, case.cluster, case.split, traffic, PAPER, case.formats)
            works = {
                "decode": Work(
                    num_seqs=self.active[ids], new_tokens=ones, past=traffic.prompt + traffic.output / 2
                ),
                "prefill": Work(num_seqs=ones, new_tokens=traffic.prompt, past=0 * ones),
            }
            shares = assumed_shares(case.model, SKEW)
            walk = lambda work, launch, case=case, shares=shares: leaves(  # noqa: E731
                step_cost(
                    case.model, case.cluster, case.split, work, formats=case.formats,
                    profile=unit_profile(launch), shares=shares,
                )
            )  # fmt: skip
            for phase, work in works.items():
                for times, term in walk(work, None):
                    parts = (
                        {"moved": term.seconds.value - term.overhead_s, "collectives": term.overhead_s}
                        if term.resource in ("link", "network")
                        else {"compute": term.compute_s, "memory": term.memory_s}
                    )
                    for part, seconds in parts.items():
                        found[phase, term.name, part][ids] += np.broadcast_to(seconds * times, len(ids))
            one = Work(num_seqs=1.0, new_tokens=1.0, past=0.0)
            for launch in LAUNCHES:
                for times, term in walk(one, launch):
                    if term.resource in ("compute", "memory"):
                        counts[term.name, launch][ids] += times * term.overhead_s
        self.unit, self.launched = dict(found), {key: one for key, one in counts.items() if one.any()}
        self.load = np.array([loads[idx] for idx in range(len(self.rows))])
        self.is_in += [new, ~new]


def rows_key(row: PerfRow) -> tuple[object, ...]:
    """What repeated reports of one measurement share."""
    return (
        row.model, row.machine, row.backend, row.prompt, row.output, row.tp, row.dp, row.ep, row.batch,
        row.dense_format, row.expert_format, row.ttft_s,
    )  # fmt: skip


def unit_profile(launch: str | None) -> Profile:
    """The datasheet's rates and a second for each launch of one kind."""
    return Profile(
        name="unit", source="modelled", compute_share=dict.fromkeys(KINDS, 1.0),
        memory_share=dict.fromkeys(KINDS, 1.0), link_share=1.0, network_share=1.0, usable_memory=0.9,
        launch_s={**dict.fromkeys(LAUNCHES, 0.0), **({launch: 1.0} if launch else {})}, hop_factor=0.0,
        exchange_factor=0.0, collective_s=1.0, full_rate_rows=FULL_RATE_ROWS,
    )  # fmt: skip


def numbers_of(theta: np.ndarray, data: Data, *, is_blind: bool = False) -> np.ndarray:
    """Logs of every fitted number of every row: the base and the deviations of its backend and generation.

    Blind, the mean over the backends takes the place of the row's.
    Shapes:  theta [1 + groups, numbers]; returns [numbers, rows].
    """
    start = np.log([START[name] for name in NUMBERS])
    member = np.array(data.is_in, dtype=np.float64)
    if is_blind:
        member[: len(BACKENDS)] = 1 / len(BACKENDS)
    return start[:, None] + theta[0][:, None] + theta[1:].T @ member


def physical(logs: np.ndarray, data: Data) -> dict[str, np.ndarray]:
    """The same times as `cost.serving.phases`, from the unit times."""
    p, zero = dict(zip(NUMBERS, np.exp(logs), strict=True)), np.zeros(len(data.rows))
    seconds, added = {}, {}
    launched = dict.fromkeys(TERMS, zero)
    for (term, launch), count in data.launched.items():
        name = "launch.linear" if launch == "mamba" else f"launch.{launch}"
        if name in p:
            launched[term] = launched[term] + count * p[name] * 1e-6
    power = np.maximum(p["launch_power"], 1.0)
    for phase in ("decode", "prefill"):
        unit = lambda name, part, phase=phase: data.unit.get((phase, name, part), zero)  # noqa: E731
        total, shared = zero, zero
        for name in TERMS:
            kind = name if name in ("attention", "experts") else "matrices"
            compute = unit(name, "compute") * p[f"compute.{kind}"]
            memory = unit(name, "memory") * p[f"memory.{kind}"]
            work = np.maximum(compute, memory)
            shared = shared + np.maximum(compute, memory / data.active)
            total = total + (work**power + launched[name] ** power) ** (1 / power)
        for name in TRANSFERS:
            moved = unit(name, "moved") * p["link"]
            total = total + moved + unit(name, "collectives") * p["collective"] * 1e-6
            shared = shared + moved
        seconds[phase], added[phase] = total, shared
    decode = seconds["decode"] + p["step"] * 1e-6
    tpot = decode + p["prefill_in_decode"] * (data.active - 1) / data.output * added["prefill"]
    busy = np.minimum(data.active * added["prefill"] / (data.output * tpot), 1.0)
    ttft = seconds["prefill"] * (1 + p["queue_share"] * (data.active ** p["queue_power"] - 1))
    ttft = ttft + p["backlog"] * data.active * busy * added["prefill"]
    ttft = ttft + p["first_steps"] * decode + p["first"] * 1e-6
    ttft = ttft + p["eager"] * sum(launched.values())
    ttft = ttft + p["slot_share"] * (data.batch / data.active - 1) * data.output * tpot
    return {"tpot": tpot, "ttft": ttft}
