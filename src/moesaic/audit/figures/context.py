"""Figures about contexts of a million tokens: KV that heads no longer divide, and splitting the context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from moesaic.account.params import dense_params, mixer_params
from moesaic.audit.figures.registry import figure
from moesaic.audit.figures.subjects import model as model_of
from moesaic.cost.helix import LongContext, appended, kv_read_s, one_after_another
from moesaic.cost.layouts import Split, step_cost
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import PAPER
from moesaic.cost.term import FloatArray, seconds_by_name, step_seconds
from moesaic.errors import ConfigError
from moesaic.spec.hardware import cluster as cluster_of
from moesaic.spec.hardware import machine as machine_of
from moesaic.spec.model import DenseSpec, GqaSpec, ModelSpec, StoredFormat

NO_LAUNCH = replace(PAPER, launch_s=dict.fromkeys(PAPER.launch_s, 0.0))
FORMATS = Formats(ends_bits=4, kv_bits=4)


def _four_bits(name: str) -> ModelSpec:
    """A dense model whose matrices are stored in 4 bits, scales not counted, as the lecture does."""
    stored = tuple(
        StoredFormat(component=part, format="nvfp4", bits=4.0) for part in ("attention", "dense_ffn")
    )
    return replace(model_of(name), stored=stored)


def _step(
    model: str, machine: str, context: int, split: Split, batch: float
) -> tuple[float, dict[str, float]]:
    work = Work(num_seqs=batch, new_tokens=1, past=context - 1)
    cost = step_cost(
        _four_bits(model), cluster_of(machine), split, work, profile=NO_LAUNCH, formats=FORMATS, shares=EVEN
    )
    parts: dict[str, float] = {name: float(np.asarray(s)) for name, s in seconds_by_name(cost).items()}
    return float(np.asarray(step_seconds(cost).value)), parts


def _grid(tp: int, kvp: int) -> Split:
    return Split(tp=tp, kvp=kvp, expert_tp=tp * kvp)


def _long(model: str, machine: str, context: int, ffn_ranks: int = 8) -> LongContext:
    return LongContext(
        model=_four_bits(model), cluster=cluster_of(machine), context=context, formats=FORMATS,
        profile=NO_LAUNCH, ffn_ranks=ffn_ranks,
    )  # fmt: skip


@figure("S004-123", "S004-124")
def step_ms(model: str, machine: str, context: int, tp: int, kvp: int, batch: int) -> float:
    """Time per token."""
    return 1e3 * _long(model, machine, context).step_s("helix", tp, kvp, batch)


@figure("S004-125")
def step_of_medha_ms(
    model: str, machine: str, context: int, tp: int, kvp: int, batch: int, ffn_ranks: int
) -> float:
    """The same when the FFN stays on few ranks."""
    return 1e3 * _long(model, machine, context, ffn_ranks).step_s("medha", tp, kvp, batch)


@figure("S004-126")
def most_sequences_of_ways(model: str, machine: str, context: int, tp: int, kvp: int) -> list[int]:
    """Sequences that fit: split context, Medha, plain tensor parallelism over as many cards."""
    where = _long(model, machine, context)
    return [
        where.largest_batch("helix", tp, kvp), where.largest_batch("medha", tp, kvp),
        where.largest_batch("tensor", tp * kvp, 1),
    ]  # fmt: skip


def ratio_at(model: str, machine: str, context: int, limit_ms: float) -> float:
    """Tokens per card with a split context by those with plain tensor parallelism, under a time per token."""
    where = _long(model, machine, context)
    split = where.best("helix", limit_ms / 1e3, overlaps=True)
    plain = where.best("tensor", limit_ms / 1e3)
    return split.per_device / plain.per_device if split and plain else 0.0


@figure("S004-129")
def ratios_at(model: str, machine: str, context: int, limits_ms: Sequence[float]) -> list[float]:
    """The same at several limits; 0 where one of them cannot keep the limit."""
    return [ratio_at(model, machine, context, limit) for limit in limits_ms]


@figure("S004-130")
def gains_at(model: str, machine: str, context: int, limits_ms: Sequence[float]) -> list[float]:
    """What a split context brings, in percent."""
    return [100 * (ratio - 1) for ratio in ratios_at(model, machine, context, limits_ms)]


@figure("S004-134", "S004-136")
def exchange_percent(model: str, machine: str, context: int, tp: int, kvp: int, batch: int) -> float:
    """The exchange of partial outputs as part of it."""
    seconds, parts = _step(model, machine, context, _grid(tp, kvp), batch)
    return 100 * parts["kv_exchange"] / seconds


@figure("S004-135")
def overlap_percent(model: str, machine: str, context: int, tp: int, kvp: int, batch: int) -> float:
    """What hiding the exchange behind the next request's attention brings."""
    where = _long(model, machine, context)
    plain, hidden = (where.step_s("helix", tp, kvp, batch, overlaps=overlaps) for overlaps in (False, True))
    return 100 * (plain / hidden - 1)


def most_sequences(model: str, machine: str, context: int, tp: int, kvp: int) -> int:
    """Sequences that fit."""
    return _long(model, machine, context).largest_batch("helix", tp, kvp)


