"""Fit the calibrated profile to a file of measured serving times and write the package's data.

    python scripts/fit_cost.py measured_e2e.csv.gz

Two stages. Interpretable numbers (shares of peaks, launch times, interference) by regularised robust least
squares on the log of physical by measured time; then the correction of what is left. Both are fitted to all
groups of (model, device), and once without each of them, always from the same start and never from a fit that
saw more; hyper-parameters are the constants below and in `cost/correction.py`, the same for every fit. The
intervals of a group come from the errors of the other groups. Takes some minutes.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from moesaic.audit.accuracy import cases_of, group_of
from moesaic.audit.perf_rows import PerfRow, read_perf_rows, spec_of
from moesaic.cost.calibrated import (
    BACKENDS,
    DATA,
    FULL_RATE_ROWS,
    HELD_OUT,
    NUMBERS,
    TARGETS,
    held_out,
    is_blackwell,
    load_of,
    setting_of,
    shipped,
)
from moesaic.cost.correction import Correction, fit_correction
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
    "queue_power": 0.5, "first_steps": 1.0, "slot_share": 0.7,
}  # fmt: skip
STIFF = {"link": 8.0, "collective": 8.0}
"""Numbers that were measured by themselves, and how much stiffer they are than the others.

Source: vLLM's all-reduce on H200 (AIConfigurator 0.12.0): 5 us for small messages, 134 GB/s of large ones.
"""
GROUPS = (*BACKENDS, "blackwell", "older")
STEPS = 15  # of a fit
HUBER = 0.15  # residuals beyond this count linearly
RIDGE = 0.018  # on the log of every number, by the square root of the rows
DEVIATION = 0.036  # the same on how far a group's number is from the common one
TTFT_WEIGHT = 0.6  # of a time to the first token, by that of a time per output token
DENSE_WEIGHT = 0.35  # dense models help with attention and links, but are not what is judged
TERMS = ("attention_projections", "attention", "experts", "shared_experts", "dense_ffn", "head")
TRANSFERS = ("attention_all_reduce", "ffn_all_reduce", "dispatch", "combine", "head")

OUTLIER = 0.5  # a row this far (log) from the physics counts half in the correction, farther ones still less
NOISE = {"tpot": 0.4, "ttft": 0.7}  # of a row about its effects; rows of a group are far from independent
CORRECTION_DENSE_WEIGHT = 0.5
COVERED = {"tpot": 0.78, "ttft": 0.765}  # of the rows: 80 % intervals, short of it to keep them narrow


@dataclass
class Data:
    """Rows and their unit times: what each would take at the datasheet's rates, by operator."""

    rows: tuple[PerfRow, ...]
    unit: dict[tuple[str, str, str], np.ndarray] = field(default_factory=dict)
    launched: dict[tuple[str, str], np.ndarray] = field(default_factory=dict)  # by term and launch: how many

    def __post_init__(self) -> None:
        rows, n = self.rows, len(self.rows)
        column = lambda name: np.array([getattr(row, name) for row in rows], dtype=np.float64)  # noqa: E731
        self.batch, self.output = column("batch"), column("output")
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


def numbers_of(theta: np.ndarray, data: Data) -> np.ndarray:
    """Logs of every fitted number of every row: the base and the deviations of its backend and generation.

    Shapes:  theta [1 + groups, numbers]; returns [numbers, rows].
    """
    start = np.log([START[name] for name in NUMBERS])
    return start[:, None] + theta[0][:, None] + theta[1:].T @ np.array(data.is_in, dtype=np.float64)


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
    queue = 1 + p["queue_share"] * (data.active ** p["queue_power"] - 1)
    ttft = seconds["prefill"] * queue + p["first_steps"] * decode + p["first"] * 1e-6
    ttft = ttft + p["eager"] * sum(launched.values())
    ttft = ttft + p["slot_share"] * (data.batch / data.active - 1) * data.output * tpot
    return {"tpot": tpot, "ttft": ttft}


