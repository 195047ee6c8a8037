"""Figures about bytes and time between devices: copies of rows, all-to-alls, links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moesaic.account.memory import kv_footprint
from moesaic.audit.figures.registry import figure
from moesaic.audit.figures.subjects import decode, experts_of, num_moe_layers, one_expert_bytes
from moesaic.audit.figures.subjects import model as model_of
from moesaic.cost import comm
from moesaic.cost.exchange import (
    copies_once,
    copies_sent,
    crossing_share,
    expert_by_tensor_bytes,
    payload_share,
)
from moesaic.cost.helix import with_ring
from moesaic.cost.layouts import Split
from moesaic.cost.profile import PAPER
from moesaic.cost.term import CostTerm, leaves
from moesaic.spec.hardware import Cluster, Fact
from moesaic.spec.hardware import cluster as cluster_of
from moesaic.spec.hardware import machine as machine_of
from moesaic.spec.model import GqaSpec


@figure("S000-024", "S002-006", holds=lambda count: count == 2)
def all_to_alls(model: str, machine: str, cards: int) -> float:
    """Exchanges of a sparse layer under expert parallelism."""
    step = decode(model, cluster_of(machine), Split(dp=cards, ep=cards), 8.0, 1024)
    names = [(times, term) for times, term in leaves(step) if term.name in ("dispatch", "combine")]
    return sum(float(np.asarray(times)) for times, _ in names) / num_moe_layers(model)


@figure("S000-025", holds=lambda partials: partials["terms"] > partials["messages"])
def partials(chosen: int, ranks: int) -> dict[str, int]:
    """Terms of a token's sum, and messages when each rank adds up its own."""
    return {"terms": chosen, "messages": min(chosen, ranks)}


@figure("S000-026", holds=lambda parts: 0.5 < parts["transfer_us"] / parts["latency_us"] < 2)
def start_up(
    tokens: int, chosen: int, pairs: int, hidden: int, latency_s: float, bytes_per_s: float
) -> dict[str, float]:
    """Bytes of a pair by the rate, the latency, and the tokens at which both are equal."""
    each = tokens * chosen / pairs * hidden * 2
    return {
        "transfer_us": 1e6 * each / bytes_per_s,
        "latency_us": 1e6 * latency_s,
        "equal_at_tokens": tokens * latency_s * bytes_per_s / each,
    }


@figure("S002-007", "S002-070")
def rows_kib(hidden: int, rows: int, bits: float) -> float:
    """Rows of one token."""
    return rows * hidden * bits / 8 / 1024


@figure("S002-009", holds=lambda sent: 0 < sent["once_per_rank"] < sent["formula"])
def traffic_bounds(tokens: int, chosen: int, hidden: int, ranks: int, num_experts: int) -> dict[str, float]:
    """Bytes of dispatch and combine by the formula, and with one copy per rank."""
    return {
        "formula": _both_ways(copies_sent(tokens, chosen, ranks), hidden),
        "once_per_rank": _both_ways(copies_once(tokens, chosen, ranks, num_experts), hidden),
    }


def _both_ways(rows: float, hidden: int) -> float:
    """Bytes of rows out and back, 16 bits."""
    return 2 * 2 * hidden * rows


@figure("S002-012", holds=lambda share: share == 0.875)
def remote_share(ranks: int) -> float:
    """Share of choices that are elsewhere."""
    return copies_sent(1, 1, ranks)


@figure("S002-013", "S002-014", "S002-015")
def both_ways_bytes(hidden: int, chosen: int, remote: float, layers: int = 1, tokens: int = 1) -> float:
    """Rows out and back, 16 bits."""
    return 2 * chosen * hidden * 2 * remote * layers * tokens


@figure("S002-017", holds=lambda growth: growth == [2.0, 2.0, 2.0])
def growth_when_doubled(tokens: int, chosen: int, hidden: int, ranks: int) -> list[float]:
    """How traffic grows when tokens, choices and width are doubled one by one."""
    base = _both_ways(copies_sent(tokens, chosen, ranks), hidden)
    doubled = (2 * tokens, chosen, hidden), (tokens, 2 * chosen, hidden), (tokens, chosen, 2 * hidden)
    return [_both_ways(copies_sent(n, k, ranks), h) / base for n, k, h in doubled]


@figure("S003-016", holds=lambda growth: growth["choices"] > 1 and growth["ranks"] > 1)
def growth_with_spread(tokens: int, chosen: int, hidden: int, ranks: int) -> dict[str, float]:
    """How traffic grows with twice the choices, and over twice the ranks."""
    base = _both_ways(copies_sent(tokens, chosen, ranks), hidden)
    return {
        "choices": _both_ways(copies_sent(tokens, 2 * chosen, ranks), hidden) / base,
        "ranks": _both_ways(copies_sent(tokens, chosen, 2 * ranks), hidden) / base,
    }


