"""Figures about what a batch reads and computes: distinct experts, reuse, the balance with compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from moesaic.account.params import expert_params
from moesaic.account.traffic import (
    expected_distinct,
    expert_utilisation,
    rows_per_expert_to_balance,
    sparsity,
)
from moesaic.audit.figures.memory import GIB
from moesaic.audit.figures.registry import figure
from moesaic.audit.figures.subjects import experts_of, num_moe_layers, one_expert_bytes
from moesaic.spec.hardware import machine as machine_of


@figure("S000-010")
def distinct(num_experts: int, chosen: int, tokens: int) -> float:
    """Experts of a layer that a batch touches, under even routing."""
    return expected_distinct(num_experts, chosen, tokens)


def distinct_of(model: str, tokens: int) -> float:
    """The same of a model."""
    moe = experts_of(model)
    return distinct(moe.num_experts, moe.experts_per_token, tokens)


@figure("S000-011")
def read_gib(model: str, tokens: int) -> float:
    """Expert weights of one layer that a batch reads."""
    return distinct_of(model, tokens) * one_expert_bytes(model) / GIB


@figure("S000-012")
def concentrated_mib(model: str, chosen: int) -> float:
    """The least: every token chooses the same."""
    return chosen * one_expert_bytes(model) / 2**20


@figure("S000-013")
def spread_of_reads(model: str, tokens: int) -> float:
    """The read of even routing by the least."""
    return distinct_of(model, tokens) / experts_of(model).experts_per_token


@figure("S000-014")
def rows_per_active(num_experts: int, chosen: int, tokens: int) -> list[float]:
    """Rows of an active expert: all touched, even random routing, one choice for all."""
    active = (num_experts, distinct(num_experts, chosen, tokens), chosen)
    return [tokens * chosen / count for count in active]


@figure("S000-015")
def expert_gflop(model: str, tokens: int) -> float:
    """Operations of one layer's routed experts."""
    moe = experts_of(model)
    return 2 * tokens * moe.experts_per_token * expert_params(moe) / 1e9


@figure("S000-016")
def read_ms(model: str, chosen: int, bytes_per_s: float) -> list[float]:
    """Reading all experts of a layer, and reading the least."""
    counts = experts_of(model).num_experts, chosen
    return [1e3 * count * one_expert_bytes(model) / bytes_per_s for count in counts]


@figure("S000-017", holds=lambda reuse: reuse > 1)
def weight_reuse(num_experts: int, chosen: int, tokens: int) -> float:
    """Choices by active experts."""
    return tokens * chosen / distinct(num_experts, chosen, tokens)


@figure("S000-018", holds=lambda reuses: all(a < b for a, b in pairwise(reuses)))
def reuse_by_batch(num_experts: int, chosen: int, batches: Sequence[int]) -> list[float]:
    """Reuse of growing batches."""
    return [weight_reuse(num_experts, chosen, tokens) for tokens in batches]


@figure("S000-020", holds=lambda reads: reads["with_replicas"] > reads["without"])
def reads_with_replicas(
    num_experts: int, chosen: int, tokens: int, ranks: int, num_redundant: int
) -> dict[str, float]:
    """Copies read by all ranks: each rank reads the active copies that it holds."""
    active = distinct(num_experts, chosen, tokens)
    copies = num_experts + num_redundant
    return {"without": active, "with_replicas": active * copies / num_experts, "ranks": ranks}


@figure("S002-061", holds=lambda ms: all(5 <= one <= 20 for one in ms))
def loads_ms(models: Sequence[str], bytes_per_s: float) -> list[float]:
    """Moving one expert of one layer."""
    return [load_ms(name, bytes_per_s) for name in models]


@figure("S002-064")
def load_ms(model: str, bytes_per_s: float) -> float:
    """Moving one expert of one layer in 16 bits."""
    return 1e3 * one_expert_bytes(model) / bytes_per_s


@figure("S002-063")
def move_ms(num_bytes: float, bytes_per_s: float) -> float:
    """Bytes over a rate."""
    return 1e3 * num_bytes / bytes_per_s


@figure("S002-060", holds=lambda ms: ms[0] < 50 <= ms[1] < ms[2])
def cold_loads_ms(model: str, bus_bytes_per_s: float, disk_bytes_per_s: float) -> list[float]:
    """One layer's expert from the host and from disk, and every layer's from the host."""
    host = load_ms(model, bus_bytes_per_s)
    return [host, load_ms(model, disk_bytes_per_s), host * num_moe_layers(model)]


@figure("S003-025", holds=lambda seconds: seconds[0] < seconds[1] < 1 < seconds[2])
def first_hit_s(model: str, bus_bytes_per_s: float, disk_bytes_per_s: float) -> list[float]:
    """One layer's expert from the host and from disk, and every layer's from disk."""
    bus, disk = (load_ms(model, rate) / 1e3 for rate in (bus_bytes_per_s, disk_bytes_per_s))
    return [bus, disk, disk * num_moe_layers(model)]


@figure("S003-026", holds=lambda stalls: stalls["expected_ms"] > 0 and stalls["per_token_ms"] > 50)
def expected_stall(model: str, share: float, bytes_per_s: float) -> dict[str, float]:
    """Waiting for an expert that takes a share of the traffic: per layer, and over all layers."""
    stall = share * load_ms(model, bytes_per_s)
    return {"expected_ms": stall, "per_token_ms": stall * num_moe_layers(model)}


@figure("S002-067", holds=lambda percents: percents[0] < percents[1] < percents[2])
def load_share_percent(
    load_ms: float, request_ms: Sequence[float], model: str, bytes_per_s: float
) -> list[float]:
    """A load as part of a long and a short request, and the real one of the short."""
    shortest, longest = sorted(request_ms)
    real = 1e3 * one_expert_bytes(model) / bytes_per_s
    return [100 * load_ms / longest, 100 * load_ms / shortest, 100 * real / shortest]


