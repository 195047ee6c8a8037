"""What uneven routing does to the slowest rank: its rows, and the distinct experts it reads.

The load is a real one (`ExpertLoad`), a skew model, or even. Which copy lives where is a contiguous
placement, or with redundant slots a greedy one; `placement` makes the real plans.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

import numpy as np

from moesaic.cost.term import FloatArray, Number
from moesaic.errors import ConfigError
from moesaic.placement.pack import placed_slots
from moesaic.spec.experts import ExpertLoad
from moesaic.spec.model import ModelSpec

MAX_LEVELS = (
    32  # shares told apart when distinct experts are counted: 0.02 % off for 256 experts of Zipf shares
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertShares:
    """How popular each expert is, per kind of layer; a layer's shares sum to 1.

    Shapes:  shares, per MoE layer or one row for all: [E] float64. None: every expert equally likely.
    """

    shares: tuple[FloatArray, ...] | None
    has_chance: bool = True  # whether the busiest of equal ranks gets more than the mean, as chance has it
    _ranks: dict[tuple[int, int, int], FloatArray] = field(default_factory=dict)

    def of_layer(self, moe_idx: int) -> FloatArray | None:
        """Shares of the moe_idx-th sparse layer."""
        if self.shares is None:
            return None
        return self.shares[min(moe_idx, len(self.shares) - 1)]


EVEN = ExpertShares(shares=None, has_chance=False)
"""Every rank gets the mean: what the paper model assumes."""
CHANCE = ExpertShares(shares=None)
"""Equally popular experts, and the busiest rank as chance has it."""


def shares_of(load: ExpertLoad, model: ModelSpec) -> ExpertShares:
    """The shares of a measured load.

    Raises: ConfigError when it is not this model's: layers, experts, negative or not finite counts, or none
    at all.
    """
    layers = model.moe_layers
    if len(load.counts) != len(layers):
        raise ConfigError(
            f"the load {load.source} has {len(load.counts)} sparse layers, the model has {len(layers)}; "
            "give a load that was recorded with this model"
        )
    found = []
    for counts, (layer_idx, moe) in zip(load.counts, layers, strict=True):
        values = np.asarray(counts, dtype=np.float64)
        if values.shape != (moe.num_experts,):
            raise ConfigError(
                f"the load {load.source} has {values.size} experts in layer {layer_idx}, the model has "
                f"{moe.num_experts}"
            )
        if not np.all(np.isfinite(values)) or values.min() < 0:
            wrong = int(np.flatnonzero(~np.isfinite(values) | (values < 0))[0])
            raise ConfigError(
                f"the load {load.source} has the count {values[wrong]:g} for expert {wrong} of layer "
                f"{layer_idx}; counts are finite and at least 0"
            )
        if values.sum() == 0:
            raise ConfigError(f"the load {load.source} counted nothing in layer {layer_idx}")
        found.append(values / values.sum())
    return ExpertShares(shares=tuple(found))


def zipf_shares(num_experts: int, exponent: float, seed: int = 0) -> ExpertShares:
    """A skew model: the r-th most popular expert has a share by r ** -exponent; ids are shuffled.

    Raises: ConfigError for an exponent below 0 or not finite.
    """
    if not 0.0 <= exponent < 100.0:
        raise ConfigError(f"a skew is an exponent of at least 0 (0 is even, 0.6 is strong), got {exponent!r}")
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    shares = np.random.default_rng(seed).permutation(weights / weights.sum())
    return ExpertShares(shares=(shares,))


def with_busiest(num_experts: int, cards: int, factor: float) -> ExpertShares:
    """Shares with which the first of `cards` contiguous cards gets `factor` times the mean, others alike."""
    per_card = num_experts // cards
    shares = np.full(num_experts, (1.0 - factor / cards) / (num_experts - per_card))
    shares[:per_card] = factor / num_experts
    return ExpertShares(shares=(shares,), has_chance=False)


@cache
def assumed_shares(model: ModelSpec, skew: float) -> ExpertShares:
    """The skew model for a model without a load; a skew of 0 is even, and chance is left out."""
    num_experts = max((moe.num_experts for _, moe in model.moe_layers), default=1)
    return zipf_shares(num_experts, skew) if skew else EVEN


def busiest_rows(
    num_rows: Number, ranks: Number, shares: ExpertShares, moe_idx: int, num_redundant: Number
) -> Number:
    """Rows of the busiest rank when `num_rows` choices go to `ranks` ranks."""
    rows, ranks = np.broadcast_arrays(np.asarray(num_rows, np.float64), np.asarray(ranks, np.float64))
    mean = rows / ranks
    busiest = mean
    if shares.has_chance:
        busiest = np.minimum(expected_maximum(mean, ranks), rows)
    layer = shares.of_layer(moe_idx)
    if layer is None:
        return busiest
    hottest = np.empty_like(mean)
    redundant = np.broadcast_to(np.asarray(num_redundant, np.float64), mean.shape)
    for ep, extra in np.unique(np.stack([ranks.ravel(), redundant.ravel()]), axis=1).T.astype(int).tolist():
        hottest[(ranks == ep) & (redundant == extra)] = _rank_shares(shares, layer, moe_idx, ep, extra).max()
    return np.maximum(busiest, rows * hottest)


def busiest_distinct(
    num_tokens: Number,
    experts_per_token: int,
    num_experts: int,
    ranks: Number,
    shares: ExpertShares,
    moe_idx: int,
) -> Number:
    """Distinct experts that the rank with the most of them must read.

    Source: an expert of share p is missed by n tokens with probability (1 - k p) ** n; the busiest of several
    equal ranks by `expected_maximum`. Skew gives fewer, so equal shares are the upper bound.
    """
    tokens, ranks = np.broadcast_arrays(np.asarray(num_tokens, np.float64), np.asarray(ranks, np.float64))
    layer = shares.of_layer(moe_idx)
    chosen = np.full(num_experts, 1.0 / num_experts) if layer is None else layer
    levels, counts = _levels(chosen)
    log_missed = np.log(np.maximum(1.0 - experts_per_token * levels, 1e-300))
    # Candidates share few token counts, and exp is several times faster than a power.
    each, idx = np.unique(tokens, return_inverse=True)
    active = num_experts - np.exp(each[:, None] * log_missed) @ counts
    mean: FloatArray = active[idx].reshape(tokens.shape) / ranks
    if not shares.has_chance:
        return mean
    slots = np.ceil(num_experts / ranks)
    # Binomial, not Poisson: no more than the rank's experts, and no spread once all are read.
    spread = np.sqrt(np.maximum(1.0 - mean / slots, 0.0))
    return np.minimum(mean + (expected_maximum(mean, ranks) - mean) * spread, slots)


def _levels(shares: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(share, how many experts): at most `MAX_LEVELS`, neighbours taken together at their mean."""
    levels, counts = np.unique(np.round(shares, 12), return_counts=True)
    if len(levels) <= MAX_LEVELS:
        return levels, counts.astype(np.float64)
    edges = np.unique(np.geomspace(1, len(shares), MAX_LEVELS).astype(int))[:-1]  # the hottest one by one
    parts = np.split(np.sort(shares)[::-1], edges)
    return np.array([part.mean() for part in parts]), np.array([float(len(part)) for part in parts])


