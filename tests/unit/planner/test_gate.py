"""Gates in numpy: choices, weights, biases and load figures, against the engine's router and by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import ConfigError
from moesaic.planner.sim.gate import (
    SIGMOID_RENORMALISED,
    SOFTMAX_OF_TOP_K,
    TOP_K_OF_SOFTMAX,
    cv_squared,
    equal_importance_example,
    learn_bias,
    route,
    top_ids,
)
from moesaic.spec.experts import FloatArray
from moesaic.spec.model import GateSpec, MoeSpec

GATES = {
    "top-k, softmax": SOFTMAX_OF_TOP_K,
    "softmax, top-k": TOP_K_OF_SOFTMAX,
    "sigmoid": SIGMOID_RENORMALISED,
    "scaled": replace(SIGMOID_RENORMALISED, scale=2.5, renormalise_epsilon=1e-20),
}
HOT = np.linspace(1.0, -1.0, 8)  # expert 0 is the favourite


def logits(seed: int, num_tokens: int = 40, num_experts: int = 8) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((num_tokens, num_experts))


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    num_experts=st.integers(1, 12),
    num_tokens=st.integers(1, 40),
    data=st.data(),
)
def test_loads_sum_to_the_pairs_and_weights_to_one(
    seed: int, num_experts: int, num_tokens: int, data: st.DataObject
) -> None:
    num_chosen = data.draw(st.integers(1, num_experts))
    for gate in (SOFTMAX_OF_TOP_K, TOP_K_OF_SOFTMAX, SIGMOID_RENORMALISED):
        found = route(logits(seed, num_tokens, num_experts), gate, num_chosen)
        assert found.load().sum() == num_tokens * num_chosen
        assert found.load().max() <= num_tokens
        assert (np.diff(found.experts_TK, axis=-1) > 0).all()  # ascending, so distinct
        sums_T = found.weights_TK.sum(axis=-1)
        if gate is TOP_K_OF_SOFTMAX and num_chosen < num_experts:
            assert (sums_T < 1).all()
        else:
            np.testing.assert_allclose(sums_T, 1, atol=1e-12)
        np.testing.assert_allclose(found.importance().sum(), sums_T.sum(), rtol=1e-12)


def test_both_softmax_orders_choose_the_same_experts_of_a_thousand_tokens() -> None:
    logits_TE = logits(0, 1000, 16)
    first, second = (route(logits_TE, gate, 2) for gate in (SOFTMAX_OF_TOP_K, TOP_K_OF_SOFTMAX))
    np.testing.assert_array_equal(first.experts_TK, second.experts_TK)
    assert second.weights_TK.sum(axis=-1).mean() == pytest.approx(0.39, abs=0.02)


def test_the_same_scores_give_other_weights_by_convention() -> None:
    logits_TE = np.log([[0.55, 0.08, 0.03, 0.30, 0.01, 0.01, 0.01, 0.01]])
    raw = route(logits_TE, TOP_K_OF_SOFTMAX, 2)
    normal = route(logits_TE, SOFTMAX_OF_TOP_K, 2)
    assert raw.experts_TK.tolist() == normal.experts_TK.tolist() == [[0, 3]]
    np.testing.assert_allclose(raw.weights_TK, [[0.55, 0.30]])
    np.testing.assert_allclose(normal.weights_TK, [[0.647059, 0.352941]], rtol=1e-5)


def test_ties_go_to_the_lowest_id() -> None:
    assert top_ids(np.zeros((1, 5)), 2).tolist() == [[0, 1]]
    assert top_ids(np.array([[0.0, 1.0, 1.0, 1.0]]), 2).tolist() == [[1, 2]]


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_choices_are_those_of_the_engines_router(gate: GateSpec) -> None:
    torch = pytest.importorskip("torch")
    from moesaic.experts.router import Router
    from moesaic.kernels.ops import choose
    from moesaic.spec.numerics import preset

    logits_TE = logits(3).astype(np.float32)
    bias_E = logits(4, 1)[0].astype(np.float32) if gate.has_selection_bias else None
    spec = MoeSpec(num_experts=8, experts_per_token=3, expert_width=8, gate=gate, shared=None, row_width=4)
    router = Router(
        spec,
        torch.zeros(8, 4),
        None if bias_E is None else torch.from_numpy(bias_E),
        None,
        choose(preset("portable", dtype="float32"), num_threads=1),
    )
    expected = router.route(torch.from_numpy(logits_TE))
    found = route(
        logits_TE.astype(np.float64), gate, 3, None if bias_E is None else bias_E.astype(np.float64)
    )
    np.testing.assert_array_equal(found.experts_TK, expected.experts_TK.numpy())
    np.testing.assert_allclose(found.weights_TK, expected.weights_TK.numpy(), rtol=1e-5)


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), size=st.floats(0.001, 2))
def test_a_bias_moves_choices_and_no_weight_of_an_unchanged_one(seed: int, size: float) -> None:
    logits_TE = logits(seed)
    bias_E = size * logits(seed + 1, 1)[0]
    without, biased = (route(logits_TE, SIGMOID_RENORMALISED, 2, bias) for bias in (None, bias_E))
    is_same_T = (without.experts_TK == biased.experts_TK).all(axis=-1)
    np.testing.assert_array_equal(without.weights_TK[is_same_T], biased.weights_TK[is_same_T])


def test_a_bias_that_leaked_into_the_weights_would_be_seen() -> None:
    """Negative control of the test above: a bias on the logits moves weights of unchanged choices."""
    logits_TE, bias_E = logits(1), 0.1 * HOT
    without = route(logits_TE, SIGMOID_RENORMALISED, 2)
    leaked = route(logits_TE + bias_E, SIGMOID_RENORMALISED, 2)
    is_same_T = (without.experts_TK == leaked.experts_TK).all(axis=-1)
    assert is_same_T.any()
    assert not np.array_equal(without.weights_TK[is_same_T], leaked.weights_TK[is_same_T])


def test_a_learnt_bias_evens_a_skewed_load_step_by_step() -> None:
    rng = np.random.default_rng(5)
    batches = [rng.standard_normal((256, 8)) + HOT for _ in range(40)]
    fresh = rng.standard_normal((256, 8)) + HOT
    ratios = []
    for num_steps in (0, 10, 20, 40):
        bias_E = learn_bias(batches[:num_steps], SIGMOID_RENORMALISED, 2, num_experts=8, rate=0.006)
        load_E = route(fresh, SIGMOID_RENORMALISED, 2, bias_E).load()
        ratios.append(load_E.max() / load_E.mean())
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 2.2
    assert ratios[-1] < 1.25
    assert (np.diff(bias_E) > 0).all()  # the less a favourite, the more it is raised


def test_even_importance_hides_uneven_load() -> None:
    found = route(equal_importance_example(), SOFTMAX_OF_TOP_K, 2)
    np.testing.assert_allclose(found.importance(), 2, rtol=1e-12)
    assert found.load().tolist() == [6, 3, 3]
    assert cv_squared(found.importance()) == pytest.approx(0, abs=1e-20)
    assert cv_squared(found.load()) == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("gate", "num_chosen", "bias_E", "expected"),
    [
        (SOFTMAX_OF_TOP_K, 0, None, "got 0 of 8"),
        (SOFTMAX_OF_TOP_K, 9, None, "got 9 of 8"),
        (TOP_K_OF_SOFTMAX, 2, HOT, "no selection bias"),
        (replace(SIGMOID_RENORMALISED, num_groups=2), 2, None, "groups"),
        (replace(TOP_K_OF_SOFTMAX, score="sparsemixer"), 2, None, "sparsemixer"),
    ],
)
def test_what_is_not_simulated_is_refused(
    gate: GateSpec, num_chosen: int, bias_E: FloatArray | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        route(logits(0), gate, num_chosen, bias_E)
