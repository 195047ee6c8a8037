"""The gate study: one batch through every gate, before and after balancing, dropless and with capacity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from moesaic.obs.load import skew
from moesaic.planner.sim.capacity import ExpertLayer, Product, capacity, is_kept, num_dropped
from moesaic.planner.sim.case import NUM_REQUESTS, Draws, GateCase, GateReport, Neighbours, Variant
from moesaic.planner.sim.gate import (
    SIGMOID_RENORMALISED,
    SOFTMAX_OF_TOP_K,
    TOP_K_OF_SOFTMAX,
    Choices,
    cv_squared,
    equal_importance_example,
    learn_bias,
    route,
)
from moesaic.planner.sim.noisy import BalanceWeights, NoisyGate, smooth_load, train
from moesaic.planner.sim.topics import Topics
from moesaic.spec.experts import FloatArray, IntArray
from moesaic.spec.model import GateSpec

Choose = Callable[[FloatArray], Choices]

WIDTH = 64
EXPERT_WIDTH = 16
NUM_DRAWS = 60
NUM_STEPS = 100  # batches that a gate learns from
BIAS_RATE = 0.006  # guess: DeepSeek-V3's is 0.001, over thousands of times as many steps
GRADIENT_RATE = 0.003  # guess: of Adam; 0.001 is not there yet, 0.01 evens the load by noise alone


def study_gates(case: GateCase) -> GateReport:
    """Everything `moesaic simulate gate` shows; the same case gives the same figures."""
    world = _World.make(case)
    trained = _train(world)
    draw_TE = world.stream("noise").standard_normal((case.num_tokens, case.num_experts))
    smooth_E = smooth_load(trained, world.topical_TD, draw_TE, case.experts_per_token)
    example = route(equal_importance_example(), SOFTMAX_OF_TOP_K, 2)
    return GateReport(
        case=case,
        capacity=world.places,
        draws=_draws(case),
        variants=tuple(_variant(world, *row) for row in _rows(world, trained, draw_TE)),
        smooth_max_mean=float(smooth_E.max() / smooth_E.mean()),
        change_blas=_neighbours(world, _gate(world, SOFTMAX_OF_TOP_K), np.matmul).change_dropless,
        example_importance=tuple(example.importance().round(9).tolist()),
        example_load=tuple(example.load().tolist()),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _World:
    """The random gate, experts and batches that all variants share."""

    case: GateCase
    places: int
    gate_DE: FloatArray
    layer: ExpertLayer
    topics: Topics
    plain_TD: FloatArray  # no topics
    topical_TD: FloatArray  # a share from topic 0
    moved_TD: FloatArray  # the same share from topic 1
    requests_TD: FloatArray  # the watched tokens, of all topics

    @classmethod
    def make(cls, case: GateCase) -> _World:
        rng = _stream(case.seed, "world")
        gate_DE = _random_gate(rng, case.num_experts)
        topics = Topics.make(rng, num_topics=case.num_topics, width=WIDTH, strength=case.strength)
        return cls(
            case=case,
            places=capacity(
                num_tokens=case.num_tokens,
                num_chosen=case.experts_per_token,
                num_experts=case.num_experts,
                factor=case.capacity_factor,
            ),
            gate_DE=gate_DE,
            layer=ExpertLayer.make(rng, num_experts=case.num_experts, width=WIDTH, expert_width=EXPERT_WIDTH),
            topics=topics,
            plain_TD=rng.standard_normal((case.num_tokens, WIDTH)),
            topical_TD=topics.draw(rng, case.num_tokens, share=case.share),
            moved_TD=topics.draw(rng, case.num_tokens, share=case.share, hot_topic=1),
            requests_TD=topics.draw(rng, NUM_REQUESTS, share=1 / case.num_topics),
        )

    def stream(self, purpose: str) -> np.random.Generator:
        """Random numbers of one purpose: using more of one moves no other."""
        return _stream(self.case.seed, purpose)

    def batches(self, rng: np.random.Generator) -> Iterator[FloatArray]:
        """What a gate learns from: fresh batches with the topics of the topical one."""
        for _ in range(NUM_STEPS):
            yield self.topics.draw(rng, self.case.num_tokens, share=self.case.share)


def _stream(seed: int, purpose: str) -> np.random.Generator:
    return np.random.default_rng([seed, *purpose.encode()])


def _random_gate(rng: np.random.Generator, num_experts: int) -> FloatArray:
    return rng.standard_normal((WIDTH, num_experts)) / math.sqrt(WIDTH)


def _gate(world: _World, spec: GateSpec, bias_E: FloatArray | None = None) -> Choose:
    return lambda x_TD: route(x_TD @ world.gate_DE, spec, world.case.experts_per_token, bias_E)


def _train(world: _World) -> NoisyGate:
    """The noisy gate that starts as the random one and learns balance alone."""
    case, rng = world.case, world.stream("train")
    return train(
        NoisyGate(weight_DE=world.gate_DE, noise_DE=np.zeros_like(world.gate_DE)),
        world.batches(rng),
        case.experts_per_token,
        weights=BalanceWeights(importance=case.importance_weight, load=case.load_weight),
        rng=rng,
        rate=GRADIENT_RATE,
    )


def _rows(
    world: _World, trained: NoisyGate, draw_TE: FloatArray
) -> tuple[tuple[str, str, Choose, bool], ...]:
    """Of every row of the table: name, batch, gate, and whether neighbours are changed."""
    case = world.case
    bias_E = learn_bias(
        (x_TD @ world.gate_DE for x_TD in world.batches(world.stream("bias"))),
        SIGMOID_RENORMALISED,
        case.experts_per_token,
        num_experts=case.num_experts,
        rate=BIAS_RATE,
    )
    plain = _gate(world, SOFTMAX_OF_TOP_K)
    sigmoid = _gate(world, SIGMOID_RENORMALISED)
    biased = _gate(world, SIGMOID_RENORMALISED, bias_E)

    def noisy(x_TD: FloatArray) -> Choices:
        return trained.choose(x_TD, case.experts_per_token, draw_TE)

    def quiet(x_TD: FloatArray) -> Choices:
        return trained.choose(x_TD, case.experts_per_token)

    return (
        ("top-k, then softmax", "no topics", plain, False),
        ("top-k, then softmax", "topical", plain, True),
        ("softmax, then top-k", "topical", _gate(world, TOP_K_OF_SOFTMAX), True),
        ("sigmoid, renormalised", "topical", sigmoid, True),
        ("sigmoid, renormalised", "topic moved", sigmoid, False),
        ("sigmoid + learnt bias", "topical", biased, True),
        ("sigmoid + learnt bias", "topic moved", biased, False),
        ("trained, noise on", "topical", noisy, False),
        ("trained, noise off", "topical", quiet, True),
        ("trained, noise off", "topic moved", quiet, False),
    )


def _variant(world: _World, name: str, tokens: str, choose: Choose, is_watched: bool) -> Variant:
    x_TD = {"no topics": world.plain_TD, "topical": world.topical_TD, "topic moved": world.moved_TD}[tokens]
    choices = choose(x_TD)
    load_E = choices.load()
    kept_TK = is_kept(choices.experts_TK, world.case.num_experts, world.places)
    rows_TD = x_TD.astype(np.float32)
    whole_TD = world.layer.forward(rows_TD, choices)
    dropped_TD = whole_TD - world.layer.forward(rows_TD, choices, kept_TK)
    return Variant(
        name=name,
        tokens=tokens,
        load=tuple(load_E.tolist()),
        max_mean=_max_mean(load_E),
        importance_cv2=cv_squared(choices.importance()),
        load_cv2=cv_squared(load_E),
        weight_sum=float(choices.weights_TK.sum(axis=-1).mean()),
        dropped_share=num_dropped(load_E, world.places) / int(load_E.sum()),
        drop_error=float(np.linalg.norm(dropped_TD) / np.linalg.norm(whole_TD)),
        neighbours=_neighbours(world, choose) if is_watched else None,
    )


def _neighbours(world: _World, choose: Choose, product: Product | None = None) -> Neighbours:
    """The watched tokens behind the topical batch and behind the moved one, dropless and with capacity."""
    dropless, limited = [], []
    num_neighbours = world.case.num_tokens - NUM_REQUESTS
    for neighbours_TD in (world.topical_TD, world.moved_TD):
        x_TD = np.concatenate([neighbours_TD[:num_neighbours], world.requests_TD])
        choices = choose(x_TD)
        kept_TK = is_kept(choices.experts_TK, choices.num_experts, world.places)
        rows_TD = x_TD.astype(np.float32)
        dropless.append(world.layer.forward(rows_TD, choices, product=product)[num_neighbours:])
        limited.append(world.layer.forward(rows_TD, choices, kept_TK, product)[num_neighbours:])
    change_TD = limited[0] - limited[1]
    return Neighbours(
        change_capacity=float(np.linalg.norm(change_TD) / np.linalg.norm(dropless[0])),
        change_capacity_max=float(np.abs(change_TD).max()),
        change_dropless=float(np.abs(dropless[0] - dropless[1]).max()),
    )


def _draws(case: GateCase) -> tuple[Draws, ...]:
    """Load of fresh gates and batches: without topics, with an even mix of them, with one hot topic."""
    rng = _stream(case.seed, "draws")
    loads: dict[str, list[IntArray]] = {"no topics": [], "even mix": [], "topical": []}
    for _ in range(NUM_DRAWS):
        gate_DE = _random_gate(rng, case.num_experts)
        topics = Topics.make(rng, num_topics=case.num_topics, width=WIDTH, strength=case.strength)
        for name, x_TD in (
            ("no topics", rng.standard_normal((case.num_tokens, WIDTH))),
            ("even mix", topics.draw(rng, case.num_tokens, share=1 / case.num_topics)),
            ("topical", topics.draw(rng, case.num_tokens, share=case.share)),
        ):
            loads[name].append(route(x_TD @ gate_DE, SOFTMAX_OF_TOP_K, case.experts_per_token).load())
    return tuple(_over_draws(case, name, found) for name, found in loads.items())


def _over_draws(case: GateCase, name: str, loads: list[IntArray]) -> Draws:
    ratios = [_max_mean(load_E) for load_E in loads]
    dropped = {}
    for factor in sorted({1.0, case.capacity_factor}):
        places = capacity(
            num_tokens=case.num_tokens,
            num_chosen=case.experts_per_token,
            num_experts=case.num_experts,
            factor=factor,
        )
        dropped[f"{factor:g}"] = float(
            np.mean([num_dropped(load_E, places) / int(load_E.sum()) for load_E in loads])
        )
    return Draws(
        name=name,
        num_draws=len(loads),
        max_mean=float(np.mean(ratios)),
        max_mean_least=min(ratios),
        max_mean_greatest=max(ratios),
        dropped_share=dropped,
    )


def _max_mean(load_E: IntArray) -> float:
    found = skew(load_E)
    return found.max_mean if found else 0.0
