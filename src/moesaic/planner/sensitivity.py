"""What a chosen plan does when the world is not as assumed: other skew, other bandwidth. The layout stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.cost.load import ExpertShares, placed_shares
from moesaic.cost.ops import Work
from moesaic.cost.term import Cost, FloatArray, Repeat, at, step_seconds
from moesaic.cost.two_sided import Sides, TwoSides, two_sided_step
from moesaic.planner.load_file import skewed
from moesaic.planner.plan import Plan, Pool
from moesaic.planner.price import PoolRole, Pricer
from moesaic.planner.search import Question
from moesaic.planner.space import COLUMNS, Block
from moesaic.spec.hardware import Cluster, Fact

SKEWS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)
RATES = {"memory": "memory_bytes_per_s", "link": "link_bytes_per_s", "network": "network_bytes_per_s"}
HOST_RATES = {"host memory": "host_memory_bytes_per_s", "host link": "host_link_bytes_per_s"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """Time per token of a plan over one thing that may differ.

    Units:  seconds at each of `at`.
    """

    name: str
    at: tuple[float, ...]
    tpot_s: tuple[float, ...]


def sensitivities(plan: Plan, question: Question) -> list[Sensitivity]:
    """Over the skew of the experts, and over the rates of memory, link and network as factors of the file's.

    With experts outside the devices, over those of the host's memory and bus, too. A rate that no machine of
    the plan has, or the skew of a dense model, is left out.
    """
    found = []
    moes = [moe.num_experts for _, moe in question.model.moe_layers]
    if moes and len(set(moes)) == 1:
        seconds = [_tpot(plan, replace(question, shares=skewed(question.model, skew)), {}) for skew in SKEWS]
        found.append(Sensitivity(name="skew", at=SKEWS, tpot_s=tuple(seconds)))
    is_whole = all(pool.residency is None for pool in plan.pools)
    for name, fact in (RATES if is_whole else {**RATES, **HOST_RATES}).items():
        if any(fact in pool.cluster.machine.facts for pool in plan.pools):
            seconds = [_tpot(plan, question, {fact: factor}) for factor in FACTORS]
            found.append(Sensitivity(name=f"{name} bandwidth", at=FACTORS, tpot_s=tuple(seconds)))
    return found


def load_per_rank(plan: Plan, shares: ExpertShares) -> FloatArray:
    """Rows of each expert rank of what decodes, over their mean, in the layer in the middle of the load.

    Shapes:  [ep x expert tp]; slices of the same experts have the same rows.
    """
    experts = plan.pools[-1].layout
    layer = shares.of_layer(len(shares.shares or ()) // 2)
    if experts["ep"] == 1 or layer is None:
        return np.ones(experts["ep"] * experts["expert_tp"])
    load = placed_shares(layer, experts["ep"], experts["num_redundant"]) * experts["ep"]
    return np.repeat(load, experts["expert_tp"])


def _tpot(plan: Plan, question: Question, factors: dict[str, float]) -> float:
    """The decode step, and the prefills between steps as much slower as one prefill is."""
    decoding = [pool for pool in plan.pools if pool.role != "prefill"]
    clusters = [_faster(pool.cluster, factors) for pool in decoding]
    step = float(step_seconds(_decode(decoding, clusters, question)).value)
    if decoding[0].role != "serve":
        return step
    pool = decoding[0]
    stages = np.array([float(pool.layout["pp"])])
    pricer = _pricer(clusters[0], question)
    prefill = float(np.asarray(pricer.prefill_interval(_block(pool), stages, question.demand).value)[0])
    between = plan.prefill_share * plan.token_s
    return step + between * prefill / float(step_seconds(plan.prefill).value)


def _decode(pools: Sequence[Pool], clusters: Sequence[Cluster], question: Question) -> Cost:
    pool, demand = pools[0], question.demand
    if pool.role != "attention":
        block = _block(pool)
        pricer = _pricer(clusters[0], question)
        role: PoolRole = "serve" if pool.role == "serve" else "decode"
        return at(pricer.decode_cost(block, np.array([float(pool.batch)]), demand, role), 0)
    theirs = pools[1].layout
    grid = TwoSides(
        num_attention=pool.layout["dp"], tp=pool.layout["tp"], ep=theirs["ep"], expert_tp=theirs["expert_tp"],
        num_redundant=theirs["num_redundant"], num_micro_batches=theirs["num_micro_batches"],
    )  # fmt: skip
    pricers = _pricer(clusters[0], question), _pricer(clusters[1], question)
    sides = Sides(
        attention=clusters[0], experts=clusters[1], profiles=(pricers[0].profile, pricers[1].profile)
    )
    work = Work(num_seqs=pool.batch / theirs["num_micro_batches"], new_tokens=1.0, past=demand.mean_context)
    cost = two_sided_step(
        question.model, sides, grid, work, formats=pool.choice.formats, shares=question.shares
    )
    return Repeat(pricers[0].level(pool.choice.formats, demand, "decode"), cost)


def _pricer(cluster: Cluster, question: Question) -> Pricer:
    return question.pricer(cluster)


def _block(pool: Pool) -> Block:
    # The column stands for experts outside the devices, and without them its times are corrected.
    knobs = COLUMNS if pool.residency is None else (*COLUMNS, "num_offloaded")
    columns: dict[str, FloatArray] = {
        knob: np.array([float(size)]) for knob, size in pool.layout.items() if knob in knobs
    }
    return Block(columns=columns, num_micro_batches=pool.layout["num_micro_batches"], choice=pool.choice)


def _faster(cluster: Cluster, factors: dict[str, float]) -> Cluster:
    facts = dict(cluster.machine.facts)
    for name, factor in factors.items():
        if name in facts:
            facts[name] = Fact(value=facts[name].value * factor, source="sensitivity")
    return replace(cluster, machine=replace(cluster.machine, facts=facts))
