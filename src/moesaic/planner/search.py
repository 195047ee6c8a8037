"""The best deployment under objectives: every candidate is priced, none is sampled; and what was ruled
out."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from moesaic.cost.load import ExpertShares
from moesaic.errors import CapacityError
from moesaic.planner.compare import Ranking, Way, best_of_each, way_of
from moesaic.planner.concurrency import Band, Verdict, alone, bands
from moesaic.planner.demand import Demand, unit_cost
from moesaic.planner.disaggregate import grids
from moesaic.planner.match import (
    KIND,
    Choices,
    Decoders,
    first_of_each,
    kind_of,
    match,
    of_grids,
    of_rows,
    value_of,
)
from moesaic.planner.plan import Plan, serve_plan
from moesaic.planner.pools import Refused, Rows, decode_rows, layout_name, prefill_rows, serve_rows
from moesaic.planner.price import Pricer, pricer_of
from moesaic.planner.residency import offloaded_blocks
from moesaic.planner.space import (
    Block,
    FormatChoice,
    Knob,
    NearMiss,
    blocks,
    check_pins,
    instance_sizes,
    spaced,
)
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """Everything a search depends on."""

    model: ModelSpec
    clusters: tuple[Cluster, ...]
    demand: Demand
    profile: str  # paper or calibrated
    shares: ExpertShares
    choices: tuple[FormatChoice, ...]
    pins: Mapping[Knob, int] = field(default_factory=dict)
    load: str = ""  # what `shares` are, in words

    def pricer(self, cluster: Cluster) -> Pricer:
        """What prices the model on a cluster."""
        return pricer_of(self.model, cluster, self.profile, self.shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a search found.

    `missed` names the objectives that no layout meets. `best` is then the plan that comes nearest to the one
    that is missed, or with several the fastest without them.
    """

    best: Plan
    runner_up: Plan | None
    other_way: Plan | None  # the best without expert parallelism if `best` has it, with it if not
    demand: Demand  # what `best` meets: all that was asked, less what was missed
    ruled_out: Mapping[str, NearMiss]
    num_candidates: int
    search_s: float
    missed: tuple[str, ...] = ()
    ways: Mapping[Way, Plan] = field(default_factory=dict)  # the best of each way to deploy


def search(question: Question) -> Answer:
    """The best plan and the runner-up.

    Raises: ConfigError for a layout or an objective that cannot be; CapacityError when no layout fits the
            memory.
    """
    start = time.perf_counter()
    if not question.demand.num_steps:  # no time per token: no limit on it
        question = replace(question, demand=replace(question.demand, tpot_s=None))
    for cluster in question.clusters:
        check_pins(question.model, cluster, question.choices, question.pins)
    refused, pricers, spaces = Refused({}), [], []
    for cluster in question.clusters:
        pricers.append(question.pricer(cluster))
        found, misses = blocks(question.model, cluster, question.choices, question.pins)
        spaces.append(found)
        refused = Refused({**refused.misses, **misses})
    missed: tuple[str, ...] = ()
    demand = question.demand
    choices = collect(pricers, spaces, question, demand, refused)
    # No limit on a time is held by moving experts away from where they are computed.
    untimed = replace(demand, tpot_s=None, ttft_s=None)
    has_room = bool(choices) or (
        untimed != demand and bool(collect(pricers, spaces, question, untimed, Refused({})))
    )
    if not has_room:
        choices = _beyond_devices(pricers, question, demand)
    for dropped in _relaxations(demand):
        if choices:
            break
        missed, demand = dropped, question.demand.without(dropped)
        choices = collect(pricers, spaces, question, demand, Refused({}))
        if not choices or (dropped == ("concurrency",) and not has_room):
            choices += _beyond_devices(pricers, question, demand)
    if not choices:
        raise CapacityError(_nothing_fits(question, refused))
    ranking = Ranking.of(choices, missed)
    second, other = ranking.runner_up, ranking.other_way
    best = ranking.plan(ranking.best)
    if len(missed) == 1:
        _name_nearest(refused, ranking, missed[0], question.demand)
    return Answer(
        best=best, runner_up=None if second is None else ranking.plan(second),
        other_way=None if other is None else ranking.plan(other), demand=demand, ruled_out=refused.misses,
        num_candidates=sum(pricer.counted[0] for pricer in pricers), search_s=time.perf_counter() - start,
        missed=missed, ways={**best_of_each(choices), way_of(best): best},
    )  # fmt: skip


