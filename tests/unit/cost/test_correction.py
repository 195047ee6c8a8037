from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from moesaic.cost.calibrated import DATA, HELD_OUT, load_of, predict, setting_of, shipped
from moesaic.cost.correction import (
    LIMIT,
    Correction,
    Priors,
    Setting,
    basis,
    middle_load,
    model_key,
    regression,
)
from moesaic.cost.layouts import Split
from moesaic.cost.ops import Formats
from moesaic.cost.serving import Traffic
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster
from moesaic.spec.locate import preset

SPLIT = Split(tp=8, expert_tp=8)
TRAFFIC = Traffic(prompt=1024.0, output=1024.0, batch=16.0)


def model(name: str):
    return read_config(preset(name).config, name=name)


def setting(model: str, machine: str = "h200", backend: str = "vllm") -> Setting:
    return Setting(backend=backend, model=model, format="fp8", generation="older", machine=machine)


def fit_correction(settings, load, ratios, weights, noise, priors=Priors()) -> Correction:  # noqa: B008
    return regression(settings, load, ratios, weights).under(priors, noise)


def synthetic(seed: int = 0) -> tuple[list[Setting], np.ndarray, np.ndarray]:
    """Four models on three machines: an offset for each model, a slope over the batch, noise."""
    rng = np.random.default_rng(seed)
    settings, batches, ratios = [], [], []
    for name, offset in (("a", 0.3), ("b", -0.2), ("c", 0.1), ("d", -0.1)):
        for machine in ("x", "y", "z"):
            for batch in 2.0 ** np.arange(2, 9):
                settings.append(setting(name, machine))
                batches.append(batch)
                ratios.append(offset + 0.1 * np.log(batch / 16) / 1.5 + 0.03 * rng.normal())
    ones = np.ones(len(batches))
    load = basis(
        batch=np.array(batches), prompt=1024 * ones, output=1024 * ones, ranks=ones, ep=ones, dp=ones
    )
    return settings, load, np.array(ratios)


def error_left_out(settings: list[Setting], load: np.ndarray, taught: np.ndarray, true: np.ndarray) -> float:
    """Mean error on each (model, machine) by a fit without it."""
    errors = []
    for group in sorted({(one.model, one.machine) for one in settings}):
        own = np.array([(one.model, one.machine) == group for one in settings])
        kept = [one for one, left in zip(settings, own, strict=True) if not left]
        found = fit_correction(kept, load[~own], taught[~own], np.ones((~own).sum()), 0.3)
        name = settings[int(np.flatnonzero(own)[0])]
        errors.append(np.abs(found.log_ratio(name, load[own]) - true[own]).mean())
    return float(np.mean(errors))


def test_a_model_is_corrected_on_a_machine_that_it_was_not_measured_on() -> None:
    settings, load, ratios = synthetic()
    without = float(np.abs(ratios).mean())
    assert error_left_out(settings, load, ratios, ratios) < 0.5 * without
    shuffled = np.random.default_rng(1).permutation(ratios)
    assert error_left_out(settings, load, shuffled, ratios) > 0.9 * without  # the negative control


def test_a_level_that_was_never_seen_says_nothing() -> None:
    settings, load, ratios = synthetic()
    found = fit_correction(settings, load, ratios, np.ones(len(ratios)), 0.3)
    known, new = setting("a", "w"), setting("e", "w")
    assert found.knows(known)
    assert not found.knows(new)
    line = load[settings.index(setting("a", "x"))][None]
    assert found.log_ratio(known, line)[0] > found.log_ratio(new, line)[0] + 0.15
    foreign = Setting(backend="other", model="e", format="int4", generation="newer", machine="w")
    assert found.log_ratio(foreign, line) == pytest.approx(line[:, :14] @ np.array(found.effects["all:"]))


def test_few_runs_say_little() -> None:
    settings, load, _ = synthetic()

    def learnt(times: int) -> float:
        found = fit_correction(
            settings[:1] * times, load[[0] * times], np.full(times, 0.5), np.ones(times), noise=0.6
        )
        return float(found.log_ratio(settings[0], load[:1])[0])

    assert 0 < learnt(1) < 0.75 * 0.5
    assert learnt(1) < learnt(2) < learnt(20) < 0.5


