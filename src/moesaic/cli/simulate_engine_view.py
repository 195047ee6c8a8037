"""Simulated engines and fleets as text: one screen each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moesaic.units import format_bytes

if TYPE_CHECKING:
    from moesaic.planner.sim.engine import EngineCase
    from moesaic.planner.sim.fleet import FleetReport
    from moesaic.planner.sim.serve import Percentiles, ServeReport

NO_CACHE = "none, as asked, or as a layer keeps a state and can reuse no prefix"


def serve_text(model: str, case: EngineCase, words: str, report: ServeReport, missed: Sequence[str]) -> str:
    """What requests waited for, and what the engine did."""
    lines = [
        _engine(model, case),
        f"{words}: {report.num_finished:,} finished in {report.duration_s:,.1f} s"
        + _left_out(report.num_too_long, report.num_cut, case)
        + (f"; {report.num_refused:,} refused by a full queue" if report.num_refused else ""),
        "",
        f"{'':<22}{'mean':>12}{'P50':>12}{'P90':>12}{'P95':>12}{'P99':>12}{'most':>12}",
    ]
    for name, found in (
        ("time to first token", report.ttft_s), ("time per token", report.tpot_s),
        ("waiting in the queue", report.queue_s), ("whole request", report.latency_s),
    ):  # fmt: skip
        lines.append(f"{name:<22}" + ("none" if found is None else _percentiles(found)))
    lines += [
        "",
        f"throughput    {report.request_rate:.3g} requests/s, {report.output_tokens_per_s:,.0f} answer and "
        f"{report.prompt_tokens_per_s:,.0f} prompt tokens/s",
        "prefix cache  "
        + (f"{report.prefix_hit:.1%} of prompt tokens found" if report.has_prefix_cache else NO_CACHE),
        f"KV pool       {report.kv_blocks:,} blocks of {case.kv_block}, at most {report.kv_peak:.0%} in use; "
        f"{report.num_preemptions} preemptions",
        f"steps         {report.num_steps:,}, {report.mean_batch:.1f} rows each, busy {report.busy:.0%} "
        f"of the time; transfers are {report.exchange_share:.0%} of the work",
        *_objectives(missed),
        "The scheduler, KV ledger and prefix cache are the engine's own; step times are "
        f"{case.step.profile.source} (profile {case.step.profile.name}).",
    ]
    return "\n".join(lines)


def fleet_text(model: str, case: EngineCase, words: str, report: FleetReport, missed: Sequence[str]) -> str:
    """Policies beside each other."""
    lines = [
        f"{report.num_engines} x {_engine(model, case)}",
        f"{words}{_left_out(report.num_too_long, report.num_cut, case)}; directory {report.staleness_s:g} s "
        f"behind; {report.kv_tokens:,} KV tokens an engine",
        "",
        f"{'':<18}{'cache':>8}{'TTFT':>11}{'':>11}{'':>11}{'TPOT':>11}{'busiest engine / mean':>25}"
        f"{'promised,':>11}",
        f"{'policy':<18}{'hits':>8}{'mean':>11}{'P50':>11}{'P99':>11}{'mean':>11}{'tokens':>13}{'requests':>12}"
        f"{'gone':>11}",
    ]
    for row in report.rows:
        ttft, tpot = row.ttft_s, row.tpot_s
        cells = (
            [f"{'none':>11}"] * 3
            if ttft is None
            else [f"{_s(one):>11}" for one in (ttft.mean, ttft.p[50], ttft.p[99])]
        )
        cells.append(f"{'none' if tpot is None else _s(tpot.mean):>11}")
        lines.append(
            f"{row.policy:<18}{row.hit_rate:>8.1%}{''.join(cells)}{row.balance_tokens:>13.2f}"
            f"{row.balance_requests:>12.2f}{row.stale_share:>11.2%}{'  *' if row.on_front else ''}"
        )
    lines += [
        "  * no other policy has both more hits and a lower P99; one endless cache would have "
        f"{report.best_hit_rate:.1%}",
        "  promised, gone: tokens that the directory said were cached and were not, of all prompt tokens",
        *([] if report.has_prefix_cache else [f"  prefix cache: {NO_CACHE}"]),
        *_objectives(missed),
        "Routing policies and KV ledgers are the router's and engine's own. Steps flow instead of being",
        "planned one by one, requests reserve room for their answers, a cache block has 512 tokens; step",
        f"times are {case.step.profile.source} (profile {case.step.profile.name}).",
    ]
    return "\n".join(lines)


def _engine(model: str, case: EngineCase) -> str:
    split = case.step.split
    numbers = {
        "dp": split.dp, "kvp": split.kvp, "tp": split.tp, "ep": split.ep, "expert_tp": split.expert_tp,
        "num_redundant": split.num_redundant, "num_micro_batches": split.num_micro_batches,
    }  # fmt: skip
    shown = " ".join(
        f"{name}={int(value)}" for name, value in numbers.items() if int(value) not in (0, 1) or name == "tp"
    )
    return f"{model} on {case.step.cluster}, {shown}; KV {format_bytes(case.kv_bytes())} a replica"


def _left_out(num_too_long: int, num_cut: int, case: EngineCase) -> str:
    text = ""
    if num_too_long:
        context = f"{case.limits.max_model_len:,}"
        text += f"; {num_too_long:,} left out: longer than the context of {context} or the pool"
    if num_cut:
        text += f"; {num_cut:,} answers cut to the context"
    return text


def _objectives(missed: Sequence[str]) -> list[str]:
    return [f"missed        {sentence}" for sentence in missed]


def _percentiles(found: Percentiles) -> str:
    values = (found.mean, *(found.p[percent] for percent in (50, 90, 95, 99)), found.most)
    return "".join(f"{_s(value):>12}" for value in values)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
