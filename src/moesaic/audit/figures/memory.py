"""Figures about parameters and bytes: experts, models, KV, and what fits where."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moesaic.account.memory import devices_for_weights, kv_footprint
from moesaic.account.params import count_params, expert_params
from moesaic.account.traffic import sparsity
from moesaic.audit.figures.registry import figure
from moesaic.audit.figures.subjects import experts_of, num_moe_layers, one_expert_bytes, resized
from moesaic.audit.figures.subjects import model as model_of
from moesaic.cost.layouts import Split, cache_bytes_per_sequence
from moesaic.cost.ops import Formats
from moesaic.cost.profile import PAPER
from moesaic.placement.pack import placed_slots
from moesaic.planner.economy import concurrency
from moesaic.spec.experts import contiguous_plan
from moesaic.spec.hardware import machine as machine_of
from moesaic.spec.model import GqaSpec

GIB = 2**30


@figure("S000-001")
def expert_size(model: str, hidden: int, expert_width: int, is_gated: bool) -> int:
    """Parameters of one expert."""
    return expert_params(resized(model, row_width=hidden, expert_width=expert_width, is_gated=is_gated))


@figure("S000-002", "S000-003", "S000-004", "S000-005", "S000-006")
def resident_gib(model: str, resident: int, layers: int) -> float:
    """Resident experts in bfloat16."""
    return resident * layers * one_expert_bytes(model) / GIB


@figure("S000-007")
def device_gib(machine: str) -> float:
    """A device's nominal memory."""
    return machine_of(machine).memory_bytes / GIB


@figure("S000-008", holds=lambda fits: fits == [False, True])
def resident_fits(model: str, resident: Sequence[int], machine: str) -> list[bool]:
    """Whether so many experts of every layer fit one device."""
    layers = num_moe_layers(model)
    return [resident_gib(model, count, layers) <= device_gib(machine) for count in resident]


@figure("S000-009", holds=lambda exceeds: exceeds is True)
def all_experts_exceed(model: str, machine: str) -> bool:
    """Whether all experts are more than one device."""
    return resident_gib(model, experts_of(model).num_experts, num_moe_layers(model)) > device_gib(machine)


@figure("S000-021", holds=lambda slots: slots["bytes_added"] > 0 and slots["distinct_added"] == 0)
def what_replicas_add(model: str, ranks: int, num_redundant: int) -> dict[str, float]:
    """Bytes and distinct experts that further slots bring over all layers."""
    moe = experts_of(model)
    shares = [1.0 / moe.num_experts] * moe.num_experts
    slots = placed_slots(np.array(shares), ranks, num_redundant)
    added = len(slots.expert) - moe.num_experts
    return {
        "bytes_added": added * num_moe_layers(model) * one_expert_bytes(model),
        "distinct_added": len(np.unique(slots.expert)) - moe.num_experts,
    }


@figure("S000-023")
def whole_model_gb(model: str, bits: float) -> float:
    """All parameters at one width."""
    return count_params(model_of(model)).num_total * bits / 8 / 1e9


@figure("S000-027")
def experts_per_rank(num_experts: int, ranks: int) -> int:
    """Experts of the fullest rank, in order."""
    plan = contiguous_plan((num_experts,), ranks)
    return int(np.bincount(plan.slot_rank[0]).max())


@figure("S002-001")
def choices_per_token(model: str) -> int:
    """Choices over all layers."""
    return sum(moe.experts_per_token for _, moe in model_of(model).moe_layers)


@figure("S002-003", "S004-005", "S004-035")
def total_billions(model: str) -> float:
    """All parameters."""
    return count_params(model_of(model)).num_total / 1e9


@figure("S002-005", holds=lambda factor: 6 < factor < 8)
def growth_by_experts(model: str) -> float:
    """Parameters by those of the same model with one expert."""
    spec = model_of(model)
    params = count_params(spec)
    routed = params.total["routed_experts"] * (1 - 1 / experts_of(model).num_experts)
    return params.num_total / (params.num_total - routed)


@figure("S002-010")
def hidden_size(model: str) -> int:
    """Width of the residual."""
    return model_of(model).hidden


@figure("S002-011")
def num_layers(model: str) -> int:
    """Layers."""
    return len(model_of(model).layers)


@figure("S002-020", holds=lambda factor: factor > 1)
def missing_factor(model: str) -> float:
    """All routed experts by those of the formula with one matrix and one layer."""
    moe = experts_of(model)
    formula = moe.num_experts * moe.row_width * moe.expert_width
    return count_params(model_of(model)).total["routed_experts"] / formula


