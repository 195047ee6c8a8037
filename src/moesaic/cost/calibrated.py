"""The profile fitted to measured serving times: shipped numbers and the intervals of their error.

`scripts/fit_cost.py` makes the data. Each (model, device) group that was fitted to has a calibration fitted
without it, so a report on these groups is about groups never seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from moesaic.cost.layouts import Split
from moesaic.cost.load import ExpertShares
from moesaic.cost.ops import Formats
from moesaic.cost.profile import KINDS, PAPER, PROFILES, Launch, Profile
from moesaic.cost.serving import Interference, Phases, Traffic, phases
from moesaic.cost.term import Interval
from moesaic.errors import ConfigError, nearest
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

DATA = Path(__file__).parent / "calibrated.json"
BACKENDS = ("sglang", "trtllm", "vllm")
TARGETS = ("tpot", "ttft")

NUMBERS = (
    "compute.matrices", "compute.attention", "compute.experts", "memory.matrices", "memory.attention",
    "memory.experts", "link", "collective", "launch.gqa", "launch.mla", "launch.index", "launch.linear",
    "launch.experts", "launch.shared_experts", "launch.dense_ffn", "step", "launch_power",
    "prefill_in_decode", "first", "queue_share", "queue_power", "first_layer", "first_steps",
)  # fmt: skip
"""Names of the fitted numbers; compute, memory and link are inverse shares, times are microseconds."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Calibration:
    """One fit: numbers, how backends and generations deviate, and the spread of the error."""

    numbers: Mapping[str, float]
    deviations: Mapping[
        str, Mapping[str, float]
    ]  # by backend, "blackwell" and "older": factors on the numbers
    bounds: Mapping[str, Mapping[str, tuple[float, float]]]
    """By target and backend ("any": all): 10 % and 90 % quantile of measured by predicted, held out."""
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
        low, high = self.bounds["tpot"][backend or "any"]
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
            queue_power=number("queue_power"), first_s=number("first") * 1e-6,
            first_layer_s=number("first_layer") * 1e-6, first_steps=number("first_steps"),
        )  # fmt: skip


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
    phases: Phases


def predict(
    model: ModelSpec, cluster: Cluster, split: Split, traffic: Traffic, *, backend: str | None = None,
    formats: Formats | None = None, shares: ExpertShares | None = None,
    calibration: Calibration | None = None,
) -> Prediction:  # fmt: skip
    """Times of an engine in steady state.

    Raises: ConfigError for an unknown backend.
    """
    if backend is not None and backend not in BACKENDS:
        raise ConfigError(f"no calibration for the backend {backend!r}; {nearest(backend, BACKENDS)}")
    fitted = calibration or shipped()
    found = phases(
        model, cluster, split, traffic, profile=fitted.profile(cluster, backend),
        interference=fitted.interference(cluster, backend), formats=formats, shares=shares,
    )  # fmt: skip
    times = {
        target: Interval.exactly(value).widened(*fitted.bounds[target][backend or "any"])
        for target, value in (("tpot", found.tpot_s), ("ttft", found.ttft_s))
    }
    return Prediction(ttft_s=times["ttft"], tpot_s=times["tpot"], phases=found)


@cache
def shipped(without: str | None = None) -> Calibration:
    """The calibration that comes with the package; `without` a group such as "deepseek-v3|h200".

    A group that was not fitted to gets the calibration of all groups.
    """
    data = json.loads(DATA.read_text(encoding="utf-8"))
    fit = data["fits"][without if without in data["fits"] else "all"]
    return Calibration(**fit, skew=data["skew"], source=data["source"])


def profile_named(name: str, cluster: Cluster, backend: str | None = None) -> Profile:
    """The profile called `paper` or `calibrated`.

    Raises: ConfigError for another name.
    """
    if name == "paper":
        return PAPER
    if name == "calibrated":
        return shipped().profile(cluster, backend)
    raise ConfigError(f"unknown profile {name!r}; {nearest(name, PROFILES)}")
