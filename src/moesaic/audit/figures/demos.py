"""Five demonstrations: a sparse layer, its cost, wide expert parallelism, ping-pong, and split contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.audit.figures import context, dense, pingpong, routing, wide
from moesaic.audit.figures.sheet import Make, Sheet
from moesaic.planner.sim.pingpong import timeline

V3: Mapping[str, Any] = {"model": "deepseek-v3", "machine": "h800", "context": 4096}
LONG: Mapping[str, Any] = {"model": "llama-3.1-405b", "machine": "gb200x4x18", "context": 1_000_000}


def layer() -> tuple[Sheet, ...]:
    """A sparse layer is a sum over few experts, wherever they are."""
    case = {"tokens": 64, "num_experts": 8, "chosen": 2}
    alone = routing.alone_and_among(**case, seed=7)
    changes = (
        ("a dense loop over all experts with zeroed weights", routing.dense_loop_error(**case)),
        ("each of 4 ranks computes its own tokens' rows", routing.spread_and_alone(**case, ranks=4)),
        ("every other token takes a second copy of its experts", routing.copies_agree(**case)),
        ("row by row, sums in a fixed order", alone["fixed_order"]),
        ("row by row, the library's product", alone["library"]),
        ("other experts for every token", routing.what_changes_outputs(**case)["other_choice"]),
    )
    return (
        Sheet(
            title="64 tokens, 8 experts, 2 each: largest change of an output",
            columns=("computed otherwise", "change"), rows=changes,
            figures=("S004 1.2", "S004 1.4", "S004 3.1"),
        ),
    )  # fmt: skip


def cost() -> tuple[Sheet, ...]:
    """A sparse model next to a dense one."""
    names = "mixtral-8x22b", "llama-3-70b"
    where: Mapping[str, Any] = {"machine": "h100x8", "context": 1024}
    batches = (1, 4, 16, 64, 256, 512, 1024)
    times = [dense.step_ms(name, batches=batches, **where) for name in names]
    rows = tuple(
        (batch, first, second, 100 * (first / second - 1))
        for batch, first, second in zip(batches, *times, strict=True)
    )
    return (
        Sheet(
            title="decode step on 8 H100, TP 8, context 1024",
            columns=("batch", "Mixtral 8x22B ms", "Llama 3 70B ms", "% more"), rows=rows,
            figures=("S004 2.2", "S004 2.3", "S004 2.4"),
        ),
    )  # fmt: skip


def decode() -> tuple[Sheet, ...]:
    """DeepSeek-V3 over 16 to 256 cards."""
    rows = []
    for cards in (16, 32, 64, 128, 256):
        seqs = wide.sequences(**V3, cards=cards)
        rows.append(
            (cards, wide.experts_gb(**V3, cards=cards), seqs, seqs * cards * 8 / 256,
             wide.speed(**V3, cards=cards), wide.speed(**V3, cards=cards, micro_batches=2))
        )  # fmt: skip
    return (
        Sheet(
            title="DeepSeek-V3 in fp8 on H800, context 4096",
            columns=("cards", "expert GB a card", "sequences a card", "tokens per expert", "tokens/s a card",
                     "two micro-batches"),
            rows=tuple(rows),
            figures=("S004 3.2", "S004 3.3", "S004 3.3/8"),
        ),
    )  # fmt: skip


def ping_pong() -> tuple[Sheet, ...]:
    """Two sides that take turns."""
    one = pingpong.stage_of(1.0, 1.0, 0.5)
    rows = []
    for count in range(1, 6):
        found = timeline(one, count, 2)
        rows.append((count, found.total_s, found.total_s / count, 100 * found.busy["experts"]))
    return (
        Sheet(
            title="Ta = Te = 1, Tc = 0.5, two layers",
            columns=("micro-batches", "time", "time each", "% experts work"), rows=tuple(rows),
            figures=("S004 4.3", "S004 4.4"),
        ),
    )  # fmt: skip


def helix() -> tuple[Sheet, ...]:
    """Splitting the context when the KV heads are used up."""
    rows = []
    for tp, kvp in ((8, 1), (16, 1), (64, 1), (8, 2), (8, 4), (8, 8)):
        time = context.step_ms(**LONG, tp=tp, kvp=kvp, batch=1)
        share = context.exchange_percent(**LONG, tp=tp, kvp=kvp, batch=1)
        rows.append(
            (f"TP {tp} x KVP {kvp}", tp * kvp, time, share, context.most_sequences(**LONG, tp=tp, kvp=kvp))
        )
    return (
        Sheet(
            title="Llama 3.1 405B in FP4 on GB200, a million tokens, batch 1",
            columns=("grid", "cards", "ms per token", "% exchange", "sequences that fit"), rows=tuple(rows),
            figures=("S004 5.1", "S004 5.2", "S004 5.3", "S004 5.5"),
        ),
    )  # fmt: skip


DEMOS: Mapping[str, Make] = {
    "layer": layer, "cost": cost, "decode": decode, "pingpong": ping_pong, "helix": helix,
}  # fmt: skip
