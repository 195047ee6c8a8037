"""Ways to deploy beside each other: in one node, over nodes, prefill apart, attention and experts apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np

from moesaic.planner.match import Choices
from moesaic.planner.plan import Plan

Way = Literal["in one node", "over nodes", "prefill apart", "attention and experts apart"]
WAYS: tuple[Way, ...] = get_args(Way)

TRADES: Mapping[Way, str] = {
    "in one node": "grows by a node or less, which is also what a failure takes",
    "over nodes": "grows by an instance, which is also what a failure takes",
    "prefill apart": "both pools grow by themselves; KV goes to the other pool once a request",
    "attention and experts apart": "both sides grow by themselves; rows go to the other in every layer, and "
    "a lost expert device stops its instance",
}  # fmt: skip


def best_of_each(choices: Sequence[Choices]) -> dict[Way, Plan]:
    """The best plan of each way that there is."""
    found: dict[Way, Plan] = {}
    for one in choices:
        plan = one.make(int(np.argmax(one.value)))
        way = way_of(plan)
        if way not in found or plan.value > found[way].value:
            found[way] = plan
    return {way: found[way] for way in WAYS if way in found}


def way_of(plan: Plan) -> Way:
    """Which way a plan is."""
    roles = {pool.role for pool in plan.pools}
    if "attention" in roles:
        return "attention and experts apart"
    if "prefill" in roles:
        return "prefill apart"
    pool = plan.decoder
    return "in one node" if pool.devices <= pool.cluster.devices_per_node else "over nodes"