def test_tight_priors_let_less_through() -> None:
    settings, load, ratios = synthetic()
    reach = []
    for size in (0.25, 0.5, 1.0):
        priors = Priors(offsets=size, slopes=size)
        found = fit_correction(settings, load, ratios, np.ones(len(ratios)), 0.6, priors)
        reach.append(float(np.mean([np.abs(found.log_ratio(one, load)).mean() for one in set(settings)])))
    assert reach == sorted(reach)
    assert reach[0] < 0.8 * reach[-1]


def test_the_middle_of_the_load_leaves_offsets_alone() -> None:
    line = middle_load(prompt=2048.0, output=1024.0)
    assert line[0, :5] == pytest.approx([1, 0, 0, 0, 0])
    assert not line[0, -2:].any()  # experts not spread, attention not replicated


def test_no_correction_is_far_from_the_physics() -> None:
    found = Correction(effects={"all:": [9.0] * 14})
    huge = basis(batch=1e9, prompt=1e9, output=1.0, ranks=1e6, ep=8, dp=8)
    assert abs(found.log_ratio(setting("a"), huge)[0]) == LIMIT
    assert np.abs(huge).max() <= 6.25  # squares of what is clipped at 2.5


def test_fits_are_deterministic() -> None:
    settings, load, ratios = synthetic()
    first, second = (fit_correction(settings, load, ratios, np.ones(len(ratios)), 0.3) for _ in range(2))
    assert first.effects == second.effects


def test_the_fit_without_a_group_has_no_effect_of_it() -> None:
    """The group's own level is in the fit of all groups, and in no fit that was made without the group."""
    whole, held_out = json.loads(DATA.read_text())["fit"], json.loads(HELD_OUT.read_text())
    assert len(held_out) > 20
    level = "backend+model+machine:"
    groups = {
        tuple(key.removeprefix(level).split("|")[1:]) for key in whole["effects"]["tpot"] if level in key
    }
    assert len(groups) == len(held_out)
    for name, fit in held_out.items():
        shape, machine = model_key(model(name.split("|")[0])), name.split("|")[1]
        for effects in fit["effects"].values():
            seen = {tuple(key.removeprefix(level).split("|")[1:]) for key in effects if level in key}
            assert seen == groups - {(shape, machine)}, name


def test_a_new_model_is_less_sure() -> None:
    known = predict(model("minimax-m2"), cluster("h100x8"), SPLIT, TRAFFIC, backend="vllm")
    new = predict(model("mixtral-8x7b"), cluster("h100x8"), SPLIT, TRAFFIC, backend="vllm")
    assert new.tpot_s.high / new.tpot_s.low > known.tpot_s.high / known.tpot_s.low
    assert shipped().widening["tpot"] > 1


def test_without_an_engine_the_correction_is_the_mean_of_theirs() -> None:
    spec, cards = model("deepseek-v3"), cluster("b200x8")
    found = predict(spec, cards, SPLIT, TRAFFIC)
    load, correction = load_of(SPLIT, TRAFFIC), shipped().corrections["tpot"]
    logs = [
        correction.log_ratio(setting_of(spec, cards, Formats(), one), load)
        for one in ("sglang", "trtllm", "vllm")
    ]
    ratio = np.log(found.tpot_s.value / found.phases.tpot_s)
    assert ratio == pytest.approx(np.mean(logs))


def test_a_measured_machine_is_not_corrected() -> None:
    """The correction was learnt against shares of datasheets' rates, and this machine's are taken whole."""
    spec, shown = model("qwen3-235b-a22b"), cluster("h200x8x1")
    facts = dict(shown.machine.facts)
    facts["memory_bytes_per_s"] = replace(facts["memory_bytes_per_s"], source="measured 2026-11-29")
    measured = replace(shown, machine=replace(shown.machine, facts=facts))
    found = {
        where: predict(spec, one, SPLIT, TRAFFIC, backend="vllm")
        for where, one in (("sheet", shown), ("own", measured))
    }
    assert float(found["own"].tpot_s.value) == float(found["own"].phases.tpot_s)
    assert float(found["sheet"].tpot_s.value) != float(found["sheet"].phases.tpot_s)