@figure("S002-019", holds=lambda us: us[0] < us[1] < us[2])
def transfer_and_experts_us(model: str, tokens: int, machine: str) -> list[float]:
    """Both transfers over the link and over the network, and the read of a rank's expert."""
    moe, cards = experts_of(model), cluster_of(machine)
    ranks = cards.num_devices
    sent = _both_ways(copies_sent(tokens, moe.experts_per_token, ranks), moe.row_width)
    read = moe.num_experts / ranks * one_expert_bytes(model)
    rates = comm.link_rate(cards, PAPER), comm.network_rate(cards, PAPER)
    memory = PAPER.memory_share["experts"] * cards.machine.memory_bytes_per_s
    return [1e6 * sent / rates[0], 1e6 * sent / rates[1], 1e6 * read / memory]


@figure("S002-027", "S002-098")
def link_one_way(machine: str) -> float:
    """What one device can send."""
    return machine_of(machine).number("link_bytes_per_s", 0.0) / 1e9


@figure("S003-014")
def link_both_ways(machine: str) -> float:
    """Both directions, as datasheets add them."""
    return 2 * link_one_way(machine)


@figure("S002-028", holds=lambda percent: percent < 40)
def part_of_peak(num_bytes: int, machine: str) -> float:
    """Percent of the link's rate that one message reaches."""
    found = machine_of(machine)
    moved = num_bytes / found.number("link_bytes_per_s", 0.0)
    return 100 * moved / (moved + found.number("link_latency_s", 0.0))


@figure("S002-029")
def bus_both_ways(machine: str) -> float:
    """The host's bus, both directions."""
    return 2 * machine_of(machine).number("host_link_bytes_per_s", 0.0) / 1e9


@figure("S002-031", holds=lambda factor: factor > 2.7)
def link_by_bus(machine: str, bus_bytes_per_s: float) -> float:
    """The link's rate by the bus'."""
    return machine_of(machine).number("link_bytes_per_s", 0.0) / bus_bytes_per_s


@figure("S002-041")
def percent_reached(reached: float, nominal: float) -> float:
    """A part in percent."""
    return 100 * reached / nominal


@figure("S002-042", holds=lambda factor: factor < 4)
def latency_ratio(machine: str) -> float:
    """A message's latency over the network by that of a hop."""
    cards = cluster_of(machine)
    return comm.network_latency(cards) / comm.link_latency(cards)


@figure("S002-052", holds=lambda saved: saved == [40.0, 60.0])
def saved_between_nodes(local: Sequence[float], nodes: int) -> list[float]:
    """Percent of the traffic between nodes that local choices save, against even routing."""
    return [100 * crossing_share(share, nodes)[1] for share in local]


@figure("S003-007", holds=lambda ratios: ratios == [0.25, 1.0, 2.0])
def ep_by_tp(chosen: Sequence[int], ranks: Sequence[int]) -> list[float]:
    """Bytes of a GPU with experts spread by its bytes with experts sliced."""
    return [expert_by_tensor_bytes(count, size) for count, size in zip(chosen, ranks, strict=True)]


@figure("S003-012")
def row_kib(hidden: int, bits: float) -> float:
    """One row."""
    return rows_kib(hidden, 1, bits)


@figure("S003-013")
def rows_mb(hidden: int, bits: float, tokens: int) -> float:
    """Many rows."""
    return tokens * hidden * bits / 8 / 1e6


@figure("S003-015")
def network_gb_per_s(machine: str) -> float:
    """A device's network card, one direction."""
    return machine_of(machine).number("network_bytes_per_s", 0.0) / 1e9


@figure("S004-042")
def copies(model: str, tokens: int, ranks: int) -> float:
    """Rows that leave a card, one for each choice."""
    return copies_sent(tokens, experts_of(model).experts_per_token, ranks)


@figure("S004-043")
def copies_once_of(model: str, tokens: int, ranks: int) -> float:
    """Rows that leave a card, one for each card with a chosen expert."""
    moe = experts_of(model)
    return copies_once(tokens, moe.experts_per_token, ranks, moe.num_experts)


@figure("S004-044", "S004-045")
def copies_mb(model: str, tokens: int, ranks: int, bits: float) -> float:
    """Their bytes."""
    return copies(model, tokens, ranks) * experts_of(model).row_width * bits / 8 / 1e6


