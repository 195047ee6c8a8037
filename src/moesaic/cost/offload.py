"""Experts outside the devices: which tier holds how many of a layer, and what a step waits for them.

The coldest ones go first. Which number is best is not known here; see `moesaic.planner.residency`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesaic.account.memory import expert_bytes
from moesaic.account.params import expert_params
from moesaic.cost.load import ExpertShares
from moesaic.cost.profile import Profile
from moesaic.cost.roofline import part_of, spread
from moesaic.cost.term import Cost, CostTerm, FloatArray, Number, Par, Resource, Seq
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec, MoeSpec

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
HOST_SHARE = 0.9  # guess: part of the host's memory and of the disk that experts may fill
BUS_SHARE = 0.8  # of PCIe's bandwidth that copies from pinned memory reach: 50 of 63 GB/s at PCIe 5.0 x16
HOST_READ_SHARE = 0.37
"""Part of the host's memory bandwidth that engines reach when they compute experts there.

Source: 0.38 by DeepSeek-V3 at 4 bits in KTransformers on one Xeon 6454S (8.73 tokens/s), 0.38 by DeepSeek-R1
in int8 in SGLang on two Xeon 6980P (68.0 ms a token), 0.35 by Qwen3-30B-A3B at 4 bits in llama.cpp on DDR4 of
102 GB/s (36.7 tokens/s); what the device takes is left out of their times.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """Experts of each sparse layer by tier.

    Shapes:  numbers, or arrays over candidates. Units: missing is bytes that no tier holds.
    """

    device: Number
    host: Number
    disk: Number
    missing: Number


def layers_bytes(model: ModelSpec, expert_format: str | None) -> float:
    """Bytes of one expert in all sparse layers together."""
    return float(sum(expert_bytes(model, moe, expert_format) for _, moe in model.moe_layers))


def room(cluster: Cluster, devices: Number) -> Mapping[Tier, Number]:
    """Bytes of the host and of the disk for an instance of some devices: those of a node share both."""
    machine, nodes = cluster.machine, np.asarray(devices, np.float64) / cluster.devices_per_node
    return {
        "host": HOST_SHARE * machine.number("host_memory_bytes", 0.0) * nodes,
        "disk": HOST_SHARE * machine.number("disk_bytes", 0.0) * nodes,
    }


def tiers(
    model: ModelSpec, cluster: Cluster, num_offloaded: Number, devices: Number, expert_format: str | None
) -> Tiers:
    """Where the `num_offloaded` coldest experts of each layer are: in host memory first, then on disk."""
    most = max((moe.num_experts for _, moe in model.moe_layers), default=0)
    each, space = max(layers_bytes(model, expert_format), 1.0), room(cluster, devices)
    off = np.asarray(num_offloaded, np.float64)
    host = np.minimum(off, np.floor(space["host"] / each))
    disk = np.minimum(off - host, np.floor(space["disk"] / each))
    return Tiers(device=most - off, host=host, disk=disk, missing=(off - host - disk) * each)


def cold_share(shares: FloatArray | None, num_experts: int, num_cold: Number) -> Number:
    """Share of all choices that go to the `num_cold` least popular experts: what is not served locally.

    Shapes:  shares [E], or None: all alike.
    """
    chosen = np.full(num_experts, 1.0 / num_experts) if shares is None else np.sort(shares)
    summed = np.concatenate([[0.0], np.cumsum(chosen)])
    return np.asarray(summed[np.minimum(np.asarray(num_cold, np.int64), num_experts)])


def cold_distinct(
    shares: FloatArray | None, num_experts: int, experts_per_token: int, tokens: Number, num_cold: Number
) -> Number:
    """Distinct experts among the `num_cold` least popular that `tokens` tokens choose, in expectation."""
    chosen = np.full(num_experts, 1.0 / num_experts) if shares is None else np.sort(shares)
    log_missed = np.log(np.maximum(1.0 - experts_per_token * chosen, 1e-300))
    rows, cold = np.broadcast_arrays(np.asarray(tokens, np.float64), np.asarray(num_cold, np.int64))
    active = 1.0 - np.exp(rows.reshape(-1, 1) * log_missed)
    summed = np.concatenate([np.zeros((rows.size, 1)), np.cumsum(active, axis=1)], axis=1)
    picked = summed[np.arange(rows.size), np.minimum(cold.ravel(), num_experts)]
    return np.asarray(picked.reshape(rows.shape))


