"""Experts spread over all devices: how memory, batch, rows and speed follow from their number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.cost.layouts import Split, largest_batch, memory_per_rank, step_cost
from moesaic.cost.load import EVEN, ExpertShares
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import Profile
from moesaic.cost.term import seconds_by_name, step_seconds
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

PUBLISHED: Mapping[str, tuple[Split, int]] = {
    "DeepSeek-V3 prefill": (Split(dp=32, ep=32, num_redundant=32), 4),
    "DeepSeek-V3 decode": (Split(dp=144, ep=144, num_redundant=32), 18),
    "DeepSeek-V3 decode, technical report": (Split(tp=4, dp=80, ep=320, num_redundant=64), 40),
}
"""(layout, nodes of eight H800). Source: DeepSeek-V3/R1 inference system overview, 2025-02; DeepSeek-V3,
arXiv:2412.19437, sec. 3.4."""


def slots_per_device(split: Split, num_experts: int) -> float:
    """Routed expert slots that a device holds: (E + redundant) / EP."""
    return float((num_experts + split.num_redundant) / split.ep)


@dataclass(frozen=True, kw_only=True, slots=True)
class WideEp:
    """One number of devices. Units: expert_bytes and batch are of one device; exchange_s of one layer."""

    devices: int
    expert_bytes: float
    batch: int
    rows_per_expert: float
    exchange_s: float
    step_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of one device."""
        return self.batch / self.step_s


def wide_ep(
    model: ModelSpec, cluster: Cluster, *, context: int, formats: Formats, profile: Profile,
    num_micro_batches: int = 1, num_redundant: int = 0, shares: ExpertShares = EVEN,
) -> WideEp:  # fmt: skip
    """Decode with attention on every device and experts spread over all, at the largest batch that fits."""
    devices, moe = cluster.num_devices, model.moe_layers[0][1]
    split = Split(dp=devices, ep=devices, num_micro_batches=num_micro_batches, num_redundant=num_redundant)
    none = memory_per_rank(
        model, split, num_seqs=0.0, context=context, max_rows=0.0, formats=formats, profile=profile
    )
    batch = int(largest_batch(model, cluster, split, context=context, profile=profile, formats=formats))
    work = Work(num_seqs=float(batch), new_tokens=1.0, past=float(context - 1))
    cost = step_cost(model, cluster, split, work, profile=profile, formats=formats, shares=shares)
    parts = seconds_by_name(cost)
    return WideEp(
        devices=devices, expert_bytes=float(none["experts"] + none["replicas"]), batch=batch,
        rows_per_expert=batch * devices * moe.experts_per_token / moe.num_experts,
        exchange_s=float(parts["dispatch"] + parts["combine"]) / len(model.moe_layers),
        step_s=float(step_seconds(cost).value),
    )  # fmt: skip
