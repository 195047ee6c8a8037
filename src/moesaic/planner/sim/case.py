"""What a gate study is asked and what it answers: plain values, checked, without numpy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from moesaic.errors import ConfigError

NUM_REQUESTS = 16
"""Tokens whose outputs are compared between two sets of neighbours."""
MAX_TABLE = 65_536
MAX_PAIRS = 8_192


@dataclass(frozen=True, kw_only=True, slots=True)
class GateCase:
    """A random gate and a batch of tokens that cluster by topic.

    Source:  sizes that give 1.2 x the mean load on unclustered tokens and 2.8 x on topical ones,
             measured by `moesaic simulate gate`.
    Raises: ConfigError for a value outside its range, with the option that sets it.
    """

    num_experts: int = 8
    experts_per_token: int = 2
    num_tokens: int = 256
    num_topics: int = 8
    strength: float = 2.5  # of a token's topic, in units of its own noise
    share: float = 0.7  # of the tokens that belong to one topic
    capacity_factor: float = 1.25
    importance_weight: float = 1.0  # of the two balance losses of the noisy gate
    load_weight: float = 1.0
    seed: int = 7

    def __post_init__(self) -> None:
        chosen, experts = self.experts_per_token, self.num_experts
        _need("num_experts (--experts)", experts, experts >= 2, "2 or more")
        _need(
            "experts_per_token (--top-k)",
            chosen,
            1 <= chosen <= experts,
            f"in 1 to {experts}, the number of experts",
        )
        least = 2 * NUM_REQUESTS
        _need(
            "num_tokens (--tokens)",
            self.num_tokens,
            self.num_tokens >= least,
            f"{least} or more, as {NUM_REQUESTS} tokens are watched while their neighbours change",
        )
        _need(
            "num_topics (--topics)",
            self.num_topics,
            self.num_topics >= 2,
            "2 or more, the hot one and one to move to",
        )
        _within("strength (--strength)", self.strength, 100)
        _within("share (--share)", self.share, 1)
        _within("importance_weight (--importance-weight)", self.importance_weight, 1000)
        _within("load_weight (--load-weight)", self.load_weight, 1000)
        factor = self.capacity_factor
        _need(
            "capacity_factor (--capacity-factor)",
            factor,
            math.isfinite(factor) and factor > 0,
            "finite and above 0",
        )
        _need("seed (--seed)", self.seed, self.seed >= 0, "0 or more")
        _limit("num_tokens * num_experts", self.num_tokens * experts, MAX_TABLE)
        _limit("num_tokens * experts_per_token", self.num_tokens * chosen, MAX_PAIRS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """Figures over many draws of gate and batch: mean, least and greatest."""

    name: str
    num_draws: int
    max_mean: float  # load of the hottest expert by the mean load
    max_mean_least: float
    max_mean_greatest: float
    dropped_share: dict[str, float]  # mean share of pairs dropped, by capacity factor


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """What other neighbours in the batch do to the outputs of the watched tokens, under one gate."""

    change_capacity: float  # norm of the change under the capacity factor, by the norm of the dropless output
    change_capacity_max: float  # the same change: largest of one number
    change_dropless: float  # largest change of one number without dropping; 0.0 means every bit the same


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One gate on one batch."""

    name: str
    tokens: str  # which batch it was given
    load: tuple[int, ...]
    max_mean: float
    importance_cv2: float
    load_cv2: float
    weight_sum: float  # mean over tokens of the sum of a token's weights
    dropped_share: float  # at the case's capacity factor
    drop_error: float  # norm of what dropping changed in the output, by the norm of the dropless output
    neighbours: Neighbours | None  # None where they were not changed: one row of a gate has it


@dataclass(frozen=True, kw_only=True, slots=True)
class GateReport:
    """The answers, in the order they are shown."""

    case: GateCase
    capacity: int  # pairs an expert takes at the case's capacity factor
    draws: tuple[Draws, ...]
    variants: tuple[Variant, ...]
    smooth_max_mean: float  # trained noisy gate, load estimator on a fresh batch
    change_blas: float  # dropless, numpy's matrix product in place of the fixed order
    example_importance: tuple[float, ...]  # the counter-example: even importance,
    example_load: tuple[int, ...]  # and uneven load

    def variant(self, name: str, tokens: str) -> Variant:
        """The row of this gate on this batch."""
        return next(one for one in self.variants if (one.name, one.tokens) == (name, tokens))


def _need(name: str, value: float, is_good: bool, rule: str) -> None:
    if not is_good:
        raise ConfigError(f"{name} must be {rule}: got {value}")


def _within(name: str, value: float, most: float) -> None:
    _need(name, value, 0 <= value <= most, f"in 0 to {most:g}")


def _limit(name: str, value: int, most: int) -> None:
    if value > most:
        raise ConfigError(
            f"{name} is {value:,}, more than the {most:,} that a study of seconds holds: give fewer --tokens"
        )
