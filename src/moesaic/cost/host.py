"""The profile of a cluster: as fitted for GPUs; where the devices are processors, with calls for launches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from moesaic.cost.calibrated import profile_named, shipped
from moesaic.cost.offload import HOST_READ_SHARE
from moesaic.cost.profile import KINDS, Launch, Profile
from moesaic.cost.serving import Interference
from moesaic.spec.hardware import Cluster

OPERATORS: Mapping[Launch, int] = {
    "gqa": 9, "mla": 14, "index": 5, "linear": 12, "mamba": 12, "experts": 12, "shared_experts": 4,
    "dense_ffn": 4, "head": 1, "quantise": 2,
}  # fmt: skip
"""Operators that a processor calls one after the other for what a GPU launches.

Source: moesaic's own layers, counted: gqa is a norm, three projections, two rotations, a write of KV,
attention, a projection and a sum; experts are router, softmax, top-k, sort, gathers, products, a sum.
"""

TILE_ROWS = 16.0  # rows of a product that fill a tile. Source: Intel AMX, tiles of 16 rows


def profile_on(name: str, cluster: Cluster) -> Profile:
    """The profile called `name` for a cluster.

    On processors no kernel is launched: each operator is a call, nothing hides it, and its work comes after
    it; fewer rows fill a tile; and of a datasheet's bandwidth the share is the one measured on hosts.

    Raises: ConfigError for an unknown profile.
    """
    found, call_s = profile_named(name, cluster), cluster.machine.operator_s
    if call_s is None:
        return found
    if name == "calibrated" and not cluster.machine.is_measured:
        found = replace(found, memory_share=dict.fromkeys(KINDS, HOST_READ_SHARE))
    return replace(
        found, launch_s={launch: count * call_s for launch, count in OPERATORS.items()}, launch_power=1.0,
        full_rate_rows=min(found.full_rate_rows, TILE_ROWS),
    )  # fmt: skip


def interference_on(cluster: Cluster) -> Interference:
    """How prompts and decoding meet on a cluster: on processors a prompt has no kernels to launch."""
    found = shipped().interference(cluster)
    return found if cluster.machine.operator_s is None else replace(found, eager=0.0)