def fit_numbers(data: Data, chosen: np.ndarray) -> np.ndarray:
    """The logs of numbers and deviations: regularised least squares with a pseudo-Huber loss.

    Gauss-Newton with Levenberg's damping and reweighting. A deviation moves a row exactly as the base does,
    where the row is in its group, so only the base's slopes are computed.
    """
    groups, k = 1 + len(GROUPS), len(NUMBERS)
    stiff = np.array([STIFF.get(name, 1.0) for name in NUMBERS])
    penalty = np.concatenate([RIDGE * stiff, np.tile(DEVIATION * stiff, len(GROUPS))]) * np.sqrt(chosen.sum())
    member = np.array([np.ones(len(chosen)), *data.is_in])[:, chosen]
    member = np.concatenate([member, member], axis=1)

    def residuals(logs: np.ndarray) -> np.ndarray:
        times = physical(logs, data)
        weight = {"tpot": data.weight, "ttft": TTFT_WEIGHT * data.weight}
        return np.concatenate([(np.log(times[t] / data.measured[t]) * weight[t])[chosen] for t in TARGETS])

    def loss(found: np.ndarray, theta: np.ndarray) -> float:
        robust = HUBER**2 * (np.sqrt(1 + (found / HUBER) ** 2) - 1)
        return float(robust.sum() + 0.5 * ((penalty * theta.ravel()) ** 2).sum())

    theta, damping = np.zeros((groups, k)), 1e-3  # never from a fit of more rows: that would leak
    now = residuals(numbers_of(theta, data))
    best = loss(now, theta)
    for _ in range(STEPS):
        logs, slopes = numbers_of(theta, data), np.empty((len(now), k))
        for idx in range(k):
            moved = logs.copy()
            moved[idx] += 1e-4
            slopes[:, idx] = (residuals(moved) - now) / 1e-4
        root = (1 + (now / HUBER) ** 2) ** -0.25
        jacobian = np.hstack([slopes * (root * one)[:, None] for one in member])
        normal = jacobian.T @ jacobian
        gradient = jacobian.T @ (now * root) + penalty**2 * theta.ravel()
        while True:
            step = np.linalg.solve(
                normal + np.diag(penalty**2 + damping * (np.diag(normal) + 1e-6)), gradient
            )
            tried = theta - np.clip(step, -1, 1).reshape(theta.shape)
            there = residuals(numbers_of(tried, data))
            value = loss(there, tried)
            if value < best or damping > 1e6:
                break
            damping *= 8
        if value >= best:
            break
        gained = best - value
        theta, now, best, damping = tried, there, value, max(damping / 5, 1e-6)
        if gained < 1e-4 * best:
            break
    return theta


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fit of both stages, and what it makes of every row, its own and others.

    Shapes:  errors and physical_errors, by target: log of measured by predicted [rows].
    """

    theta: np.ndarray
    corrections: dict[str, Correction]
    errors: dict[str, np.ndarray]
    physical_errors: dict[str, np.ndarray]
    is_known: np.ndarray  # whether the correction knows the row's model in its engine


def fit(data: Data, chosen: np.ndarray) -> Fit:
    """Both stages on the chosen rows; nothing of the others is looked at."""
    theta = fit_numbers(data, chosen)
    times = physical(numbers_of(theta, data), data)
    left = {target: np.log(data.measured[target] / times[target]) for target in TARGETS}
    settings = [data.settings[idx] for idx in np.flatnonzero(chosen)]
    corrections = {
        target: fit_correction(
            settings, data.load[chosen], left[target][chosen],
            (data.correction_weight / (1 + (left[target] / OUTLIER) ** 2))[chosen], NOISE[target],
        )
        for target in TARGETS
    }  # fmt: skip
    corrected = {target: left[target] - log_ratios(corrections[target], data) for target in TARGETS}
    return Fit(
        theta=theta, corrections=corrections, errors=corrected, physical_errors=left,
        is_known=np.array([corrections["tpot"].knows(one) for one in data.settings]),
    )  # fmt: skip


def log_ratios(correction: Correction, data: Data) -> np.ndarray:
    """What a correction says of every row."""
    found, rows = np.zeros(len(data.rows)), defaultdict(list)
    for idx, setting in enumerate(data.settings):
        rows[setting].append(idx)
    for setting, ids in rows.items():
        found[ids] = correction.log_ratio(setting, data.load[ids])
    return found


def main() -> int:
    """Fit, report the error on groups never fitted, write the package's data."""
    path, began = Path(sys.argv[1]), time.monotonic()
    data = Data(read_perf_rows(path).rows)
    fits = {"all": fit(data, np.ones(len(data.rows), dtype=bool))}
    for name in sorted(set(data.group.tolist())):
        fits[name] = fit(data, data.group != name)
        own = data.group == name
        report(f"{name} {time.monotonic() - began:.0f} s", {t: fits[name].errors[t][own] for t in TARGETS})
    errors, physics = (
        {t: of_held_out(fits, data, which, t) for t in TARGETS} for which in ("errors", "physical_errors")
    )
    report("physics alone", {t: physics[t][data.is_sparse] for t in TARGETS})
    report("corrected", {t: errors[t][data.is_sparse] for t in TARGETS})
    write(fits, errors, physics, data, path)
    return 0


def of_held_out(fits: dict[str, Fit], data: Data, which: str, target: str) -> np.ndarray:
    """The errors of every row by the fit without its group."""
    return np.array([getattr(fits[name], which)[target][idx] for idx, name in enumerate(data.group.tolist())])


def report(title: str, errors: dict[str, np.ndarray]) -> None:
    """Median and 90 % absolute error of both targets."""
    ape = {target: np.abs(np.expm1(-one)) for target, one in errors.items()}
    figures = (f"{t} {np.median(one):.3f} / {np.quantile(one, 0.9):.3f}" for t, one in ape.items())
    print(f"{title}: {', '.join(figures)}", flush=True)


