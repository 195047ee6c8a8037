"""Capacity and dropping: counts, order, and whose neighbours change whose bits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import ConfigError
from moesaic.planner.sim.capacity import ExpertLayer, capacity, fixed_product, is_kept, num_dropped
from moesaic.planner.sim.gate import SOFTMAX_OF_TOP_K, Choices, route

WIDTH = 16
RNG = np.random.default_rng(0)
LAYER = ExpertLayer.make(RNG, num_experts=6, width=WIDTH, expert_width=8)
GATE_DE = RNG.standard_normal((WIDTH, 6))


def tokens(seed: int, num_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_tokens, WIDTH)).astype(np.float32)


def choose(x_TD: np.ndarray, num_chosen: int = 2) -> Choices:
    return route(x_TD.astype(np.float64) @ GATE_DE, SOFTMAX_OF_TOP_K, num_chosen)


@pytest.mark.parametrize(
    ("num_tokens", "num_chosen", "num_experts", "factor", "expected"),
    [
        (256, 2, 8, 1.0, 64),
        (256, 2, 8, 1.25, 80),
        (400, 2, 8, 1.1, 110),  # 110.00000000000001 in floating point
        (10, 1, 4, 1.0, 3),  # 2.5
        (256, 2, 8, 1e-9, 1),
        (256, 2, 8, 1e308, 256),
    ],
)
def test_capacity(num_tokens: int, num_chosen: int, num_experts: int, factor: float, expected: int) -> None:
    found = capacity(num_tokens=num_tokens, num_chosen=num_chosen, num_experts=num_experts, factor=factor)
    assert found == expected


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf")])
def test_a_capacity_factor_that_is_none_is_refused(factor: float) -> None:
    with pytest.raises(ConfigError, match="capacity factor must be a finite number above 0"):
        capacity(num_tokens=8, num_chosen=1, num_experts=2, factor=factor)


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.integers(1, 60),
    num_chosen=st.integers(1, 6),
    places=st.integers(1, 80),
)
def test_drops_are_what_is_over_the_capacity(
    seed: int, num_tokens: int, num_chosen: int, places: int
) -> None:
    choices = choose(tokens(seed, num_tokens), num_chosen)
    kept_TK = is_kept(choices.experts_TK, 6, places)
    load_E = choices.load()
    assert (~kept_TK).sum() == np.maximum(load_E - places, 0).sum() == num_dropped(load_E, places)
    for expert_id in range(6):  # the first ones of each expert, in batch order
        of_expert = kept_TK[choices.experts_TK == expert_id]
        assert of_expert[:places].all()
        assert not of_expert[places:].any()


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32), num_tokens=st.integers(1, 40))
def test_dropless_outputs_follow_their_tokens_in_any_order(seed: int, num_tokens: int) -> None:
    x_TD = tokens(seed, num_tokens)
    order = np.random.default_rng(seed).permutation(num_tokens)
    whole_TD = LAYER.forward(x_TD, choose(x_TD))
    shuffled_TD = LAYER.forward(x_TD[order], choose(x_TD[order]))
    np.testing.assert_array_equal(whole_TD[order], shuffled_TD)  # every bit


def test_a_token_alone_has_the_bits_it_has_among_others() -> None:
    x_TD = tokens(1, 64)
    choices = choose(x_TD)
    whole_TD = LAYER.forward(x_TD, choices)
    for token in range(64):  # alone, each expert of the token receives exactly one row
        alone_TD = LAYER.forward(x_TD[token : token + 1], choose(x_TD[token : token + 1]))
        np.testing.assert_array_equal(alone_TD[0], whole_TD[token])


def test_sums_whose_order_follows_the_number_of_rows_are_caught() -> None:
    """Negative control: a product that sums backwards for an odd number of rows, as a BLAS might."""

    def product(x_RD: np.ndarray, weight_DF: np.ndarray) -> np.ndarray:
        step = -1 if len(x_RD) % 2 else 1
        terms_RDF = (x_RD[:, :, None] * weight_DF)[:, ::step]
        total_RF = np.zeros_like(terms_RDF[:, 0])
        for d in range(terms_RDF.shape[1]):
            total_RF += terms_RDF[:, d]
        return total_RF

    x_TD = tokens(1, 64)
    whole_TD = LAYER.forward(x_TD, choose(x_TD), product=product)
    alone = [LAYER.forward(x_TD[t : t + 1], choose(x_TD[t : t + 1]), product=product)[0] for t in range(64)]
    assert not np.array_equal(np.stack(alone), whole_TD)
    np.testing.assert_allclose(np.stack(alone), whole_TD, atol=1e-5)


def test_layer_is_the_dense_sum_over_all_experts() -> None:
    x_TD = tokens(2, 20)
    choices = choose(x_TD)
    weights_TE = np.zeros((20, 6))
    np.put_along_axis(weights_TE, choices.experts_TK, choices.weights_TK, axis=-1)
    inner = np.maximum(np.einsum("td,edf->tef", x_TD.astype(np.float64), LAYER.up_EDF), 0)
    expected = np.einsum("te,tef,efd->td", weights_TE, inner, LAYER.down_EFD)
    np.testing.assert_allclose(LAYER.forward(x_TD, choices), expected, atol=1e-5)


def test_dropped_pairs_add_nothing_and_the_order_decides_which() -> None:
    x_TD = tokens(3, 40)
    choices = choose(x_TD)
    none_TD = LAYER.forward(x_TD, choices, np.zeros((40, 2), dtype=bool))
    assert not none_TD.any()
    backwards = choices.experts_TK[::-1]
    kept_TK, kept_back_TK = is_kept(choices.experts_TK, 6, 8), is_kept(backwards, 6, 8)[::-1]
    assert kept_TK.sum() == kept_back_TK.sum()
    assert not np.array_equal(kept_TK, kept_back_TK)
    all_TD = LAYER.forward(x_TD, choices, is_kept(choices.experts_TK, 6, 40))
    np.testing.assert_array_equal(all_TD, LAYER.forward(x_TD, choices))


def test_fixed_product_is_the_product() -> None:
    x_RD, weight_DF = tokens(4, 7), LAYER.up_EDF[0]
    np.testing.assert_allclose(fixed_product(x_RD, weight_DF), x_RD @ weight_DF, atol=1e-5)
