"""Every metric and span, in one table: name, kind, unit, labels, help. `metrics.py` fills it.

Names follow Prometheus' advice: base units as suffix, `_total` on counters, no label whose values grow with
traffic. Expert ids are labels of the expert-load family alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "seconds", "bytes", "tokens", "ratio"]

# From one decode step of a tiny model to a long answer of a large one.
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
LONG_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric family. Its values come from the engine's snapshot, the expert load, or the server."""

    name: str
    kind: Kind
    help: str
    unit: Unit = ""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()  # histograms only: upper bounds, without infinity
    snapshot: str | None = None  # in the engine's snapshot: a number, or numbers by the one label, or None


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One stretch of time inside a step; a step's spread has its seconds by this name, a metric their sum."""

    name: str
    help: str


WINDOW_S = 60.0  # of the gauges that describe recent expert load

SPANS: tuple[Span, ...] = (
    Span(name="forward", help="Embedding to the last hidden row, all layers."),
    Span(name="sample", help="Logits, masks, drawing, and prompt log probabilities."),
)

METRICS: tuple[Metric, ...] = (
    Metric(
        name="moesaic_build_info",
        kind="gauge",
        labels=("version", "model", "backend", "numerics_digest"),
        help="Always 1; the labels say what runs.",
    ),
    # -- the server ------------------------------------------------------------------------------------
    Metric(
        name="moesaic_http_requests_total",
        kind="counter",
        labels=("route", "status"),
        help="HTTP requests answered, by route pattern and status code; 499: the client left first.",
    ),
    Metric(
        name="moesaic_http_requests_in_flight",
        kind="gauge",
        help="Generation requests that are being answered.",
    ),
    Metric(
        name="moesaic_requests_total",
        kind="counter",
        labels=("finish_reason",),
        help="Sequences that ended (each of n choices is one): stop, length, error, or cancelled when the "
        "client left first.",
    ),
    Metric(
        name="moesaic_time_to_first_token_seconds",
        kind="histogram",
        unit="seconds",
        buckets=LONG_SECONDS,
        help="From the arrival of a request's body to its first token, per sequence.",
    ),
    Metric(
        name="moesaic_time_per_output_token_seconds",
        kind="histogram",
        unit="seconds",
        buckets=SHORT_SECONDS,
        help="Mean time between output tokens after the first, per finished sequence of two tokens or more.",
    ),
    Metric(
        name="moesaic_request_duration_seconds",
        kind="histogram",
        unit="seconds",
        buckets=LONG_SECONDS,
        help="From the arrival of a request's body to its last token, per finished sequence.",
    ),
    # -- the engine ------------------------------------------------------------------------------------
    Metric(
        name="moesaic_engine_ready",
        kind="gauge",
        snapshot="is_ready",
        help="1 when the engine takes requests.",
    ),
    Metric(
        name="moesaic_requests_running",
        kind="gauge",
        snapshot="num_running",
        help="Sequences that take part in steps.",
    ),
    Metric(
        name="moesaic_requests_waiting",
        kind="gauge",
        snapshot="num_waiting",
        help="Sequences in the queue, preempted ones included.",
    ),
    Metric(name="moesaic_steps_total", kind="counter", snapshot="steps_total", help="Steps committed."),
    Metric(
        name="moesaic_step_seconds_total",
        kind="counter",
        unit="seconds",
        labels=("span",),
        snapshot="span_seconds_total",
        help=f"Time of the steps committed, by span: {', '.join(span.name for span in SPANS)}.",
    ),
    Metric(
        name="moesaic_preemptions_total",
        kind="counter",
        snapshot="preemptions_total",
        help="Times that a running sequence gave up its KV blocks to an older one.",
    ),
    Metric(
        name="moesaic_prompt_tokens_total",
        kind="counter",
        unit="tokens",
        snapshot="prompt_tokens_total",
        help="Prompt tokens of admitted sequences.",
    ),
    Metric(
        name="moesaic_cached_prompt_tokens_total",
        kind="counter",
        unit="tokens",
        snapshot="cached_tokens_total",
        help="Prompt tokens found in the prefix cache; divided by the prompt tokens, the hit ratio.",
    ),
    Metric(
        name="moesaic_output_tokens_total",
        kind="counter",
        unit="tokens",
        snapshot="output_tokens_total",
        help="Tokens generated.",
    ),
    Metric(
        name="moesaic_kv_blocks",
        kind="gauge",
        snapshot="kv_blocks_total",
        help="Blocks of the KV pools of all replicas.",
    ),
    Metric(
        name="moesaic_kv_blocks_used",
        kind="gauge",
        snapshot="kv_blocks_used",
        help="Blocks held by sequences; blocks kept for prefix reuse are not in use.",
    ),
    Metric(
        name="moesaic_kv_pool_bytes",
        kind="gauge",
        unit="bytes",
        snapshot="kv_bytes",
        help="Memory of the KV pools of all ranks.",
    ),
    Metric(
        name="moesaic_weight_bytes",
        kind="gauge",
        unit="bytes",
        snapshot="weight_bytes",
        help="Memory of the weights.",
    ),
    # -- ranks -----------------------------------------------------------------------------------------
    Metric(
        name="moesaic_rank_jobs_total",
        kind="counter",
        labels=("rank",),
        snapshot="ranks.num_jobs",
        help="Choices that the experts of this rank computed.",
    ),
    *(
        Metric(
            name=f"moesaic_rank_{name}_bytes_total",
            kind="counter",
            unit="bytes",
            labels=("rank",),
            snapshot=f"ranks.{name}_bytes",
            help=f"Messages of steps that this rank {what} other ranks; experts that move are counted apart.",
        )
        for name, what in (("sent", "sent to"), ("received", "received from"))
    ),
    *(
        Metric(
            name=f"moesaic_rank_{name}_seconds_total",
            kind="counter",
            unit="seconds",
            labels=("rank",),
            snapshot=f"ranks.{name}_s",
            help=f"Time of the steps committed that this rank spent {what}.",
        )
        for name, what in (
            ("compute", "computing: all that is neither transfer nor waiting"),
            ("transfer", "packing, handing over and unpacking messages"),
            ("wait", "waiting for other ranks"),
        )
    ),
    Metric(
        name="moesaic_rank_compute_skew_ratio",
        kind="gauge",
        unit="ratio",
        snapshot="ranks.compute_skew",
        help=f"Most choices that a rank's experts computed by the mean of all ranks, over the last "
        f"{WINDOW_S:g} s; 1 is even.",
    ),
    Metric(
        name="moesaic_rank_communication_skew_ratio",
        kind="gauge",
        unit="ratio",
        snapshot="ranks.communication_skew",
        help=f"Most bytes sent and received by a rank by the mean of all, over the last {WINDOW_S:g} s; 1 is "
        "even.",
    ),
    Metric(
        name="moesaic_expert_plan_version",
        kind="gauge",
        snapshot="plan_version",
        help="Version of the expert plan in force; it rises with every stage of a swap.",
    ),
    Metric(
        name="moesaic_expert_moved_bytes_total",
        kind="counter",
        unit="bytes",
        snapshot="moved_bytes_total",
        help="Experts that ranks sent to each other when the plan changed.",
    ),
    # -- expert load: the only family with expert ids ----------------------------------------------------
    Metric(
        name="moesaic_expert_tokens_total",
        kind="counter",
        unit="tokens",
        labels=("layer", "expert_id", "phase"),
        help="Tokens that chose this logical expert; committed steps and real tokens only, each once.",
    ),
    Metric(
        name="moesaic_expert_utilization_ratio",
        kind="gauge",
        unit="ratio",
        labels=("layer", "expert_id"),
        help=f"Share of the layer's tokens of the last {WINDOW_S:g} s that chose this expert, 0 to 1.",
    ),
    Metric(
        name="moesaic_routed_tokens_total",
        kind="counter",
        unit="tokens",
        labels=("phase",),
        help="Tokens that went through the sparse layers.",
    ),
    Metric(
        name="moesaic_expert_load_max_mean_ratio",
        kind="gauge",
        unit="ratio",
        labels=("layer",),
        help=f"Load of the hottest expert by the mean load, over the last {WINDOW_S:g} s; 1 is even.",
    ),
    Metric(
        name="moesaic_expert_load_variation_ratio",
        kind="gauge",
        unit="ratio",
        labels=("layer",),
        help=f"Standard deviation of expert loads by their mean, over the last {WINDOW_S:g} s; 0 is even.",
    ),
)

