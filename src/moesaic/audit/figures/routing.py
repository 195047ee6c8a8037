"""Figures about gates, capacity and experts as functions: small layers in numpy, with fixed seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.audit.figures.registry import figure
from moesaic.planner.sim.capacity import ExpertLayer, Float32Array, capacity, fixed_product
from moesaic.planner.sim.case import Draws, GateCase, GateReport
from moesaic.planner.sim.gate import (
    SIGMOID_RENORMALISED,
    SOFTMAX_OF_TOP_K,
    TOP_K_OF_SOFTMAX,
    Choices,
    route,
    top_ids,
)
from moesaic.planner.sim.study import study_gates
from moesaic.spec.experts import FloatArray

WIDTH = 64


def _logits(tokens: int, num_experts: int, seed: int) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((tokens, num_experts))


@figure("S004-001", holds=lambda agree: agree is True)
def same_choices(tokens: int, num_experts: int, chosen: int, seed: int) -> bool:
    """Whether both orders choose the same experts for every token."""
    logits_TE = _logits(tokens, num_experts, seed)
    first, second = (route(logits_TE, gate, chosen) for gate in (SOFTMAX_OF_TOP_K, TOP_K_OF_SOFTMAX))
    return bool(np.array_equal(first.experts_TK, second.experts_TK))


@figure("S004-002", holds=lambda sums: sums[0] == 1 and sums[1] < 1)
def weight_sums(tokens: int, num_experts: int, chosen: int, seed: int) -> list[float]:
    """Mean sum of a token's weights in both orders."""
    logits_TE = _logits(tokens, num_experts, seed)
    gates = SOFTMAX_OF_TOP_K, TOP_K_OF_SOFTMAX
    return [float(route(logits_TE, gate, chosen).weights_TK.sum(axis=-1).mean()) for gate in gates]


@figure("S004-003", holds=lambda found: found["moved"] > 0 and found["weights_changed"] == 0)
def bias_effect(tokens: int, num_experts: int, chosen: int, bias: float, seed: int) -> dict[str, float]:
    """Tokens whose choice a bias on half the experts moves, and weights that it changes where none moved."""
    logits_TE = _logits(tokens, num_experts, seed)
    bias_E = np.where(np.arange(num_experts) % 2, bias, 0.0)
    plain = route(logits_TE, SIGMOID_RENORMALISED, chosen)
    biased = route(logits_TE, SIGMOID_RENORMALISED, chosen, bias_E)
    is_same = (plain.experts_TK == biased.experts_TK).all(axis=-1)
    changed = plain.weights_TK[is_same] != biased.weights_TK[is_same]
    return {"moved": int((~is_same).sum()), "weights_changed": int(changed.sum())}


@figure("S003-004")
def normalised(scores: Sequence[float]) -> list[float]:
    """Weights of the chosen from their probabilities: softmax over the chosen alone."""
    logits_TE = np.log(np.array([scores], np.float64))
    return [float(x) for x in route(logits_TE, SOFTMAX_OF_TOP_K, len(scores)).weights_TK[0]]


@figure("S003-005")
def rest_of_scores(scores: Sequence[float]) -> float:
    """What is left of a probability of one."""
    return 1 - sum(scores)


def _topical(
    num_experts: int, chosen: int, tokens: int, topics: int, strength: float, share: float, seed: int
) -> GateCase:
    return GateCase(
        num_experts=num_experts, experts_per_token=chosen, num_tokens=tokens, num_topics=topics,
        strength=strength, share=share, seed=seed,
    )  # fmt: skip


@cache
def gate_report(case: GateCase) -> GateReport:
    """The gate study of a case, once."""
    return study_gates(case)


def _draws(case: GateCase, name: str) -> Draws:
    return next(one for one in gate_report(case).draws if one.name == name)


@figure("S004-013")
def busiest_of_noise(**sizes: Any) -> float:
    """Busiest expert by the mean on inputs without topics, over many gates and batches."""
    return _draws(_topical(**sizes), "no topics").max_mean


@figure("S004-014")
def busiest_of_topics(**sizes: Any) -> float:
    """The same when one topic has most of the tokens."""
    return _draws(_topical(**sizes), "topical").max_mean


