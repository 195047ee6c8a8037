"""Experts in host memory or on disk: how much goes where, and what a decode step then costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesaic.account.memory import expert_bytes
from moesaic.account.params import expert_params
from moesaic.cost.layouts import Split, memory_per_rank, step_cost
from moesaic.cost.load import ExpertShares, assumed_shares, busiest_distinct
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import Profile
from moesaic.cost.roofline import spread
from moesaic.cost.term import Cost, CostTerm, Interval, Resource, Seq, scaled, step_seconds
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
HOST_SHARE = 0.9
"""guess: part of the host's memory, of its bandwidth's reach and of the disk that experts may use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Bytes per tier over the whole cluster, and the share of the routed experts in each.

    Units:  bytes. `missing` is what no tier holds.
    """

    need: Mapping[Tier, int]
    have: Mapping[Tier, int]
    expert_share: Mapping[Tier, float]
    missing: int


def tier_bytes(cluster: Cluster, profile: Profile) -> dict[Tier, int]:
    """What each tier of a cluster can hold; 0 where the machine's file knows no such tier."""
    machine = cluster.machine
    return {
        "device": int(profile.usable_memory * machine.memory_bytes * cluster.num_devices),
        "host": int(HOST_SHARE * machine.number("host_memory_bytes", 0.0) * cluster.num_nodes),
        "disk": int(HOST_SHARE * machine.number("disk_bytes", 0.0) * cluster.num_nodes),
    }


def place(
    model: ModelSpec, cluster: Cluster, split: Split, *, num_seqs: float, context: float, profile: Profile,
    formats: Formats,
) -> Placement:  # fmt: skip
    """Everything on the devices if it fits, else routed experts from the fastest tier down.

    Attention, shared experts, KV and buffers stay on the devices.
    """
    parts = memory_per_rank(
        model, split, num_seqs=num_seqs, context=context, max_rows=np.maximum(num_seqs, 1.0), formats=formats,
        profile=profile,
    )  # fmt: skip
    stages = float(np.asarray(split.ranks) * split.pp)
    experts = sum(moe.num_experts * expert_bytes(model, moe, formats.experts) for _, moe in model.moe_layers)
    fixed = sum(float(size) for name, size in parts.items() if name != "experts") * stages
    have = tier_bytes(cluster, profile)
    left, need, share = float(experts), dict.fromkeys(TIERS, 0), dict.fromkeys(TIERS, 0.0)
    for tier in TIERS:
        free = max(have[tier] - (fixed if tier == "device" else 0.0), 0.0)
        held = min(left, free)
        need[tier], share[tier] = int(held), held / experts if experts else 0.0
        left -= held
    need["device"] += int(fixed)
    short = max(fixed - have["device"], 0.0)
    return Placement(need=need, have=have, expert_share=share, missing=int(left + short))


def offloaded_step(
    model: ModelSpec, cluster: Cluster, split: Split, work: Work, placement: Placement, *, profile: Profile,
    formats: Formats, shares: ExpertShares | None = None,
) -> Cost:  # fmt: skip
    """One step in which the experts of lower tiers are computed by the host, or brought to the device.

    Host experts take the faster of two ways: read and computed where they are, or sent over the bus. Disk
    experts are read into host memory first. Experts are equally likely to be in any tier.
    """
    shares = shares or assumed_shares(model, profile.skew)
    machine, parts = (
        cluster.machine,
        [_resident(model, cluster, split, work, placement, profile, formats, shares)],
    )
    lower: tuple[Tier, ...] = ("host", "disk")
    for tier in lower:
        share = placement.expert_share[tier]
        if share <= 0:
            continue
        read, flops = 0.0, 0.0
        for moe_idx, (_, moe) in enumerate(model.moe_layers):
            tokens = work.rows * split.dp
            distinct = busiest_distinct(tokens, moe.experts_per_token, moe.num_experts, 1.0, shares, moe_idx)
            read += share * float(distinct) * expert_bytes(model, moe, formats.experts)
            flops += share * 2.0 * float(np.asarray(tokens)) * moe.experts_per_token * expert_params(moe)
        nodes = cluster.num_nodes
        host_rate = HOST_SHARE * machine.number("host_memory_bytes_per_s", machine.memory_bytes_per_s) * nodes
        compute_rate = machine.number("host_flops_per_s", machine.flops_per_s(machine.wide_dtype))
        bus_rate = machine.number("host_link_bytes_per_s", 0.0) * profile.link_share * cluster.num_devices
        here_s = max(read / host_rate, flops / (profile.compute_share["experts"] * compute_rate * nodes))
        seconds = min(here_s, read / bus_rate) if bus_rate else here_s
        resource: Resource = "host_link" if seconds < here_s else "memory"
        if tier == "disk":
            seconds, resource = read / (machine.number("disk_bytes_per_s", 1.0) * nodes), "disk"
        parts.append(
            CostTerm(
                name="expert_load",
                resource=resource,
                seconds=spread(seconds, profile),
                flops=flops,
                bytes=read,
                source=profile.source,
            )
        )
    return Seq(tuple(parts))


def tokens_per_second(cost: Cost, num_tokens: float) -> Interval:
    """Tokens of a step by its seconds."""
    seconds = step_seconds(cost)
    return Interval(
        value=num_tokens / seconds.value, low=num_tokens / seconds.high, high=num_tokens / seconds.low
    )


def _resident(
    model: ModelSpec, cluster: Cluster, split: Split, work: Work, placement: Placement, profile: Profile,
    formats: Formats, shares: ExpertShares,
) -> Cost:  # fmt: skip
    """The step as if all were resident, with the experts' reads scaled to the resident share."""
    whole = step_cost(model, cluster, split, work, profile=profile, formats=formats, shares=shares)
    return scaled(whole, "experts", placement.expert_share["device"])
