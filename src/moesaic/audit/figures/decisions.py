"""Decision tables and check lists: what speaks for what, with our numbers where there are any."""

from __future__ import annotations

import numpy as np

from moesaic.audit.figures import memory, reading
from moesaic.audit.figures.exercises import space_and_time
from moesaic.audit.figures.registry import figure
from moesaic.audit.figures.sheet import Sheet
from moesaic.audit.figures.subjects import experts_of, model, one_expert_bytes
from moesaic.audit.figures.table import figures
from moesaic.cost.load import EVEN, busiest_distinct, zipf_shares
from moesaic.cost.profile import PAPER
from moesaic.planner.advice import habits as advise_habits
from moesaic.planner.advice import suitability
from moesaic.planner.compare import TRADES
from moesaic.planner.demand import Demand
from moesaic.planner.economy import economy
from moesaic.planner.question import clusters_of, format_choices
from moesaic.planner.search import Question, search
from moesaic.spec.hardware import cluster, machine

QWEN = "qwen3-235b-a22b"
ROWS = (1, 4, 16, 40, 64, 256)
HOST = {"memory_bytes_per_s": 220e9, "flops_per_s": 2e12, "bus_bytes_per_s": 50e9}

CHECKLIST = (
    ("all-to-all rate", "at least 300 GB/s busbw at 1 GB on H100; no GPU sends more than {link:.0f}",
     "alltoall_perf of nccl-tests"),
    ("expert distribution", "10,000 samples; skew of 2:1 and more needs copies", "/v1/internal/experts"),
    ("capacity factor", "starts at 1.3, within 1 and 2; the engine itself drops nothing", "moesaic simulate"),
    ("prefetch", "cold misses under 5 %", "misses by requests"),
    ("quantisation", "experts at 4 bits lose under one point; the router stays in high precision",
     "moesaic verify"),
    ("pipeline bubbles", "under 5 % of the step, by events", "traces; moesaic simulate pingpong"),
    ("alerts by expert", "deviation over 5 minutes above half the mean", "/metrics"),
    ("stress test", "1.5 x the peak, p99 under 500 ms, nothing dropped", "moesaic bench serve"),
    ("topology", "kept as code beside the launch line", "machine files in TOML"),
)  # fmt: skip
"""Production checks: what, the threshold, how it is shown."""


@figure("S002-096")
def num_checks() -> int:
    """Items of the production checklist."""
    return len(CHECKLIST)


def checklist() -> Sheet:
    """What to have checked before production."""
    link = machine("h100").number("link_bytes_per_s", 0.0) / 1e9
    return Sheet(
        title="production checklist",
        columns=("check", "threshold", "shown by"),
        rows=tuple((name, rule.format(link=link), how) for name, rule, how in CHECKLIST),
        figures=("S002-096", "S002-098"),
    )


def routing_shapes() -> Sheet:
    """What a layer of Qwen3-235B reads for 64 tokens, by how they choose."""
    moe, tokens = experts_of(QWEN), 64
    spread = float(np.asarray(busiest_distinct(
        tokens, moe.experts_per_token, moe.num_experts, 1.0, zipf_shares(moe.num_experts, 0.8), 0
    )))  # fmt: skip
    touched = {
        "every expert touched": float(moe.num_experts),
        "random": reading.distinct_of(QWEN, tokens),
        "random, Zipf 0.8": spread,
        "all the same": float(moe.experts_per_token),
    }
    choices = tokens * moe.experts_per_token
    return Sheet(
        title="routing shapes: Qwen3-235B, 64 tokens, one layer in bfloat16",
        columns=("tokens choose", "experts read", "rows per expert", "GiB", "ms from a host at 220 GB/s"),
        rows=tuple(
            (name, count, choices / count, count * one_expert_bytes(QWEN) / 2**30,
             1e3 * count * one_expert_bytes(QWEN) / HOST["memory_bytes_per_s"])
            for name, count in touched.items()
        ),
        figures=("S000-014", "S000-016"),
        notes=("the operations are the same in every shape; the reads are not",),
    )  # fmt: skip


def host_or_device() -> Sheet:
    """Where an expert outside the device is better computed."""
    rows = []
    for count in ROWS:
        host, fetch, _ = reading.host_or_device(QWEN, count, **HOST)
        rows.append((count, host, fetch, "host" if host <= fetch else "device"))
    return Sheet(
        title="an expert in host memory: compute it there, or fetch it",
        columns=("rows", "ms on the host", "ms to fetch", "better"),
        rows=tuple(rows),
        figures=("S000-029",),
        notes=("assumed: 2 TFLOP/s on the host, 50 GB/s to the device",),
    )