LAYER_SPANS: tuple[Span, ...] = (
    Span(name="embedding", help="Rows of the input embedding."),
    Span(name="attention_projections", help="Query, key, value and output projections of the mixer."),
    Span(name="attention", help="Scores and weighted sums over the cache, or the state update."),
    Span(name="kv_exchange", help="Partial outputs between ranks that share a context."),
    Span(name="attention_all_reduce", help="Sum of the attention's parts over tensor-parallel ranks."),
    Span(name="dispatch", help="Rows to the ranks of their experts."),
    Span(name="experts", help="The gate and the routed experts."),
    Span(name="combine", help="Rows back from the ranks of their experts."),
    Span(name="shared_experts", help="The experts that every token passes."),
    Span(name="dense_ffn", help="A dense feed-forward network."),
    Span(name="ffn_all_reduce", help="Sum of the feed-forward's parts over tensor-parallel ranks."),
    Span(name="head", help="Logits of the last row of each sequence."),
    Span(name="pipeline_send", help="Rows to the next pipeline stage."),
    Span(name="expert_load", help="Experts outside the devices: reading, sending or computing them."),
    Span(name="host", help="Scheduling, launching and sampling that the devices wait for."),
)
"""Parts of a step by the names that predicted costs have; the engine times the whole forward so far."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def metric(name: str) -> Metric:
    """The entry of a metric; an unknown name is a mistake of ours (KeyError)."""
    return _BY_NAME[name]
