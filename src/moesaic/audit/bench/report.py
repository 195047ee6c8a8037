"""A benchmark's result as a value, for people and programs: median and range, and what is doubtful about it.

Numbers without machine, versions and numerics are not a result; a warning names the flag to try.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moesaic.audit.bench.measure import Measured, Plan
from moesaic.audit.bench.timing import FIGURES, Run, Spread, over_runs
from moesaic.units import format_bytes, format_seconds

MIN_RUNS = 3
NOISY = 0.10  # guess: a range of a tenth of the median is more than two runs of one thing should differ
BUSY = 0.5  # guess: half a processor's worth of other work per processor shows in the figures
_LIBRARIES = ("moesaic", "torch", "numpy", "httpx")


@dataclass(frozen=True, kw_only=True, slots=True)
class Slo:
    """Targets for the 99th percentile over requests; the median over runs counts."""

    ttft_s: float | None = None
    tpot_s: float | None = None

    def missed(self, figures: Mapping[str, Spread]) -> tuple[str, ...]:
        """One sentence per target that was not met; a figure that is absent is not met."""
        found = []
        for name, target in (("ttft_s_p99", self.ttft_s), ("tpot_s_p99", self.tpot_s)):
            if target is None:
                continue
            spread = figures.get(name)
            if spread is None:
                found.append(f"{name}: no request was completed, the target is {format_seconds(target)}")
            elif spread.median > target:
                found.append(
                    f"{name}: {format_seconds(spread.median)}, the target is {format_seconds(target)}"
                )
        return tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """Everything that a benchmark found."""

    kind: str  # "throughput" or "serve"
    subject: str  # the model folder, or the server's address and model
    workload: str
    routing: str
    plan: Plan
    figures: Mapping[str, Spread]
    runs: tuple[Run, ...]
    warnings: tuple[str, ...]
    slo_missed: tuple[str, ...]
    active: Mapping[str, Any]  # what the engine says of itself: numerics digest, backend, effects
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    date: str

    def to_json(self) -> dict[str, Any]:
        """Plain values; units are in the keys."""
        return {
            "schema_version": 1,
            "kind": self.kind,
            "subject": self.subject,
            "workload": self.workload,
            "routing": self.routing,
            "plan": asdict(self.plan),
            "figures": {name: asdict(spread) for name, spread in self.figures.items()},
            "runs": [asdict(run) for run in self.runs],
            "warnings": list(self.warnings),
            "slo_missed": list(self.slo_missed),
            "numerics_digest": self.active.get("numerics_digest"),
            "active": dict(self.active),
            "machine": dict(self.machine),
            "versions": dict(self.versions),
            "date": self.date,
        }

    def to_markdown(self) -> str:
        """A table and what is needed to read it."""
        lines = [
            f"| {self.kind}: {self.subject} | median | min | max |",
            "|--|--:|--:|--:|",
            *(
                f"| {FIGURES[name]} (`{name}`) | {_show(name, s.median)} | {_show(name, s.min)} | "
                f"{_show(name, s.max)} |"
                for name, s in self.figures.items()
            ),
            "",
            f"{self.workload}; {self.routing}. {len(self.runs)} runs, "
            f"{self.plan.num_warmups} warm-up; {_load_text(self.plan)}.",
            f"{self.machine_text()}; {', '.join(f'{k} {v}' for k, v in self.versions.items())}; "
            f"numerics {self.active.get('numerics_digest', 'unknown')}; {self.date}.",
        ]
        lines += [f"- Warning: {text}" for text in self.warnings]
        lines += [f"- SLO missed: {text}" for text in self.slo_missed]
        return "\n".join(lines) + "\n"

    def to_text(self) -> str:
        """For the terminal."""
        width = max((len(FIGURES[name]) for name in self.figures), default=0)
        lines = [
            f"{self.kind}: {self.subject}",
            f"  {self.workload}; {_load_text(self.plan)}",
            f"  {len(self.runs)} runs, {self.plan.num_warmups} warm-up",
            f"  routing: {self.routing}",
            f"  {self.machine_text()}; numerics {self.active.get('numerics_digest', 'unknown')}",
            "",
            *(
                f"  {FIGURES[name]:<{width}}  {_show(name, s.median):>12}   "
                f"[{_show(name, s.min)} .. {_show(name, s.max)}]"
                for name, s in self.figures.items()
            ),
        ]
        lines += ["", *(f"warning: {text}" for text in self.warnings)] if self.warnings else []
        lines += [f"SLO missed: {text}" for text in self.slo_missed]
        return "\n".join(lines)

    def machine_text(self) -> str:
        """Processor, how many of it, memory."""
        machine = self.machine
        memory = format_bytes(machine["memory_bytes"])
        return f"{machine['cpu']}, {machine['num_cpus']} processors, {memory}, {machine['system']}"


def make_report(
    *,
    kind: str,
    subject: str,
    measured: Measured,
    plan: Plan,
    slo: Slo,
    active: Mapping[str, Any],
    load_before: float,
    ignore_eos: bool,
) -> Report:
    """Put a result together, with what is doubtful about it."""
    figures = over_runs(measured.runs)
    return Report(
        kind=kind,
        subject=subject,
        workload=measured.workload.name,
        routing=measured.workload.routing,
        plan=plan,
        figures=figures,
        runs=measured.runs,
        warnings=tuple(_warnings(measured, plan, figures, active, load_before, ignore_eos=ignore_eos)),
        slo_missed=slo.missed(figures),
        active=active,
        machine=describe_machine(),
        versions=describe_versions(),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _warnings(
    measured: Measured,
    plan: Plan,
    figures: Mapping[str, Spread],
    active: Mapping[str, Any],
    load_before: float,
    *,
    ignore_eos: bool,
) -> list[str]:
    runs, items = measured.runs, measured.workload.items
    found = []
    if len(runs) < MIN_RUNS:
        found.append(f"{len(runs)} run(s) give no range: try --runs {MIN_RUNS} or more")
    if plan.num_warmups == 0:
        found.append("no warm-up: the first requests may pay for caches and memory; try --warmup 1")
    rate = figures.get("output_tokens_per_s")
    if rate is not None and rate.relative > NOISY:
        found.append(
            f"output tokens/s range over {rate.relative:.0%} of the median: close other programs, or try "
            "more --num-prompts or --runs"
        )
    if load_before > BUSY * (os.cpu_count() or 1):
        found.append(f"the machine was busy before the start (load {load_before:.1f}): close other programs")
    if num_rejected := sum(run.num_rejected for run in runs):
        found.append(f"{num_rejected} requests were rejected: try a lower --concurrency or --request-rate")
    if num_failed := sum(run.num_failed for run in runs):
        errors = "; ".join(dict.fromkeys(error for run in runs for error in run.errors))
        found.append(f"{num_failed} requests failed: {errors}")
    if num_short := sum(run.num_short for run in runs):
        hint = "raise the server's context" if ignore_eos else "try --ignore-eos"
        found.append(f"{num_short} outputs are shorter than asked for: {hint}")
    if plan.concurrency is not None and len(items) < plan.concurrency:
        found.append(
            f"{len(items)} prompts never fill a concurrency of {plan.concurrency}: try more --num-prompts"
        )
    if measured.workload.num_dropped:
        found.append(
            f"{measured.workload.num_dropped} requests of the trace are longer than the context and were "
            "left out: try --trace-scale below 1"
        )
    cached = sum(run.num_cached_tokens for run in runs)
    prompt = sum(run.num_prompt_tokens for run in runs)
    if cached > NOISY * prompt:
        found.append(f"{cached / prompt:.0%} of the prompt tokens came from the prefix cache")
    found += [f"not active: {note}" for note in active.get("not_active", ())]
    return found


def describe_machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    return {
        "cpu": cpu,
        "num_cpus": os.cpu_count() or 1,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
    }


def describe_versions() -> dict[str, str]:
    """Python, and the libraries that decide speed."""
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def load_average() -> float:
    """Processes that wanted to run over the last minute."""
    return os.getloadavg()[0]


def _load_text(plan: Plan) -> str:
    if plan.request_rate is not None:
        text = f"{plan.request_rate:g} requests/s"
        return text if plan.concurrency is None else f"{text}, at most {plan.concurrency} at once"
    return "as fast as they come" if plan.concurrency is None else f"{plan.concurrency} at once"


def _show(name: str, value: float) -> str:
    if name.endswith("_per_s"):
        return f"{value:.1f}"
    return format_seconds(value)
