"""Bytes that move in a step, and the batch from which experts are no longer bound by memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.account.memory import expert_bytes, kv_footprint, weight_bytes
from moesaic.errors import ConfigError
from moesaic.spec.hardware import Machine
from moesaic.spec.model import ModelSpec, MoeSpec
from moesaic.spec.numerics import KvFormat

FLOPS_EFFICIENCY = 0.7  # guess: share of the datasheet's rate that large matrix products reach
BANDWIDTH_EFFICIENCY = 0.8  # guess: share of the datasheet's bandwidth that long reads reach


def sparsity(moe: MoeSpec) -> float:
    """E / k: how many times more experts there are than one token uses."""
    return moe.num_experts / moe.experts_per_token


def expected_distinct(num_experts: int, experts_per_token: int, num_tokens: int) -> float:
    """Distinct experts that `num_tokens` tokens choose in one layer, when every expert is equally likely.

    Skewed routing chooses fewer.

    Source: E * (1 - (1 - k / E) ** n): an expert is missed by all n tokens independently.
    """
    return num_experts * (1.0 - (1.0 - experts_per_token / num_experts) ** num_tokens)


def rows_per_expert_to_balance(flops_per_s: float, bytes_per_s: float, *, weight_bits: float = 16.0) -> float:
    """Rows an expert needs so that computing takes as long as reading its weights once.

    Units:  rows. Per weight: 2 operations a row against weight_bits / 8 bytes.
    Source: F / B for 2-byte weights: 312e12 / 2.0e12 = 156 (A100), 0.7 * 989e12 / (0.8 * 3.35e12) = 258
    (H100).
    Raises: ConfigError for a rate that is not above zero.
    """
    if flops_per_s <= 0 or bytes_per_s <= 0:
        raise ConfigError(f"rates must be above zero, got {flops_per_s:g} FLOP/s and {bytes_per_s:g} B/s")
    return flops_per_s / bytes_per_s * weight_bits / 16.0


@dataclass(frozen=True, kw_only=True, slots=True)
class BalancePoint:
    """Where the experts of a model stop being bound by memory on one machine.

    Units:  rows per expert; tokens in the whole batch.
    """

    machine: str
    compute_dtype: str  # what the products are computed in
    peak_rows: float  # at the datasheet's rates
    rows: float  # at the shares of them that are reached
    peak_batch: int
    batch: int


def balance_point(spec: ModelSpec, machine: Machine) -> BalancePoint | None:
    """Batch from which the experts are bound by compute: rows per expert times E / k; None if dense."""
    layers = spec.moe_layers
    if not layers:
        return None
    stored = spec.stored_format("routed_experts")
    # 8-bit weights meet 8-bit activations where the device has such a rate; narrower ones are unpacked first.
    is_narrow = stored.format in ("fp8", "int8") and machine.has_rate(stored.format)
    compute_dtype = stored.format if is_narrow else machine.wide_dtype
    flops_per_s, bits = machine.flops_per_s(compute_dtype), stored.bits
    peak = rows_per_expert_to_balance(flops_per_s, machine.memory_bytes_per_s, weight_bits=bits)
    real = peak * FLOPS_EFFICIENCY / BANDWIDTH_EFFICIENCY
    worst = max(sparsity(moe) for _, moe in layers)
    return BalancePoint(
        machine=machine.name,
        compute_dtype=compute_dtype,
        peak_rows=peak,
        rows=real,
        peak_batch=math.ceil(peak * worst - 1e-9),
        batch=math.ceil(real * worst - 1e-9),
    )


def expert_utilisation(moe: MoeSpec, batch: int, *, flops_per_s: float, bytes_per_s: float) -> float:
    """Share of the peak that 2-byte experts reach at a batch, were they alone.

    Source: min(k / E * B / F * b, 1).
    """
    return min(1.0, batch / sparsity(moe) * bytes_per_s / flops_per_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTraffic:
    """What one decode step of a batch reads from memory, on one device that holds everything.

    Units:  bytes; experts as expected under even routing.
    """

    batch: int
    expert_bytes: int
    other_weight_bytes: int
    kv_bytes: int
    distinct_experts: float  # per sparse layer, mean
    rows_per_expert: float  # per chosen expert, mean

    @property
    def total(self) -> int:
        """All bytes."""
        return self.expert_bytes + self.other_weight_bytes + self.kv_bytes


def step_traffic(
    spec: ModelSpec, batch: int, context_len: int, kv_format: KvFormat = "bfloat16"
) -> StepTraffic:
    """Bytes read by one step that decodes one token for each of `batch` sequences of `context_len`.

    Raises: ConfigError for a batch below 1.
    """
    if batch < 1:
        raise ConfigError(f"a batch has at least 1 token, got {batch}")
    weights = weight_bytes(spec)
    others = sum(
        size for component, size in weights.items() if component not in ("routed_experts", "embedding")
    )
    if spec.has_tied_head:
        others += weights["embedding"]
    distinct = [
        expected_distinct(moe.num_experts, moe.experts_per_token, batch) for _, moe in spec.moe_layers
    ]
    experts = sum(
        count * expert_bytes(spec, moe) for count, (_, moe) in zip(distinct, spec.moe_layers, strict=True)
    )
    choices = sum(batch * moe.experts_per_token for _, moe in spec.moe_layers)
    return StepTraffic(
        batch=batch,
        expert_bytes=round(experts),
        other_weight_bytes=others,
        kv_bytes=batch * kv_footprint(spec, kv_format).sequence_bytes(context_len),
        distinct_experts=sum(distinct) / len(distinct) if distinct else 0.0,
        rows_per_expert=choices / sum(distinct) if distinct else 0.0,
    )


def dispatch_bytes_per_token(
    spec: ModelSpec, *, dispatch_bits: float = 16.0, combine_bits: float = 16.0
) -> int:
    """Bytes one token sends to its experts and gets back, over all sparse layers, if no two share a device.

    Units:  bytes; both directions together.
    Source: k rows of the seam's width out and k back per layer.
    """
    rows = sum(moe.experts_per_token * moe.row_width for _, moe in spec.moe_layers)
    return round(rows * (dispatch_bits + combine_bits) / 8)
