"""Figures about uneven load: chance, skew, copies of hot experts, and which card holds what."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesaic.account.traffic import expected_distinct
from moesaic.audit.figures.registry import figure
from moesaic.audit.figures.subjects import experts_of
from moesaic.cost.load import placed_shares
from moesaic.errors import ConfigError
from moesaic.hashing import digest_bytes, rendezvous
from moesaic.placement.grid import SlotGrid
from moesaic.placement.lpt import lpt
from moesaic.placement.pack import placed_slots
from moesaic.placement.slots import Placement
from moesaic.planner.sim.ep import gpu_rows
from moesaic.planner.sim.traffic import TopicTraffic, max_mean, share_variation
from moesaic.spec.experts import FloatArray, IntArray


def _loads(
    num_experts: int, exponent: float, chosen: int, tokens: int, trials: int, seed: int
) -> list[IntArray]:
    """Tokens of each expert in independent batches; the heat is shuffled anew for each when there is any."""
    rng = np.random.default_rng(seed)
    found = []
    for trial in range(trials):
        traffic = TopicTraffic.zipf(num_experts, exponent, seed=seed + (trial if exponent else 0))
        found.append(traffic.counts(rng, np.zeros(tokens, np.int64), chosen))
    return found


@figure("S000-019", holds=lambda touched: touched["skewed"] < 0.97 * touched["even"])
def touched_by_skew(num_experts: int, chosen: int, tokens: int, exponent: float) -> dict[str, float]:
    """Distinct experts of a batch under Zipf popularity, mean over draws, and the even formula."""
    loads = _loads(num_experts, exponent, chosen, tokens, 60, 0)
    return {
        "skewed": float(np.mean([np.count_nonzero(load) for load in loads])),
        "even": expected_distinct(num_experts, chosen, tokens),
    }


@figure("S004-023")
def touched_formula_and_drawn(num_experts: int, chosen: int, tokens: int, seed: int) -> list[float]:
    """Distinct experts by the formula, and the mean of drawn batches."""
    loads = _loads(num_experts, 0.0, chosen, tokens, 40, seed)
    drawn = float(np.mean([np.count_nonzero(load) for load in loads]))
    return [expected_distinct(num_experts, chosen, tokens), drawn]


@figure("S004-063")
def busiest_expert_spread(num_experts: int, chosen: int, tokens: int, trials: int, seed: int) -> list[float]:
    """Busiest by mean under equal heat: mean over batches, and deviation of one."""
    ratios = [max_mean(load) for load in _loads(num_experts, 0.0, chosen, tokens, trials, seed)]
    return [float(np.mean(ratios)), float(np.std(ratios))]


@figure("S004-064")
def busiest_expert(num_experts: int, chosen: int, tokens: int, trials: int, seed: int) -> float:
    """The mean alone."""
    return busiest_expert_spread(num_experts, chosen, tokens, trials, seed)[0]


@figure("S004-065")
def busiest_cards(
    num_experts: int, chosen: int, tokens: Sequence[int], trials: Sequence[int], ranks: int, seed: int
) -> list[float]:
    """Busiest card of neighbouring experts, for each batch size."""
    found = []
    for count, draws in zip(tokens, trials, strict=True):
        loads = _loads(num_experts, 0.0, chosen, count, draws, seed)
        found.append(float(np.mean([max_mean(_by_card(load, ranks)) for load in loads])))
    return found


def _by_card(load_E: IntArray | FloatArray, ranks: int) -> FloatArray:
    return gpu_rows(load_E, placed_slots(np.asarray(load_E, np.float64), ranks, 0), ranks)


@figure("S004-066")
def hottest_popularity(num_experts: int, exponent: float) -> float:
    """Popularity of the hottest expert by the mean."""
    return max_mean(TopicTraffic.zipf(num_experts, exponent).popularity_ZE[0])


@figure("S004-067")
def hottest_load(num_experts: int, exponent: float, chosen: int, tokens: int, seed: int) -> float:
    """Its load by the mean, when a token's choices are distinct."""
    return max_mean(_loads(num_experts, exponent, chosen, tokens, 1, seed)[0])


