"""The profile fitted to measured serving times: physical numbers, a correction, intervals of the error.

`predict` is the door: physics (`serving`), times what measured runs say beyond it (`correction`), and an
interval as wide as the errors on groups left out were. `scripts/fit_cost.py` makes the data. Each (model,
device) group that was fitted to has a calibration fitted without it, so a report on these groups is about
groups never seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.cost.correction import Correction, Setting, basis, model_key
from moesaic.cost.layouts import Split
from moesaic.cost.load import ExpertShares
from moesaic.cost.ops import Formats
from moesaic.cost.profile import KINDS, PAPER, PROFILES, Launch, Profile
from moesaic.cost.serving import Interference, Phases, Traffic, phases
from moesaic.cost.term import FloatArray, Interval
from moesaic.errors import ConfigError, nearest
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

DATA = Path(__file__).parent / "calibrated.json"
HELD_OUT = Path(__file__).parent / "calibrated_held_out.json"
"""The same fit without each of the groups in turn; only a report on its accuracy reads it."""
BACKENDS = ("sglang", "trtllm", "vllm")
TARGETS = ("tpot", "ttft")

NUMBERS = (
    "compute.matrices", "compute.attention", "compute.experts", "memory.matrices", "memory.attention",
    "memory.experts", "link", "collective", "launch.gqa", "launch.mla", "launch.index", "launch.linear",
    "launch.experts", "launch.shared_experts", "launch.dense_ffn", "launch.quantise", "step", "launch_power",
    "prefill_in_decode", "first", "eager", "queue_share", "queue_power", "backlog", "first_steps",
    "slot_share",
)  # fmt: skip
"""Names of the fitted numbers; compute, memory and link are inverse shares, times are microseconds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calibration:
    """One fit: numbers, how backends and generations deviate, the correction, and the spread of the error."""

    numbers: Mapping[str, float]
    deviations: Mapping[
        str, Mapping[str, float]
    ]  # by backend, "blackwell" and "older": factors on the numbers
    bounds: Mapping[str, Mapping[str, tuple[float, float]]]
    """10 % and 90 % quantile of measured by predicted time on groups left out, by target: for each backend,
    for one that is not known ("any"), of what a plan says, for no engine ("plan"), of the physics alone."""
    widening: Mapping[str, float]
    """By target: the bounds of a model that was not measured in the engine are these with this power."""
    corrections: Mapping[str, Correction]  # by target
    skew: float
    source: str

    def number(self, name: str, backend: str | None, is_new: bool) -> float:
        """A fitted number for a backend (None: the geometric mean of them) and a generation."""
        factors = [self.deviations[one][name] for one in (BACKENDS if backend is None else (backend,))]
        found = self.numbers[name] * self.deviations["blackwell" if is_new else "older"][name]
        found *= math.prod(factors) ** (1 / len(factors))
        return found

    def profile(self, cluster: Cluster, backend: str | None = None) -> Profile:
        """The profile of an engine on a cluster; without a backend, of the mean of those fitted."""

        def number(name: str) -> float:
            return self.number(name, backend, is_blackwell(cluster))

        launches: dict[Launch, float] = {"mamba": number("launch.linear") * 1e-6, "head": 0.0}
        for name in NUMBERS:
            if name.startswith("launch."):
                launches[name.removeprefix("launch.")] = number(name) * 1e-6  # type: ignore[index]
        low, high = self.bounds["tpot"]["physics"]
        found = Profile(
            name="calibrated", source="modelled",
            compute_share={kind: 1 / number(f"compute.{kind}") for kind in KINDS},
            memory_share={kind: 1 / number(f"memory.{kind}") for kind in KINDS},
            link_share=1 / number("link"), network_share=NETWORK_SHARE, usable_memory=PAPER.usable_memory,
            launch_s=launches, launch_power=max(number("launch_power"), 1.0),
            hop_factor=0.0, exchange_factor=EXCHANGE_FACTOR,
            collective_s=number("collective") * 1e-6, step_s=number("step") * 1e-6, skew=self.skew,
            full_rate_rows=FULL_RATE_ROWS, low=low, high=high,
        )  # fmt: skip
        return with_whole_rates(found) if cluster.machine.is_measured else found

    def interference(self, cluster: Cluster, backend: str | None = None) -> Interference:
        """How prompts and decoding meet in an engine."""

        def number(name: str) -> float:
            return self.number(name, backend, is_blackwell(cluster))

        return Interference(
            prefill_in_decode=number("prefill_in_decode"), queue_share=number("queue_share"),
            queue_power=number("queue_power"), backlog=number("backlog"), first_s=number("first") * 1e-6,
            eager=number("eager"), first_steps=number("first_steps"), slot_share=number("slot_share"),
        )  # fmt: skip

    def log_ratios(
        self, target: str, model: ModelSpec, cluster: Cluster, formats: Formats, load: FloatArray,
        backend: str | None = None,
    ) -> FloatArray:  # fmt: skip
        """Log of corrected by physical time; without a backend, the mean over them; 0 on a measured machine.

        Shapes:  load as `load_of` gives it; returns [cases].
        """
        if cluster.machine.is_measured:
            return np.zeros(len(load))
        correction = self.corrections[target]
        settings = _settings(model, cluster, formats, backend)
        found: FloatArray = np.mean([correction.log_ratio(one, load) for one in settings], axis=0)
        return found

    def factors(
        self, target: str, model: ModelSpec, cluster: Cluster, formats: Formats, backend: str | None = None,
        sort: str | None = None,
    ) -> tuple[float, float]:  # fmt: skip
        """The 80 % interval by a time, wider for a model that was measured in no such engine."""
        correction = self.corrections[target]
        is_known = any(correction.knows(one) for one in _settings(model, cluster, formats, backend))
        power = 1.0 if is_known else self.widening[target]
        low, high = self.bounds[target][sort or backend or "any"]
        return low**power, high**power