@figure("S002-062")
def bus_and_memory(machine: str, share: float) -> list[float]:
    """What of a PCIe bus is reached, and memory's rate."""
    found = machine_of(machine)
    return [found.number("host_link_bytes_per_s", 0.0) * share / 1e9, found.memory_bytes_per_s / 1e9]


@figure("S002-016", holds=lambda milliseconds: milliseconds < 1)
def memory_pass_ms(num_bytes: float, machine: str) -> float:
    """How long memory takes for the bytes."""
    return 1e3 * num_bytes / machine_of(machine).memory_bytes_per_s


@figure("S004-019", holds=lambda rows: rows == [32.0, 128.0])
def rows_with_replicas(tokens: int, chosen: int, num_experts: int, replicas: int) -> list[float]:
    """Mean tokens per expert, for one attention replica and for several."""
    mean = tokens * chosen / num_experts
    return [mean, mean * replicas]


@figure("S004-020", holds=lambda ratio: ratio == 8192)
def compute_by_traffic(hidden: int, inner: int) -> float:
    """Multiply-adds of a two-matrix expert by the numbers that come and go."""
    moe = replace(experts_of("mixtral-8x7b"), row_width=hidden, expert_width=inner, is_gated=False)
    return expert_params(moe) / (2 * hidden)


@figure("S004-024")
def rows_of_model(model: str, tokens: int) -> float:
    """Mean tokens per expert."""
    return tokens / sparsity(experts_of(model))


@figure("S004-150")
def mean_rows(num_experts: int, chosen: int, tokens: int) -> float:
    """Mean tokens per expert."""
    return tokens * chosen / num_experts


@figure("S004-149")
def distinct_by_batch(num_experts: int, chosen: int, batches: Sequence[int]) -> list[float]:
    """Experts touched by each batch."""
    return [distinct(num_experts, chosen, tokens) for tokens in batches]


@figure("S004-154")
def read_gb(model: str, tokens: int) -> float:
    """Expert weights that a step reads over all layers."""
    return distinct_of(model, tokens) * one_expert_bytes(model) * num_moe_layers(model) / 1e9


@figure("S004-152")
def layer_and_step_gb(model: str, tokens: int) -> list[float]:
    """The same per layer, and in all."""
    whole = read_gb(model, tokens)
    return [whole / num_moe_layers(model), whole]


@figure("S004-153")
def distinct_and_gb(model: str, tokens: int) -> list[float]:
    """Experts touched, and what they weigh over all layers."""
    return [distinct_of(model, tokens), read_gb(model, tokens)]


@figure("S004-155")
def growth(model: str, batches: Sequence[int]) -> list[float]:
    """How much reads and compute grow from one batch to the next."""
    first, second = batches
    return [read_gb(model, second) / read_gb(model, first), second / first]


@figure("S004-036")
def balance_rows(flops_per_s: float, bytes_per_s: float) -> float:
    """Rows per expert that take as long to compute as the weights to read."""
    return rows_per_expert_to_balance(flops_per_s, bytes_per_s)


@figure("S004-039")
def balance_rows_reached(machine: str, compute_share: float, memory_share: float) -> float:
    """The same at the shares of the datasheet that are reached."""
    found = machine_of(machine)
    return balance_rows(
        compute_share * found.flops_per_s("bfloat16"), memory_share * found.memory_bytes_per_s
    )


@figure("S004-156")
def balance_batch(model: str, flops_per_s: float, bytes_per_s: float) -> float:
    """The batch that gives every expert so many rows."""
    return balance_rows(flops_per_s, bytes_per_s) * sparsity(experts_of(model))


@figure("S004-037", "S004-157")
def rows_and_use(model: str, batch: int, flops_per_s: float, bytes_per_s: float) -> list[float]:
    """Rows per expert, and percent of the peak that they reach."""
    moe = experts_of(model)
    use = expert_utilisation(moe, batch, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    return [batch / sparsity(moe), 100 * use]


@figure("S004-038", holds=lambda use: use[0] < use[1] <= use[2] == 1)
def use_by_batch(model: str, batches: Sequence[int], flops_per_s: float, bytes_per_s: float) -> list[float]:
    """Share of the peak of growing batches: linear, then one."""
    moe = experts_of(model)
    return [
        expert_utilisation(moe, batch, flops_per_s=flops_per_s, bytes_per_s=bytes_per_s) for batch in batches
    ]


@figure("S000-029", holds=lambda found: found[0] < found[1] and found[2] > 1)
def host_or_device(
    model: str, rows: int, memory_bytes_per_s: float, flops_per_s: float, bus_bytes_per_s: float
) -> list[float]:
    """Computing an expert's rows on the host, fetching it instead, and the rows at which both are equal."""
    size, operations = one_expert_bytes(model), 2 * expert_params(experts_of(model))
    host_s = max(size / memory_bytes_per_s, rows * operations / flops_per_s)
    fetch_s = size / bus_bytes_per_s
    return [1e3 * host_s, 1e3 * fetch_s, fetch_s * flops_per_s / operations]


@figure("S002-069", holds=lambda ms: ms[0] > 1 and ms[1] > 5)
def compute_to_hide_ms(model: str, load_ms: float, left_ms: float, bytes_per_s: float) -> list[float]:
    """Compute of a layer that hides all but a rest of a load: of the load stated, and of the real one."""
    return [load_ms - left_ms, 1e3 * one_expert_bytes(model) / bytes_per_s - left_ms]
