"""What chance and skew make of a batch, by drawing tokens: how much more than the mean the busiest has.

`load` has the closed forms that pricing uses; these draws are what they are held against.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moesaic.cost.load import ExpertShares, Slots, placed_slots
from moesaic.cost.term import FloatArray
from moesaic.spec.experts import IntArray

CHUNK = 20_000  # tokens drawn at a time


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Largest by mean, over some draws."""

    mean: float
    deviation: float


def drawn_choices(
    shares_E: FloatArray, experts_per_token: int, num_tokens: int, rng: np.random.Generator
) -> IntArray:
    """Experts of each token, k different ones, by popularity.

    Shapes:  shares_E [E]; returns [num_tokens, k].
    Source: of exponential waiting times at the rates `shares_E` the k shortest are k draws without putting
    back (Plackett-Luce).
    """
    waits = rng.standard_exponential((num_tokens, len(shares_E)), np.float32) / shares_E.astype(np.float32)
    return np.argpartition(waits, experts_per_token - 1, axis=1)[:, :experts_per_token].astype(np.int64)


def drawn_loads(
    shares_E: FloatArray, experts_per_token: int, num_tokens: int, rng: np.random.Generator
) -> IntArray:
    """Tokens of each expert. Shapes: [E]."""
    loads = np.zeros(len(shares_E), dtype=np.int64)
    for first in range(0, num_tokens, CHUNK):
        chosen = drawn_choices(shares_E, experts_per_token, min(CHUNK, num_tokens - first), rng)
        loads += np.bincount(chosen.ravel(), minlength=len(loads))
    return loads


def even(num_experts: int) -> FloatArray:
    """All experts equally popular. Shapes: [E]."""
    return np.full(num_experts, 1.0 / num_experts)


def busiest_ratio(
    shares_E: FloatArray, experts_per_token: int, num_tokens: int, *, cards: int | None = None,
    trials: int = 20, seed: int = 0, is_shuffled: bool = False,
) -> Ratio:  # fmt: skip
    """How much more than the mean the busiest expert gets, or the busiest of `cards` with contiguous experts.

    `is_shuffled`: which expert has which share is drawn anew each time.
    """
    rng, found = np.random.default_rng(seed), []
    for _ in range(trials):
        shares = rng.permutation(shares_E) if is_shuffled else shares_E
        loads = drawn_loads(shares, experts_per_token, num_tokens, rng)
        groups = loads if cards is None else loads.reshape(cards, -1).sum(axis=1)
        found.append(groups.max() / groups.mean())
    return Ratio(mean=float(np.mean(found)), deviation=float(np.std(found)))


def realised_shares(
    shares_E: FloatArray, experts_per_token: int, *, num_tokens: int = 30_000, seed: int = 0
) -> FloatArray:
    """Part of all choices that each expert gets: flatter than its popularity, as a token takes it once.

    Shapes:  [E].
    """
    loads = drawn_loads(shares_E, experts_per_token, num_tokens, np.random.default_rng(seed))
    return np.asarray(loads / loads.sum())


def placed_ratio(
    shares_E: FloatArray, experts_per_token: int, num_tokens: int, cards: int, num_redundant: int, *,
    trials: int = 5, seed: int = 0,
) -> tuple[float, Ratio]:  # fmt: skip
    """(busiest card by mean if every batch were average, the same over drawn batches), hot experts copied.

    Tokens of an expert are divided evenly over its copies.
    """
    realised = realised_shares(shares_E, experts_per_token, seed=seed)
    slots = placed_slots(realised, cards, num_redundant)
    rng = np.random.default_rng(seed + 1)
    found = [
        _card_ratio(slots, drawn_loads(shares_E, experts_per_token, num_tokens, rng), cards)
        for _ in range(trials)
    ]
    static = _card_ratio(slots, realised, cards)
    return static, Ratio(mean=float(np.mean(found)), deviation=float(np.std(found)))


def _card_ratio(slots: Slots, loads_E: np.ndarray, cards: int) -> float:
    held = np.bincount(slots.rank, weights=slots.share * loads_E[slots.expert], minlength=cards)
    return float(held.max() / held.mean())


def skews(experts_TK: IntArray, rank_of_E: IntArray, cards: int) -> tuple[float, float]:
    """(computing, receiving): busiest by mean of expert rows, and of tokens that arrive once per card.

    A hot expert beside cold ones makes its card compute more; popular pairs on one card make it receive less.

    Shapes:  experts_TK [T, k] logical ids; rank_of_E [E] the card of each.
    """
    ranks_TK = rank_of_E[experts_TK]
    rows = np.bincount(ranks_TK.ravel(), minlength=cards)
    arrives = np.zeros((len(ranks_TK), cards), dtype=bool)
    np.put_along_axis(arrives, ranks_TK, True, axis=1)
    received = arrives.sum(axis=0)
    return float(rows.max() / rows.mean()), float(received.max() / received.mean())


def with_busiest(num_experts: int, cards: int, factor: float) -> ExpertShares:
    """Shares with which the first of `cards` contiguous cards gets `factor` times the mean, others alike."""
    per_card = num_experts // cards
    shares = np.full(num_experts, (1.0 - factor / cards) / (num_experts - per_card))
    shares[:per_card] = factor / num_experts
    return ExpertShares(shares=(shares,), has_chance=False)


def straggler_share(seconds: FloatArray) -> float:
    """Part of a synchronous step that the mean rank waits for the slowest one: 1 - mean / max.

    Shapes:  seconds [ranks].
    """
    return float(1.0 - np.mean(seconds) / np.max(seconds))
