"""Fit the calibrated profile to a file of measured serving times and write the package's data.

    python scripts/fit_cost.py measured_e2e.csv.gz

Interpretable numbers (shares of peaks, launch times, interference) by regularised least squares on the log of
predicted by measured time, for all groups of (model, device) and once without each of them. Takes a minute.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from moesaic.audit.accuracy import cases_of, group_of
from moesaic.audit.perf_rows import PerfRow, read_perf_rows, spec_of
from moesaic.cost.calibrated import BACKENDS, DATA, FULL_RATE_ROWS, NUMBERS, TARGETS, is_blackwell, shipped
from moesaic.cost.layouts import step_cost
from moesaic.cost.load import assumed_shares
from moesaic.cost.ops import Work
from moesaic.cost.profile import KINDS, LAUNCHES, Profile
from moesaic.cost.term import leaves
from moesaic.spec.model import DenseSpec, GqaSpec, LinearSpec, MambaSpec, MlaSpec, MoeSpec

SKEW = 0.9  # exponent of expert popularity
START = {
    "compute.matrices": 1.4, "compute.attention": 1.4, "compute.experts": 1.6, "memory.matrices": 1.3,
    "memory.attention": 1.3, "memory.experts": 1.3, "link": 1.9, "collective": 5.0, "launch.gqa": 8.0,
    "launch.mla": 15.0, "launch.index": 10.0, "launch.linear": 10.0, "launch.experts": 15.0,
    "launch.shared_experts": 4.0, "launch.dense_ffn": 4.0, "step": 1000.0, "launch_power": 1.3,
    "prefill_in_decode": 1.0, "first": 30e3, "queue_share": 0.1, "queue_power": 0.5, "first_layer": 100.0,
    "first_steps": 1.0,
}  # fmt: skip
STIFF = {"link": 8.0, "collective": 8.0}
"""Numbers that were measured by themselves, and how much stiffer they are than the others.

