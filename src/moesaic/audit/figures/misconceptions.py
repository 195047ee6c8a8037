"""What people believe about MoE inference, each belief beside a number that contradicts it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moesaic.audit.figures import (
    balance,
    behaviour,
    dense,
    memory,
    pingpong,
    reading,
    routing,
    traffic,
    wide,
)
from moesaic.audit.figures.sheet import Sheet

QWEN = "qwen3-235b-a22b"
V3: Mapping[str, Any] = {"model": "deepseek-v3", "machine": "h800", "context": 4096}
LONG: Mapping[str, Any] = {"model": "llama-3.1-405b", "machine": "gb200x4x18", "context": 1_000_000}
PAIR: Mapping[str, Any] = {"models": ("mixtral-8x22b", "llama-3-70b"), "machine": "h100x8", "context": 1024}


class Belief(NamedTuple):
    """A belief, and a demonstration: what was computed, in words, and whether it contradicts the belief."""

    text: str
    show: Callable[[], tuple[str, bool]]


def _replicas() -> tuple[str, bool]:
    added = memory.what_replicas_add(QWEN, 4, 32)
    shown = f"32 more slots: {added['bytes_added'] / 1e9:.0f} GB more, {added['distinct_added']} experts more"
    return shown, added["distinct_added"] == 0


def _reads() -> tuple[str, bool]:
    first, second = reading.read_gib(QWEN, 1), reading.read_gib(QWEN, 64)
    return f"64 times the tokens read {second / first:.1f} times the weights", second / first < 64


def _exchanges() -> tuple[str, bool]:
    count = traffic.all_to_alls(QWEN, "h100x8", 8)
    return f"{count:g} exchanges in a sparse layer: out and back", count == 2


def _temperature() -> tuple[str, bool]:
    found = behaviour.found_at_other_temperature(48, 16)
    return f"{found} of 48 prompt tokens found at another temperature", found > 0


def _one_token() -> tuple[str, bool]:
    found = behaviour.tokens_found(1024, 1000, 16)
    return f"token 1000 of 1024 differs: {found} are found", found > 0


def _memory() -> tuple[str, bool]:
    total, active = memory.total_and_active("mixtral-8x22b")
    return f"Mixtral 8x22B computes with {active:.0f}B and stores {total:.0f}B parameters", total > 2 * active


def _faster() -> tuple[str, bool]:
    percents = dense.extra_percents(**PAIR, batches=[1, 16, 512])
    return "Mixtral's step at 1, 16, 512: " + ", ".join(f"{x:+.0f} %" for x in percents), percents[1] > 0


def _batch() -> tuple[str, bool]:
    rows, use = reading.rows_and_use(QWEN, 400, 312e12, 2e12)
    return f"a batch of 400 gives an expert {rows:g} rows, {use:.0f} % of an A100's peak", use < 50


def _overlap() -> tuple[str, bool]:
    few, many = (100 * (wide.dual_ratio(**V3, cards=cards) - 1) for cards in (16, 64))
    return f"two micro-batches: {few:+.0f} % on 16 cards, {many:+.0f} % on 64", few < 0


def _even() -> tuple[str, bool]:
    ratio = balance.busiest_expert(256, 8, 32, 50, 0)
    return f"equally popular experts, a token each: the busiest has {ratio:.1f} x the mean", ratio > 2


def _skew() -> tuple[str, bool]:
    even, skewed = wide.even_and_skewed(**V3, cards=128, max_mean=5.76)
    return f"Zipf 0.6 in order on 128 cards: {even:.0f} to {skewed:.0f} tokens/s a card", skewed < even / 2


def _formula() -> tuple[str, bool]:
    formula, simulated = pingpong.formula_and_simulation(1.0, 1.0, 0.3, 56, 1)
    return f"one micro-batch: {formula:g} by formula (5), {simulated:g} simulated", formula < simulated


def _heads() -> tuple[str, bool]:
    eight, many = (memory.kv_per_card_gb("llama-3.1-405b", 1_000_000, 4, tp) for tp in (8, 64))
    return f"TP 8 keeps {eight:.1f} GB of a sequence's KV on a card, TP 64 {many:.1f}", eight == many


def _dropping() -> tuple[str, bool]:
    change = routing.dropping_error(
        num_experts=8, chosen=2, tokens=256, topics=8, strength=2.5, share=0.7, seed=7
    )["change_by_neighbours"]
    return f"the same request behind other neighbours: a number moves by {change:.1f}", change > 0


ON_SERVING = (
    Belief("copies of hot experts add capacity", _replicas),
    Belief("weight reads grow with the batch", _reads),
    Belief("expert separation costs one exchange a layer", _exchanges),
    Belief("another temperature needs other KV", _temperature),
    Belief("one changed token loses the whole prefix", _one_token),
)
ON_THEORY = (
    Belief("a token uses few experts, so memory is small", _memory),
    Belief("fewer active parameters are always faster", _faster),
    Belief("a large batch fills the experts", _batch),
    Belief("two micro-batches always pay", _overlap),
    Belief("equally popular experts are evenly loaded", _even),
    Belief("experts in order are good enough", _skew),
    Belief("the pipeline formula always holds", _formula),
    Belief("more tensor parallelism divides the KV", _heads),
    Belief("dropping a few choices harms nobody", _dropping),
)


def misconceptions() -> tuple[Sheet, ...]:
    """Both lists, each belief demonstrated."""
    return tuple(
        Sheet(
            title=title,
            columns=("belief", "demonstration", "refuted"),
            rows=tuple((one.text, *one.show()) for one in beliefs),
        )
        for title, beliefs in (("on serving", ON_SERVING), ("on cost and parallelism", ON_THEORY))
    )