def break_even_rows(
    num_bytes: float, num_params: float, host_flops_per_s: float, bus_bytes_per_s: float
) -> float:
    """Rows of one expert from which sending its weights to the device beats computing it on the host.

    Source: rows * 2 * params / host rate = bytes / bus rate; with fewer rows the host is faster, as long as
    it reads the weights faster than the bus moves them.
    """
    return host_flops_per_s * num_bytes / (bus_bytes_per_s * 2.0 * num_params)


def transfer_s(num_bytes: float, bytes_per_s: float, compute_s: float = 0.0) -> tuple[float, float]:
    """(seconds of a transfer, seconds of it that show beside `compute_s` of other work)."""
    load_s = num_bytes / bytes_per_s
    return load_s, max(0.0, load_s - compute_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Offload:
    """What pricing needs to know of an instance whose `num_offloaded` coldest experts are elsewhere.

    Shapes:  num_offloaded and devices are numbers, or arrays over candidates.
    """

    model: ModelSpec
    cluster: Cluster
    expert_format: str | None
    profile: Profile
    shares: ExpertShares
    num_offloaded: Number
    devices: Number

    def layer(
        self, routed: CostTerm, beside: tuple[Cost, ...], moe: MoeSpec, moe_idx: int, tokens: Number
    ) -> Cost:
        """A layer's experts; `routed` is the term with all of them on the devices.

        Few rows are computed on the host, where the weights are; with many rows the weights are sent to the
        devices: whichever ends first. Both go on beside the resident experts and `beside`, so only what takes
        longer shows.
        """
        layer, profile, machine = self.shares.of_layer(moe_idx), self.profile, self.cluster.machine
        args = layer, moe.num_experts, moe.experts_per_token, tokens
        held = tiers(self.model, self.cluster, self.num_offloaded, self.devices, self.expert_format)
        one = expert_bytes(self.model, moe, self.expert_format)
        rows = np.asarray(tokens, np.float64) * moe.experts_per_token
        cold = cold_share(layer, moe.num_experts, self.num_offloaded)
        read, every = cold_distinct(*args, self.num_offloaded), cold_distinct(*args, moe.num_experts)
        flops = 2.0 * rows * cold * expert_params(moe)
        read_s, compute_s = self._host_seconds(read * one, flops)
        bus_s = self._bus_seconds(read * one)
        disk_s = (
            cold_distinct(*args, held.disk) * one / (machine.number("disk_bytes_per_s", 1.0) * self._nodes)
        )
        kept = part_of(routed, 1.0 - cold, 1.0 - read / every, profile)
        here_s = np.maximum(np.maximum(read_s, compute_s), kept.seconds.value)
        stays = here_s <= np.maximum(bus_s, routed.seconds.value)
        parts: tuple[tuple[Resource, Number, Number, Number], ...] = (
            ("memory", stays, np.where(stays, read_s, 0.0), np.where(stays, compute_s, 0.0)),
            ("host_link", ~stays, np.where(stays, 0.0, bus_s), 0.0 * bus_s),
            ("disk", held.disk, disk_s, 0.0 * disk_s),
        )
        loads = tuple(
            CostTerm(
                name="expert_load",
                resource=resource,
                memory_s=moved_s,
                compute_s=product_s,
                seconds=spread(np.maximum(moved_s, product_s), profile),
                bytes=read * one,
                flops=flops * (resource == "memory"),
                source=profile.source,
            )
            for resource, is_used, moved_s, product_s in parts
            if np.any(is_used)
        )
        gone, unread = np.where(stays, cold, 0.0), np.where(stays, read / every, 0.0)
        return Par((Seq((part_of(routed, 1.0 - gone, 1.0 - unread, profile), *beside)), *loads))

    @property
    def _nodes(self) -> Number:
        return np.asarray(self.devices, np.float64) / self.cluster.devices_per_node

    def _host_seconds(self, num_bytes: Number, flops: Number) -> tuple[Number, Number]:
        """(reading, computing) on the hosts; without end where the machine's file knows no host."""
        number = self.cluster.machine.number
        rate, flops_per_s = number("host_memory_bytes_per_s", 0.0), number("host_flops_per_s", 0.0)
        if not rate or not flops_per_s:
            return np.full(np.shape(num_bytes), np.inf), np.zeros(np.shape(num_bytes))
        share = self.profile.compute_share["experts"]
        return (
            num_bytes / (HOST_READ_SHARE * rate * self._nodes),
            flops / (share * flops_per_s * self._nodes),
        )

    def _bus_seconds(self, num_bytes: Number) -> Number:
        """A device without a bus is the host itself: what is read from disk is in its own memory."""
        rate = self.cluster.machine.number("host_link_bytes_per_s", 0.0)
        return (
            num_bytes / (BUS_SHARE * rate * np.asarray(self.devices, np.float64)) if rate else 0.0 * num_bytes
        )