@figure("S004-046")
def exchange_ms(model: str, tokens: int, machine: str) -> list[float]:
    """Dispatch in one byte a number and combine in two."""
    return [1e3 * float(term.seconds.value) for term in _exchange(model, tokens, machine)]


def _exchange(model: str, tokens: int, machine: str) -> list[CostTerm]:
    cards = cluster_of(machine)
    return [
        comm.all_to_all(
            "dispatch", near_bytes=0.0, ranks=cards.num_devices, cluster=cards, profile=PAPER,
            far_bytes=1e6 * copies_mb(model, tokens, cards.num_devices, bits),
        )
        for bits in (8, 16)
    ]  # fmt: skip


@figure("S004-047")
def exchange_all_layers_ms(model: str, tokens: int, machine: str) -> float:
    """Both, over all sparse layers."""
    return num_moe_layers(model) * sum(exchange_ms(model, tokens, machine))


@figure("S004-158")
def exchange_sizes_and_times(model: str, tokens: int, machine: str) -> list[float]:
    """MB and us of dispatch and of combine, and ms over all layers."""
    terms = _exchange(model, tokens, machine)
    each = [number for term in terms for number in (term.bytes / 1e6, 1e6 * term.seconds.value)]
    return [*(float(number) for number in each), exchange_all_layers_ms(model, tokens, machine)]


@figure("S004-108")
def bytes_of_pair(batch: int, chosen: int, num_experts: int, hidden: int, tp: int) -> float:
    """Rows of a micro-batch from one of `tp` attention cards to one expert's card."""
    return batch * chosen / num_experts * hidden * 2 / tp


@figure("S004-132")
def ring_ms(ranks: int, latency_s: float) -> float:
    """Latency of an all-reduce around a ring."""
    known = machine_of("h100")
    facts = {**known.facts, "link_latency_s": Fact(value=latency_s, source="the figure's input")}
    cards = with_ring(Cluster(machine=replace(known, facts=facts), devices_per_node=8, num_nodes=ranks // 8))
    term = comm.all_reduce("ffn_all_reduce", num_bytes=0.0, ranks=ranks, cluster=cards, profile=PAPER)
    return 1e3 * float(np.asarray(term.overhead_s))


@figure("S004-165")
def context_exchange(model: str, machine: str, batch: int, tp: int, kvp: int) -> list[float]:
    """What a card sends of its partial outputs: kB and us."""
    mixer, cards = model_of(model).layers[0].mixer, cluster_of(machine)
    width = mixer.num_heads * mixer.head_dim if isinstance(mixer, GqaSpec) else 0
    sent = batch * width / tp * (kvp - 1) / kvp * 2
    term = comm.all_to_all(
        "kv_exchange", near_bytes=sent, far_bytes=0.0, ranks=tp * kvp, cluster=cards, profile=PAPER
    )
    return [sent / 1e3, 1e6 * float(term.seconds.value)]


@figure("S002-089")
def left_over(memory: float, experts: float, reserved: float) -> float:
    """A difference."""
    return memory - experts - reserved


@figure("S002-090")
def product_mb(factors: Sequence[int]) -> float:
    """A product of bytes."""
    return float(np.prod(factors)) / 1e6


@figure("S002-093")
def quotient(free: float, each: float) -> float:
    """A quotient."""
    return free / each


@figure("S000-028", holds=lambda sizes: sizes[0] > 0.5 and sizes[1] < 1)
def prompt_and_rows(model: str, prompt: int, tokens: int, pairs: int) -> list[float]:
    """KV of a prompt in GB, and rows of one layer between one pair of cards in MB."""
    moe = experts_of(model)
    rows = tokens * moe.experts_per_token / pairs * moe.row_width * 2
    return [kv_footprint(model_of(model)).sequence_bytes(prompt) / 1e9, rows / 1e6]


@figure("S004-137")
def worst_case_payload(chosen: int, ranks: int) -> float:
    """Percent of buffers for every token and destination that can be payload."""
    return 100 * payload_share(chosen, ranks)


@figure("S004-138", holds=lambda percents: percents[0] < percents[1] < 54 < percents[2])
def remote_payload(chosen: int, ranks: int, num_experts: int) -> list[float]:
    """Percent of them: sent once per card, sent once per choice, and with local rows in the numerator."""
    once = payload_share(chosen, ranks, num_experts=num_experts)
    return [100 * once, 100 * copies_sent(1, chosen, ranks) / (ranks - 1), worst_case_payload(chosen, ranks)]


@figure("S004-139")
def capacity_payload(chosen: int, ranks: int, payload: Sequence[float], factor: float) -> list[float]:
    """Percent of buffers sized by a capacity factor that the same rows fill."""
    return [percent / (factor * chosen / ranks) for percent in payload]
