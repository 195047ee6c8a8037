"""From readings to facts: medians and spreads, alpha and beta of collectives, the numbers of a file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moesaic.errors import ConfigError
from moesaic.spec.hardware import PRODUCT_RATES, Fact
from moesaic.units import format_bytes, format_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """One thing that was measured several times.

    Units:  of `values` as `unit` says: bytes/s, flop/s or s.
    """

    part: str  # memory, gemm, disk or collectives
    case: Mapping[str, Any]
    unit: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        """The number to believe."""
        return float(np.median(self.values))

    @property
    def spread(self) -> float | None:
        """(third quartile - first) / median; None of a single value."""
        if len(self.values) < 2:
            return None
        low, high = np.percentile(self.values, [25, 75])
        return float((high - low) / self.median)

    @property
    def spread_text(self) -> str:
        """The spread for a table."""
        return "once" if self.spread is None else f"{self.spread:.0%}"

    @property
    def label(self) -> str:
        """The case in words."""
        case = self.case
        if self.part == "memory":
            threads = "1 thread" if case["threads"] == 1 else f"{case['threads']} threads"
            return f"read by {threads}, {case['pages']} pages ({case['by']})"
        if self.part == "gemm":
            sizes = f"{case['rows']} x {case['hidden']} x {case['ffn']}"
            return f"{case['dtype']} {sizes}, {case['expert']} ({case['by']})"
        if self.part == "disk":
            readers = "1 reader" if case["readers"] == 1 else f"{case['readers']} readers"
            what = "run" if case["expert"] == "-" else f"experts of {case['expert']}"
            return f"{case['order']} {what}, {readers} of {format_bytes(case['piece_bytes'])} ({case['way']})"
        return f"{case['op']} of {format_bytes(case['bytes'])}, {case['processes']} processes"

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "part": self.part, **self.case, "unit": self.unit, "median": self.median, "spread": self.spread,
            "values": list(self.values),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """t = alpha + bytes / beta.

    Units:  alpha in seconds, beta in bytes per second. The errors are relative to the measured times.
    """

    alpha_s: float
    beta_bytes_per_s: float
    rms_error: float
    max_error: float


def fit_line(num_bytes: Sequence[float], seconds: Sequence[float]) -> Line:
    """The line with the least sum of squared relative errors; neither part may be negative.

    Relative, since absolute errors of the long messages would drown what the short ones say of alpha.

    Raises: ConfigError with fewer than two sizes, and for times that do not grow with the size.
    """
    size_N, time_N = np.asarray(num_bytes, np.float64), np.asarray(seconds, np.float64)
    if len(np.unique(size_N)) < 2:
        raise ConfigError(f"alpha and beta need two sizes at least, got {len(np.unique(size_N))}")
    scaled = np.stack([1 / time_N, size_N / time_N], axis=1)
    alpha, slope = np.linalg.lstsq(scaled, np.ones(len(time_N)), rcond=None)[0]
    if alpha < 0:  # the best line that starts at zero
        alpha, slope = 0.0, scaled[:, 1].sum() / (scaled[:, 1] ** 2).sum()
    if slope <= 0:
        raise ConfigError("the times do not grow with the size, so they say nothing of the bandwidth")
    error_N = scaled @ np.array([alpha, slope]) - 1
    return Line(
        alpha_s=float(alpha), beta_bytes_per_s=float(1 / slope),
        rms_error=float(np.sqrt(np.mean(error_N**2))), max_error=float(np.abs(error_N).max()),
    )  # fmt: skip


def fit_collectives(readings: Iterable[Reading]) -> list[dict[str, Any]]:
    """Alpha and beta of each collective and number of processes, or `why_not`."""
    series: dict[tuple[str, int], list[Reading]] = {}
    for one in readings:
        if one.part == "collectives":
            series.setdefault((one.case["op"], one.case["processes"]), []).append(one)
    fits = []
    for (op, processes), points in series.items():
        found: dict[str, Any] = {"op": op, "processes": processes}
        try:
            line = fit_line([one.case["bytes"] for one in points], [one.median for one in points])
            found |= {
                "alpha_s": line.alpha_s, "beta_bytes_per_s": line.beta_bytes_per_s,
                "rms_error": line.rms_error, "max_error": line.max_error,
            }  # fmt: skip
        except ConfigError as error:
            found["why_not"] = str(error)
        fits.append(found)
    return fits


def facts_of(readings: Sequence[Reading], fits: Sequence[Mapping[str, Any]], source: str) -> dict[str, Fact]:
    """The numbers of a machine file that the readings support; the others are left out.

    Rates are the highest median: what the machine gives to who asks in the best of the ways that were tried.
    A link is two processes of this machine; the drive is read as experts are, at random. A rate of int8 below
    that of bfloat16 is no reason to multiply in int8, which a plan would take it for.
    """
    facts: dict[str, Fact] = {}

    def take(key: str, those: Iterable[Reading]) -> None:
        best = max(those, key=lambda one: one.median, default=None)
        if best is not None:
            facts[key] = Fact(
                value=_three_digits(best.median),
                source=f"{source}: {best.label}, median of {len(best.values)}, spread {best.spread_text}",
            )

    take("memory_bytes_per_s", (one for one in readings if one.part == "memory"))
    for dtype in ("float32", "bfloat16", "int8"):
        gemms = (one for one in readings if one.part == "gemm" and one.case["dtype"] == dtype)
        take(f"flops_per_s.{dtype}", gemms)
    wide = max((facts[key].value for key in PRODUCT_RATES if key in facts), default=0.0)
    if "flops_per_s.int8" in facts and facts["flops_per_s.int8"].value < wide:
        del facts["flops_per_s.int8"]
    random_reads = (one for one in readings if one.part == "disk" and one.case["order"] == "random")
    take("disk_bytes_per_s", random_reads)
    for fit in fits:
        if fit["op"] == "send_recv" and fit["processes"] == 2 and "alpha_s" in fit:
            said = (
                f"{source}: messages of gloo between two processes of this machine, t = alpha + bytes / "
                f"beta, rms error {fit['rms_error']:.0%}"
            )
            facts["link_bytes_per_s"] = Fact(value=_three_digits(fit["beta_bytes_per_s"]), source=said)
            if fit["alpha_s"] > 0:
                facts["link_latency_s"] = Fact(value=_three_digits(fit["alpha_s"]), source=said)
    return facts


def notes_of(readings: Iterable[Reading], fits: Iterable[Mapping[str, Any]], versions: str) -> list[str]:
    """Everything that was measured, for the head of a machine file: its fields hold only a part."""
    notes = [
        f"SI units. Measured on the machine itself by `moesaic calibrate`, {versions}.",
        "Medians, and the quartile range over the median:",
    ]
    notes += [
        f"{one.part:<12} {one.median:10.4g} {one.unit:<8} {one.spread_text:>5}  {one.label}"
        for one in readings
    ]
    notes += [f"{'fit':<12} {words(fit)}" for fit in fits]
    return notes


def words(fit: Mapping[str, Any]) -> str:
    """A fitted collective in a line."""
    head = f"{fit['op']}, {fit['processes']} processes"
    if "why_not" in fit:
        return f"{head}: {fit['why_not']}"
    return (
        f"{head}: alpha {format_seconds(fit['alpha_s'])}, beta {format_bytes(fit['beta_bytes_per_s'])}/s, "
        f"off by {fit['rms_error']:.0%} (rms), {fit['max_error']:.0%} at most"
    )


def _three_digits(value: float) -> float:
    """A measurement has no more."""
    return float(f"{value:.3g}")
