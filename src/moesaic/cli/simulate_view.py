"""The studies of a layer as text: one screen each."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from moesaic.cli.simulate_output import gantt
from moesaic.planner.sim.burst import BurstReport
from moesaic.planner.sim.chunking import ChunkReport, MessageRow
from moesaic.planner.sim.ep import EpReport, Spread
from moesaic.planner.sim.ep_question import MAX_COUNTED, EpAnswer
from moesaic.planner.sim.pingpong import PingPongStudy

WIDTH = 108


def pingpong_text(name: str, report: PingPongStudy, shown_s: float) -> str:
    """Stages, the table over micro-batches, the timeline."""
    lines = [
        f"{name}: attention {_ms(report.attention_s)}, experts {_ms(report.expert_s)}, one way "
        f"{_ms(report.transfer_s)}; {report.num_layers} layers",
        "",
        f"{'micro-batches':>14}{'simulated':>13}{'closed form':>13}{'formula (5)':>13}{'per batch':>12}"
        f"{'throughput':>12}{'attention':>11}{'experts':>9}",
    ]
    for row in report.rows:
        gain = "" if row.gain is None else f"{row.gain - 1:+.1%}"
        paper = "-" if row.paper_s is None else _ms(row.paper_s)
        lines.append(
            f"{row.num_micro_batches:>14}{_ms(row.simulated_s):>13}{_ms(row.closed_form_s):>13}{paper:>13}"
            f"{_ms(row.simulated_s / row.num_micro_batches):>12}{gain:>12}{row.busy['attention']:>11.1%}"
            f"{row.busy['experts']:>9.1%}"
        )
    lines += [
        "",
        f"enough: {report.fewest} micro-batches keep the slowest station busy (m max >= Ta + Te + 2 Tc); the "
        f"paper's rule says {report.paper_fewest}",
    ]
    refused = [row for row in report.rows if row.paper_refusal is not None]
    if refused:
        last = refused[-1]
        lines += wrap(
            f"formula (5) is left out where it does not hold; with {last.num_micro_batches}: "
            f"{last.paper_refusal}",
            WIDTH,
        )
    jobs = len({span.job for span in report.chosen.spans})
    lines += ["", f"{jobs} micro-batches, the first layers:", *gantt(report.chosen, until_s=shown_s)]
    return "\n".join(lines)


def ep_text(answer: EpAnswer, machine: str) -> str:
    """Imbalance by batch, copies over the wires; with a machine the exchange in chunks, and messages."""
    lines = _routing(answer.routing)
    if answer.chunks is not None:
        lines += ["", *_chunks(machine, answer.chunks), "", *_messages(answer.messages)]
    return "\n".join(lines)


def _messages(rows: Sequence[MessageRow]) -> list[str]:
    """Aggregation of a GPU's dispatch."""
    lines = [
        f"{'a GPU dispatches up to ' + str(MAX_COUNTED) + ' tokens in':<40}{'messages':>10}{'one by one':>14}"
    ]
    return lines + [f"  {row.name:<38}{row.num_messages:>10.1f}{_us(row.seconds):>14}" for row in rows]


def _straggler(report: EpReport) -> list[str]:
    """What a slow GPU does to all: collectives end with the last one."""
    if report.case.slow == 1.0:
        return []
    last = report.rows[-1]
    waits = ", ".join(f"{1 - one.utilisation:.0%} ({name})" for name, one in last.placements.items())
    text = (
        f"one GPU is {report.case.slow:g} x as slow: at {last.tokens_per_gpu} tokens the mean GPU waits for "
        f"{waits} of a step; a profile shows that as time in collectives"
    )
    return ["  " + line for line in wrap(text, WIDTH - 2)]