def expected_maximum(mean: Number, ranks: Number) -> Number:
    """Largest of `ranks` Poisson counts of one mean, in expectation.

    Source: the expected largest of W normals is near the quantile (W - 3/8) / (W + 1/4) (Blom); the skewness
    of a Poisson count adds (z^2 - 1) / 6 (Cornish-Fisher).
    """
    ranks = np.asarray(ranks, np.float64)
    z = np.empty_like(ranks)
    for count in np.unique(ranks):
        z[ranks == count] = _largest_normal(float(count))
    mean = np.asarray(mean, np.float64)
    extra = z * np.sqrt(mean) + np.maximum(z * z - 1.0, 0.0) / 6.0 * np.minimum(mean, 1.0)
    return mean + np.where(ranks > 1, extra, 0.0)


@cache
def _largest_normal(count: float) -> float:
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25)) if count > 1 else 0.0


def _rank_shares(shares: ExpertShares, layer: FloatArray, moe_idx: int, ep: int, extra: int) -> FloatArray:
    key = (moe_idx, ep, extra)
    if key not in shares._ranks:
        shares._ranks[key] = placed_shares(layer, ep, extra)
    return shares._ranks[key]


def placed_shares(layer: FloatArray, ep: int, num_redundant: int) -> FloatArray:
    """Share of all choices that each of `ep` ranks gets.

    Shapes:  layer [E]; returns [ep].
    """
    slots = placed_slots(layer, ep, num_redundant)
    return np.bincount(slots.rank, weights=slots.share * layer[slots.expert], minlength=ep).astype(np.float64)
