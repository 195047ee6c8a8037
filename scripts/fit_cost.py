"""Fit the calibrated profile to a file of measured serving times and write the package's data.

    python scripts/fit_cost.py measured_e2e.csv.gz

Two stages. Interpretable numbers (shares of peaks, launch times, interference) by regularised robust least
squares on the log of physical by measured time; then the correction of what is left. Both are fitted to all
groups of (model, device), and once without each of them, always from the same start and never from a fit that
saw more. How freely the effects may move is chosen by cross-validation among the groups that a fit
may see (nested: `Choices`), the intervals of a group come from the errors of the other groups. Takes some
minutes.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
from cost_rows import SKEW, START, Data, numbers_of, physical

from moesaic.audit.perf_rows import read_perf_rows
from moesaic.cost.calibrated import BACKENDS, DATA, HELD_OUT, NUMBERS, TARGETS, held_out, shipped
from moesaic.cost.correction import Correction, Priors, Regression, Setting, middle_load, regression

STIFF = {"link": 8.0, "collective": 8.0}
"""Numbers that were measured by themselves, and how much stiffer they are than the others.

Source: vLLM's all-reduce on H200 (AIConfigurator 0.12.0): 5 us for small messages, 134 GB/s of large ones.
"""
GROUPS = (*BACKENDS, "blackwell", "older")
STEPS = 15  # of a fit
HUBER = 0.15  # residuals beyond this count linearly
RIDGE = 0.018  # on the log of every number, by the square root of the rows
DEVIATION = 0.036
"""The same on how far a group's number is from the common one.

guess: cross-validation among the measured rows would have it looser, 0.065, but then experts' and products'
rates leave what is plausible, and a published pair of layouts far from those rows is ranked the wrong way.
"""
TTFT_WEIGHT = 0.6  # of a time to the first token, by that of a time per output token

NOISE = {"tpot": 0.4, "ttft": 0.7}  # of a row about its effects; rows of a group are far from independent
COVERED = {"tpot": 0.78, "ttft": 0.755}  # of the rows: 80 % intervals, short of it to keep them narrow

FOLDS = 6  # that the groups are parted into to choose
PRIORS = tuple(Priors(offsets=one, slopes=two) for one, two in product((0.5, 1.0), repeat=2))
OUTLIER = 0.35
"""A row this far (log) from the physics counts half in the correction, farther ones still less.

guess: chosen with the priors, between this and 0.7, the 90 % errors come out up to four points higher.
"""

Tried = tuple[str, Priors]
"""A target and what is tried for it."""


Choice = dict[str, Priors]
"""What is chosen for the correction of a fit, by target."""


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


SORTS = ("physical_errors", "blind_errors", "plan_errors", "errors")


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fit of both stages, and what it makes of every row, its own and others.

    Shapes:  errors, those of one who does not know the backend, those of a plan (no backend, only the level
             of the correction, and of times per token), those of the physics alone, by target: log of
             measured by predicted [rows].
    """

    theta: np.ndarray
    corrections: dict[str, Correction]
    errors: dict[str, np.ndarray]
    blind_errors: dict[str, np.ndarray]
    plan_errors: dict[str, np.ndarray]
    physical_errors: dict[str, np.ndarray]
    is_known: np.ndarray  # whether the correction knows the row's model in its engine
    is_known_anywhere: np.ndarray  # or in any engine


def fit(data: Data, chosen: np.ndarray, choice: Choice) -> Fit:
    """Both stages on the chosen rows; nothing of the others is looked at."""
    theta = fit_numbers(data, chosen)
    left = left_by(theta, data)
    corrections = {
        target: equations(data, chosen, left[target]).under(choice[target], NOISE[target])
        for target in TARGETS
    }
    corrected = {target: left[target] - log_ratios(corrections[target], data) for target in TARGETS}
    blind = left_by(theta, data, is_blind=True)
    level = middle_load(prompt=data.prompt, output=data.output)
    return Fit(
        theta=theta, corrections=corrections, errors=corrected, physical_errors=left,
        blind_errors={
            target: blind[target] - blind_ratios(corrections[target], data, data.load) for target in TARGETS
        },
        plan_errors={
            "tpot": blind["tpot"] - blind_ratios(corrections["tpot"], data, level), "ttft": blind["ttft"]
        },
        is_known=np.array([corrections["tpot"].knows(one) for one in data.settings]),
        is_known_anywhere=np.array(
            [
                any(corrections["tpot"].knows(replace(one, backend=name)) for name in BACKENDS)
                for one in data.settings
            ]
        ),
    )  # fmt: skip


