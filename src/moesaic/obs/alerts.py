"""When to call someone: rules over counters and times, each with what it saw and what to do about it.

Pure functions of numbers. A threshold is policy, stated with its source; who gathers numbers is not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.errors import ConfigError
from moesaic.obs.load import skew
from moesaic.spec.experts import IntArray

SKEW_VARIATION = 0.5  # standard deviation by mean, over five minutes; lecture notes on MoE serving
SKEW_WINDOW_S = 300.0
HOT_MAX_MEAN = 2.0  # guess: the hottest GPU has twice the mean, so the others idle half the time
EXCHANGE_SHARE = 0.35  # of a step's work that is transfers; the same notes
COLD_MISS = 0.05  # requests that met an expert which was not resident; the same notes
BUBBLE = 0.05  # of a step in which a rank waits; the same notes
STALL_SHARE = 0.2  # guess: of a step's time, above which loading cold experts is what it waits for


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """A rule that fired."""

    rule: str
    value: float
    threshold: float
    message: str  # what was seen, and the next step


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadSample:
    """Tokens per expert or GPU in one stretch of time.

    Shapes:  counts [E] or [ranks].
    """

    until_s: float
    counts: IntArray


def skew_alert(
    samples: Sequence[LoadSample], *, now_s: float, what: str = "experts", window_s: float = SKEW_WINDOW_S
) -> Alert | None:
    """Load over the window whose standard deviation is above half its mean, per expert or per GPU.

    Shares of 2:1 among eight (two of 17 %, two of 8.5 %, four of 12.25 %) have 0.24 and do not fire.
    """
    recent = [sample.counts for sample in samples if now_s - window_s < sample.until_s <= now_s]
    total = np.sum(recent, axis=0) if recent else np.zeros(0, np.int64)
    found = skew(total) if total.size else None
    if found is None or found.variation <= SKEW_VARIATION:
        return None
    return Alert(
        rule="load skew", value=found.variation, threshold=SKEW_VARIATION,
        message=f"load of {what} over {window_s:.0f} s has {found.variation:.2f} of its mean as standard "
        f"deviation; number {found.hottest_id} has {found.max_mean:.1f} times the mean: give it copies, or "
        "place experts anew",
    )  # fmt: skip


def hot_card_alert(rank_load: Sequence[float]) -> Alert | None:
    """One GPU does twice the mean or more: the others wait for it."""
    values = np.asarray(rank_load, np.float64)
    if not values.size or values.sum() == 0:
        return None
    ratio = float(values.max() / values.mean())
    if ratio < HOT_MAX_MEAN:
        return None
    return Alert(
        rule="hot card", value=ratio, threshold=HOT_MAX_MEAN,
        message=f"GPU {int(values.argmax())} does {ratio:.2f} times the mean, so GPUs work "
        f"{1 / ratio:.0%} of the time on average: copy its hottest experts, or place them anew",
    )  # fmt: skip


def exchange_alert(
    exchange_s: float, compute_s: float, *, larger_batch: tuple[float, float] | None = None
) -> Alert | None:
    """Transfers are more than 0.35 of the work. `larger_batch` is (exchange, compute) at a larger batch.

    Which way the batch should go depends: where latencies dominate a larger batch lowers the share, where
    bytes do it does not. Without the second measurement the advice is to make it.

    Raises: ConfigError for negative times.
    """
    share = exchange_share(exchange_s, compute_s)
    if share <= EXCHANGE_SHARE:
        return None
    if larger_batch is None:
        advice = "measure a larger batch too: only then is it known whether the batch should grow or shrink"
    elif exchange_share(*larger_batch) < share:
        advice = "a larger batch lowers the share (latencies dominate): let it grow"
    else:
        advice = (
            "a larger batch does not lower the share (bytes dominate): shrink it, overlap, or move experts"
        )
    return Alert(
        rule="exchange share", value=share, threshold=EXCHANGE_SHARE,
        message=f"transfers are {share:.0%} of the work; {advice}",
    )  # fmt: skip


def exchange_share(exchange_s: float, compute_s: float) -> float:
    """Transfers by transfers and computing.

    Raises: ConfigError for negative times.
    """
    if exchange_s < 0 or compute_s < 0:
        raise ConfigError(f"times must be at least 0, got {exchange_s:g} and {compute_s:g} s")
    total = exchange_s + compute_s
    return exchange_s / total if total else 0.0


def batch_growth_alert(shares: Mapping[int, float], throughputs: Mapping[int, float]) -> Alert | None:
    """A batch that still gains throughput while transfers already are more than 0.35 of its work.

    Shapes:  both by batch. The largest batch is the one that throughput alone would choose.
    """
    if not shares or set(shares) != set(throughputs):
        raise ConfigError("shares and throughputs must be of the same batches, and of at least one")
    greedy = max(throughputs, key=lambda batch: throughputs[batch])
    within = [batch for batch in shares if shares[batch] <= EXCHANGE_SHARE]
    if shares[greedy] <= EXCHANGE_SHARE:
        return None
    best = max(within, key=lambda batch: throughputs[batch]) if within else None
    return Alert(
        rule="batch growth", value=shares[greedy], threshold=EXCHANGE_SHARE,
        message=f"batch {greedy} has the most throughput with {shares[greedy]:.0%} of its work in transfers; "
        + ("no batch is within the limit" if best is None else f"batch {best} stays within the limit"),
    )  # fmt: skip


def cold_miss_alert(num_misses: int, num_requests: int) -> Alert | None:
    """More than 5 % of requests met an expert that was not resident."""
    share = num_misses / num_requests if num_requests else 0.0
    if share <= COLD_MISS:
        return None
    return Alert(
        rule="cold load", value=share, threshold=COLD_MISS,
        message=f"{share:.1%} of requests waited for an expert to be loaded: prefetch the likely ones, or "
        "keep more resident",
    )  # fmt: skip


def low_threshold_alert(offloaded_shares: Sequence[float], load_s: float, step_s: float) -> Alert | None:
    """Experts that are offloaded and chosen often: the threshold below which they leave the device is wrong.

    Each choice of one stalls a step for `load_s`; the stall per step is the sum over them of share x load_s.
    """
    stall_s = float(np.sum(np.asarray(offloaded_shares, np.float64))) * load_s
    part = stall_s / (stall_s + step_s) if step_s > 0 else 0.0
    if part <= STALL_SHARE:
        return None
    return Alert(
        rule="low threshold", value=part, threshold=STALL_SHARE,
        message=f"offloaded experts, the hottest with {max(offloaded_shares):.0%} of the choices, stall a "
        f"step for {stall_s * 1e3:.2f} ms beside {step_s * 1e3:.2f} ms of work: keep the hottest resident",
    )  # fmt: skip


def dense_method_alert(counts: IntArray, num_tokens: int) -> Alert | None:
    """A benchmark whose experts are as even as chance alone makes them: its tokens were random.

    Routing of real text varies by more than a Poisson count. Fires where the variance of the counts is within
    twice that of chance.
    """
    mean = float(counts.mean()) if counts.size else 0.0
    if mean < 1.0 or num_tokens < 1:
        return None
    ratio = float(counts.var()) / mean
    if ratio > 2.0:
        return None
    return Alert(
        rule="dense benchmark", value=ratio, threshold=2.0,
        message=f"expert counts vary {ratio:.2f} times as much as chance makes them, so the tokens were "
        "random: measure with text of the real use, as skew is what a MoE's speed depends on",
    )  # fmt: skip


def dropped_alert(num_dropped: int, num_tokens: int) -> Alert | None:
    """Any token without its experts: inference drops none."""
    if num_dropped == 0:
        return None
    return Alert(
        rule="dropped tokens", value=num_dropped / max(num_tokens, 1), threshold=0.0,
        message=f"{num_dropped} of {num_tokens} tokens were dropped: run steps that overflow again without "
        "buffers",
    )  # fmt: skip


def bubble_alert(idle_s: float, step_s: float) -> Alert | None:
    """A rank waits for more than 5 % of a step."""
    share = idle_s / step_s if step_s > 0 else 0.0
    if share <= BUBBLE:
        return None
    return Alert(
        rule="bubble", value=share, threshold=BUBBLE,
        message=f"ranks wait {share:.1%} of a step: more micro-batches, or a better balance of the two sides",
    )  # fmt: skip