def dense_or_sparse() -> Sheet:
    """A dense 70B model next to Mixtral 8x7B."""
    rows = []
    for name in ("llama-3-70b", "mixtral-8x7b"):
        one = economy(model(name), cluster("h100x8"), batch=32, context=4096, profile=PAPER)
        rows.append(
            (name, one.num_params / 1e9, one.weight_bytes / 1e9, memory.model_gib(name),
             one.active_params / 1e9, one.flops_per_token / 1e9, one.kv_bytes_per_token / 1e3,
             1e3 * one.step_s)
        )  # fmt: skip
    return Sheet(
        title="dense 70B or Mixtral 8x7B, 16 bits; a step is of 32 sequences of 4096 tokens on 8 H100",
        columns=(
            "model",
            "B params",
            "GB",
            "GiB",
            "B a token",
            "GFLOP a token",
            "kB of KV a token",
            "ms a step",
        ),
        rows=tuple(rows),
        figures=("S003-017", "S003-018", "S003-019", "S003-021"),
    )


def engines() -> tuple[Sheet, ...]:
    """What a comparison of engines claims, and what is known of it."""
    wanted = ("S002-080", "S002-081", "S002-082", "S002-083", "S002-058", "S002-057", "S002-032")
    return (
        Sheet(
            title="a comparison of four engines: the claims, none of them used here",
            columns=("claim", "verdict", "what is known"),
            rows=tuple((row.claim, row.verdict, row.note) for row in figures() if row.id in wanted),
        ),
        Sheet(
            title="which engine to take",
            columns=("wanted", "do"),
            rows=(
                ("lowest latency", "measure: moesaic bench serve --url against each, on your prompts"),
                (
                    "highest throughput",
                    "the same at your concurrency; rankings without model and batch say nothing",
                ),
                (
                    "a layout first",
                    "moesaic plan; then moesaic serve, or another engine with the same layout",
                ),
            ),
            notes=("advice by name of engine has no source, and versions change it",),
        ),
    )


def papers() -> Sheet:
    """Numbers that only their papers can say."""
    rows = [
        (row.id, row.claim, str(row.seed_value), row.note)
        for row in figures()
        if row.verdict == "paper-reported" and row.id.startswith("S004")
    ]
    return Sheet(title="reported by papers, not recomputed", columns=("figure", "claim", "value", "source"),
                 rows=tuple(rows))  # fmt: skip


def advice() -> tuple[Sheet, ...]:
    """What to do first, and whether a sparse model suits, for one model and machine."""
    spec, cards = model("mixtral-8x7b"), cluster("h100x8")
    demand = Demand(isl=1024, osl=512, tpot_s=0.05, concurrency=64)
    lists = {
        "habits: Mixtral 8x7B on 8 H100, 64 sequences": advise_habits(
            spec, cards, PAPER, has_load=False, batch=64
        ),
        "does it suit: 64 requests of 1024 + 512 tokens, 50 ms a token": suitability(spec, cards, demand),
    }
    return tuple(
        Sheet(
            title=title,
            columns=("topic", "applies", "why"),
            rows=tuple((one.topic, one.holds, one.reason) for one in found),
        )
        for title, found in lists.items()
    )


def ways() -> Sheet:
    """The best plan of each way to deploy."""
    spec = model("deepseek-v3")
    demand = Demand(isl=1024, osl=512, tpot_s=0.05, objective="per-price")
    answer = search(
        Question(
            model=spec, clusters=clusters_of(["h200x8x4"], []), demand=demand, profile="calibrated",
            shares=EVEN, choices=format_choices(spec, "stored", "bfloat16", None),
        )
    )  # fmt: skip
    return Sheet(
        title="ways to deploy DeepSeek-V3 on 32 H200: 1024 + 512 tokens, at most 50 ms a token",
        columns=("way", "tokens/s a GPU", "tokens/s per price", "ms a token", "how it grows and fails"),
        rows=tuple(
            (way, plan.tokens_per_s_per_gpu, plan.tokens_per_s / (plan.price or 1.0),
             1e3 * plan.token_s, TRADES[way])
            for way, plan in answer.ways.items()
        ),
        notes=("the best plan that moesaic plan finds of each way; prices relative to one L20",),
    )  # fmt: skip


def decisions() -> tuple[Sheet, ...]:
    """All tables."""
    return (
        routing_shapes(), host_or_device(), dense_or_sparse(), *engines(), *space_and_time(), ways(),
        papers(), checklist(), *advice(),
    )  # fmt: skip
