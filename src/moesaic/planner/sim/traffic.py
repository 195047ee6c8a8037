"""Made-up routing: which experts tokens choose when experts, or topics of requests, have a popularity.

A token's k experts are distinct, so the hottest expert gets less than its popularity. Knows no placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from moesaic.cost.load import ExpertShares, zipf_shares
from moesaic.errors import ConfigError
from moesaic.spec.experts import FloatArray, IntArray

CHUNK_TOKENS = 4096  # drawn at a time, so that memory does not grow with the batch
MAX_DRAWS = 600_000_000  # pairs of token and expert that a study of a minute draws
MAX_POPULARITIES = 10_000_000  # topics x experts that are held
MAX_TAKEN = (
    0.5  # of the popularity, by a token's first choices: beyond, drawing again and again takes longest
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicTraffic:
    """How popular each expert is with the tokens of each topic; one topic is plain skew.

    Shapes:  popularity_ZE [topics, E] float64, rows sum to 1.
    """

    popularity_ZE: FloatArray

    @classmethod
    def zipf(cls, num_experts: int, exponent: float, *, num_topics: int = 1, seed: int = 0) -> Self:
        """Topics that each like other experts: the r-th favourite by r ** -exponent, ids shuffled per topic.

        Raises: ConfigError for an exponent below 0, for fewer than one topic, and for more than are held.
        """
        if num_topics < 1:
            raise ConfigError(f"topics must be at least 1 (one: plain skew), got {num_topics}")
        if num_topics * num_experts > MAX_POPULARITIES:
            raise ConfigError(
                f"{num_topics:,} topics of {num_experts} experts are more than the {MAX_POPULARITIES:,} "
                "popularities that are held; give fewer --topics"
            )
        rows = [zipf_shares(num_experts, exponent, seed + topic).of_layer(0) for topic in range(num_topics)]
        return cls(popularity_ZE=np.array(rows))

    @classmethod
    def recorded(cls, shares: ExpertShares) -> Self:
        """Each layer of a recorded load as a topic of its own.

        Raises: ConfigError for shares without a load.
        """
        if shares.shares is None:
            raise ConfigError("a recorded load has shares per layer; these are even")
        return cls(popularity_ZE=np.array(shares.shares))

    @property
    def num_experts(self) -> int:
        """Experts of the layer."""
        return int(self.popularity_ZE.shape[1])

    def draw(self, rng: np.random.Generator, topic_T: IntArray, num_chosen: int) -> IntArray:
        """The distinct experts of each token, ids ascending.

        Shapes:  topic_T [T]; returns [T, K] int64.
        Raises:  ConfigError when a token cannot choose so many.
        Source:  one after the other in proportion to what is left (Plackett-Luce, the same as Gumbel top-k).
        """
        if not 1 <= num_chosen <= self.num_experts:
            raise ConfigError(f"a token chooses 1 to {self.num_experts} experts, not {num_chosen}")
        popularity_ZE = np.maximum(self.popularity_ZE, 1e-30)
        most = np.sort(popularity_ZE, axis=1)[:, -num_chosen:].sum(axis=1).max()
        by_line = most <= MAX_TAKEN * popularity_ZE.sum(axis=1).min()
        take = _first_distinct if by_line else _race
        parts = [
            np.sort(take(rng, popularity_ZE, topic_T[start : start + CHUNK_TOKENS], num_chosen), axis=1)
            for start in range(0, len(topic_T), CHUNK_TOKENS)
        ]
        return np.concatenate(parts) if parts else np.empty((0, num_chosen), np.int64)

    def counts(self, rng: np.random.Generator, topic_T: IntArray, num_chosen: int) -> IntArray:
        """Tokens of each expert in one batch.

        Shapes:  topic_T [T]; returns [E] int64.
        """
        return counted(self.draw(rng, topic_T, num_chosen), self.num_experts)


def _first_distinct(
    rng: np.random.Generator, popularity_ZE: FloatArray, topic_T: IntArray, num_chosen: int
) -> IntArray:
    """Draws with replacement, of which the first distinct ones count: fast while most draws are new."""
    totals_Z = popularity_ZE.sum(axis=1, keepdims=True)
    line = (np.cumsum(popularity_ZE, axis=1) / totals_Z + np.arange(len(popularity_ZE))[:, None]).ravel()
    num_experts = popularity_ZE.shape[1]
    drawn_TM = np.empty((len(topic_T), 0), np.int64)
    chosen_TK = np.full((len(topic_T), num_chosen), -1, np.int64)
    left = np.arange(len(topic_T))
    while len(left):
        points = rng.random((len(left), num_chosen + 2)) + topic_T[left, None]
        found = np.searchsorted(line, points, side="right") - topic_T[left, None] * num_experts
        drawn_TM = np.concatenate([drawn_TM, np.minimum(found, num_experts - 1)], axis=1)
        is_new = np.ones(drawn_TM.shape, dtype=bool)
        for idx in range(1, drawn_TM.shape[1]):
            is_new[:, idx] = (drawn_TM[:, :idx] != drawn_TM[:, idx, None]).all(axis=1)
        has_all = is_new.sum(axis=1) >= num_chosen
        first = np.argsort(~is_new, axis=1, kind="stable")[:, :num_chosen]
        chosen_TK[left[has_all]] = np.take_along_axis(drawn_TM, first, axis=1)[has_all]
        left, drawn_TM = left[~has_all], drawn_TM[~has_all]
    return chosen_TK


def _race(
    rng: np.random.Generator, popularity_ZE: FloatArray, topic_T: IntArray, num_chosen: int
) -> IntArray:
    """The first to arrive of exponential waiting times at the rates of popularity: as long for any skew.

    Source:  the k shortest are k draws without putting back (Plackett-Luce).
    """
    waits_TE = rng.standard_exponential((len(topic_T), popularity_ZE.shape[1]), np.float32)
    waits_TE /= popularity_ZE.astype(np.float32)[topic_T]
    return np.argpartition(waits_TE, num_chosen - 1, axis=1)[:, :num_chosen].astype(np.int64)


def check_draws(draws: float, what: str, options: str) -> None:
    """Nothing, if so many pairs of token and expert are drawn in a minute.

    Raises: ConfigError naming what they are a product of, and the options to lower.
    """
    if draws > MAX_DRAWS:
        raise ConfigError(
            f"{draws:,.0f} draws ({what}) are more than the {MAX_DRAWS:,} of a study of a minute; give fewer "
            f"{options}"
        )


def counted(experts_TK: IntArray, num_experts: int) -> IntArray:
    """Tokens of each expert [E]."""
    return np.bincount(experts_TK.ravel(), minlength=num_experts).astype(np.int64)


def max_mean(load: Sequence[float] | FloatArray | IntArray) -> float:
    """The most by the mean; the mean utilisation of parts that wait for the busiest is one by this."""
    values = np.asarray(load, np.float64)
    return float(values.max() / values.mean()) if values.size and values.sum() else 1.0


def share_variation(
    traffic: TopicTraffic,
    rng: np.random.Generator,
    *,
    num_requests: int,
    tokens_per_request: int,
    num_chosen: int,
    num_batches: int,
) -> float:
    """How much an expert's share moves from batch to batch: standard deviation by mean, over all experts.

    Each request is of one topic. Many requests with a token each (decode) even out; few with many tokens
    (prefill) do not.
    """
    loads = []
    for _ in range(num_batches):
        topics = rng.integers(0, len(traffic.popularity_ZE), num_requests)
        loads.append(traffic.counts(rng, np.repeat(topics, tokens_per_request), num_chosen))
    shares = np.array(loads, np.float64) / (num_requests * tokens_per_request * num_chosen)
    return float((shares.std(axis=0) / np.maximum(shares.mean(axis=0), 1e-12)).mean())
