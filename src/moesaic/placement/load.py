"""Expert loads as arrays: from records, between batches, and made-up ones whose topics drift."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesaic.errors import ConfigError
from moesaic.spec.experts import ExpertLoad, FloatArray


def load_array(load: ExpertLoad) -> FloatArray:
    """Counts as an array.

    Shapes:  returns [L, E] float64.
    Raises:  ConfigError when layers differ in experts, or a count is negative or not finite.
    """
    sizes = {len(counts) for counts in load.counts}
    if len(sizes) != 1:
        raise ConfigError(
            f"{load.source}: a placement needs as many experts in every sparse layer; it has "
            f"{sorted(sizes) or 'none'}"
        )
    counts = np.stack([np.asarray(row, dtype=np.float64) for row in load.counts])
    wrong = np.argwhere(~np.isfinite(counts) | (counts < 0))
    if len(wrong):
        layer, expert = wrong[0].tolist()
        raise ConfigError(
            f"{load.source}: expert {expert} of sparse layer {layer} has the count "
            f"{counts[layer, expert]:g}; counts "
            "are finite and at least 0"
        )
    return counts


def stacked(loads: Sequence[ExpertLoad]) -> FloatArray:
    """Several loads of one model.

    Shapes:  returns [S, L, E].
    Raises:  ConfigError when they differ in layers or experts, naming both.
    """
    arrays = [load_array(load) for load in loads]
    for load, array in zip(loads, arrays, strict=True):
        if array.shape != arrays[0].shape:
            raise ConfigError(
                f"{load.source} has {array.shape[0]} sparse layers of {array.shape[1]} experts, "
                f"{loads[0].source} has "
                f"{arrays[0].shape[0]} of {arrays[0].shape[1]}; loads of one model are needed"
            )
    return np.stack(arrays)


def share_variation(counts_BE: FloatArray) -> float:
    """How much an expert's share changes from batch to batch: standard deviation by mean, mean over experts.

    What a placement for the mean load misses. Experts that were never chosen are left out.

    Shapes:  counts_BE [batches, E]; batches without a count are left out.
    Raises:  ConfigError for fewer than two batches with counts.
    """
    counts = counts_BE[counts_BE.sum(axis=1) > 0]
    if len(counts) < 2:
        raise ConfigError(f"a variation between batches needs two of them, got {len(counts)}")
    share = counts / counts.sum(axis=1, keepdims=True)
    used = share.mean(axis=0) > 0
    return float((share.std(axis=0)[used] / share.mean(axis=0)[used]).mean())


def drifting_loads(
    rng: np.random.Generator,
    *,
    num_experts: int,
    experts_per_token: int,
    num_topics: int,
    requests: Sequence[int],
    tokens_per_request: int,
    turn_per_step: float = 0.0,
    concentration: float = 0.3,
) -> FloatArray:
    """Counts of steps whose requests each have a topic, and whose mix of topics turns with time.

    A topic prefers experts with weights drawn from a Dirichlet distribution of `concentration`; popularity of
    topics is Zipf of 1, turned by `turn_per_step` places a step. Decode is many requests of one token a
    step, prefill few of many: with as many tokens, its batches differ far more.

    Shapes:  requests: how many in each step; returns [steps, E].
    """
    prefers = rng.dirichlet(np.full(num_experts, concentration), num_topics)
    popularity = 1.0 / np.arange(1, num_topics + 1, dtype=np.float64)
    counts = np.zeros((len(requests), num_experts))
    for step, num_requests in enumerate(requests):
        place = step * turn_per_step
        mix = (1 - place % 1) * np.roll(popularity, int(place)) + (place % 1) * np.roll(
            popularity, int(place) + 1
        )
        topics = rng.multinomial(num_requests, mix / mix.sum())
        for topic in np.flatnonzero(topics):
            tokens = int(topics[topic]) * tokens_per_request
            counts[step] += rng.multinomial(tokens * experts_per_token, prefers[topic])
    return counts
