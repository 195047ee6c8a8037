"""Rules of thumb with their numbers: whether a sparse model suits, what to do first, which batch to run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.account.memory import weight_bytes
from moesaic.account.traffic import balance_point, sparsity, step_traffic
from moesaic.cost.comm import link_rate, network_rate
from moesaic.cost.exchange import expert_by_tensor_bytes
from moesaic.cost.profile import Profile
from moesaic.cost.term import Cost, leaves
from moesaic.errors import ConfigError
from moesaic.planner.demand import Demand
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec
from moesaic.units import format_bytes

EXCHANGE_LIMIT = 0.35
"""Share of a step in exchanges above which it counts as bound by them. Source: the lecture notes' alert."""
FAST = 2.0  # guess: a time per token this near to reading the active weights alone is out of reach
LONG_ANSWER = 128  # guess: tokens from which decoding, not the prompt, is most of a request


SPOKEN = ("memory", "requests at a time", "length of answers", "latency", "statistics", "formats")
"""Topics that a plan's screen has a line for; the layout itself says the rest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """One rule: whether it speaks for the thing, and the arithmetic."""

    topic: str
    holds: bool
    reason: str


def suitability(model: ModelSpec, cluster: Cluster, demand: Demand) -> tuple[Advice, ...]:
    """For and against a sparse model on some devices under some traffic.

    Source: the lecture notes' table: suits many requests at a time, long answers and quality; not little
    memory, short exchanges, or the lowest latency.
    """
    moes = [moe for _, moe in model.moe_layers]
    if not moes:
        return ()
    have = cluster.num_devices * cluster.machine.memory_bytes * 0.9
    need = sum(weight_bytes(model).values())
    found = [Advice(
        topic="memory", holds=need <= have,
        reason=f"all {format_bytes(need)} of weights are kept, {format_bytes(have)} are usable",
    )]  # fmt: skip
    if demand.concurrency is not None:
        rows, ratio = demand.concurrency / max(sparsity(moe) for moe in moes), max(map(sparsity, moes))
        point = balance_point(model, cluster.machine)
        wanted = point.rows if point is not None else 0.0
        found.append(Advice(
            topic="requests at a time", holds=rows >= 1.0,
            reason=f"{demand.concurrency} / (E / k = {ratio:.3g}) = {rows:.3g} rows an expert; below 1 most "
            f"weights are read for one row, from {wanted:.3g} on computing bounds",
        ))  # fmt: skip
    found.append(Advice(
        topic="length of answers", holds=demand.osl >= LONG_ANSWER,
        reason=f"{demand.osl} tokens; decoding is what sparsity makes cheap, from {LONG_ANSWER} or so it is "
        "most of a request",
    ))  # fmt: skip
    if demand.tpot_s is not None:
        read = step_traffic(model, 1, demand.isl).total
        floor = read / (cluster.num_devices * cluster.machine.memory_bytes_per_s)
        found.append(Advice(
            topic="latency", holds=demand.tpot_s >= FAST * floor,
            reason=f"{demand.tpot_s * 1e3:.3g} ms a token; reading the active weights once takes "
            f"{floor * 1e3:.3g} ms on all devices",
        ))  # fmt: skip
    return tuple(found)


def habits(
    model: ModelSpec, cluster: Cluster, profile: Profile, *, has_load: bool, batch: int
) -> tuple[Advice, ...]:
    """What to do before and while serving: statistics first, formats first, expert parallelism by bandwidth.

    Source: the lecture notes' habits of practice.
    """
    moes = [moe for _, moe in model.moe_layers]
    if not moes:
        return ()
    stored = model.stored_format("routed_experts")
    can_narrow = stored.bits >= 16 and cluster.machine.has_rate("fp8")
    k, devices = moes[0].experts_per_token, cluster.num_devices
    ratio = expert_by_tensor_bytes(k, devices) if devices > 1 else 1.0
    leaves_node = devices > cluster.link_domain
    slower = link_rate(cluster, profile) / network_rate(cluster, profile) if leaves_node else 1.0
    return (
        Advice(
            topic="statistics", holds=not has_load,
            reason="count how often each expert is chosen on real requests, and give it by --load; repeat it "
            "with the traffic, and place copies anew",
        ),
        Advice(
            topic="formats", holds=can_narrow,
            reason=f"experts are stored in {stored.bits:.3g} bits; 8 halve what is read and sent, before any "
            "layout" if can_narrow else f"experts are stored in {stored.bits:.3g} bits",
        ),
        Advice(
            topic="expert parallelism", holds=ratio * slower < 1.0,
            reason=f"it sends k / n = {ratio:.3g} of tensor parallelism's bytes"
            + (f", over a network {slower:.3g} times slower than the link" if leaves_node else ""),
        ),
        Advice(
            topic="batch", holds=batch / sparsity(moes[0]) < 1.0,
            reason=f"{batch} sequences are {batch / sparsity(moes[0]):.3g} rows an expert; more cost little "
            "as long as weights are read for fewer rows than a product takes",
        ),
    )  # fmt: skip


def worth_saying(advice: Sequence[Advice]) -> list[str]:
    """What speaks against a sparse model here, and what to do first, as sentences."""
    return [
        f"{one.topic}: {one.reason}"
        for one in advice
        if one.holds == (one.topic in ("statistics", "formats")) and one.topic in SPOKEN
    ]


def exchange_share(cost: Cost) -> float:
    """Part of all work of a step that is exchanges between ranks: Tcomm / (Tcomm + Tcomp)."""
    seconds = {True: 0.0, False: 0.0}
    for times, term in leaves(cost):
        seconds[term.resource in ("link", "network")] += float(np.asarray(times * term.seconds.value))
    return seconds[True] / (seconds[True] + seconds[False])


def batch_within(
    batches: Sequence[int], shares: Sequence[float], limit: float = EXCHANGE_LIMIT
) -> tuple[int, str]:
    """(batch, why): the largest whose exchanges take at most `limit` of the step.

    Where all take more, a smaller batch helps only if its share is smaller: with few rows latency is most of
    an exchange, and a larger batch is the better one.

    Raises: ConfigError for no batches, or not as many shares.
    """
    if not batches or len(batches) != len(shares):
        raise ConfigError(f"one share for each batch, got {len(batches)} batches and {len(shares)} shares")
    allowed = [idx for idx, share in enumerate(shares) if share <= limit]
    if allowed:
        idx = allowed[-1]
        return batches[idx], f"the largest whose exchanges take {shares[idx]:.0%}, at most {limit:.0%}"
    idx = int(np.argmin(shares))
    way = "smaller" if idx == 0 else "larger"
    return batches[idx], (
        f"exchanges take at least {shares[idx]:.0%} of a step, above {limit:.0%}; a {way} batch is the "
        "nearest, or fewer ranks"
    )
