"""A search's answer as plain values for JSON: the keys that programs read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moesaic.cost.term import Interval
from moesaic.planner.advice import Advice
from moesaic.planner.compare import TRADES
from moesaic.planner.concurrency import Band
from moesaic.planner.demand import stretched
from moesaic.planner.plan import Plan, Pool
from moesaic.planner.question import price_unit, undeclared_format
from moesaic.planner.search import Answer, Question

NO_TPOT = "with one token out there is no time per token: it is null, and no limit on it is looked at"


def notes_on(model: str, question: Question) -> list[str]:
    """What to know about the question: how its numbers are to be read. `model` is what the caller calls
    it."""
    demand, hosts = question.demand, [one for one in question.clusters if one.machine.operator_s is not None]
    found = [price_unit(question.clusters)[1], stretched(demand.length, question.model.max_position)]
    found.append(NO_TPOT if not demand.num_steps else None)
    if any(choice.weights is None for choice in question.choices):
        found.append(undeclared_format(model, question.model))
    for one in hosts:
        found.append(f"{one.machine.name} is a processor: no measured service stands behind its intervals")
    return [note for note in found if note is not None]


def as_json(
    model: str, question: Question, answer: Answer, bands: Sequence[Band], advice: Sequence[Advice] = ()
) -> dict[str, Any]:
    """The answer; `missed` names objectives that no layout meets, and `best` is then the best without
    them."""
    return {
        "notes": notes_on(model, question),
        "search_s": answer.search_s,
        "candidates": answer.num_candidates,
        "missed": [name.removesuffix("_s") for name in answer.missed],
        "best": _plan(answer.best),
        "runner_up": None if answer.runner_up is None else _plan(answer.runner_up),
        "ways": {
            way: {
                "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
                "tokens_per_s_per_price": None if plan.price is None else plan.tokens_per_s / plan.price,
                "tpot_s": _interval(plan.tpot), "ttft_s": _interval(plan.ttft),
                "pools": [str(pool) for pool in plan.pools], "trade": TRADES[way],
            }
            for way, plan in answer.ways.items()
        },
        "advice": [{"topic": one.topic, "holds": one.holds, "reason": one.reason} for one in advice],
        "ruled_out": {
            reason: {"count": miss.count, "nearest": miss.nearest} for reason,
            miss in answer.ruled_out.items()
        },
        "ep_verdict": [
            {
                "concurrency_from": band.concurrency_from, "concurrency_to": band.concurrency_to,
                "use_ep": band.use_ep, "gain": band.gain, "reason": band.reason,
            }
            for band in bands
        ],
    }  # fmt: skip


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "pools": [_pool(pool) for pool in plan.pools],
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": plan.tokens_per_s_per_gpu,
        "tokens_per_s_per_price": None if plan.price is None else plan.tokens_per_s / plan.price,
        "tokens_per_s_per_watt": None if plan.power_w is None else plan.tokens_per_s / plan.power_w,
        "tpot_s": _interval(plan.tpot),
        "ttft_s": _interval(plan.ttft),
        "bottleneck": plan.bottleneck,
    }


def _pool(pool: Pool) -> dict[str, Any]:
    return {
        "role": pool.role,
        "machine": pool.cluster.machine.name,
        "num_gpus": pool.num_devices,
        "instances": pool.count,
        "layout": dict(pool.layout),
        "batch": pool.batch,
        "formats": {"weights": pool.choice.weights, "kv": pool.choice.kv, "dispatch": pool.choice.dispatch},
        "experts": _experts(pool),
        "memory_bytes_per_rank": {name: round(size) for name, size in pool.memory.items()},
    }


def _experts(pool: Pool) -> dict[str, float] | None:
    """Experts of each sparse layer by tier, and the share of choices served by a device; None: all are on
    devices."""
    held = pool.residency
    if held is None:
        return None
    return {"device": held.device, "host": held.host, "disk": held.disk, "local_share": held.local_share}


def _interval(interval: Interval | None) -> dict[str, float] | None:
    if interval is None:
        return None
    return {"value": float(interval.value), "low": float(interval.low), "high": float(interval.high)}
