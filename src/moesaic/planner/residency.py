"""Layouts with some experts outside the devices, for machines whose devices cannot hold them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from moesaic.cost.load import ExpertShares
from moesaic.cost.offload import cold_share, layers_bytes, tiers
from moesaic.planner.space import Block, FormatChoice, Knob, blocks
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

NUM_LEVELS = 32  # guess: numbers of resident experts that are tried, evenly spaced
_FIXED: Mapping[Knob, int] = {"pp": 1, "kvp": 1, "num_micro_batches": 1, "num_redundant": 0}


def offloaded_blocks(
    model: ModelSpec, cluster: Cluster, choices: Sequence[FormatChoice], pins: Mapping[Knob, int]
) -> list[Block]:
    """Layouts of one instance inside a node, each with several numbers of experts in host memory or on disk.

    Empty for a dense model, for pins that such a layout cannot have, and where no tier has the room.
    """
    most = max((moe.num_experts for _, moe in model.moe_layers), default=0)
    if not most or any(pins.get(knob, value) != value for knob, value in _FIXED.items()):
        return []
    step = max(1, most // NUM_LEVELS)
    levels = [pins["num_offloaded"]] if "num_offloaded" in pins else range(step, most + 1, step)
    kept: dict[Knob, int] = {knob: value for knob, value in pins.items() if knob != "num_offloaded"}
    space, _ = blocks(model, replace(cluster, num_nodes=1), choices, {**kept, **_FIXED})
    found = []
    for block in space:
        columns = {name: np.repeat(column, len(levels)) for name, column in block.columns.items()}
        columns["num_offloaded"] = np.tile(np.array(levels, np.float64), len(block))
        whole = replace(block, columns=columns)
        held = tiers(model, cluster, columns["num_offloaded"], whole.devices, block.choice.formats.experts)
        has_room = np.asarray(held.missing) <= 0
        is_shared_out = columns["ep"] <= np.maximum(most - columns["num_offloaded"], 1.0)
        rows = np.flatnonzero(has_room & is_shared_out)
        if len(rows):
            found.append(whole.take(rows))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Residency:
    """How many experts of each sparse layer are where, and what that means.

    Units:  resident_bytes are those of all resident experts of one instance; local_share is the part of all
            choices that finds its expert on a device.
    """

    device: int
    host: int
    disk: int
    resident_bytes: float
    local_share: float


def residency(
    model: ModelSpec, cluster: Cluster, num_offloaded: int, devices: int, expert_format: str | None,
    shares: ExpertShares,
) -> Residency:  # fmt: skip
    """The experts of one instance by tier; the most popular ones are on the devices."""
    held = tiers(model, cluster, float(num_offloaded), float(devices), expert_format)
    local = [
        1.0 - float(cold_share(shares.of_layer(moe_idx), moe.num_experts, num_offloaded))
        for moe_idx, (_, moe) in enumerate(model.moe_layers)
    ]
    return Residency(
        device=int(held.device), host=int(held.host), disk=int(held.disk),
        resident_bytes=float(held.device) * layers_bytes(model, expert_format),
        local_share=sum(local) / max(len(local), 1),
    )  # fmt: skip
