"""Figures about a sparse model next to a dense one, tensor parallel on one node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moesaic.account.traffic import sparsity
from moesaic.audit.figures.registry import figure
from moesaic.audit.figures.subjects import decode, experts_of, fullest
from moesaic.audit.figures.subjects import model as model_of
from moesaic.cost.layouts import Split
from moesaic.cost.ops import Formats
from moesaic.cost.profile import PAPER
from moesaic.cost.term import FloatArray, leaves
from moesaic.planner.economy import decode_curve
from moesaic.spec.hardware import Cluster
from moesaic.spec.hardware import cluster as cluster_of

ALL_TOUCHED = 4096  # tokens after which every expert of a small model has been chosen


def _split(cards: Cluster) -> Split:
    return Split(tp=cards.num_devices, expert_tp=cards.num_devices)


def _seconds(name: str, machine: str, batch: Sequence[int], context: int) -> FloatArray:
    return decode_curve(model_of(name), cluster_of(machine), batch, context=context, profile=PAPER)


@figure("S004-025", holds=lambda s: s["operators_s"] >= s["whole_step_s"] > 0)
def two_rooflines(model: str, machine: str, batch: int, context: int) -> dict[str, float]:
    """The sum of operators' slower halves, and the slower of the step's sums."""
    cards = cluster_of(machine)
    terms = list(leaves(decode(model, cards, _split(cards), float(batch), context)))
    compute, memory = (
        sum(float(np.asarray(times * getattr(term, part))) for times, term in terms)
        for part in ("compute_s", "memory_s")
    )
    each = sum(float(np.asarray(times * np.maximum(term.compute_s, term.memory_s))) for times, term in terms)
    return {"operators_s": each, "whole_step_s": max(compute, memory)}


@figure("S004-026", "S004-027")
def ffn_read_us(model: str, machine: str) -> float:
    """Reading one layer's FFN, all its experts, on each of the cards."""
    cards, names = cluster_of(machine), ("experts", "dense_ffn")
    step = decode(model, cards, _split(cards), float(ALL_TOUCHED), 1)
    found = [float(np.asarray(term.memory_s)) for _, term in leaves(step) if term.name in names]
    return 1e6 * found[-1]


@figure("S004-028")
def ffn_read_ratio(models: Sequence[str], machine: str) -> float:
    """One model's read by the other's."""
    first, second = (ffn_read_us(name, machine) for name in models)
    return first / second


@figure("S004-029")
def saved_percent(models: Sequence[str], machine: str, context: int, batch: int) -> float:
    """How much less time the first takes."""
    return -extra_percents(models, machine, context, [batch])[0]


def extra_percents(models: Sequence[str], machine: str, context: int, batches: Sequence[int]) -> list[float]:
    """How much more time the first takes at each batch."""
    first, second = (_seconds(name, machine, batches, context) for name in models)
    return [100 * float(x) for x in first / second - 1]


@figure("S004-030")
def extra_least_and_most(
    models: Sequence[str], machine: str, context: int, batches: Sequence[int]
) -> list[float]:
    """The least and the most of it."""
    found = extra_percents(models, machine, context, batches)
    return [min(found), max(found)]


@figure("S004-031", holds=lambda ratios: max(ratios) < 1)
def time_ratios(models: Sequence[str], machine: str, context: int, batches: Sequence[int]) -> list[float]:
    """One model's time by the other's."""
    return [1 + percent / 100 for percent in extra_percents(models, machine, context, batches)]


@figure("S004-032", "S004-033")
def largest_throughput(model: str, machine: str, context: int) -> float:
    """Tokens per second at the largest batch."""
    cards = cluster_of(machine)
    batch = fullest(model, cards, _split(cards), context)
    return batch / float(_seconds(model, machine, [batch], context)[0])


@figure("S004-034")
def throughput_ratio(models: Sequence[str], machine: str, context: int) -> float:
    """One model's by the other's."""
    first, second = (largest_throughput(name, machine, context) for name in models)
    return first / second


@figure("S004-040", holds=lambda rows: 100 <= rows <= 200)
def rows_at_largest_batch(model: str, machine: str, context: int) -> float:
    """Tokens per expert at the largest batch."""
    cards = cluster_of(machine)
    return fullest(model, cards, _split(cards), context) / sparsity(experts_of(model))


@figure("S004-041", holds=lambda rows: max(rows) < 11)
def rows_of_deployments(
    model: str, context: int, deployments: Sequence[tuple[str, int, int, str]]
) -> list[float]:
    """The same of several (machine, TP, PP, format)."""
    found = []
    for machine, tp, pp, form in deployments:
        bits = 8 if form == "fp8" else 16
        formats = Formats(dense=form, experts=form, ends_bits=bits)
        split = Split(tp=tp, expert_tp=tp, pp=pp)
        batch = fullest(model, cluster_of(machine), split, context, formats=formats)
        found.append(batch / sparsity(experts_of(model)))
    return found


def step_ms(model: str, machine: str, context: int, batches: Sequence[int]) -> list[float]:
    """Time of a decode step at each batch."""
    return [1e3 * float(x) for x in _seconds(model, machine, batches, context)]
