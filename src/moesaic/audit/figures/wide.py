"""Figures about experts spread over many cards: what fits, how fast, with one micro-batch and with two."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.audit.figures.registry import figure
from moesaic.audit.figures.subjects import experts_of
from moesaic.audit.figures.subjects import model as model_of
from moesaic.cost.load import EVEN, ExpertShares, with_busiest, zipf_shares
from moesaic.cost.ops import Formats
from moesaic.cost.profile import PAPER
from moesaic.cost.wide_ep import WideEp, wide_ep
from moesaic.spec.hardware import Cluster, machine

FORMATS = Formats(ends_bits=8, dispatch_bits=8, combine_bits=16)  # fp8 weights and dispatch


def _cluster(name: str, cards: int) -> Cluster:
    return Cluster(machine=machine(name), devices_per_node=8, num_nodes=max(cards // 8, 1))


def layout(
    model: str, machine: str, cards: int, context: int, *, micro_batches: int = 1, num_redundant: int = 0,
    shares: ExpertShares = EVEN,
) -> WideEp:  # fmt: skip
    """Decode at the largest batch that fits. Redundant slots take memory; `shares` say what they do."""
    return wide_ep(
        model_of(model), _cluster(machine, cards), context=context, formats=FORMATS, profile=PAPER,
        num_micro_batches=micro_batches, num_redundant=num_redundant, shares=shares,
    )  # fmt: skip


@figure("S004-050", "S004-051")
def experts_gb(model: str, machine: str, cards: int, context: int) -> float:
    """Routed experts of a card."""
    return layout(model, machine, cards, context).expert_bytes / 1e9


@figure("S004-052", "S004-053")
def sequences(model: str, machine: str, cards: int, context: int) -> int:
    """Sequences that fit a card."""
    return layout(model, machine, cards, context).batch


@figure("S004-054", holds=lambda rows: 24 <= rows[0] < 25 and rows[1] > 1000)
def rows_per_expert(model: str, machine: str, cards: Sequence[int], context: int) -> list[float]:
    """Tokens per expert."""
    return [layout(model, machine, count, context).rows_per_expert for count in cards]


def speed(
    model: str, machine: str, cards: int, context: int, *, micro_batches: int = 1,
    shares: ExpertShares = EVEN, num_redundant: int = 0,
) -> float:  # fmt: skip
    """Tokens per second and card."""
    return layout(
        model,
        machine,
        cards,
        context,
        micro_batches=micro_batches,
        num_redundant=num_redundant,
        shares=shares,
    ).tokens_per_s


@figure("S004-055", "S004-056")
def even_speed(model: str, machine: str, cards: int, context: int) -> float:
    """The same with even experts and one micro-batch."""
    return speed(model, machine, cards, context)


@figure("S004-057")
def exchanges_ms(model: str, machine: str, cards: Sequence[int], context: int) -> list[float]:
    """Dispatch and combine of a layer."""
    return [1e3 * layout(model, machine, count, context).exchange_s for count in cards]


def _dual_ratio(model: str, machine: str, cards: int, context: int) -> float:
    dual = speed(model, machine, cards, context, micro_batches=2)
    return dual / speed(model, machine, cards, context)


@figure("S004-058")
def dual_gains(model: str, machine: str, cards: Sequence[int], context: int) -> list[float]:
    """Percent that two micro-batches bring."""
    return [100 * (_dual_ratio(model, machine, count, context) - 1) for count in cards]


@figure("S004-059", holds=lambda ratio: ratio < 1)
def dual_ratio(model: str, machine: str, cards: int, context: int) -> float:
    """Throughput with two micro-batches by that with one."""
    return _dual_ratio(model, machine, cards, context)


@figure("S004-060")
def dual_speeds(model: str, machine: str, cards: Sequence[int], context: int) -> list[float]:
    """Tokens per second and card with two micro-batches."""
    return [speed(model, machine, count, context, micro_batches=2) for count in cards]


@figure("S004-069", "S004-073")
def skewed_speed(model: str, machine: str, cards: int, context: int, max_mean: float) -> float:
    """Tokens per second and card, two micro-batches, when the busiest card has so much more than the mean."""
    shares = with_busiest(experts_of(model).num_experts, cards, max_mean)
    return speed(model, machine, cards, context, micro_batches=2, shares=shares)


@figure("S004-070")
def even_and_skewed(model: str, machine: str, cards: int, context: int, max_mean: float) -> list[float]:
    """Without the skew and with it."""
    return [
        speed(model, machine, cards, context, micro_batches=2),
        skewed_speed(model, machine, cards, context, max_mean),
    ]


@figure("S004-071", holds=lambda lost: abs(lost["two_micro_batches"]) < 2 < lost["one_micro_batch"])
def lost_by_skew(model: str, machine: str, cards: int, context: int, exponent: float) -> dict[str, float]:
    """Percent that Zipf heat in order costs, with two micro-batches and with one."""
    shares = zipf_shares(experts_of(model).num_experts, exponent)
    skewed = ExpertShares(shares=shares.shares, has_chance=False)
    lost = {}
    for name, count in (("two_micro_batches", 2), ("one_micro_batch", 1)):
        even = speed(model, machine, cards, context, micro_batches=count)
        hot = speed(model, machine, cards, context, micro_batches=count, shares=skewed)
        lost[name] = 100 * (even / hot - 1)
    return lost


@figure("S004-074", holds=lambda part: 90 < part["large"] <= 100 and part["small_charged"] < 90)
def recovered(
    model: str, machine: str, cards: Sequence[int], context: int, max_mean: float
) -> dict[str, float]:
    """Percent of the even throughput: many cards, few cards, and few when the copies' memory is charged."""
    large, small = cards
    even = {count: speed(model, machine, count, context, micro_batches=2) for count in cards}
    charged = speed(model, machine, small, context, micro_batches=2, num_redundant=small)
    return {
        "large": 100 * skewed_speed(model, machine, large, context, max_mean) / even[large],
        "small": 100 * skewed_speed(model, machine, small, context, max_mean) / even[small],
        "small_charged": 100 * charged / even[small],
    }
