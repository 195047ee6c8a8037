"""From the times of single requests to the figures of a run, and over runs to median and range.

Definitions, for tools differ: TTFT is from sending the request to its first token; TPOT is (last token -
first token) / (tokens - 1); inter-token time is between two arrivals; latency is from sending to the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """One request, by one clock.

    Units:  seconds; `token_s` are the arrivals of output, which may carry several tokens each.
    """

    sent_s: float
    token_s: tuple[float, ...]
    end_s: float
    num_prompt: int
    num_output: int
    num_wanted: int
    num_cached: int = 0
    is_rejected: bool = False  # the server was full, and said so
    error: str | None = None

    @property
    def is_complete(self) -> bool:
        """Whether it can be timed."""
        return self.error is None and self.num_output > 0 and bool(self.token_s)

    @property
    def ttft_s(self) -> float:
        """To the first token."""
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """Per token after the first; None for a single token."""
        if self.num_output < 2:
            return None
        return (self.token_s[-1] - self.token_s[0]) / (self.num_output - 1)


FIGURES: Mapping[str, str] = {
    "ttft_s_p50": "time to first token, median",
    "ttft_s_p99": "time to first token, 99th percentile",
    "tpot_s_p50": "time per output token after the first, median over requests",
    "tpot_s_p99": "time per output token after the first, 99th percentile",
    "inter_token_s_p50": "time between tokens, median",
    "inter_token_s_p99": "time between tokens, 99th percentile",
    "latency_s_p50": "whole request, median",
    "latency_s_p99": "whole request, 99th percentile",
    "output_tokens_per_s": "output tokens per second of the run",
    "total_tokens_per_s": "prompt and output tokens per second of the run",
    "requests_per_s": "requests completed per second of the run",
    "duration_s": "first request sent to last one ended",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run: its figures, and what did not go as asked."""

    figures: Mapping[str, float]
    num_complete: int
    num_rejected: int
    num_failed: int
    num_short: int  # ended with fewer tokens than asked for
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    errors: tuple[str, ...]  # distinct, the first few


def summarise(timings: Sequence[Timing]) -> Run:
    """The figures of one run; those that need a completed request are absent without one."""
    complete = [timing for timing in timings if timing.is_complete]
    figures: dict[str, float] = {}
    if complete:
        tpots = [tpot for timing in complete if (tpot := timing.tpot_s) is not None]
        gaps = [gap for timing in complete for gap in np.diff(timing.token_s).tolist()]
        _percentiles(figures, "ttft_s", [timing.ttft_s for timing in complete])
        _percentiles(figures, "tpot_s", tpots)
        _percentiles(figures, "inter_token_s", gaps)
        _percentiles(figures, "latency_s", [timing.end_s - timing.sent_s for timing in complete])
        duration = max(t.end_s for t in complete) - min(t.sent_s for t in timings)
        num_output = sum(timing.num_output for timing in complete)
        figures["output_tokens_per_s"] = num_output / duration
        figures["total_tokens_per_s"] = (num_output + sum(t.num_prompt for t in complete)) / duration
        figures["requests_per_s"] = len(complete) / duration
        figures["duration_s"] = duration
    errors = dict.fromkeys(timing.error for timing in timings if timing.error is not None)
    return Run(
        figures=figures,
        num_complete=len(complete),
        num_rejected=sum(timing.is_rejected for timing in timings),
        num_failed=sum(timing.error is not None and not timing.is_rejected for timing in timings),
        num_short=sum(timing.num_output < timing.num_wanted for timing in complete),
        num_prompt_tokens=sum(timing.num_prompt for timing in complete),
        num_cached_tokens=sum(timing.num_cached for timing in complete),
        num_output_tokens=sum(timing.num_output for timing in complete),
        errors=tuple(errors)[:3],
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """One figure over the runs."""

    median: float
    min: float
    max: float

    @property
    def relative(self) -> float:
        """(max - min) / median."""
        return (self.max - self.min) / self.median if self.median else 0.0


def over_runs(runs: Sequence[Run]) -> dict[str, Spread]:
    """Median and range of every figure that each run has, in the order of `FIGURES`."""
    spreads = {}
    for name in FIGURES:
        values = [run.figures[name] for run in runs if name in run.figures]
        if values and len(values) == len(runs):
            spreads[name] = Spread(median=float(np.median(values)), min=min(values), max=max(values))
    return spreads


def _percentiles(figures: dict[str, float], name: str, values: Sequence[float]) -> None:
    if values:
        figures[f"{name}_p50"] = float(np.percentile(values, 50))
        figures[f"{name}_p99"] = float(np.percentile(values, 99))
