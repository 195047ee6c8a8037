"""What `alltoall_perf` measured, judged against the links of a machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from moesaic.errors import ConfigError
from moesaic.spec.hardware import Cluster
from moesaic.units import format_bytes

GOOD_SHARE = 0.7
"""Part of the datasheet's rate that a sound node reaches with large messages.

Source: guess, from NVSwitch nodes whose all-to-all is reported at 0.75 to 0.85 of 450 GB/s.
"""
TOLERANCE = 0.02  # of a printed number: nccl-tests rounds to two decimals
LARGE_BYTES = 16 * 2**20  # smaller messages measure latency

Verdict = Literal["good", "slow", "impossible", "wrong"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One message size. Units: bytes, seconds, bytes per second."""

    size_bytes: int
    time_s: float
    algbw: float  # bytes of a rank's buffer over the time
    busbw: float  # bytes that leave a rank over the time
    num_wrong: int | None  # results that differed; None: not checked


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """Whether a measured all-to-all is what the machine's links allow. Units: bytes per second."""

    verdict: Verdict
    num_ranks: int
    busbw: float  # best of the large messages
    peak: float  # that no all-to-all of so many ranks can exceed
    at_least: float
    bound_by: Literal["link", "network"]
    reason: str


def read_results(
    text: str, *, num_ranks: int | None = None, name: str = "results"
) -> tuple[int, tuple[Row, ...]]:
    """Ranks and rows of an alltoall_perf output; the out-of-place columns.

    Raises: ConfigError without rows, and where the number of ranks is neither printed nor given.
    """
    rows = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 8 and words[0].isdigit() and words[1].isdigit():
            numbers = words[5:9] if re.fullmatch(r"-?\d+", words[4]) else words[4:8]
            try:
                time_us, algbw, busbw = (float(word) for word in numbers[:3])
            except ValueError:
                continue
            wrong = numbers[3] if len(numbers) > 3 else "N/A"
            rows.append(
                Row(
                    size_bytes=int(words[0]), time_s=time_us / 1e6, algbw=algbw * 1e9, busbw=busbw * 1e9,
                    num_wrong=int(wrong) if wrong.isdigit() else None,
                )
            )  # fmt: skip
    printed = len(re.findall(r"^#\s+Rank\s+\d+", text, re.MULTILINE))
    ranks = printed or num_ranks
    if not rows:
        raise ConfigError(f"{name}: no line of sizes and times; give the whole output of alltoall_perf")
    if ranks is None or ranks < 2:
        raise ConfigError(
            f"{name}: says not how many ranks took part; name them with --machine, as in h100x8"
        )
    return ranks, tuple(rows)


def bus_bandwidth(algbw: float, num_ranks: int) -> float:
    """What leaves a rank: of its buffer the part that is not for itself, (n - 1) / n.

    Source: nccl-tests, doc/PERFORMANCE.md.
    """
    return algbw * (num_ranks - 1) / num_ranks


def peak_bandwidth(cluster: Cluster, num_ranks: int) -> tuple[float, Literal["link", "network"]]:
    """The busbw that no all-to-all exceeds, and what bounds it.

    Of n ranks, p in a link domain, a rank sends (p - 1) / n of its buffer over the link and (n - p) / n over
    the network; the slower of the two decides.

    Raises: ConfigError for a machine whose file has no such rate.
    """
    inside = min(cluster.link_domain, num_ranks)
    facts = cluster.machine.facts
    bounds: list[tuple[float, Literal["link", "network"]]] = []
    if inside > 1:
        link = facts.get("link_bytes_per_s") or facts.get("host_link_bytes_per_s")
        if link is None:
            raise ConfigError(f"machine {cluster.machine.name} has no link in its file")
        bounds.append((link.value * (num_ranks - 1) / (inside - 1), "link"))
    if num_ranks > inside:
        network = facts.get("network_bytes_per_s")
        if network is None:
            raise ConfigError(f"machine {cluster.machine.name} has no network in its file")
        bounds.append((network.value * (num_ranks - 1) / (num_ranks - inside), "network"))
    return min(bounds)


def judge(
    num_ranks: int, rows: tuple[Row, ...], cluster: Cluster, at_least: float | None = None
) -> Judgement:
    """Whether the best large message is as fast as the links let it be.

    `at_least` is the bytes per second that are asked for (None: GOOD_SHARE of the peak).

    Raises: ConfigError for a threshold that the links cannot reach.
    """
    peak, bound = peak_bandwidth(cluster, num_ranks)
    rate = f"{format_bytes(peak)}/s"
    if at_least is not None and at_least >= peak:
        raise ConfigError(
            f"a threshold of {format_bytes(at_least)}/s is never met: {num_ranks} ranks of {cluster} send at "
            f"most {rate} each over the {bound}; ask for less, as {format_bytes(GOOD_SHARE * peak)}/s"
        )
    wanted = GOOD_SHARE * peak if at_least is None else at_least
    large = [row for row in rows if row.size_bytes >= LARGE_BYTES] or [rows[-1]]
    best = max(large, key=lambda row: row.busbw)
    verdict, reason = _verdict(num_ranks, rows, best, peak, wanted, bound)
    return Judgement(
        verdict=verdict, num_ranks=num_ranks, busbw=best.busbw, peak=peak, at_least=wanted, bound_by=bound,
        reason=reason,
    )  # fmt: skip


def _verdict(
    num_ranks: int, rows: tuple[Row, ...], best: Row, peak: float, wanted: float, bound: str
) -> tuple[Verdict, str]:
    shown = f"{format_bytes(best.busbw)}/s at {format_bytes(best.size_bytes)}"
    wrong = next((row for row in rows if row.num_wrong), None)
    if wrong is not None:
        return "wrong", (
            f"{wrong.num_wrong} results of the message of {format_bytes(wrong.size_bytes)} differ: a "
            "link or a "
            "driver is broken"
        )
    for row in rows:
        expected = bus_bandwidth(row.algbw, num_ranks)
        if abs(row.busbw - expected) > TOLERANCE * expected + 0.01e9:
            return "impossible", (
                f"busbw {format_bytes(row.busbw)}/s is not algbw x {num_ranks - 1}/{num_ranks} = "
                f"{format_bytes(expected)}/s: these are not {num_ranks} ranks, or not an all-to-all"
            )
    if best.busbw > peak:
        return "impossible", f"{shown} is more than the {format_bytes(peak)}/s that the {bound} carries"
    if best.busbw < wanted:
        return (
            "slow",
            f"{shown} is below {format_bytes(wanted)}/s, {best.busbw / peak:.0%} of the {bound}'s peak",
        )
    return "good", f"{shown}, {best.busbw / peak:.0%} of the {bound}'s peak"