def ep_bands(question: Question, answer: Answer) -> tuple[Band, ...]:
    """Expert parallelism or not by concurrency, by the best of all deployments that the answer was chosen of.

    Empty for a dense model.
    """
    if not question.model.moe_layers:
        return ()
    if all(instance_sizes(one) == [1] for one in question.clusters):
        return (
            alone(answer.best, answer.demand, [str(one) for one in question.clusters if one.num_devices > 1]),
        )
    find = deployments(question, is_offloaded=answer.best.decoder.layout["num_offloaded"] > 0)

    def ranked(concurrency: int) -> Ranking | None:
        choices = find(replace(answer.demand, concurrency=concurrency))
        return Ranking.of(choices) if choices else None

    return bands(ranked, Verdict.of_answer(answer.best, answer.other_way, answer.demand))


def deployments(question: Question, *, is_offloaded: bool) -> Callable[[Demand], list[Choices]]:
    """What finds every deployment of a question for demands that differ in nothing but concurrency.

    `is_offloaded`: those with experts in host memory or on disk instead.
    """
    pricers = [question.pricer(cluster) for cluster in question.clusters]
    spaces = [blocks(question.model, one, question.choices, question.pins)[0] for one in question.clusters]
    prefills: dict[int, Rows] = {}

    def find(demand: Demand) -> list[Choices]:
        if is_offloaded:
            return _beyond_devices(pricers, question, demand)
        return collect(pricers, spaces, question, demand, Refused({}), prefills)

    return find


def collect(
    pricers: Sequence[Pricer],
    spaces: Sequence[Sequence[Block]],
    question: Question,
    demand: Demand,
    refused: Refused,
    prefills: dict[int, Rows] | None = None,
) -> list[Choices]:
    """Every deployment that holds the objectives.

    Servers of both phases; prefill beside decode; prefill beside attention and experts on devices of their
    own. `prefills` keeps the prefill of every cluster for questions that differ in concurrency alone.
    """
    is_one, is_far = len(pricers) == 1, _is_far(pricers)
    can_part = demand.num_steps > 0 and _can_part(pricers, is_far)
    found: list[Choices] = []
    prefills = {} if prefills is None else prefills
    decoders: list[Decoders] = []
    for idx, (pricer, space) in enumerate(zip(pricers, spaces, strict=True)):
        if space:
            served = serve_rows(pricer, space, demand, refused)
            is_inside = served.devices <= pricer.cluster.devices_per_node
            for rows in (served.take(is_inside), served.take(~is_inside)):
                found.append(_serve_choices(pricer, rows, demand, is_one))
        if not space or not can_part:
            continue
        if idx not in prefills:
            prefills[idx] = _best_of_size(prefill_rows(pricer, space, demand, refused, is_far), demand)
        counts = spaced(pricer.cluster.num_devices)
        rows = _best_of_size(decode_rows(pricer, space, demand, refused, counts), demand)
        decoders.append(of_rows(pricer, rows, idx, len(pricers)))
    every = range(len(pricers)) if can_part else ()
    for one, other, choice in product(every, every, question.choices):
        two_sided = grids((pricers[one], pricers[other]), choice, demand, question.pins, refused)
        if two_sided is not None and len(two_sided.batch):
            decoders.append(of_grids(two_sided, (one, other), len(pricers), demand))
    for idx, prefill in prefills.items():
        for decoder in decoders:
            if len(prefill) and len(decoder.rate):
                found.append(match(pricers, idx, prefill, decoder, demand))
    return [choices for choices in found if len(choices.value)]


def _beyond_devices(pricers: Sequence[Pricer], question: Question, demand: Demand) -> list[Choices]:
    """Servers of both phases with experts in host memory or on disk: where nothing else has the room."""
    found = []
    for pricer in pricers:
        space = offloaded_blocks(pricer.model, pricer.cluster, question.choices, question.pins)
        if space:
            rows = serve_rows(pricer, space, demand, Refused({}))
            found.append(_serve_choices(pricer, rows, demand, len(pricers) == 1))
    return [choices for choices in found if len(choices.value)]


def _is_far(pricers: Sequence[Pricer]) -> bool:
    """Whether instances may be on different nodes, or kinds of machine."""
    first = pricers[0].cluster
    return len(pricers) > 1 or first.num_devices > first.link_domain