Source: vLLM's all-reduce on H200 (AIConfigurator 0.12.0): 5 us for small messages, 134 GB/s of large ones.
"""
GROUPS = (*BACKENDS, "blackwell", "older")
STEPS = 25  # evaluations of a fit
HUBER = 0.15  # residuals beyond this count linearly
DEVIATION = 1.0  # ridge on deviations, by twice that on the numbers
RIDGE = 0.018  # on the log of every number, by the square root of the rows
DENSE_WEIGHT = 0.35  # dense models help with attention and links, but are not what is judged
COVERED = {"tpot": 0.79, "ttft": 0.755}  # of the rows: 80 % intervals, short of it to keep them narrow


@dataclass
class Data:
    """Rows and their unit times: what each would take at the datasheet's rates, by operator."""

    rows: tuple[PerfRow, ...]
    unit: dict[tuple[str, str, str], np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows = self.rows
        column = lambda name: np.array([getattr(row, name) for row in rows], dtype=np.float64)  # noqa: E731
        self.batch, self.output = column("batch"), column("output")
        self.measured = {"tpot": column("tpot_s"), "ttft": column("ttft_s")}
        self.group = np.array([group_of(row) for row in rows])
        self.is_sparse = np.array([bool(spec_of(row.model).moe_layers) for row in rows])
        self.num_layers = np.array([float(len(spec_of(row.model).layers)) for row in rows])
        sizes = {name: int((self.group == name).sum()) for name in set(self.group)}
        self.weight = np.array([(40 / max(sizes[name], 15)) ** 0.25 for name in self.group])
        self.weight *= np.where(self.is_sparse, 1.0, DENSE_WEIGHT)
        self.is_in = [np.array([row.backend == name for row in rows]) for name in BACKENDS]
        self._extract()

    def _extract(self) -> None:
        unit = Profile(
            name="unit", source="modelled", compute_share=dict.fromkeys(KINDS, 1.0),
            memory_share=dict.fromkeys(KINDS, 1.0), link_share=1.0, network_share=1.0, usable_memory=0.9,
            launch_s=dict.fromkeys(LAUNCHES, 0.0), hop_factor=0.0, exchange_factor=0.0, collective_s=1.0,
            full_rate_rows=FULL_RATE_ROWS,
        )  # fmt: skip
        found: dict[tuple[str, str, str], np.ndarray] = defaultdict(lambda: np.zeros(len(self.rows)))
        new = np.zeros(len(self.rows), dtype=bool)
        for ids, case in cases_of(self.rows):
            traffic, ones = case.traffic, np.ones(len(ids))
            new[ids] = is_blackwell(case.cluster)
            works = {
                "decode": Work(
                    num_seqs=traffic.batch, new_tokens=ones, past=traffic.prompt + traffic.output / 2
                ),
                "prefill": Work(num_seqs=ones, new_tokens=traffic.prompt, past=0 * ones),
            }
            for phase, work in works.items():
                cost = step_cost(
                    case.model, case.cluster, case.split, work, formats=case.formats, profile=unit,
                    shares=assumed_shares(case.model, SKEW),
                )  # fmt: skip
                for times, term in leaves(cost):
                    parts = (
                        {"moved": term.seconds.value - term.overhead_s, "collectives": term.overhead_s}
                        if term.resource in ("link", "network")
                        else {"compute": term.compute_s, "memory": term.memory_s}
                    )
                    for part, seconds in parts.items():
                        found[phase, term.name, part][ids] += np.broadcast_to(seconds * times, len(ids))
        self.unit = dict(found)
        self.is_in += [new, ~new]
        self.counts = {name: self._count(name) for name in LAUNCHES}

    def _count(self, launch: str) -> np.ndarray:
        kinds = {"gqa": GqaSpec, "mla": MlaSpec, "linear": LinearSpec, "mamba": MambaSpec}
        counts = {}
        for name in {row.model for row in self.rows}:
            layers = spec_of(name).layers
            if launch in kinds:
                counts[name] = sum(isinstance(layer.mixer, kinds[launch]) for layer in layers)
            elif launch == "index":
                counts[name] = sum(isinstance(x.mixer, MlaSpec) and x.mixer.index is not None for x in layers)
            elif launch == "experts":
                counts[name] = sum(isinstance(layer.ffn, MoeSpec) for layer in layers)
            elif launch == "shared_experts":
                counts[name] = sum(isinstance(x.ffn, MoeSpec) and x.ffn.shared is not None for x in layers)
            else:
                counts[name] = sum(isinstance(layer.ffn, DenseSpec) for layer in layers) * (
                    launch == "dense_ffn"
                )
        return np.array([float(counts[row.model]) for row in self.rows])


def numbers_of(theta: np.ndarray, data: Data) -> dict[str, np.ndarray]:
    """Every fitted number of every row: the base times the deviations of its backend and generation."""
    k = len(NUMBERS)
    logs = np.log([START[name] for name in NUMBERS])[:, None] + theta[:k, None]
    for idx, is_in in enumerate(data.is_in):
        logs = logs + theta[k * (idx + 1) : k * (idx + 2), None] * is_in
    return dict(zip(NUMBERS, np.exp(logs), strict=True))


def physical(theta: np.ndarray, data: Data) -> dict[str, np.ndarray]:
    """The same times as `cost.serving.phases`, from the unit times."""
    p, zero = numbers_of(theta, data), np.zeros(len(data.rows))
    seconds, added = {}, {}
    for phase in ("decode", "prefill"):
        unit = lambda name, part, phase=phase: data.unit.get((phase, name, part), zero)  # noqa: E731
        launched = {x: data.counts[x] * p[f"launch.{x}"] * 1e-6 for x in LAUNCHES if f"launch.{x}" in p}
        launched["attention"] = data.counts["mamba"] * p["launch.linear"] * 1e-6
        for mixer in ("gqa", "mla", "index", "linear"):
            launched["attention"] = launched["attention"] + launched[mixer]
        power, total, shared = np.maximum(p["launch_power"], 1.0), zero, zero
        for name in ("attention_projections", "attention", "experts", "shared_experts", "dense_ffn", "head"):
            kind = name if name in ("attention", "experts") else "matrices"
            compute = unit(name, "compute") * p[f"compute.{kind}"]
            memory = unit(name, "memory") * p[f"memory.{kind}"]
            work = np.maximum(compute, memory)
            shared = shared + np.maximum(compute, memory / data.batch)
            total = total + (work**power + launched.get(name, zero) ** power) ** (1 / power)
        for name in ("attention_all_reduce", "ffn_all_reduce", "dispatch", "combine", "head"):
            moved = unit(name, "moved") * p["link"]
            total = total + moved + unit(name, "collectives") * p["collective"] * 1e-6
            shared = shared + moved
        seconds[phase], added[phase] = total, shared
    decode = seconds["decode"] + p["step"] * 1e-6
    tpot = decode + p["prefill_in_decode"] * (data.batch - 1) / data.output * added["prefill"]
    queue = 1 + p["queue_share"] * (data.batch ** p["queue_power"] - 1)
    ttft = seconds["prefill"] * queue + p["first_steps"] * decode
    ttft = ttft + (p["first"] + p["first_layer"] * data.num_layers) * 1e-6
    return {"tpot": tpot, "ttft": ttft}


def fit_numbers(data: Data, chosen: np.ndarray) -> np.ndarray:
    """The logs of numbers and deviations by regularised least squares with a Huber-like loss."""
    k, n = len(NUMBERS), len(NUMBERS) * (1 + len(GROUPS))
    theta = np.zeros(n)  # never from a fit of more rows: that would leak what is held out
    stiff = np.array([STIFF.get(name, 1.0) for name in NUMBERS])
    penalty = np.concatenate([0.5 * stiff, np.tile(DEVIATION * stiff, len(GROUPS))])
    penalty = penalty * RIDGE * 2 * np.sqrt(chosen.sum())

    def raw(x: np.ndarray) -> np.ndarray:
        times = physical(x, data)
        weights = {"tpot": data.weight, "ttft": 0.6 * data.weight}
        return np.concatenate([(np.log(times[t] / data.measured[t]) * weights[t])[chosen] for t in TARGETS])

    def loss(x: np.ndarray) -> np.ndarray:
        return np.concatenate([soften(raw(x)), penalty * x])

    def slope(x: np.ndarray) -> np.ndarray:
        now = raw(x)
        change = np.empty((len(now), k))
        for idx in range(k):
            moved = x.copy()
            moved[idx] += 1e-4
            change[:, idx] = (raw(moved) - now) / 1e-4
        change *= soften_slope(now)[:, None]
        # A deviation moves a row exactly as the base does, where the row is in its group.
        parts = [change] + [change * np.tile(is_in[chosen], len(TARGETS))[:, None] for is_in in data.is_in]
        return np.vstack([np.hstack(parts), np.diag(penalty)])

    return least_squares(loss, theta, jac=slope, max_nfev=STEPS).x


def soften(r: np.ndarray) -> np.ndarray:
    """Residuals whose squares are a pseudo-Huber loss."""
    return np.sign(r) * np.sqrt(2 * HUBER**2 * (np.sqrt(1 + (r / HUBER) ** 2) - 1))


def soften_slope(r: np.ndarray) -> np.ndarray:
    """Derivative of `soften`."""
    soft = np.abs(soften(r))
    return np.where(
        np.abs(r) < 1e-6, 1.0, np.abs(r) / np.sqrt(1 + (r / HUBER) ** 2) / np.maximum(soft, 1e-12)
    )


def as_fit(theta: np.ndarray) -> dict[str, dict]:
    """The data file's form of the numbers."""
    k = len(NUMBERS)
    numbers = {name: START[name] * float(np.exp(theta[idx])) for idx, name in enumerate(NUMBERS)}
    deviations = {
        group: {name: float(np.exp(theta[k * (1 + g) + idx])) for idx, name in enumerate(NUMBERS)}
        for g, group in enumerate(GROUPS)
    }
    return {
        "numbers": numbers,
        "deviations": deviations,
        "bounds": {target: {} for target in TARGETS},
    }


def main() -> int:
    """Fit, report the error on groups never fitted, write the package's data."""
    path, began = Path(sys.argv[1]), time.monotonic()
    data = Data(read_perf_rows(path).rows)
    start = fit_numbers(data, np.ones(len(data.rows), dtype=bool))
    fits = {"all": as_fit(start)}
    errors = {target: np.zeros(len(data.rows)) for target in TARGETS}
    for name in sorted(set(data.group)):
        chosen = data.group != name
        theta = fit_numbers(data, chosen)
        fits[str(name)] = as_fit(theta)
        times = physical(theta, data)
        for target in TARGETS:
            errors[target][~chosen] = np.log(data.measured[target] / times[target])[~chosen]
            print(f"{name} {target} {np.median(np.abs(np.expm1(-errors[target][~chosen]))):.3f}", end="  ")
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    for target in TARGETS:
        ape = np.abs(np.expm1(-errors[target]))[data.is_sparse]
        print(f"{target}: median {np.median(ape):.3f}, 90 % {np.quantile(ape, 0.9):.3f}")
    write(fits, errors, data, path)
    return 0


def bounds(errors: np.ndarray, level: float) -> list[float]:
    """Quantiles of measured by predicted at a level on each side; the value itself is always inside."""
    low, high = np.exp(np.quantile(errors, (level, 1 - level)))
    return [min(float(low), 1.0), max(float(high), 1.0)]


def widest_level(errors: np.ndarray, groups: np.ndarray, covered: float) -> float:
    """The level at which quantiles of the other groups cover so much of a group's rows, over all groups.

    Groups differ more than rows of a group do, so it is below the 10 % that equal rows would need.
    """
    for level in np.arange(0.10, 0.005, -0.005):
        inside = np.zeros(len(errors), dtype=bool)
        for name in set(groups):
            own = groups == name
            low, high = bounds(errors[~own], level)
            inside[own] = (np.exp(errors[own]) >= low) & (np.exp(errors[own]) <= high)
        if inside.mean() >= covered:
            break
    return float(level)


def write(fits: dict[str, dict], errors: dict[str, np.ndarray], data: Data, path: Path) -> None:
    """The data file; the bounds of a group come from the errors of the other groups."""
    every = np.ones(len(data.rows), dtype=bool)
    for backend, is_in in zip(("any", *BACKENDS), (every, *data.is_in), strict=False):
        chosen = data.is_sparse & is_in
        for target in TARGETS:
            level = widest_level(errors[target][chosen], data.group[chosen], COVERED[target])
            for name, fit in fits.items():
                others = errors[target][chosen & (data.group != name)]
                fit["bounds"][target][backend] = bounds(others, level)
    text = {
        "source": f"scripts/fit_cost.py on {path.name}: {len(data.rows)} measured rows of AIConfigurator "
        "0.12.0 (Apache-2.0), aggregated serving",
        "units": "compute, memory and link are inverse shares; times are microseconds",
        "skew": SKEW,
        "fits": fits,
    }
    DATA.write_text(json.dumps(text, indent=1) + "\n")
    shipped.cache_clear()


if __name__ == "__main__":
    sys.exit(main())