FULL_RATE_ROWS = 256.0  # guess: rows of a product at which a tensor core's tiles are full
NETWORK_SHARE = 0.9
EXCHANGE_FACTOR = 2.0
"""Source: DeepEP's low-latency all-to-all on H800: 173 us for a dispatch of 128 tokens over 64 devices, 192
us over 128 (7.2 MB at 0.9 of 50 GB/s and 10 us)."""


def with_whole_rates(profile: Profile) -> Profile:
    """A profile for a machine whose file was measured: what software does not reach is not in the rates.

    Overheads and the interval stay those of the engines that were fitted: nothing is known of others.
    """
    whole = dict.fromkeys(KINDS, 1.0)
    return replace(profile, compute_share=whole, memory_share=whole, link_share=1.0, full_rate_rows=0.0)


def is_blackwell(cluster: Cluster) -> bool:
    """Whether the device multiplies 4-bit floats: the generation that the calibration tells apart."""
    return cluster.machine.has_rate("fp4")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a request sees, with 80 % intervals, and the phases behind it.

    Shapes:  arrays over cases; seconds.
    """

    ttft_s: Interval
    tpot_s: Interval
    decode_s: Interval  # per token where others prefill: corrected as with the shortest prompts
    phases: Phases


def predict(
    model: ModelSpec, cluster: Cluster, split: Split, traffic: Traffic, *, backend: str | None = None,
    formats: Formats | None = None, shares: ExpertShares | None = None,
    calibration: Calibration | None = None,
) -> Prediction:  # fmt: skip
    """Times of an engine in steady state; without a backend, of the mean of those fitted.

    On a machine whose file was measured the physics stands alone: the correction was learnt against shares of
    datasheets' rates.

    Raises: ConfigError for an unknown backend.
    """
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"no calibration for the backend {backend!r}; {nearest(backend, BACKENDS)}")
    fitted = calibration or shipped()
    found = phases(
        model, cluster, split, traffic, profile=fitted.profile(cluster, backend),
        interference=fitted.interference(cluster, backend), formats=formats, shares=shares,
    )  # fmt: skip
    load = load_of(split, traffic)
    alone = load_of(split, replace(traffic, prompt=1.0))
    times = {}
    for name, value, case_load in (
        ("tpot", found.tpot_s, load), ("ttft", found.ttft_s, load), ("decode", found.decode_s, alone)
    ):  # fmt: skip
        target = "ttft" if name == "ttft" else "tpot"
        logs = fitted.log_ratios(target, model, cluster, formats or Formats(), case_load, backend)
        corrected = np.asarray(value) * np.exp(logs).reshape(np.shape(value))
        low, high = fitted.factors(target, model, cluster, formats or Formats(), backend)
        times[name] = Interval.exactly(corrected).widened(low, high)
    return Prediction(ttft_s=times["ttft"], tpot_s=times["tpot"], decode_s=times["decode"], phases=found)


def _settings(model: ModelSpec, cluster: Cluster, formats: Formats, backend: str | None) -> list[Setting]:
    """That of a backend, or of each of them."""
    return [setting_of(model, cluster, formats, one) for one in ((backend,) if backend else BACKENDS)]


def setting_of(model: ModelSpec, cluster: Cluster, formats: Formats, backend: str) -> Setting:
    """The facts of a run that the correction goes by."""
    stored = formats.experts or model.stored_format("routed_experts").format if model.moe_layers else "dense"
    return Setting(
        backend=backend, model=model_key(model), format=stored, machine=cluster.machine.name,
        generation="blackwell" if is_blackwell(cluster) else "older",
    )  # fmt: skip


def load_of(split: Split, traffic: Traffic) -> FloatArray:
    """The load of the cases in the correction's terms."""
    return basis(
        batch=traffic.batch, prompt=traffic.prompt, output=traffic.output, ranks=split.ranks, ep=split.ep,
        dp=split.dp,
    )  # fmt: skip


@cache
def shipped(without: str | None = None) -> Calibration:
    """The calibration that comes with the package; `without` a group such as "deepseek-v3|h200".

    A group that was not fitted to gets the calibration of all groups.
    """
    data = json.loads(DATA.read_text(encoding="utf-8"))
    fit = data["fit"] if without is None else held_out().get(without, data["fit"])
    corrections = {target: Correction(effects=effects) for target, effects in fit["effects"].items()}
    return Calibration(
        numbers=fit["numbers"], deviations=fit["deviations"], bounds=fit["bounds"], widening=fit["widening"],
        corrections=corrections, skew=data["skew"], source=data["source"],
    )  # fmt: skip


@cache
def held_out() -> Mapping[str, Any]:
    """The fits without one group each, by the group's name."""
    found: Mapping[str, Any] = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    return found


def stricter_errors() -> Mapping[str, Mapping[str, tuple[float, float]]]:
    """What less knowledge than the report's costs: median and 90 % error by what was left out and target.

    "physics": as in the report, but without the correction; "model" and "gpu": every row of a sparse model,
    or of a device, by a fit that saw no row of it.
    """
    found: Mapping[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))["stricter"]
    return found


def profile_named(name: str, cluster: Cluster, backend: str | None = None) -> Profile:
    """The profile called `paper` or `calibrated`.

    Raises: ConfigError for another name.
    """
    if name == "paper":
        return PAPER
    if name == "calibrated":
        return shipped().profile(cluster, backend)
    raise ConfigError(f"unknown profile {name!r}; {nearest(name, PROFILES)}")