@figure("S004-133")
def gains(model: str, machine: str, context: int) -> list[float]:
    """Time and batch of a split context next to plain tensor parallelism, 64 cards."""
    times = [step_ms(model, machine, context, tp, kvp, 1) for tp, kvp in ((64, 1), (8, 8))]
    batches = [most_sequences(model, machine, context, tp, kvp) for tp, kvp in ((8, 8), (64, 1))]
    return [times[0] / times[1], batches[0] / batches[1]]


@figure("S004-118")
def interleaved(tokens: int, block: int, ranks: int) -> list[int]:
    """Tokens of each rank when blocks go round."""
    return list(appended(tokens, ranks, block))


@figure("S004-113")
def kv_read_us(
    model: str, batch: int, context: int, kv_heads: int, head_dim: int, kv_bits: float, tp: int,
    bytes_per_s: float,
) -> float:  # fmt: skip
    """Reading one layer's KV on one card, at the full rate."""
    layer = model_of(model).layers[0]
    sized = replace(layer, mixer=replace(_heads(model), num_kv_heads=kv_heads, head_dim=head_dim))
    one = replace(model_of(model), layers=(sized,))
    seconds = kv_read_s(one, batch=batch, context=context, tp=tp, kv_bits=kv_bits, bytes_per_s=bytes_per_s)
    return 1e6 * seconds


def _heads(name: str) -> GqaSpec:
    mixer = model_of(name).layers[0].mixer
    if not isinstance(mixer, GqaSpec):
        raise ConfigError(f"{name} has no KV heads, which this figure is about; give llama-3.1-405b")
    return mixer


@figure("S004-115")
def latent_read_ms(
    model: str, batch: int, context: int, kv_bits: float, bytes_per_s: float, tp: int
) -> float:
    """Reading the latent KV of all layers on each card."""
    seconds = kv_read_s(
        model_of(model), batch=batch, context=context, tp=tp, kv_bits=kv_bits, bytes_per_s=bytes_per_s
    )
    return 1e3 * seconds


@figure("S004-114", holds=lambda ratio: ratio > 4)
def kv_by_weights(
    model: str, batch: int, context: int, hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int
) -> float:  # fmt: skip
    """KV of a batch by the weights of a layer, both at one width."""
    sized = replace(_heads(model), num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    [cache] = sized.caches("bfloat16")
    weights = mixer_params(sized, hidden) + dense_params(DenseSpec(width=inner), hidden)
    return batch * context * cache.bytes_per_token / 2 / weights


@figure("S004-131")
def ffn_gb_and_ms(model: str, machine: str, bits: float, tp: int) -> list[float]:
    """FFN weights of a layer, and reading all layers' on `tp` cards."""
    spec = model_of(model)
    ffn = spec.layers[0].ffn
    if not isinstance(ffn, DenseSpec):
        raise ConfigError(f"{model} has no dense FFN, which this figure is about; give llama-3.1-405b")
    size = dense_params(ffn, spec.hidden) * bits / 8
    rate = PAPER.memory_share["matrices"] * machine_of(machine).memory_bytes_per_s
    return [size / 1e9, 1e3 * len(spec.layers) * size / tp / rate]


@figure("S004-117", holds=lambda sent: len(set(sent)) == 1 and sent[0] > 0)
def exchange_by_context(model: str, machine: str, contexts: Sequence[int], tp: int, kvp: int) -> list[float]:
    """Microseconds of the exchange in one layer, for each context."""
    layers = len(model_of(model).layers)
    return [
        1e6 * _step(model, machine, context, _grid(tp, kvp), 1)[1]["kv_exchange"] / layers
        for context in contexts
    ]


@figure("S004-119")
def with_and_without_overlap(requests: int, attention: float, exchange: float) -> list[float]:
    """One request after the other, and with each exchange behind the next attention."""
    return list(one_after_another(requests, attention, exchange))


@figure("S004-116", holds=lambda error: 0 < error < 2e-6)
def split_attention_error(context: int, heads: int, head_dim: int, splits: Sequence[int], seed: int) -> float:
    """Largest difference between attention over parts of the KV, merged, and over the whole."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((heads, head_dim)).astype(np.float32)
    key, value = (rng.standard_normal((heads, context, head_dim)).astype(np.float32) for _ in range(2))
    whole, _ = _attend(query, key, value)
    worst = 0.0
    for count in splits:
        ranges = np.array_split(np.arange(context), count)
        parts = [_attend(query, key[:, part], value[:, part]) for part in ranges]
        sums = np.stack([lse for _, lse in parts])
        weights = np.exp(sums - np.logaddexp.reduce(sums, axis=0)).astype(np.float32)
        merged = sum(weight[:, None] * out for weight, (out, _) in zip(weights, parts, strict=True))
        worst = max(worst, float(np.abs(merged - whole).max()))
    return worst


def _attend(query: FloatArray, key: FloatArray, value: FloatArray) -> tuple[FloatArray, FloatArray]:
    """One query per head: the output [H, C] and the log of the sum of powers [H]."""
    scores = np.einsum("hc,hsc->hs", query, key) / np.float32(np.sqrt(query.shape[1]))
    top = scores.max(axis=1, keepdims=True)
    powers = np.exp(scores - top)
    total = powers.sum(axis=1, keepdims=True)
    return np.einsum("hs,hsc->hc", powers / total, value), (top + np.log(total))[:, 0]