def left_by(theta: np.ndarray, data: Data, *, is_blind: bool = False) -> dict[str, np.ndarray]:
    """Log of measured by physical time of every row."""
    times = physical(numbers_of(theta, data, is_blind=is_blind), data)
    return {target: np.log(data.measured[target] / times[target]) for target in TARGETS}


def equations(data: Data, chosen: np.ndarray, left: np.ndarray) -> Regression:
    """Those of the correction of what is left of the chosen rows."""
    settings = [data.settings[idx] for idx in np.flatnonzero(chosen)]
    weights = data.correction_weight / (1 + (left / OUTLIER) ** 2)
    return regression(settings, data.load[chosen], left[chosen], weights[chosen])


class Choices:
    """Nested cross-validation: what to choose where some rows may not be seen.

    Groups are parted into folds. For every pair of folds and every choice there is a fit without the pair,
    and its errors on the pair. A fit without a group chooses by the errors on the folds that the group is not
    in, of fits without the group's whole fold: nothing of the group is looked at. Where rows of several folds
    are hidden (a whole model or device), they are left out of the errors alone.
    """

    def __init__(self, data: Data) -> None:
        names = sorted(set(data.group.tolist()))
        self.data = data
        self.fold = np.array([names.index(name) % FOLDS for name in data.group.tolist()])
        self.errors = {pair: self._errors(np.isin(self.fold, pair)) for pair in combinations(range(FOLDS), 2)}

    def _errors(self, hidden: np.ndarray) -> dict[Tried, np.ndarray]:
        """Absolute log errors of every row by fits without the hidden ones."""
        left = left_by(fit_numbers(self.data, ~hidden), self.data)
        found = {}
        for target in TARGETS:
            solved = equations(self.data, ~hidden, left[target])
            for priors in PRIORS:
                effects = log_ratios(solved.under(priors, NOISE[target]), self.data)
                found[target, priors] = np.abs(left[target] - effects)
        return found

    def without(self, hidden: np.ndarray) -> Choice:
        """The choice for a fit without the hidden rows."""
        scores = self._scores(hidden)
        return {target: cautious(scores, target) for target in TARGETS}

    def _scores(self, hidden: np.ndarray) -> dict[Tried, np.ndarray]:
        """Mean errors over rows of sparse models, one for each pair of folds that may be looked at."""
        folds = set(self.fold[hidden].tolist())
        is_one = len(folds) == 1
        scores: dict[Tried, list[float]] = defaultdict(list)
        for pair, errors in self.errors.items():
            if is_one and not folds & set(pair):
                continue
            judged = np.isin(self.fold, list(set(pair) - folds) if is_one else pair)
            judged &= self.data.is_sparse & ~hidden
            for key, one in errors.items():
                scores[key].append(float(one[judged].mean()))
        return {key: np.array(one) for key, one in scores.items()}


def cautious(scores: dict[Tried, np.ndarray], target: str) -> Priors:
    """The most shrunk choice of a target within a standard error of the one with the least mean error.

    Source: the one-standard-error rule, Breiman et al. 1984, sec. 3.4.3, on differences pair by pair.
    """
    tried = [key for key in scores if key[0] == target]
    best = min(tried, key=lambda key: scores[key].mean())
    more = {key: scores[key] - scores[best] for key in tried}
    within = [key for key, one in more.items() if one.mean() <= one.std(ddof=1) / np.sqrt(len(one))]
    return min((priors for _, priors in within), key=lambda one: (one.slopes, one.offsets))


def log_ratios(correction: Correction, data: Data) -> np.ndarray:
    """What a correction says of every row."""
    found = np.zeros(len(data.rows))
    for setting, ids in rows_by_setting(data).items():
        found[ids] = correction.log_ratio(setting, data.load[ids])
    return found


