"""Noisy top-k gating and its two balance losses, with gradients by hand. Knows no task but balance.

Source:  Shazeer et al., arXiv:1701.06538, sec. 2.1 and 4, appendix A.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moesaic.planner.sim.gate import SOFTMAX_OF_TOP_K, Choices, cv_squared, route
from moesaic.spec.experts import FloatArray, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceWeights:
    """How much the evenness of importance and of load count in the loss.

    Source:  arXiv:1701.06538, appendix A, table 6, tries pairs from 0 to 1.0.
    """

    importance: float = 1.0
    load: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NoisyGate:
    """x W_g, plus normal noise times softplus(x W_noise) while training.

    Shapes:  weight_DE, noise_DE [D, E] float64.
    """

    weight_DE: FloatArray
    noise_DE: FloatArray

    def logits(self, x_TD: FloatArray, draw_TE: FloatArray | None = None) -> FloatArray:
        """Logits with the noise of this standard normal draw; None is inference: no noise.

        Shapes:  x_TD [T, D]; draw_TE [T, E]; returns logits_TE [T, E].
        """
        clean_TE = x_TD @ self.weight_DE
        return clean_TE if draw_TE is None else clean_TE + draw_TE * self.noise_scale(x_TD)

    def noise_scale(self, x_TD: FloatArray) -> FloatArray:
        """Standard deviation of each logit's noise [T, E]."""
        return np.logaddexp(0.0, x_TD @ self.noise_DE)

    def choose(self, x_TD: FloatArray, num_chosen: int, draw_TE: FloatArray | None = None) -> Choices:
        """Top-k of the logits, then softmax."""
        return route(self.logits(x_TD, draw_TE), SOFTMAX_OF_TOP_K, num_chosen)


_erfc = np.frompyfunc(math.erfc, 1, 1)


def normal_cdf(values: FloatArray) -> FloatArray:
    """Chance that a standard normal is below each value, to full precision in both tails.

    The standard library's, number by number: importing scipy.special takes longer than a study's calls.
    """
    return 0.5 * np.asarray(_erfc(-values / math.sqrt(2)), dtype=np.float64)


def smooth_load(gate: NoisyGate, x_TD: FloatArray, draw_TE: FloatArray, num_chosen: int) -> FloatArray:
    """The load estimator: per expert the sum over tokens of the chance to be chosen again [E].

    The chance is over a new draw of that expert's own noise, the noise of the others held. Its mean over
    draws is the expected load.
    """
    load_E: FloatArray = _chances(gate, x_TD, draw_TE, num_chosen).probability_TE.sum(axis=0)
    return load_E


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chances:
    """P(x, i), and the rival whose logit expert i must exceed: the greatest left out, or the least chosen."""

    probability_TE: FloatArray
    margin_TE: FloatArray  # (clean logit - rival's logit) / noise scale
    scale_TE: FloatArray
    is_chosen_TE: NDArray[np.bool_]
    first_left_T1: IntArray
    last_chosen_T1: IntArray


