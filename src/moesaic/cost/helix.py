"""Long contexts split over ranks (Helix): what a step takes, how many sequences fit, which grid is best.

Source: Helix Parallelism, arXiv:2507.07120: attention over kvp x tp ranks that share a context, the rest of
the layer over all of them; its baselines are tensor parallelism alone, and Medha, whose feed-forward stays on
the ranks of one context part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from moesaic.account.params import dense_params
from moesaic.cost import ops
from moesaic.cost.layouts import Split, memory_per_rank, step_cost
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import Profile
from moesaic.cost.term import step_seconds
from moesaic.errors import ConfigError
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import DenseSpec, GqaSpec, ModelSpec

KV_BLOCK = 16  # tokens that are appended to one rank before the next one's turn

Way = Literal["helix", "tensor", "medha"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LongContext:
    """A dense model that decodes with very long contexts on one kind of device."""

    model: ModelSpec
    cluster: Cluster
    context: int
    formats: Formats
    profile: Profile
    ffn_ranks: int = 8  # ranks that Medha's feed-forward stays on

    def step_s(self, way: Way, tp: int, kvp: int, batch: float, *, overlaps: bool = False) -> float:
        """Seconds of a step. `overlaps`: a request's exchange hides behind the next one's attention."""
        split = Split(tp=tp, kvp=kvp, expert_tp=tp * kvp, overlaps_requests=overlaps)
        work = Work(num_seqs=float(batch), new_tokens=1.0, past=float(self.context - 1))
        cost = step_cost(
            self.model, self.cluster, split, work, profile=self.profile, formats=self.formats, shares=EVEN
        )
        seconds = float(step_seconds(cost).value)
        if way == "medha":  # all of it is reading, so what is read more takes longer by that much
            rate = self.profile.memory_share["matrices"] * self.cluster.machine.memory_bytes_per_s
            seconds += self._rest_bytes() * (1 / min(self.ffn_ranks, tp * kvp) - 1 / (tp * kvp)) / rate
        return seconds

    def largest_batch(self, way: Way, tp: int, kvp: int) -> int:
        """Sequences whose KV fits beside the weights."""
        split = Split(tp=tp, kvp=kvp, expert_tp=tp * kvp)
        none, one = (
            float(sum(memory_per_rank(
                self.model, split, num_seqs=seqs, context=float(self.context), max_rows=0.0,
                formats=self.formats, profile=self.profile,
            ).values()))
            for seqs in (0.0, 1.0)
        )  # fmt: skip
        if way == "medha":
            none_more = self._rest_bytes() * (1 / min(self.ffn_ranks, tp * kvp) - 1 / (tp * kvp))
            none, one = none + none_more, one + none_more
        free = self.profile.usable_memory * self.cluster.machine.memory_bytes - none
        return max(int(free / (one - none)), 0)

    def _rest_bytes(self) -> float:
        """Output projections and feed-forward of all layers: what Helix spreads over all ranks."""
        total = 0.0
        for layer in self.model.layers:
            if not isinstance(layer.mixer, GqaSpec) or not isinstance(layer.ffn, DenseSpec):
                raise ConfigError("Medha's layout is priced for dense models with grouped-query attention")
            out = self.model.hidden * layer.mixer.num_heads * layer.mixer.head_dim
            total += out + dense_params(layer.ffn, self.model.hidden)
        ctx = ops.Context(
            model=self.model, machine=self.cluster.machine, profile=self.profile, formats=self.formats
        )
        return total * ctx.stored(is_expert=False)[1] / 8

    def grids(self, way: Way, most: int) -> Iterator[tuple[int, int]]:
        """(tp, kvp) of up to `most` devices, powers of two; a split context has tp up to its KV heads."""
        heads = min(
            layer.mixer.num_kv_heads for layer in self.model.layers if isinstance(layer.mixer, GqaSpec)
        )
        tp = 1
        while tp <= most:
            kvp = 1
            while tp * kvp <= most:
                if kvp == 1 or (way != "tensor" and tp <= heads):
                    yield tp, kvp
                kvp *= 2
            tp *= 2

    def best(self, way: Way, limit_s: float, *, most: int = 64, overlaps: bool = False) -> Best | None:
        """The grid and batch with the most tokens per second and device, a step taking at most `limit_s`."""
        found: Best | None = None
        for tp, kvp in self.grids(way, most):
            low, high = 0, self.largest_batch(way, tp, kvp)
            while low < high:  # a step only gets longer with the batch
                middle = (low + high + 1) // 2
                if self.step_s(way, tp, kvp, middle, overlaps=overlaps) <= limit_s:
                    low = middle
                else:
                    high = middle - 1
            if low:
                seconds = self.step_s(way, tp, kvp, low, overlaps=overlaps)
                one = Best(tp=tp, kvp=kvp, batch=low, step_s=seconds, per_device=low / seconds / (tp * kvp))
                found = one if found is None or one.per_device > found.per_device else found
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Best:
    """One grid with its batch. Units: per_device is tokens per second and device."""

    tp: int
    kvp: int
    batch: int
    step_s: float
    per_device: float


def kv_read_s(
    model: ModelSpec, *, batch: int, context: int, tp: int, kv_bits: float, bytes_per_s: float
) -> float:
    """Seconds in which one of `tp` ranks reads the KV of all layers: no less beyond the KV heads.

    A latent is on every rank whatever tp is.
    """
    work = Work(num_seqs=1.0, new_tokens=1.0, past=float(context - 1))
    read = sum(float(np.asarray(ops.cache_bytes_read(one, work, tp, kv_bits))) for one in model.layers)
    return batch * read / bytes_per_s


def appended(num_tokens: int, ranks: int, block: int = KV_BLOCK) -> tuple[int, ...]:
    """Tokens of a sequence that each rank keeps when blocks go round."""
    whole, left = divmod(num_tokens, block)
    counts = [block * (whole // ranks + (rank < whole % ranks)) for rank in range(ranks)]
    counts[whole % ranks] += left
    return tuple(counts)


def one_after_another(num_requests: int, attention: float, exchange: float) -> tuple[float, float]:
    """(time without overlap, time when a request's exchange hides behind the next one's attention).

    Source: HOP-B of Helix: 8 requests of 2 and 1.2 take 25.6 without and 17.2 with it.
    """
    plain = num_requests * (attention + exchange)
    return plain, attention + max(attention, exchange) * (num_requests - 1) + exchange


def with_ring(cluster: Cluster) -> Cluster:
    """The same devices in one node: collectives are rings of hops instead of one pass over a switch."""
    return replace(cluster, devices_per_node=cluster.num_devices, num_nodes=1)