def _can_part(pricers: Sequence[Pricer], is_far: bool) -> bool:
    """Whether work can be parted over instances: there are two devices, and the machines' files say what
    joins them."""
    if len(pricers) == 1 and pricers[0].cluster.num_devices == 1:
        return False
    wanted = ("network_bytes_per_s",) if is_far else ("link_bytes_per_s", "host_link_bytes_per_s")
    return all(any(name in pricer.cluster.machine.facts for name in wanted) for pricer in pricers)


def _name_nearest(refused: Refused, ranking: Ranking, missed: str, demand: Demand) -> None:
    """Let the plan that comes nearest to a missed objective be the nearest of what it ruled out."""
    plan, asked = ranking.plan(ranking.best), float(getattr(demand, missed))
    name = layout_name((plan.decoder if missed != "ttft_s" else plan.pools[0]).layout)
    tpot_s, ttft_s, held = plan.token_s, float(plan.ttft.value), plan.num_sequences
    reason, found, text = {
        "tpot_s": ("tpot", tpot_s, f"{tpot_s * 1e3:.4g} ms a token"),
        "ttft_s": ("ttft", ttft_s, f"{ttft_s * 1e3:.4g} ms to the first token"),
        "concurrency": ("concurrency", held, f"room for {held} requests in all"),
    }[missed]
    distance = asked / max(found, 1) if missed == "concurrency" else found / asked
    count = refused.misses[reason].count if reason in refused.misses else 0
    refused.misses[reason] = NearMiss(count=count, nearest=f"{name}: {text}", distance=distance)


def _relaxations(demand: Demand) -> list[tuple[str, ...]]:
    """Sets of objectives to drop when all together cannot be met: one alone, then all."""
    asked = tuple(name for name in ("ttft_s", "concurrency", "tpot_s") if getattr(demand, name) is not None)
    return [*((name,) for name in asked), *([asked] if len(asked) > 1 else [])]


def _serve_choices(pricer: Pricer, rows: Rows, demand: Demand, is_one: bool) -> Choices:
    total = pricer.cluster.num_devices
    charged = np.full(len(rows), float(total)) if is_one else rows.count * rows.devices
    tokens_per_s = rows.rate * rows.count * demand.osl
    cost = charged * unit_cost(pricer.cluster, demand.objective)
    value = value_of(tokens_per_s, cost, rows.ttft_s, rows.tpot_s, demand)

    def make(idx: int) -> Plan:
        return serve_plan(pricer, rows, idx, demand, int(charged[idx]), float(value[idx]))

    kind = kind_of(rows)
    return Choices(
        value=value, prefill_ep=rows.ep, prefill_pp=rows.stages, kind=kind, ttft_s=rows.ttft_s,
        tpot_s=rows.tpot_s, in_flight=rows.batch * kind[:, KIND.index("dp")] * rows.count,
        alone=np.stack([value, value], axis=1), make=make,
    )  # fmt: skip


def _best_of_size(rows: Rows, demand: Demand) -> Rows:
    """The best layout of every number of devices, stages, expert ranks and instances: no other can be in a
    best pair."""
    is_latency = demand.objective == "latency"
    merit = -(rows.ttft_s + demand.osl * rows.tpot_s) if is_latency else rows.rate
    return rows.take(first_of_each(np.stack([rows.devices, rows.ep, rows.stages, rows.count]), merit))


def _nothing_fits(question: Question, refused: Refused) -> str:
    shown = " or ".join(str(cluster) for cluster in question.clusters)
    miss = refused.misses.get("memory")
    if miss is None:
        sizes = ", ".join(str(size) for size in instance_sizes(question.clusters[0]))
        pins = " ".join(f"{knob} {value}" for knob, value in question.pins.items())
        alone = (
            ", and experts outside the devices go with pp 1, kvp 1, one micro-batch and no redundant slots"
            if question.pins.get("num_offloaded")
            else ""
        )
        return (
            f"no layout has {pins} on {shown}: instances have {sizes} devices, and dp x kvp x tp = ep x "
            f"expert_tp{alone}; give fewer of the numbers"
        )
    return (
        f"no layout fits {shown}: the nearest is {miss.nearest}; take more devices, fewer tokens, or "
        "narrower --weights and --kv; experts in host memory or on disk do not help, see moesaic fit"
    )
