"""The exchange of a layer cut in chunks, so that dispatch, experts and combine of different chunks overlap.

Bytes, messages and times of one GPU, priced by `cost`; the overlap is a timeline of three streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.cost import comm, ops
from moesaic.cost.layouts import copies_per_token
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Context, Formats
from moesaic.cost.profile import Profile
from moesaic.errors import ConfigError
from moesaic.planner.sim.line import Timeline, run_line
from moesaic.planner.sim.traffic import TopicTraffic
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec, MoeSpec

STREAMS = ("dispatch", "experts", "combine")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One MoE layer over the GPUs of a cluster, `tokens` on each.

    Raises: ConfigError for a dense model, tokens below 1 and GPUs that do not divide the experts.
    """

    model: ModelSpec
    cluster: Cluster
    tokens: int
    profile: Profile
    formats: Formats

    def __post_init__(self) -> None:
        if not self.model.moe_layers:
            raise ConfigError("an exchange needs routed experts, and this model is dense")
        if self.tokens < 1:
            raise ConfigError(f"tokens must be at least 1, got {self.tokens}")
        if self.moe.num_experts % self.cluster.num_devices:
            raise ConfigError(
                f"{self.moe.num_experts} experts do not divide over {self.cluster.num_devices} GPUs"
            )

    @property
    def moe(self) -> MoeSpec:
        """The sparse layer, the first of the model."""
        return self.model.moe_layers[0][1]

    def seconds(self, num_tokens: float) -> tuple[float, float, float]:
        """Dispatch, experts and combine of so many of each GPU's tokens."""
        gpus, moe = float(self.cluster.num_devices), self.moe
        ctx = Context(
            model=self.model, machine=self.cluster.machine, profile=self.profile, formats=self.formats
        )
        computed = ops.experts(moe, num_tokens, num_tokens * gpus, gpus, 1.0, 0.0, ctx, EVEN, 0)
        copies = float(np.asarray(copies_per_token(moe, gpus, self.profile)))
        sent = []
        for name, bits in (
            ("dispatch", self.formats.dispatch_bits),
            ("combine", self.formats.combine_bits),
        ):
            size = num_tokens * copies * moe.row_width * bits / 8
            far = max(gpus - self.cluster.link_domain, 0.0) / max(gpus - 1, 1.0)
            term = comm.all_to_all(
                name,  # type: ignore[arg-type]
                near_bytes=size * (1 - far), far_bytes=size * far, ranks=gpus, cluster=self.cluster,
                profile=self.profile,
            )  # fmt: skip
            sent.append(float(np.asarray(term.seconds.value)))
        return sent[0], float(np.asarray(computed.seconds.value)), sent[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkRow:
    """The layer in chunks of so many tokens.

    Units:  seconds; exposed is the time in which no expert computes; closed_form_s is that of equal chunks.
    """

    chunk_tokens: int
    num_chunks: int
    simulated_s: float
    closed_form_s: float
    exposed_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkReport:
    """Chunk sizes beside each other; the first row is the layer uncut."""

    tokens: int
    rows: tuple[ChunkRow, ...]
    best: ChunkRow
    timeline: Timeline  # of the best


def study_chunks(exchange: Exchange, sizes: Sequence[int] | None = None) -> ChunkReport:
    """Every chunk size that is a power of two, or those given, up to the whole batch."""
    total = exchange.tokens
    if sizes is None:
        sizes = [1 << bit for bit in range(total.bit_length()) if total >> bit <= 64]
    wanted = sorted({total, *(size for size in sizes if 0 < size < total)}, reverse=True)
    rows, lines = [], []
    for size in wanted:
        chunks = [size] * (total // size) + ([total % size] if total % size else [])
        ways = [list(zip(STREAMS, exchange.seconds(float(chunk)), strict=True)) for chunk in chunks]
        found = run_line(STREAMS, ways)
        equal = exchange.seconds(total / len(chunks))
        rows.append(
            ChunkRow(
                chunk_tokens=size, num_chunks=len(chunks), simulated_s=found.total_s,
                closed_form_s=sum(equal) + (len(chunks) - 1) * max(equal),
                exposed_s=found.total_s * (1.0 - found.busy["experts"]),
            )
        )  # fmt: skip
        lines.append(found)
    idx = min(range(len(rows)), key=lambda i: rows[i].simulated_s)
    return ChunkReport(tokens=total, rows=tuple(rows), best=rows[idx], timeline=lines[idx])


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageRow:
    """One way of putting the rows that a GPU dispatches into messages: mean over GPUs.

    Units:  seconds: a latency a message one after the other, and the bytes by the rate of the network, or of
            the link where there is none between the GPUs.
    """

    name: str
    num_messages: float
    seconds: float


def study_messages(
    exchange: Exchange, traffic: TopicTraffic, num_tokens: int, seed: int
) -> tuple[MessageRow, ...]:
    """A message per row, per expert and per GPU, for `num_tokens` of each GPU: what putting together saves.

    Rows are those of each choice that leaves its GPU, under contiguous placement.
    """
    gpus, moe, cluster = exchange.cluster.num_devices, exchange.moe, exchange.cluster
    rng = np.random.default_rng(seed)
    topics = rng.integers(0, len(traffic.popularity_ZE), num_tokens * gpus)
    experts_TK = traffic.draw(rng, topics, moe.experts_per_token)
    target_TK = experts_TK * gpus // moe.num_experts
    home_TK = np.broadcast_to((np.arange(len(experts_TK)) % gpus)[:, None], experts_TK.shape)
    is_sent = target_TK != home_TK
    is_far = gpus > cluster.link_domain
    latency_s = comm.network_latency(cluster) if is_far else comm.link_latency(cluster)
    rate = (comm.network_rate if is_far else comm.link_rate)(cluster, exchange.profile)
    num_rows = int(is_sent.sum()) / gpus
    moved_s = num_rows * moe.row_width * exchange.formats.dispatch_bits / 8 / rate
    counts = {
        "a message per row": num_rows,
        "one per expert": len(np.unique((home_TK * moe.num_experts + experts_TK)[is_sent])) / gpus,
        "one per GPU": len(np.unique((home_TK * gpus + target_TK)[is_sent])) / gpus,
    }
    return tuple(
        MessageRow(name=name, num_messages=count, seconds=count * latency_s + moved_s)
        for name, count in counts.items()
    )