def _routing(report: EpReport) -> list[str]:
    case = report.case
    lines = [
        f"{case.num_experts} experts, top-{case.experts_per_token}, over {case.num_gpus} GPUs in "
        f"{case.num_nodes} nodes; {case.num_trials} batches each; seed {case.seed}",
        *wrap(
            f"routing: {report.source}; the hottest expert has {report.hottest_popularity:.1f} x the mean "
            "popularity",
            WIDTH,
        ),
        "",
        f"{'tokens':>8}{'per':>8}{'experts':>9}{'busiest':>16} "
        + "".join(f"{'busiest GPU, ' + name:>31}" for name in report.rows[0].placements),
        f"{'per GPU':>8}{'expert':>8}{'touched':>9}{'expert':>16} "
        + "".join(f"{'rows':>15}{'arrivals':>10}{'busy':>6}" for _ in report.rows[0].placements),
    ]
    for row in report.rows:
        cells = "".join(
            f"{_spread(one.rows, 15)}{one.arrivals.mean:>10.2f}{one.utilisation:>6.0%}"
            for one in row.placements.values()
        )
        lines.append(
            f"{row.tokens_per_gpu:>8}{row.mean_per_expert:>8,.4g}{row.touched:>9.1f}"
            f"{_spread(row.experts, 16)} {cells}"
        )
    lines += [
        "  busiest by the mean; rows are computed, arrivals received (a token once per GPU); busy: mean GPU",
        *_straggler(report),
        "",
        f"{'a token is sent':<18}{'copies':>10}{'closed form':>13}{'across nodes':>14}{'closed form':>13}",
    ]
    for name, one in report.copies.items():
        lines.append(
            f"  {name:<16}{one.copies:>10.3f}{one.closed:>13.3f}{one.across_nodes:>14.3f}"
            f"{one.across_nodes_closed:>13.3f}"
        )
    lines.append(
        "  closed forms are of equally popular experts; once per node: then on over the link inside it"
    )
    lines.append(
        f"buffers with room for every token of every other GPU carry {report.payload:.1%}, at most "
        f"k / (D - 1) = {report.payload_most:.1%}"
    )
    if report.variation is not None:
        decode, prefill = report.variation["decode"], report.variation["prefill"]
        lines.append(
            f"an expert's share varies by {decode:.2f} of its mean between batches of many requests, by "
            f"{prefill:.2f} of four"
        )
    return lines


def _chunks(machine: str, report: ChunkReport) -> list[str]:
    lines = [
        f"one layer on {machine}, {report.tokens} tokens per GPU; dispatch and combine on own streams",
        f"{'chunk':>8}{'chunks':>8}{'simulated':>13}{'closed form':>13}{'no expert computes':>20}",
    ]
    for row in report.rows:
        mark = "  <- best" if row is report.best else ""
        lines.append(
            f"{row.chunk_tokens:>8}{row.num_chunks:>8}{_us(row.simulated_s):>13}{_us(row.closed_form_s):>13}"
            f"{_us(row.exposed_s):>20}{mark}"
        )
    return [*lines, "", *gantt(report.timeline)]


def capacity_text(report: BurstReport) -> str:
    """Ways to set the factor, and the controller's step response."""
    case, policy = report.case, report.policy
    start_s, end_s = case.before_s, case.before_s + case.burst_s
    lines = [
        f"{case.num_experts} experts, top-{case.experts_per_token}, {case.tokens} tokens a step, "
        f"{case.burst:g} x as many from {start_s:g} to {end_s:g} s; seed {case.seed}",
        f"no step would overflow from a factor of {report.needed['quiet']:.2f} on, in the burst of "
        f"{report.needed['burst']:.2f}",
        "",
        f"{'':<18}{'step time over tokens':>24}{'in the burst':>22}{'steps that ran again':>28}{'mean':>8}",
        f"{'factor':<18}{'mean':>12}{'P99':>12}{'mean':>11}{'P99':>11}{'before':>10}{'burst':>9}{'after':>9}"
        f"{'factor':>8}{'swings':>8}",
    ]
    for row in report.rows:
        over = row.overflow
        lines.append(
            f"{row.name:<18}{_ms(row.step_s.mean):>12}{_ms(row.step_s.p[99]):>12}"
            f"{_ms(row.burst_step_s.mean):>11}{_ms(row.burst_step_s.p[99]):>11}{over['before']:>10.1%}"
            f"{over['burst']:>9.1%}{over['after']:>9.1%}{row.mean_factor:>8.2f}{row.num_swings:>8}"
        )
    lines += [
        "  a step that overflows runs again without buffers: no token is dropped",
        "",
        f"adaptive: factor + {policy.overflow_gain:g} x overflow - {policy.fill_gain:g} x (fill - "
        f"{policy.target:g}) every {policy.window_s * 1e3:g} ms, {policy.least:g} to {policy.most:g}",
        *_response(report),
    ]
    return "\n".join(lines)


def _response(report: BurstReport) -> list[str]:
    """The adaptive factor over time, a column per 0.5 s, a row per 0.1."""
    trail, policy = report.row("adaptive").factors, report.policy
    step = report.case.duration_s / 96
    seen = [policy.start] * 96
    for at_s, factor in trail:
        for column in range(min(int(at_s / step), 95), 96):
            seen[column] = factor
    top, bottom = round(policy.most * 10), round(policy.least * 10)
    lines = []
    for level in range(top, bottom - 1, -2):
        cells = "".join("#" if round(value * 10) >= level else " " for value in seen)
        lines.append(f"  {level / 10:.1f} |{cells}".rstrip())
    return [*lines, f"  {'':3} +{'-' * 95}", f"  {'':4} 0 s{report.case.duration_s:>90.0f} s"]


def _spread(found: Spread, width: int) -> str:
    return f"{f'{found.mean:.2f} +-{found.deviation:5.2f}':>{width}}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} us"
