"""Deployments of every kind of layout, as the planner makes them, without a search."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np

from moesaic.hashing import digest
from moesaic.planner.deployment import expert_plan
from moesaic.spec.deployment import (
    Deployment,
    ExpertTier,
    Grid,
    Instance,
    KvTier,
    Layout,
    TierPlan,
)
from moesaic.spec.families import read_config
from moesaic.spec.locate import preset
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import preset as numerics_preset


@cache
def model(name: str) -> ModelSpec:
    """The facts of a preset."""
    return read_config(preset(name).config, name=name)


_DIGESTS: dict[int, str] = {}  # of the models above, which live as long as the tests


def instance(
    spec: ModelSpec,
    *,
    dp: int = 1,
    tp: int = 1,
    kvp: int = 1,
    ep: int = 1,
    pp: int = 1,
    redundant: int = 0,
    micro: int = 1,
    phases: str = "prefill decode",
    name: str = "serve",
    count: int = 1,
    machine: str = "h200",
    tiers: TierPlan | None = None,
    experts_apart: int = 0,
) -> Instance:
    """One instance; `experts_apart` experts have ranks of their own."""
    ranks = dp * tp * kvp
    expert_ranks = experts_apart or ranks
    expert_tp = expert_ranks // ep
    first = ranks if experts_apart else 0
    dispatcher = "local" if ranks == 1 and not experts_apart else "gathered"
    if dp > 1 and ep > 1:
        dispatcher = "exchange"
    if experts_apart:
        dispatcher = "remote"
    return Instance(
        name=name,
        phases=frozenset(phases.split()),  # type: ignore[arg-type]
        count=count,
        machines={"attention": machine, "expert": machine},
        layout=Layout(
            attention=Grid(axes={"dp": dp, "kvp": kvp, "tp": tp}, ranks=tuple(range(ranks))),
            experts=Grid(axes={"ep": ep, "tp": expert_tp}, ranks=tuple(range(first, first + expert_ranks))),
            dispatcher=dispatcher,  # type: ignore[arg-type]
            pipeline=pp,
            num_micro_batches=micro,
        ),
        plan=expert_plan(spec, ep, expert_tp, redundant, None),
        tiers=tiers or TierPlan(),
    )


def deployment(spec: ModelSpec, *instances: Instance, formats: str | None = None) -> Deployment:
    """A deployment; `formats` are those of another engine, as in `weights=fp8 kv=fp8 dispatch=fp8`."""
    backend = "reference" if formats is None else f"external {formats}"
    numerics = numerics_preset("portable", dtype=spec.dtype, backend=backend)
    return Deployment(
        model_digest=_DIGESTS.get(id(spec)) or _DIGESTS.setdefault(id(spec), digest(spec)),
        numerics=numerics.with_leaves(matmul_shards=256, kv_lanes=64),
        instances=instances,
    )


def with_places_of_its_own(one: Instance) -> Instance:
    """The same slots with the experts of the first and the last slot exchanged, in every layer."""
    plan = one.plan
    swapped = {
        name: tuple(np.concatenate([row[-1:], row[1:-1], row[:1]]) for row in getattr(plan, name))
        for name in ("slot_expert", "slot_share")
    }
    return replace(one, plan=replace(plan, **swapped))


def with_uneven_shares(one: Instance) -> Instance:
    """The first expert that has two copies gives one of them more."""
    shares = []
    for ids, parts in zip(one.plan.slot_expert, one.plan.slot_share, strict=True):
        changed = parts.copy()
        expert = next(int(e) for e in ids if np.count_nonzero(ids == e) > 1)
        where = np.flatnonzero(ids == expert)
        changed[where[0]], changed[where[1]] = 0.75 * parts[where].sum(), 0.25 * parts[where].sum()
        changed[where[2:]] = 0.0
        shares.append(changed)
    return replace(one, plan=replace(one.plan, slot_share=tuple(shares)))


HOST = TierPlan(experts=(ExpertTier(place="host", budget_bytes=200 * 2**30),))
KV_HOST = TierPlan(kv=(KvTier(place="host", budget_bytes=512 * 2**30),))


def every_kind() -> Iterator[tuple[str, Deployment, ModelSpec]]:
    """(name, deployment, model) of layouts that engines carry in whole or in part."""
    v3, qwen, dense = model("deepseek-v3"), model("qwen3-30b-a3b"), model("llama-3.1-70b")
    fp8 = "weights=fp8 kv=fp8 dispatch=fp8"
    bf16 = "weights=fp8 kv=bfloat16 dispatch=fp8"
    yield "tp", deployment(qwen, instance(qwen, tp=4)), qwen
    yield "one", deployment(qwen, instance(qwen)), qwen
    yield "dense", deployment(dense, instance(dense, tp=8)), dense
    yield "pp", deployment(dense, instance(dense, tp=8, pp=2)), dense
    yield "wide", deployment(v3, instance(v3, dp=16, ep=16), formats=bf16), v3
    yield "copies", deployment(v3, instance(v3, dp=32, ep=32, redundant=32, micro=2), formats=fp8), v3
    yield "tp-ep", deployment(v3, instance(v3, dp=4, tp=4, ep=16), formats=bf16), v3
    yield "dp-slices", deployment(v3, instance(v3, dp=8), formats=bf16), v3
    yield "mixed", deployment(qwen, instance(qwen, tp=8, ep=4)), qwen
    yield "helix", deployment(v3, instance(v3, tp=2, kvp=4, ep=8), formats=bf16), v3
    yield "across", deployment(v3, instance(v3, tp=16, ep=16), formats=bf16), v3
    yield "gathered", deployment(qwen, instance(qwen, tp=8, ep=8, count=3)), qwen
    yield "kv-host", deployment(qwen, instance(qwen, tp=2, tiers=KV_HOST)), qwen
    yield "host", deployment(v3, instance(v3, machine="rtx-4090", tiers=HOST), formats=bf16), v3
    yield (
        "fp4",
        deployment(qwen, instance(qwen, tp=2), formats="weights=nvfp4 kv=fp4 dispatch=bfloat16"),
        qwen,
    )
    yield (
        "online",
        deployment(qwen, instance(qwen, tp=2), formats="weights=fp8 kv=int8 dispatch=bfloat16"),
        qwen,
    )
    yield (
        "apart",
        deployment(v3, instance(v3, tp=4, dp=2, ep=8, experts_apart=8, phases="decode"), formats=bf16),
        v3,
    )
    prefill = instance(v3, dp=16, ep=16, phases="prefill", name="prefill", count=3)
    decode = instance(v3, dp=20, tp=2, ep=40, redundant=24, phases="decode", name="decode", count=2)
    yield "two-pools", deployment(v3, prefill, decode, formats=bf16), v3
    placed = with_places_of_its_own(instance(v3, dp=16, ep=16, redundant=16))
    yield "placed", deployment(v3, placed, formats=bf16), v3
    uneven = with_uneven_shares(instance(v3, dp=16, ep=16, redundant=16))
    yield "uneven", deployment(v3, uneven, formats=bf16), v3