def _chances(gate: NoisyGate, x_TD: FloatArray, draw_TE: FloatArray, num_chosen: int) -> _Chances:
    clean_TE, scale_TE = x_TD @ gate.weight_DE, gate.noise_scale(x_TD)
    noisy_TE = clean_TE + draw_TE * scale_TE
    order_TE = np.argsort(-noisy_TE, axis=-1, kind="stable")
    last_chosen_T1 = order_TE[:, num_chosen - 1, None]
    is_chosen_TE = np.zeros(noisy_TE.shape, dtype=bool)
    np.put_along_axis(is_chosen_TE, order_TE[:, :num_chosen], True, axis=-1)
    threshold_TE = np.take_along_axis(noisy_TE, last_chosen_T1, axis=-1)
    if num_chosen < noisy_TE.shape[1]:
        first_left_T1 = order_TE[:, num_chosen, None]
        threshold_TE = np.where(
            is_chosen_TE, np.take_along_axis(noisy_TE, first_left_T1, axis=-1), threshold_TE
        )
    else:  # nobody is left out: every expert is certain
        first_left_T1, threshold_TE = last_chosen_T1, np.full_like(noisy_TE, -np.inf)
    margin_TE = (clean_TE - threshold_TE) / scale_TE
    return _Chances(
        probability_TE=normal_cdf(margin_TE),
        margin_TE=margin_TE,
        scale_TE=scale_TE,
        is_chosen_TE=is_chosen_TE,
        first_left_T1=first_left_T1,
        last_chosen_T1=last_chosen_T1,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class BalanceLoss:
    """Weighted sum of the CV^2 of importance and of smooth load, and its gradients [D, E]."""

    value: float
    importance_cv2: float
    load_cv2: float
    weight_gradient_DE: FloatArray
    noise_gradient_DE: FloatArray


def balance_loss(
    gate: NoisyGate, x_TD: FloatArray, draw_TE: FloatArray, num_chosen: int, weights: BalanceWeights
) -> BalanceLoss:
    """The loss of one batch under one draw of the noise; the choice itself is held, as top-k has no slope.

    Shapes:  x_TD [T, D]; draw_TE [T, E] standard normal.
    """
    choices = gate.choose(x_TD, num_chosen, draw_TE)
    chances = _chances(gate, x_TD, draw_TE, num_chosen)
    importance_E, load_E = choices.importance(), chances.probability_TE.sum(axis=0)

    # importance: softmax over the chosen
    slope_TK = weights.importance * _cv_squared_slope(importance_E)[choices.experts_TK]
    pull_TK = choices.weights_TK * (slope_TK - (choices.weights_TK * slope_TK).sum(axis=-1, keepdims=True))
    noisy_slope_TE = np.zeros_like(draw_TE)
    np.put_along_axis(noisy_slope_TE, choices.experts_TK, pull_TK, axis=-1)

    # load: through the expert's clean logit, its noise scale, and the rival's noisy logit
    density_TE = np.exp(-0.5 * chances.margin_TE**2) / np.sqrt(2 * np.pi)
    clean_slope_TE = weights.load * _cv_squared_slope(load_E) * density_TE / chances.scale_TE
    # where the density is 0 the margin may be infinite: nothing to pass on
    scale_slope_TE = -clean_slope_TE * np.where(density_TE > 0, chances.margin_TE, 0.0)
    rival_slope_TE = np.zeros_like(draw_TE)
    from_left_T1 = (clean_slope_TE * ~chances.is_chosen_TE).sum(axis=-1, keepdims=True)
    from_chosen_T1 = (clean_slope_TE * chances.is_chosen_TE).sum(axis=-1, keepdims=True)
    np.put_along_axis(rival_slope_TE, chances.last_chosen_T1, from_left_T1, axis=-1)
    if num_chosen < draw_TE.shape[1]:
        np.put_along_axis(rival_slope_TE, chances.first_left_T1, from_chosen_T1, axis=-1)
    noisy_slope_TE -= rival_slope_TE
    scale_slope_TE += noisy_slope_TE * draw_TE

    softplus_slope_TE = -np.expm1(-chances.scale_TE)  # the sigmoid of what softplus was given
    importance_cv2, load_cv2 = cv_squared(importance_E), cv_squared(load_E)
    return BalanceLoss(
        value=weights.importance * importance_cv2 + weights.load * load_cv2,
        importance_cv2=importance_cv2,
        load_cv2=load_cv2,
        weight_gradient_DE=x_TD.T @ (clean_slope_TE + noisy_slope_TE),
        noise_gradient_DE=x_TD.T @ (scale_slope_TE * softplus_slope_TE),
    )


def train(
    gate: NoisyGate,
    batches: Iterable[FloatArray],
    num_chosen: int,
    *,
    weights: BalanceWeights,
    rng: np.random.Generator,
    rate: float,
) -> NoisyGate:
    """The gate after one step of Adam on the balance losses of each batch, each with its own noise.

    Adam divides by the size of the slopes, so of the two weights only the ratio counts here.

    Source:  Adam, arXiv:1412.6980, alg. 1; the squares decay by 0.99, as a hundred steps never fill
             the usual 0.999.
    """
    values = np.stack([gate.weight_DE, gate.noise_DE])
    mean, square = np.zeros_like(values), np.zeros_like(values)
    for step, x_TD in enumerate(batches, start=1):
        draw_TE = rng.standard_normal((len(x_TD), values.shape[-1]))
        loss = balance_loss(
            NoisyGate(weight_DE=values[0], noise_DE=values[1]), x_TD, draw_TE, num_chosen, weights
        )
        slope = np.stack([loss.weight_gradient_DE, loss.noise_gradient_DE])
        mean = 0.9 * mean + 0.1 * slope
        square = 0.99 * square + 0.01 * slope**2
        values = values - rate * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
    return NoisyGate(weight_DE=values[0], noise_DE=values[1])


def _cv_squared_slope(amounts_E: FloatArray) -> FloatArray:
    """Gradient of `cv_squared`: with S the sum, CV^2 = E * sum(a^2) / S^2 - 1."""
    total = float(amounts_E.sum())
    return 2 * len(amounts_E) / total**2 * (amounts_E - float((amounts_E**2).sum()) / total)