def blind_ratios(correction: Correction, data: Data, load: np.ndarray) -> np.ndarray:
    """The same for one who does not know the backend: the mean over them."""
    found = np.zeros(len(data.rows))
    for setting, ids in rows_by_setting(data).items():
        every = [replace(setting, backend=name) for name in BACKENDS]
        found[ids] = np.mean([correction.log_ratio(one, load[ids]) for one in every], axis=0)
    return found


def rows_by_setting(data: Data) -> dict[Setting, list[int]]:
    """The rows of every setting."""
    rows: dict[Setting, list[int]] = defaultdict(list)
    for idx, setting in enumerate(data.settings):
        rows[setting].append(idx)
    return rows


def main() -> int:
    """Fit, report the error on groups never fitted, write the package's data."""
    path, began = Path(sys.argv[1]), time.monotonic()
    data = Data(read_perf_rows(path).rows)
    choices = Choices(data)
    print(f"cross-validated, {time.monotonic() - began:.0f} s", flush=True)
    fits = {"all": fit_without(data, np.zeros(len(data.rows), dtype=bool), choices)}
    for name in sorted(set(data.group.tolist())):
        own = data.group == name
        fits[name] = fit_without(data, own, choices)
        report(f"{name} {time.monotonic() - began:.0f} s", {t: fits[name].errors[t][own] for t in TARGETS})
    found = {which: {t: of_held_out(fits, data, which, t) for t in TARGETS} for which in SORTS}
    for which, errors in found.items():
        report(which, {t: errors[t][data.is_sparse] for t in TARGETS})
    write(fits, found, choices, path)
    return 0


def fit_without(data: Data, hidden: np.ndarray, choices: Choices) -> Fit:
    """A fit that neither saw the hidden rows nor was chosen by them."""
    choice = choices.without(hidden)
    return fit(data, ~hidden, choice)


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


def stricter(choices: Choices) -> dict[str, dict[str, list[float]]]:
    """Median and 90 % error when the whole model, or the whole device, was left out."""
    data, found = choices.data, {}
    for sort in ("model", "gpu"):
        names = np.array([row.model if sort == "model" else row.machine for row in data.rows])
        errors = {target: np.zeros(len(names)) for target in TARGETS}
        for name in sorted(set(names[data.is_sparse].tolist())):
            own = names == name
            left = fit_without(data, own, choices).errors
            for target in TARGETS:
                errors[target][own] = left[target][own]
        report(f"whole {sort} left out", {t: errors[t][data.is_sparse] for t in TARGETS})
        found[sort] = figures(errors, data)
    return found


def figures(errors: dict[str, np.ndarray], data: Data) -> dict[str, list[float]]:
    """Median and 90 % absolute error of the rows of sparse models, by target."""
    ape = {target: np.abs(np.expm1(-one[data.is_sparse])) for target, one in errors.items()}
    return {target: rounded(np.quantile(one, (0.5, 0.9))) for target, one in ape.items()}


def write(
    fits: dict[str, Fit], found: dict[str, dict[str, np.ndarray]], choices: Choices, path: Path
) -> None:
    """The data files; the bounds of a group come from the errors of the other groups."""
    data = choices.data
    is_known, is_known_anywhere = (
        np.array([getattr(fits[name], which)[idx] for idx, name in enumerate(data.group.tolist())])
        for which in ("is_known", "is_known_anywhere")
    )
    plain = {name: as_plain(one) for name, one in fits.items()}
    errors = found["errors"]
    sorts = {
        "any": found["blind_errors"], "plan": found["plan_errors"], "physics": found["physical_errors"],
        **dict.fromkeys(BACKENDS, errors),
    }  # fmt: skip
    members = dict(zip(BACKENDS, data.is_in, strict=False))
    for name, one in plain.items():
        others = data.is_sparse & (data.group != name)
        for target in TARGETS:
            wide = widening(errors[target], others, is_known)
            one["widening"][target] = round(wide, 4)
            for sort, source in sorts.items():
                near = is_known_anywhere if sort in ("any", "plan") else is_known | (sort == "physics")
                power = np.where(near, 1.0, wide)
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
            "physics": figures(found["physical_errors"], data),
            "engine": figures(found["blind_errors"], data),
            "plan": figures(found["plan_errors"], data),
            **stricter(choices),
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
