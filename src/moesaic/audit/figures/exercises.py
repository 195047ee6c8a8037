"""Nine exercises, each worked with the planner's own functions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moesaic.account.traffic import rows_per_expert_to_balance, sparsity
from moesaic.audit.figures import balance, memory, pingpong, reading, routing, traffic, wide
from moesaic.audit.figures.sheet import Make, Sheet
from moesaic.audit.figures.subjects import experts_of
from moesaic.cost.exchange import copies_over_nodes
from moesaic.cost.profile import PAPER
from moesaic.errors import ConfigError
from moesaic.planner.sim.case import GateCase
from moesaic.planner.sim.pingpong import timeline
from moesaic.spec.hardware import machine

A100 = {"flops_per_s": 312e12, "bytes_per_s": 2e12}
LOAD = (8, 4, 2, 2, 1, 1, 1, 1)


def touched() -> tuple[Sheet, ...]:
    """Experts that a batch touches, and what a step reads."""
    return (
        Sheet(
            title="experts that a batch touches: 64 experts, 4 per token",
            columns=("batch", "experts touched", "tokens per expert"),
            rows=tuple(
                (n, reading.distinct(64, 4, n), reading.mean_rows(64, 4, n)) for n in (1, 16, 64, 256)
            ),
        ),
        Sheet(
            title="Mixtral 8x7B: expert weights that a step reads, 32 layers in 16 bits",
            columns=("batch", "experts touched", "GB per step", "GB per token"),
            rows=tuple(
                (n, *(pair := reading.distinct_and_gb("mixtral-8x7b", n)), pair[1] / n)
                for n in (1, 4, 32, 128)
            ),
            figures=("exercise 1",),
            notes=("reads grow slower than the batch, so every token gets cheaper",),
        ),
    )


def balance_batches() -> tuple[Sheet, ...]:
    """Batches at which experts are bound by compute."""
    rows = []
    for name in ("mixtral-8x22b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"):
        batch = reading.balance_batch(name, **A100)
        at_400 = reading.rows_and_use(name, 400, **A100)
        rows.append((name, sparsity(experts_of(name)), math.ceil(batch), *at_400))
    return (
        Sheet(
            title=f"A100: an expert needs {reading.balance_rows(**A100):g} rows to be bound by compute",
            columns=("model", "E / k", "batch needed", "rows per expert at 400", "% of peak at 400"),
            rows=tuple(rows),
            figures=("exercise 2",),
        ),
    )


def exchange() -> tuple[Sheet, ...]:
    """Bytes of dispatch and combine, and what sending once saves."""
    moe = experts_of("deepseek-v3")
    counts = {
        "a copy per choice": traffic.copies("deepseek-v3", 128, 64),
        "once per card": traffic.copies_once_of("deepseek-v3", 128, 64),
        "between nodes, once per node": copies_over_nodes(128, moe.experts_per_token, 64, 8, moe.num_experts)[
            1
        ],
    }
    return (
        Sheet(
            title="DeepSeek-V3 on 64 cards, 8 a node: rows that leave a card, 128 tokens",
            columns=("sent", "rows", "MB in fp8", "ms at 40 GB/s"),
            rows=tuple(
                (name, count, count * moe.row_width / 1e6, 5e-3 + count * moe.row_width / 40e9 * 1e3)
                for name, count in counts.items()
            ),
            figures=("exercise 3",),
            notes=("once per node, the copies to other cards of the node go over NVLink",),
        ),
    )


def pipeline() -> tuple[Sheet, ...]:
    """Micro-batches of a ping-pong pipeline."""
    times, rows = {"attention_s": 0.4, "expert_s": 0.5, "transfer_s": 0.3}, []
    for count in range(1, 6):
        total = pingpong.times_by_count(**times, layers=40, micro_batches=[count])[0]
        busy = timeline(pingpong.stage_of(**times), count, 40).busy["experts"]
        try:
            formula: float | str = pingpong.formula_five(**times, layers=40, micro_batches=count)
        except ConfigError as error:
            formula = str(error).partition(",")[0].partition(";")[0]
        rows.append((count, total, total / count, 100 * busy, formula))
    return (
        Sheet(
            title="Ta 0.4, Te 0.5, Tc 0.3 ms, 40 layers",
            columns=("micro-batches", "ms", "ms each", "% experts work", "formula (5)"),
            rows=tuple(rows),
            figures=("exercise 4",),
        ),
    )


def dropping() -> tuple[Sheet, ...]:
    """Why training may drop choices and inference must not."""
    case = GateCase()
    report = routing.gate_report(case)
    rows = [
        (one.name, one.tokens, 100 * one.dropped_share, 100 * one.drop_error,
         one.neighbours.change_capacity_max, one.neighbours.change_dropless)
        for one in report.variants
        if one.neighbours is not None
    ]  # fmt: skip
    return (
        Sheet(
            title=f"capacity factor {case.capacity_factor}: what dropping does to outputs",
            columns=("gate", "tokens", "% dropped", "% output error", "change by neighbours", "dropless"),
            rows=tuple(rows),
            notes=(
                "training averages such errors over batches and has an even gate; a request has one "
                "batch and must not depend on its neighbours",
                "a fixed capacity is good for buffers: when it overflows, the step runs again without it",
            ),
            figures=("S004-018", "S004-bitwise"),
        ),
    )


def long_context() -> tuple[Sheet, ...]:
    """KV of a million tokens over grids of cards."""
    where: Mapping[str, Any] = {"model": "llama-3.1-405b", "context": 1_000_000, "kv_bits": 4}
    rows = [
        (f"TP {tp} x KVP {kvp}", tp * kvp, memory.kv_per_card_gb(**where, tp=tp, kvp=kvp))
        for tp, kvp in ((1, 1), (8, 1), (16, 1), (64, 1), (8, 2), (8, 8))
    ]
    return (
        Sheet(
            title="Llama 3.1 405B, 8 KV heads: FP4 KV of one sequence of a million tokens",
            columns=("grid", "cards", "GB per card"),
            rows=tuple(rows),
            figures=("exercise 6",),
            notes=("beyond the number of KV heads more TP repeats KV; splitting the context goes on",),
        ),
    )


def copies_of_hot() -> tuple[Sheet, ...]:
    """Copies of hot experts, and where they go."""
    plan = balance.lpt_cards(LOAD, 4, 3)
    loads = balance.loads_of_cards(LOAD, 4, 3)
    in_order = [sum(LOAD[2 * card : 2 * card + 2]) for card in range(4)]
    return (
        Sheet(
            title=f"loads {list(LOAD)} on 4 cards",
            columns=("card", "in order", "with 4 more slots", "experts"),
            rows=tuple(
                (card, in_order[card], loads[card], " ".join(map(str, sorted(plan[card]))))
                for card in range(4)
            ),
            figures=("exercise 7",),
        ),
    )


def phases() -> tuple[Sheet, ...]:
    """Why prefill wants fewer cards than decode."""
    moe = experts_of("deepseek-v3")
    card = machine("h800")
    reached = PAPER.compute_share["experts"] * card.flops_per_s("fp8")
    read = PAPER.memory_share["experts"] * card.memory_bytes_per_s
    needed = rows_per_expert_to_balance(reached, read, weight_bits=8)
    rows = []
    for cards in (16, 32, 64, 144, 320):
        prefill = 4096 * cards / sparsity(moe)
        seqs = wide.sequences("deepseek-v3", "h800", cards // 8 * 8, 4096)
        decode = seqs * cards / sparsity(moe)
        rows.append((cards, prefill, prefill >= needed, seqs, decode, decode >= needed))
    return (
        Sheet(
            title=f"DeepSeek-V3 in fp8 on H800: rows per expert; {needed:.0f} are bound by compute",
            columns=("EP", "prefill: 4096 tokens a card", "bound by compute", "decode: sequences a card",
                     "rows per expert", "is bound by compute"),
            rows=tuple(rows),
            figures=("exercise 8",),
            notes=(
                "prefill has its rows with few cards, and fewer cards mean less to send; decode has one "
                "token a sequence, and only many cards bring sequences together and free memory for them",
            ),
        ),
    )  # fmt: skip


def space_and_time() -> tuple[Sheet, ...]:
    """Separation in space (attention and experts on other cards) and in time (the same cards, regrouped)."""
    pair = traffic.bytes_of_pair(128, 2, 8, 6144, 2)
    sent, _ = traffic.context_exchange("llama-3.1-405b", "gb200x4x18", 16, 8, 2)
    return (
        Sheet(
            title="two ways to give attention and FFN the cards that each wants",
            columns=("", "in space: MegaScale-Infer", "in time: Helix"),
            rows=(
                ("attention on", "its own cards, data parallel", "all cards, KV split by context"),
                ("FFN on", "other cards, an expert each", "the same cards, regrouped"),
                ("cards wait", "unless 3 or 4 micro-batches fill both sides", "never for the other side"),
                ("sent in a layer", f"rows to experts and back: {pair / 1e3:.0f} kB a pair",
                 f"partial outputs: {sent:.0f} kB a card"),
                ("grows with", "the batch", "the batch; not the context"),
                ("different cards", "yes: bandwidth for attention, compute for experts", "no"),
                ("pays when", "many users, short contexts", "few users, contexts of 100,000s of tokens"),
            ),
            figures=("S004-108", "S004-165", "S004-104"),
        ),
    )  # fmt: skip


EXERCISES: Mapping[int, Make] = {
    1: touched, 2: balance_batches, 3: exchange, 4: pipeline, 5: dropping, 6: long_context, 7: copies_of_hot,
    8: phases, 9: space_and_time,
}  # fmt: skip