@figure("S004-015")
def dropped_shares(**sizes: Any) -> list[float]:
    """Choices over the capacity then, at a factor of 1.25 and of 1."""
    dropped = _draws(_topical(**sizes), "topical").dropped_share
    return [dropped["1.25"], dropped["1"]]


@figure("S004-016", holds=lambda found: min(found.values()) > 0)
def dropping_error(**sizes: Any) -> dict[str, float]:
    """What dropping changes in outputs, and what other neighbours then change in the same request."""
    row = gate_report(_topical(**sizes)).variant("top-k, then softmax", "topical")
    changed = 0.0 if row.neighbours is None else row.neighbours.change_capacity_max
    return {"relative_error": row.drop_error, "change_by_neighbours": changed}


@figure("S004-018", "S002-055", holds=lambda places: places == 80)
def places(tokens: int, chosen: int, num_experts: int, factor: float) -> int:
    """Choices that one expert takes."""
    return capacity(num_tokens=tokens, num_chosen=chosen, num_experts=num_experts, factor=factor)


def _layer(
    num_experts: int, chosen: int, tokens: int, seed: int
) -> tuple[ExpertLayer, Float32Array, Choices]:
    rng = np.random.default_rng(seed)
    layer = ExpertLayer.make(rng, num_experts=num_experts, width=WIDTH, expert_width=WIDTH // 4)
    x_TD = rng.standard_normal((tokens, WIDTH)).astype(np.float32)
    logits_TE = x_TD.astype(np.float64) @ rng.standard_normal((WIDTH, num_experts)) / WIDTH**0.5
    return layer, x_TD, route(logits_TE, SOFTMAX_OF_TOP_K, chosen)


@figure("S004-bitwise", holds=lambda change: change["library"] > 0 and change["fixed_order"] == 0)
def alone_and_among(tokens: int, num_experts: int, chosen: int, seed: int) -> dict[str, float]:
    """Largest change of an output when rows are computed one by one: library's product, fixed order."""
    layer, x_TD, choices = _layer(num_experts, chosen, tokens, seed)
    found = {}
    for name, product in (("library", np.matmul), ("fixed_order", fixed_product)):
        whole_TD = layer.forward(x_TD, choices, product=product)
        each = [layer.forward(x_TD[[i]], _only(choices, [i]), product=product)[0] for i in range(tokens)]
        found[name] = float(np.abs(whole_TD - np.stack(each)).max())
    return found


def _only(choices: Choices, rows: Sequence[int] | NDArray[Any]) -> Choices:
    return Choices(
        experts_TK=choices.experts_TK[list(rows)], weights_TK=choices.weights_TK[list(rows)],
        num_experts=choices.num_experts,
    )  # fmt: skip


@figure("S004-048", holds=lambda change: change == 0)
def spread_and_alone(tokens: int, num_experts: int, chosen: int, ranks: int, seed: int = 0) -> float:
    """Largest change of an output when each rank computes its own tokens' rows alone."""
    layer, x_TD, choices = _layer(num_experts, chosen, tokens, seed)
    whole_TD = layer.forward(x_TD, choices)
    parts = np.array_split(np.arange(tokens), ranks)
    spread_TD = np.concatenate([layer.forward(x_TD[part], _only(choices, part)) for part in parts])
    return float(np.abs(whole_TD - spread_TD).max())


@figure("S002-050", "S003-009", holds=lambda change: change == 0)
def copies_agree(tokens: int, num_experts: int, chosen: int, seed: int = 0) -> float:
    """Largest change of an output when every other token goes to a second copy of the experts."""
    layer, x_TD, choices = _layer(num_experts, chosen, tokens, seed)
    copy = replace(layer, up_EDF=layer.up_EDF.copy(), down_EFD=layer.down_EFD.copy())
    split_TD = layer.forward(x_TD, choices)
    whole_TD = split_TD.copy()
    split_TD[1::2] = copy.forward(x_TD[1::2], _only(choices, range(1, tokens, 2)))
    return float(np.abs(whole_TD - split_TD).max())


@figure("S003-006", holds=lambda found: found["moved_copies"] == 0 and found["other_choice"] > 0)
def what_changes_outputs(tokens: int, num_experts: int, chosen: int, seed: int = 0) -> dict[str, float]:
    """Largest change of an output by another place for an expert, and by another choice of experts."""
    layer, x_TD, choices = _layer(num_experts, chosen, tokens, seed)
    shifted = replace(choices, experts_TK=np.sort((choices.experts_TK + 1) % num_experts, axis=-1))
    changed_TD = layer.forward(x_TD, shifted) - layer.forward(x_TD, choices)
    return {
        "moved_copies": copies_agree(tokens, num_experts, chosen, seed),
        "other_choice": float(np.abs(changed_TD).max()),
    }


@figure("S003-010", holds=lambda rows: rows["dropless"] < rows["every_expert"])
def activation_rows(tokens: int, num_experts: int, chosen: int, seed: int = 0) -> dict[str, int]:
    """Rows that experts hold: dropless, and if every expert computed every token."""
    load_E = _layer(num_experts, chosen, tokens, seed)[2].load()
    return {"dropless": int(load_E.sum()), "every_expert": tokens * num_experts}


@figure("S003-011", holds=lambda rows: rows["one_at_a_time"] < rows["all_at_once"])
def peak_rows(tokens: int, num_experts: int, chosen: int, seed: int = 0) -> dict[str, int]:
    """Most rows alive at once, when all experts compute together and when one does at a time."""
    load_E = _layer(num_experts, chosen, tokens, seed)[2].load()
    return {"all_at_once": int(load_E.sum()), "one_at_a_time": int(load_E.max())}


@figure("S002-perexpert", holds=lambda errors: errors[1] < errors[0] / 10)
@figure("S002-075", holds=lambda errors: errors[1] < errors[0])
def scale_errors(stds: Sequence[float], seed: int) -> list[float]:
    """Relative squared error of INT8 weights, mean over experts: one scale for all, one per expert."""
    rng = np.random.default_rng(seed)
    experts = [rng.normal(0.0, std, (64, 64)) for std in stds]
    largest = [float(np.abs(one).max()) for one in experts]
    common = max(largest)
    return [
        float(np.mean([relative_error(one, scale) for one, scale in zip(experts, scales, strict=True)]))
        for scales in ([common] * len(experts), largest)
    ]


def relative_error(weights: FloatArray, largest: float) -> float:
    """Squared error by squared size when weights up to `largest` are rounded to 127 steps each way."""
    step = largest / 127
    rounded = np.clip(np.round(weights / step), -127, 127) * step
    return float(np.mean((rounded - weights) ** 2) / np.mean(weights**2))


@figure("S002-078", holds=lambda percent: percent > 2)
def fp8_router_percent(hidden: int, num_experts: int, chosen: int, tokens: int, seed: int) -> float:
    """Percent of tokens whose set of experts changes when a random router's inputs and weights are E4M3."""
    rng = np.random.default_rng(seed)
    x_TD = rng.standard_normal((tokens, hidden))
    gate_DE = rng.standard_normal((hidden, num_experts)) / hidden**0.5
    exact_TK = top_ids(x_TD @ gate_DE, chosen)
    rounded_TK = top_ids(e4m3(x_TD) @ e4m3(gate_DE, 448 / float(np.abs(gate_DE).max())), chosen)
    return 100 * float((exact_TK != rounded_TK).any(axis=-1).mean())


def e4m3(numbers: FloatArray, scale: float = 1.0) -> FloatArray:
    """The nearest numbers of 4 bits of exponent and 3 of mantissa, ties to even, saturating at 448.

    Source:  OCP 8-bit floating point, v1.0: bias 7, subnormals of 2^-9.
    """
    scaled = np.clip(numbers * scale, -448, 448)
    exponent = np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    rounded: FloatArray = np.round(scaled / step) * step / scale
    return rounded


def dense_loop_error(tokens: int, num_experts: int, chosen: int, seed: int = 0) -> float:
    """Largest change of an output when every expert computes every token, most with a weight of 0."""
    layer, x_TD, choices = _layer(num_experts, chosen, tokens, seed)
    weights_TE = np.zeros((tokens, num_experts))
    np.put_along_axis(weights_TE, choices.experts_TK, choices.weights_TK, axis=-1)
    every = Choices(
        experts_TK=np.tile(np.arange(num_experts), (tokens, 1)),
        weights_TK=weights_TE,
        num_experts=num_experts,
    )
    return float(np.abs(layer.forward(x_TD, every) - layer.forward(x_TD, choices)).max())