def bounds(errors: np.ndarray, level: float) -> list[float]:
    """Quantiles of measured by predicted at a level on each side; the value itself is always inside."""
    low, high = np.exp(np.quantile(errors, (level, 1 - level)))
    return [min(float(low), 1.0), max(float(high), 1.0)]


def widest_level(errors: np.ndarray, groups: np.ndarray, covered: float) -> float:
    """The level at which quantiles of the other groups cover so much of a group's rows, over all groups.

    Groups differ more than rows of a group do, so it is below the 10 % that equal rows would need.
    """
    for level in np.arange(0.14, 0.005, -0.005):
        inside = np.zeros(len(errors), dtype=bool)
        for name in set(groups):
            own = groups == name
            low, high = bounds(errors[~own], level)
            inside[own] = (np.exp(errors[own]) >= low) & (np.exp(errors[own]) <= high)
        if inside.mean() >= covered:
            break
    return float(level)


def widening(errors: np.ndarray, chosen: np.ndarray, is_known: np.ndarray) -> float:
    """How many times farther off (log, 80 %) rows of models new to their engine are."""
    far, near = (np.quantile(np.abs(errors[chosen & one]), 0.8) for one in (~is_known, is_known))
    return float(np.clip(far / near, 1.0, 3.0))


def stricter(data: Data) -> dict[str, dict[str, list[float]]]:
    """Median and 90 % error when the whole model, or the whole device, was left out."""
    found = {}
    for sort in ("model", "gpu"):
        names = np.array([row.model if sort == "model" else row.machine for row in data.rows])
        errors = {target: np.zeros(len(names)) for target in TARGETS}
        for name in sorted(set(names[data.is_sparse].tolist())):
            own = names == name
            left = fit(data, ~own).errors
            for target in TARGETS:
                errors[target][own] = left[target][own]
        report(f"whole {sort} left out", {t: errors[t][data.is_sparse] for t in TARGETS})
        ape = {target: np.abs(np.expm1(-errors[target][data.is_sparse])) for target in TARGETS}
        found[sort] = {t: rounded([np.median(one), np.quantile(one, 0.9)]) for t, one in ape.items()}
    return found


def write(
    fits: dict[str, Fit],
    errors: dict[str, np.ndarray],
    physics: dict[str, np.ndarray],
    data: Data,
    path: Path,
) -> None:
    """The data files; the bounds of a group come from the errors of the other groups."""
    is_known = np.array([fits[name].is_known[idx] for idx, name in enumerate(data.group.tolist())])
    plain = {name: as_plain(one) for name, one in fits.items()}
    sorts = {"any": errors, "physics": physics, **dict.fromkeys(BACKENDS, errors)}
    members = dict(zip(BACKENDS, data.is_in, strict=False))
    for name, one in plain.items():
        others = data.is_sparse & (data.group != name)
        for target in TARGETS:
            wide = widening(errors[target], others, is_known)
            one["widening"][target] = round(wide, 4)
            for sort, source in sorts.items():
                power = np.where(is_known | (sort == "physics"), 1.0, wide)
                chosen = others & members.get(sort, True)
                scaled = (source[target] / power)[chosen]
                level = widest_level(scaled, data.group[chosen], COVERED[target])
                one["bounds"][target][sort] = rounded(bounds(scaled, level))
    text = {
        "source": f"scripts/fit_cost.py on {path.name}: {len(data.rows)} measured rows of AIConfigurator "
        "0.12.0 (Apache-2.0), aggregated serving",
        "units": "compute, memory and link are inverse shares; times are microseconds; effects are logs",
        "skew": SKEW,
        "stricter": {
            "physics": {
                target: rounded(np.quantile(np.abs(np.expm1(-physics[target][data.is_sparse])), (0.5, 0.9)))
                for target in TARGETS
            },
            **stricter(data),
        },
        "fit": plain.pop("all"),
    }
    DATA.write_text(json.dumps(text, indent=1) + "\n")
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in plain.items())
    HELD_OUT.write_text(f"{{\n{lines}\n}}\n")
    shipped.cache_clear()
    held_out.cache_clear()


def as_plain(found: Fit) -> dict[str, dict]:
    """The data files' form of a fit."""
    numbers = np.exp(found.theta)
    start = np.array([START[name] for name in NUMBERS])
    return {
        "numbers": dict(zip(NUMBERS, rounded(start * numbers[0]), strict=True)),
        "deviations": {
            group: dict(zip(NUMBERS, rounded(numbers[1 + idx]), strict=True))
            for idx, group in enumerate(GROUPS)
        },
        "effects": {
            target: {key: [round(x, 4) for x in weights] for key, weights in one.effects.items()}
            for target, one in found.corrections.items()
        },
        "bounds": {target: {} for target in TARGETS},
        "widening": {},
    }


def rounded(values: object) -> list[float]:
    """Six digits: more would only differ between machines."""
    return [float(f"{value:.6g}") for value in np.asarray(values, dtype=np.float64).tolist()]


if __name__ == "__main__":
    sys.exit(main())
