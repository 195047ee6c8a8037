"""A plan on one screen of text."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from moesaic.cost.term import Interval
from moesaic.planner.advice import Advice, worth_saying
from moesaic.planner.answer import notes_on
from moesaic.planner.balanced import shown_balance
from moesaic.planner.compare import CLOSE, Way, why_taken
from moesaic.planner.concurrency import Band
from moesaic.planner.plan import Plan, Pool
from moesaic.planner.question import price_unit
from moesaic.planner.residency import Residency
from moesaic.planner.search import Answer, Question
from moesaic.units import format_bytes, format_seconds

_COMPONENTS = ("weights", "experts", "replicas", "kv", "dispatch_buffers", "workspace")
WIDTH = 96  # of the text beside the labels
_OPTION = {"tpot_s": "--tpot-ms", "ttft_s": "--ttft-ms", "concurrency": "--concurrency"}


def render(
    model: str, question: Question, answer: Answer, bands: Sequence[Band], advice: Sequence[Advice] = ()
) -> str:
    """The answer, why, what else, and what not."""
    best = answer.best
    lines = [f"{model} on {' + '.join(str(one) for one in question.clusters)}, {_asked(question)}"]
    lines += _row("note", notes_on(model, question))
    lines += _missed(question, answer)
    lines += _row(
        "answer",
        [
            _throughput(best, price_unit(question.clusters)[0], _device(question)),
            f"TPOT {_interval(best.tpot)}, TTFT {_interval(best.ttft)} (no queue)",
        ],
    )
    lines += [line for pool in best.pools for line in _row(pool.role, [str(pool), _batch(pool)])]
    for held in (pool.residency for pool in best.pools if pool.residency is not None):
        lines += _row("experts", [_residency(held)])
    balance = shown_balance(question, best)
    lines += _row("ping-pong", [balance]) if balance is not None else []
    lines += _row("bottleneck", [best.bottleneck])
    if answer.runner_up is not None:
        lines += _row("runner-up", _runner_up(best, answer.runner_up, answer.missed))
    lines += _row("ways", [_way(way, plan, _device(question)) for way, plan in answer.ways.items()])
    lines += _memory(best.pools)
    lines += _row("EP or not?", [_band(band) for band in bands])
    lines += _row("advice", worth_saying(advice))
    lines += _row("ruled out", [
        f"{miss.count} by {_reason(name)}, nearest {miss.nearest}" for name, miss in answer.ruled_out.items()
    ] or ["nothing"])  # fmt: skip
    lines += _row("searched", [
        f"{answer.num_candidates:,} candidates in {format_seconds(answer.search_s)}; numbers are "
        f"{best.source}, profile {question.profile}, {question.load}"
    ])  # fmt: skip
    return "\n".join(lines)


def _asked(question: Question) -> str:
    demand = question.demand
    parts = [f"{demand.isl} tokens in, {demand.osl} out"]
    if demand.prefix_hit:
        parts.append(f"{demand.prefix_hit:.0%} of a prompt cached")
    if demand.tpot_s is not None:
        parts.append(f"TPOT <= {format_seconds(demand.tpot_s)}")
    if demand.ttft_s is not None:
        parts.append(f"TTFT <= {format_seconds(demand.ttft_s)}")
    if demand.concurrency is not None:
        parts.append(f"{demand.concurrency} in flight")
    return ", ".join([*parts, f"best {demand.objective.replace('-', ' ')}"])


def _missed(question: Question, answer: Answer) -> list[str]:
    if not answer.missed:
        return []
    best = answer.best
    takes = {
        "tpot_s": f"--tpot-ms {best.token_s * 1e3 + 0.05:.1f}",
        "ttft_s": f"--ttft-ms {float(best.ttft.value) * 1e3 + 0.5:.0f}",
        "concurrency": f"--concurrency {best.num_sequences}",
    }
    names = " and ".join(_OPTION[name] for name in answer.missed)
    needs = " ".join(takes[name] for name in answer.missed)
    return [f"no layout meets {names}; the nearest needs {needs}, or other machines:"]


def _device(question: Question) -> str:
    has_processor = any(one.machine.operator_s is not None for one in question.clusters)
    return "device" if has_processor else "GPU"


def _throughput(plan: Plan, unit: str, device: str) -> str:
    text = f"{_rate(plan.tokens_per_s_per_gpu)} tokens/s per {device}, {_rate(plan.tokens_per_s)} in all"
    if plan.price is not None:
        text += f", {plan.tokens_per_s / plan.price:.4g} per price unit ({unit})"
    if plan.power_w is not None:
        text += f", {plan.tokens_per_s / plan.power_w:.3g} per watt"
    return text


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _batch(pool: Pool) -> str:
    what = "prompts a replica and step" if pool.role == "prefill" else "sequences a replica"
    stored = pool.choice.weights or "as stored"
    return f"{pool.batch} {what}; weights {stored}, KV {pool.choice.kv}, dispatch {pool.choice.dispatch}"


def _residency(held: Residency) -> str:
    places = [(held.device, "on the devices"), (held.host, "in host memory"), (held.disk, "on disk")]
    shown = ", ".join(f"{count} {place}" for count, place in places if count)
    return (
        f"of each layer {shown}, the most popular nearest; the devices serve {held.local_share:.0%} of all "
        "choices, the host computes the others or sends their weights, whichever ends first"
    )


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    value, low, high = (float(one) for one in (interval.value, interval.low, interval.high))
    return f"{format_seconds(value)} ({format_seconds(low)} to {format_seconds(high)})"


def _way(way: Way, plan: Plan, device: str) -> str:
    price = "" if plan.price is None else f", {plan.tokens_per_s / plan.price:.4g} per price"
    return (
        f"{way}: {_rate(plan.tokens_per_s_per_gpu)} tokens/s per {device}{price}, TPOT "
        f"{'-' if plan.tpot is None else format_seconds(plan.token_s)}"
    )


def _runner_up(best: Plan, other: Plan, missed: Sequence[str]) -> list[str]:
    loss = 1.0 - other.value / best.value
    why = (
        "the answer is nearer to what was asked" if missed else f"within {CLOSE:.0%} {why_taken(best, other)}"
    )
    text = f"{loss:.1%} less" if loss >= 0 else f"{-loss:.1%} more, but {why}"
    pools = " + ".join(f"{pool.role} {pool}" for pool in other.pools)
    return [f"{text}: {pools}", f"TPOT {_interval(other.tpot)}, TTFT {_interval(other.ttft)}"]


def _memory(pools: Sequence[Pool]) -> list[str]:
    head = "".join(
        f"{name.replace('_', ' '):>18}" if len(name) > 9 else f"{name:>10}" for name in _COMPONENTS
    )
    lines = [f"  {'memory':<12}{head}  of usable"]
    for pool in pools:
        cells = "".join(
            f"{format_bytes(pool.memory[name]):>18}"
            if len(name) > 9
            else f"{format_bytes(pool.memory[name]):>10}"
            for name in _COMPONENTS
        )
        share = sum(pool.memory.values()) / pool.usable_bytes
        lines.append(f"  {pool.role:<12}{cells}  {share:.0%} of {format_bytes(pool.usable_bytes)}")
    return lines


def _band(band: Band) -> str:
    verdict = "EP" if band.use_ep else "no EP"
    gain = "" if band.gain is None else f" by {band.gain:.0%}"
    return f"{band.concurrency_from} to {band.concurrency_to} requests: {verdict}{gain}; {band.reason}"


def _reason(name: str) -> str:
    return {"tpot": "time per token", "ttft": "time to first token"}.get(name, name)


def _row(label: str, texts: Sequence[str]) -> list[str]:
    lines = [
        f"{'' if idx == 0 else '  '}{line}"
        for text in texts
        for idx, line in enumerate(wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False))
    ]
    return [f"  {label if idx == 0 else '':<12}{line}" for idx, line in enumerate(lines)]
