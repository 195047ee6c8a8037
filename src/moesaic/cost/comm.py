"""Time of transfers between ranks: latency plus bytes by bandwidth. Which bytes go where, `layouts` says.

Units:  bytes are what one rank sends (or receives) in one direction.
"""

from __future__ import annotations

import numpy as np

from moesaic.cost.profile import Profile
from moesaic.cost.roofline import spread
from moesaic.cost.term import CostTerm, Number, TermName
from moesaic.errors import ConfigError
from moesaic.spec.hardware import Cluster

LATENCY_S = 5e-6  # guess: a message, where a machine's file has no latency


def link_rate(cluster: Cluster, profile: Profile) -> float:
    """Bytes per second to a device of the same node or rack; over the host's bus where there is no link."""
    machine = cluster.machine
    rate = machine.number("link_bytes_per_s", machine.number("host_link_bytes_per_s", 0.0))
    if rate <= 0:
        raise ConfigError(
            f"machine {machine.name} has neither link_bytes_per_s nor host_link_bytes_per_s, so ranks on "
            "several devices cannot be priced; use one device, or add the number and its source to the "
            "machine's file"
        )
    return rate * profile.link_share


def network_rate(cluster: Cluster, profile: Profile) -> float:
    """Bytes per second and device to another node."""
    machine = cluster.machine
    rate = machine.number("network_bytes_per_s", 0.0)
    if rate <= 0:
        raise ConfigError(
            f"machine {machine.name} has no network_bytes_per_s, so ranks on several nodes cannot be priced; "
            "use one node, or add the number and its source to the machine's file"
        )
    return rate * profile.network_share


def link_latency(cluster: Cluster) -> float:
    """Seconds of one hop over the link, or of a whole collective over the switch of a rack."""
    return cluster.machine.number("link_latency_s", LATENCY_S)


def network_latency(cluster: Cluster) -> float:
    """Seconds of one exchange out of the node."""
    return cluster.machine.number("network_latency_s", LATENCY_S)


def is_switched(cluster: Cluster) -> bool:
    """Whether one switch joins more devices than a node has (NVL72): collectives are then one hop."""
    return cluster.link_domain > max(cluster.devices_per_node, 8)


def all_reduce(
    name: TermName, *, num_bytes: Number, ranks: Number, cluster: Cluster, profile: Profile
) -> CostTerm:
    """Sum of `num_bytes` over `ranks`, each of which has the result.

    Source: a ring has 2 (n - 1) hops and moves 2 (n - 1) / n of the bytes; over one switch it is one
    collective. Between nodes the ring runs at the slowest link, the network.
    """
    ranks = np.asarray(ranks, dtype=np.float64)
    volume = 2 * (ranks - 1) / ranks * num_bytes
    if is_switched(cluster):
        hops = np.where(ranks > 1, link_latency(cluster), 0.0)
    else:
        hops = 2 * (ranks - 1) * link_latency(cluster)
    hops = profile.hop_factor * hops + np.where(ranks > 1, profile.collective_s, 0.0)
    return _transfer(name, volume, hops, _is_far(ranks, cluster), cluster, profile)


def all_gather(
    name: TermName, *, num_bytes: Number, ranks: Number, cluster: Cluster, profile: Profile
) -> CostTerm:
    """Each rank gets the `num_bytes` of all: half an all-reduce."""
    ranks = np.asarray(ranks, dtype=np.float64)
    volume = (ranks - 1) / ranks * num_bytes
    each = np.minimum(ranks - 1, 1.0) if is_switched(cluster) else ranks - 1
    hops = profile.hop_factor * each * link_latency(cluster) + profile.collective_s * (ranks > 1) / 2
    return _transfer(name, volume, hops, _is_far(ranks, cluster), cluster, profile)


def all_to_all(
    name: TermName,
    *,
    near_bytes: Number,
    far_bytes: Number,
    ranks: Number,
    cluster: Cluster,
    profile: Profile,
) -> CostTerm:
    """One exchange of the busiest rank: bytes to its own node or rack go beside bytes to others.

    Two-level exchange (once per node, then over the link) is the same with the far bytes of distinct nodes.
    """
    ranks = np.asarray(ranks, dtype=np.float64)
    is_far = _is_far(ranks, cluster)
    near = link_latency(cluster) if is_switched(cluster) else network_latency(cluster)
    latency = profile.exchange_factor * np.where(
        ranks > 1, np.where(is_far, network_latency(cluster), near), 0.0
    )
    near_s = near_bytes / link_rate(cluster, profile) if np.any(ranks > 1) else 0.0
    far_s = far_bytes / network_rate(cluster, profile) if np.any(is_far) else 0.0
    moved_s = np.where(ranks > 1, np.maximum(near_s, far_s), 0.0)
    return CostTerm(
        name=name, resource="network" if np.any(is_far) else "link",
        seconds=spread(moved_s + latency, profile),
        bytes=near_bytes + far_bytes, source=profile.source, overhead_s=latency,
    )  # fmt: skip


def point_to_point(
    name: TermName, *, num_bytes: Number, is_far: Number, cluster: Cluster, profile: Profile
) -> CostTerm:
    """One message from a rank to another."""
    far = np.asarray(is_far, dtype=bool)
    latency = profile.exchange_factor * np.where(far, network_latency(cluster), link_latency(cluster))
    return _transfer(name, np.asarray(num_bytes, dtype=np.float64), latency, far, cluster, profile)


def _is_far(ranks: Number, cluster: Cluster) -> np.ndarray:
    """Whether a group of consecutive ranks leaves the node or rack."""
    return np.asarray(ranks) > cluster.link_domain


def _transfer(
    name: TermName, volume: Number, latency: Number, is_far: np.ndarray, cluster: Cluster, profile: Profile
) -> CostTerm:
    volume = np.asarray(volume, dtype=np.float64)
    moves = volume > 0
    near_s = volume / link_rate(cluster, profile) if np.any(moves & ~is_far) else 0.0
    far_s = volume / network_rate(cluster, profile) if np.any(moves & is_far) else 0.0
    return CostTerm(
        name=name, resource="network" if np.any(is_far) else "link",
        seconds=spread(np.where(is_far, far_s, near_s) + latency, profile),
        bytes=volume, source=profile.source, overhead_s=latency,
    )  # fmt: skip