@figure("S004-068")
def hottest_card(
    num_experts: int, exponent: float, chosen: int, ranks: int, trials: int, seed: int
) -> list[float]:
    """Busiest card of neighbouring experts over shuffles of the heat: mean, and deviation of one."""
    inclusion = _inclusion(num_experts, exponent, chosen, seed)
    rng = np.random.default_rng(seed)
    ratios = [max_mean(placed_shares(rng.permutation(inclusion), ranks, 0)) for _ in range(trials)]
    return [float(np.mean(ratios)), float(np.std(ratios))]


def _inclusion(num_experts: int, exponent: float, chosen: int, seed: int) -> FloatArray:
    """Share of all choices that each expert gets."""
    load_E = _loads(num_experts, exponent, chosen, 40_000, 1, seed)[0]
    shares: FloatArray = load_E / load_E.sum()
    return shares


@figure("S004-072", holds=lambda ratios: ratios[0] <= ratios[1] <= ratios[2] <= 1.1)
def left_by_copies(
    num_experts: int, exponent: float, ranks: int, slots: int, batch: int, chosen: int, seed: int
) -> list[float]:
    """Busiest card with copies of hot experts: as planned, in a batch, in half a batch."""
    inclusion = _inclusion(num_experts, exponent, chosen, seed)
    plan = placed_slots(inclusion, ranks, ranks * slots - num_experts)
    rng = np.random.default_rng(seed)
    found = [max_mean(placed_shares(inclusion, ranks, ranks * slots - num_experts))]
    traffic = TopicTraffic.zipf(num_experts, exponent, seed=seed)
    for tokens in (batch, batch // 2):
        loads = [traffic.counts(rng, np.zeros(tokens, np.int64), chosen) for _ in range(4)]
        found.append(float(np.mean([max_mean(gpu_rows(load, plan, ranks)) for load in loads])))
    return found


@figure("S004-076", holds=lambda variation: variation[0] < 0.5 * variation[1])
def variation_of_phases(
    num_experts: int, topics: int, exponent: float, chosen: int, requests: Sequence[int],
    tokens: Sequence[int], seed: int,
) -> list[float]:  # fmt: skip
    """How much an expert's share moves between batches: many requests of a token, few of many."""
    traffic = TopicTraffic.zipf(num_experts, exponent, num_topics=topics, seed=seed)
    return [
        share_variation(
            traffic, np.random.default_rng(seed), num_requests=count, tokens_per_request=each,
            num_chosen=chosen, num_batches=40,
        )
        for count, each in zip(requests, tokens, strict=True)
    ]  # fmt: skip


@figure("S004-166")
def in_order(load: Sequence[float], ranks: int) -> float:
    """Busiest card by the mean with experts in order."""
    return max_mean(placed_shares(np.array(load, np.float64), ranks, 0))


@figure("S003-008")
def share_of_copy(copies: int) -> float:
    """Part of an expert's load that each of its copies gets."""
    slots = placed_slots(np.ones(1), copies, copies - 1)
    return float(slots.share.max())


@figure("S002-008", holds=lambda percent: percent == 40)
def use_at(max_mean: float) -> float:
    """Mean utilisation in percent when the busiest has so much more than the mean."""
    return 100 / max_mean


@figure("S003-033", holds=lambda ratio: 2.5 < ratio < 2.6)
def max_by_mean(hot: float, others: float, cards: int) -> float:
    """Of one hot card among equal ones."""
    return max_mean([hot] + [others] * (cards - 1))


@figure("S002-043")
def share_ratio(hot: float, cold: float) -> float:
    """One share by another."""
    return hot / cold


@figure("S002-044")
def cold_use(hot: float, cold: float) -> float:
    """Percent of its time that a cold card works while the hot one always does."""
    return 100 * cold / hot


@figure("S002-084", holds=lambda spread: spread < 0.5)
def spread_of_shares(shares: Sequence[float]) -> float:
    """Coefficient of variation."""
    values = np.array(shares, np.float64)
    return float(values.std() / values.mean())


@figure("S003-024")
def rest_of_shares(shares: Sequence[float]) -> float:
    """Percent that is left."""
    return 100 - sum(shares)


@figure("S002-080")
def products(nodes: Sequence[int], per_node: Sequence[int]) -> list[int]:
    """Cards of each deployment."""
    return [count * each for count, each in zip(nodes, per_node, strict=True)]


@figure("S002-071", "S002-073")
def points_lost(before: float, after: float) -> float:
    """A difference."""
    return before - after


def lpt_cards(load: Sequence[float], ranks: int, slots: int) -> IntArray:
    """Experts of each card [ranks, slots], greedy copies and LPT with a slot limit."""
    grid = SlotGrid(num_experts=len(load), num_gpus=ranks, num_slots=ranks * slots)
    ids_GC: IntArray = lpt(np.array([load], np.float64), grid).ids_LGC[0]
    return ids_GC


@figure("S004-167")
def copies_of_experts(load: Sequence[float], ranks: int, slots: int) -> list[int]:
    """How many slots each expert gets."""
    ids_GC = lpt_cards(load, ranks, slots)
    return [int(count) for count in np.bincount(ids_GC.ravel(), minlength=len(load))]


@figure("S004-168")
def loads_of_cards(load: Sequence[float], ranks: int, slots: int) -> list[float]:
    """Load of each card, copies sharing evenly."""
    plan = Placement(ids_LGC=lpt_cards(load, ranks, slots)[None])
    return [float(total) for total in plan.gpu_load(np.array([load], np.float64))[0]]


@figure("S003-027", holds=lambda found: found["ep_fits"] is False and found["tp_x_ep_fits"] is True)
def expert_ranks(model: str, ranks: int) -> dict[str, bool]:
    """Whether so many ranks each get an expert of their own, and whether they do with experts cut in two."""
    num_experts = experts_of(model).num_experts
    return {"ep_fits": _has_slots(num_experts, ranks), "tp_x_ep_fits": _has_slots(2 * num_experts, ranks)}


def _has_slots(num_experts: int, ranks: int) -> bool:
    try:
        SlotGrid(num_experts=num_experts, num_gpus=ranks, num_slots=num_experts)
    except ConfigError:
        return False
    return True


@figure("S004-062")
def slots_per_card(num_experts: int, num_redundant: int, ranks: Sequence[int]) -> list[int]:
    """Routed experts of a card."""
    slots = num_experts + num_redundant
    return [
        SlotGrid(num_experts=num_experts, num_gpus=count, num_slots=slots).slots_per_gpu for count in ranks
    ]


@figure("S004-061")
def cards_of_unit(tp: int, dp: int, num_experts: int, further: int) -> list[int]:
    """Cards of attention and of experts, one expert a card and further cards for copies and shared ones."""
    return [tp * dp, num_experts + further]


@figure("S002-049", holds=lambda moved: moved["consistent"] < 0.5 * moved["modulo"])
def keys_moved(replicas: int, keys: int = 4000) -> dict[str, float]:
    """Share of keys that go to another replica when one more comes: hash % count, and rendezvous hashing."""
    names = [f"replica {idx}".encode() for idx in range(replicas + 1)]
    digests = [digest_bytes(b"", str(idx).encode()) for idx in range(keys)]
    numbers = [int.from_bytes(one, "little") for one in digests]
    return {
        "modulo": sum(one % replicas != one % (replicas + 1) for one in numbers) / keys,
        "consistent": sum(rendezvous(one, names[:-1]) != rendezvous(one, names) for one in digests) / keys,
    }