@figure("S002-021", "S002-023")
def expert_mb(model: str, bits: float) -> float:
    """One expert of one layer."""
    return one_expert_bytes(model, bits) / 1e6


@figure("S002-022")
def matrix_mb(model: str, bits: float) -> float:
    """One of its matrices."""
    moe = experts_of(model)
    return moe.row_width * moe.expert_width * bits / 8 / 1e6


@figure("S002-024", "S002-025")
def layer_experts_mb(model: str, bits: float) -> float:
    """All experts of one layer."""
    return experts_of(model).num_experts * one_expert_bytes(model, bits) / 1e6


@figure("S002-026", holds=lambda tokens: 0 < tokens < 1e6)
def tokens_as_large_as_experts(model: str) -> float:
    """Cached tokens whose KV is as large as the routed experts."""
    return 2 * count_params(model_of(model)).total["routed_experts"] / kv_bytes(model, 1)


def kv_bytes(model: str, tokens: int, kv_bits: float = 16.0) -> float:
    """KV of one sequence."""
    return kv_footprint(model_of(model)).sequence_bytes(tokens) * kv_bits / 16


@figure("S002-087", holds=lambda sizes: len(set(sizes)) == 1 and sizes[0] > 0)
def kv_by_routing(model: str, chosen: Sequence[int], tokens: int) -> list[float]:
    """KV of a request in MB when a token chooses another number of experts."""
    spec = model_of(model)
    sizes = []
    for count in chosen:
        ffn = replace(experts_of(model), experts_per_token=count)
        layers = tuple(replace(layer, ffn=ffn) for layer in spec.layers)
        sizes.append(kv_footprint(replace(spec, layers=layers)).sequence_bytes(tokens) / 1e6)
    return sizes


@figure("S002-091")
def request_kv_mb(model: str, tokens: int) -> float:
    """KV of one request."""
    return kv_bytes(model, tokens) / 1e6


@figure("S002-092")
def requests_kv_mb(models: Sequence[str], tokens: int) -> list[float]:
    """KV of one request of each model."""
    return [kv_bytes(name, tokens) / 1e6 for name in models]


@figure("S003-001", holds=lambda ffn: ffn["total"] == 8 and ffn["active"] == 2)
def experts_worth(model: str) -> dict[str, float]:
    """Routed parameters in units of one expert and layer: all, and those that a token uses."""
    params, one = count_params(model_of(model)), expert_params(experts_of(model)) * num_moe_layers(model)
    return {"total": params.total["routed_experts"] / one, "active": params.active["routed_experts"] / one}


@figure("S003-002")
def experts_and_choices(model: str) -> list[int]:
    """Experts of a layer and choices of a token."""
    moe = experts_of(model)
    return [moe.num_experts, moe.experts_per_token]


@figure("S003-003")
def idle_experts(model: str) -> int:
    """Experts of a layer that a token does not use."""
    moe = experts_of(model)
    return moe.num_experts - moe.experts_per_token


@figure("S003-017", "S003-018")
def model_gib(model: str) -> float:
    """A model in 16 bits."""
    return 2 * count_params(model_of(model)).num_total / GIB


@figure("S003-019")
def memory_ratio(models: Sequence[str]) -> float:
    """Parameters of the first by those of the second."""
    first, second = (count_params(model_of(name)).num_total for name in models)
    return first / second


@figure("S003-020", holds=lambda billions: 12 <= billions <= 14)
def active_billions(model: str) -> float:
    """Parameters that a token uses."""
    return count_params(model_of(model)).num_active / 1e9


@figure("S004-006")
def active_billions_published(model: str) -> float:
    """Parameters that a token uses, as reports count them."""
    return active_billions(model)


@figure("S003-021")
def compute_ratio(models: Sequence[str]) -> float:
    """Parameters that a token uses in the first model by those in the second."""
    first, second = (active_billions(name) for name in models)
    return first / second


@figure("S003-022")
def share_of_experts(model: str) -> float:
    """Share of a layer's experts that a token uses."""
    moe = experts_of(model)
    return moe.experts_per_token / moe.num_experts


@figure("S003-028", holds=lambda splits: splits is True)
def heads_divide(model: str, tp: int) -> bool:
    """Whether the KV heads divide over tensor-parallel ranks."""
    mixer = model_of(model).layers[0].mixer
    return isinstance(mixer, GqaSpec) and mixer.num_kv_heads % tp == 0


@figure("S004-004")
def granularity(models: Sequence[str]) -> list[int]:
    """Experts and choices of each."""
    return [number for name in models for number in experts_and_choices(name)]


@figure("S004-007")
def total_and_active(model: str) -> list[float]:
    """Billions of parameters in all and per token."""
    return [total_billions(model), active_billions(model)]


@figure("S004-008")
def totals(models: Sequence[str]) -> list[float]:
    """Billions of parameters of each."""
    return [total_billions(name) for name in models]


@figure("S004-009", "S004-010")
def devices_needed(model: str, machine: str, bits: float, usable: float) -> int:
    """Devices that hold the weights."""
    num_bytes = math.ceil(count_params(model_of(model)).num_total * bits / 8)
    return devices_for_weights(num_bytes, machine_of(machine).memory_bytes, usable=usable)


@figure("S004-049", holds=lambda lacks: lacks is True)
def cannot_hold(model: str, machine: str, cards: int) -> bool:
    """Whether its weights in one byte each are more than so many devices hold."""
    return devices_needed(model, machine, 8, PAPER.usable_memory) > cards


@figure("S004-022")
def idle_percent(num_experts: int, chosen: int) -> float:
    """Percent of a layer's experts that a token does not use."""
    return 100 * (
        1 - 1 / sparsity(resized("mixtral-8x7b", num_experts=num_experts, experts_per_token=chosen))
    )


@figure("S004-075", holds=lambda size: 10 <= size < 100)
def expert_fp8_mb(model: str) -> float:
    """One expert of one layer in one byte a weight."""
    return one_expert_bytes(model, 8) / 1e6


@figure("S004-127")
def kv_gb(model: str, context: int, kv_bits: float) -> float:
    """KV of one sequence."""
    return kv_bytes(model, context, kv_bits) / 1e9


@figure("S004-128")
def kv_per_card_gb(model: str, context: int, kv_bits: float, tp: int, kvp: int = 1) -> float:
    """KV of one sequence on one card: split by heads up to their number, and by context."""
    split = Split(tp=tp, kvp=kvp, expert_tp=tp * kvp)
    return float(cache_bytes_per_sequence(model_of(model), split, context, Formats(kv_bits=kv_bits))) / 1e9


@figure("S004-164")
def kv_of_grids_gb(model: str, context: int, kv_bits: float, grids: Sequence[tuple[int, int]]) -> list[float]:
    """The same of several (TP, KVP)."""
    return [kv_per_card_gb(model, context, kv_bits, tp, kvp) for tp, kvp in grids]


@figure("S004-151")
def expert_millions_and_gb(model: str) -> list[float]:
    """One expert: parameters in millions, size in 16 bits."""
    return [expert_params(experts_of(model)) / 1e6, one_expert_bytes(model) / 1e9]


@figure("S004-147")
def link_domain(machine: str) -> int:
    """Devices of one link domain."""
    return int(machine_of(machine).number("num_devices_per_link_domain", 1))


@figure("S004-145", holds=lambda found: found["qwen3-235b-a22b"] == 0 and min(found.values()) == 0)
def shared_experts(models: Sequence[str]) -> dict[str, int]:
    """How many shared experts each has, in widths of a routed one."""
    return {name: _num_shared(name) for name in models}


def _num_shared(name: str) -> int:
    moe = experts_of(name)
    return 0 if moe.shared is None else moe.shared.width // moe.expert_width


@figure("S002-077")
def tera_rates(machine: str) -> list[float]:
    """Dense rates in fp8 and bfloat16."""
    found = machine_of(machine)
    return [found.flops_per_s(dtype) / 1e12 for dtype in ("fp8", "bfloat16")]


def num_requests(model: str, machine: str, cards: int, tokens: int, reserved: float) -> int:
    """Requests at a time: memory without what is reserved on each card and the weights, by KV of one."""
    weights = 2.0 * count_params(model_of(model)).num_total
    return concurrency(
        machine_of(machine).memory_bytes, weights, kv_bytes(model, tokens), num_devices=cards,
        system_bytes=reserved,
    )  # fmt: skip


@figure("S002-094")
def requests_at_a_time(model: str, machine: str, cards: int, tokens: int, reserved: float) -> int:
    """Requests at a time in 16 bits."""
    return num_requests(model, machine, cards, tokens, reserved)


@figure("S002-088", holds=lambda count: count > 0)
def requests_that_fit(model: str, machine: str, cards: int, tokens: int, reserved: float) -> int:
    """The same."""
    return num_requests(model, machine, cards, tokens, reserved)


@figure("S002-095", holds=lambda count: count < 3000)
def requests_in_practice(model: str, machine: str, cards: int, tokens: int, reserved: float) -> int:
    """The same: what fits bounds what is served."""
    return num_requests(model, machine, cards, tokens, reserved)
