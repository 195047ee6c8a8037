"""A MoE layer in numpy, dropless or with capacity-factor dropping. Knows no gate and no placement.

Dropping is `batch_dependent`: whether a token keeps its experts depends on who came before it in the batch.
Here it is studied only; the engine drops nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import ConfigError
from moesaic.planner.sim.gate import Choices
from moesaic.spec.experts import IntArray

Float32Array = NDArray[np.float32]
Product = Callable[[Float32Array, Float32Array], Float32Array]


def capacity(*, num_tokens: int, num_chosen: int, num_experts: int, factor: float) -> int:
    """Pairs of token and expert that one expert takes from a batch: factor * n * k / E, rounded up.

    At least 1, and at most n: no expert receives a token twice.

    Raises: ConfigError when the factor is not a number above 0.
    Source:  GShard, arXiv:2006.16668, sec. 2.2; Switch Transformer, arXiv:2101.03961, sec. 2.2.
    """
    if not (math.isfinite(factor) and factor > 0):
        raise ConfigError(
            f"capacity factor must be a finite number above 0: got {factor:g}; give one such as 1.25"
        )
    # 1.1 * 100 is 110.00000000000001: what floating point adds must not become a place
    places = round(min(factor * num_tokens * num_chosen / num_experts, num_tokens), 9)
    return max(1, math.ceil(places))


def is_kept(experts_TK: IntArray, num_experts: int, places: int) -> NDArray[np.bool_]:
    """Which pairs find a place when tokens take them in batch order; the rest is dropped.

    Shapes:  experts_TK [T, K]; returns [T, K] bool.
    """
    pairs = experts_TK.ravel()
    order = np.argsort(pairs, kind="stable")  # by expert, then by batch order
    load_E = np.bincount(pairs, minlength=num_experts)
    first_E = np.cumsum(load_E) - load_E
    rank = np.empty(len(pairs), dtype=np.int64)
    rank[order] = np.arange(len(pairs)) - first_E[pairs[order]]
    return (rank < places).reshape(experts_TK.shape)


def num_dropped(load_E: IntArray, places: int) -> int:
    """Pairs over the capacity: sum of max(load - capacity, 0), whatever the order."""
    return int(np.maximum(load_E - places, 0).sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """Experts of two matrices with a ReLU between.

    Shapes:  up_EDF [E, D, F], down_EFD [E, F, D] float32.
    """

    up_EDF: Float32Array
    down_EFD: Float32Array

    @classmethod
    def make(cls, rng: np.random.Generator, *, num_experts: int, width: int, expert_width: int) -> Self:
        """Random experts that keep the scale of their input."""
        up_EDF = rng.standard_normal((num_experts, width, expert_width)) / math.sqrt(width / 2)
        down_EFD = rng.standard_normal((num_experts, expert_width, width)) / math.sqrt(expert_width)
        return cls(up_EDF=up_EDF.astype(np.float32), down_EFD=down_EFD.astype(np.float32))

    def forward(
        self,
        x_TD: Float32Array,
        choices: Choices,
        kept_TK: NDArray[np.bool_] | None = None,
        product: Product | None = None,
    ) -> Float32Array:
        """The weighted sum over each token's experts; a pair that is not kept adds 0. None: dropless.

        Each expert multiplies all the rows it received at once. With `product` None that is `fixed_product`,
        and a token's bits depend on nothing but its own row and its own dropped pairs.

        Shapes:  x_TD [T, D] float32; returns y_TD [T, D] float32.
        """
        multiply = product or fixed_product
        results_TKD = np.zeros((*choices.experts_TK.shape, x_TD.shape[1]), dtype=np.float32)
        is_sent_TK = np.ones(choices.experts_TK.shape, dtype=bool) if kept_TK is None else kept_TK
        for expert_id, (up_DF, down_FD) in enumerate(zip(self.up_EDF, self.down_EFD, strict=True)):
            token, choice = np.nonzero((choices.experts_TK == expert_id) & is_sent_TK)
            if len(token):
                inner_RF = np.maximum(multiply(x_TD[token], up_DF), 0)
                results_TKD[token, choice] = multiply(inner_RF, down_FD)
        weights_TK = choices.weights_TK.astype(np.float32)
        y_TD = np.zeros_like(results_TKD[:, 0])
        for choice_idx in range(weights_TK.shape[1]):  # ids ascending: one order for every batch
            y_TD += weights_TK[:, choice_idx, None] * results_TKD[:, choice_idx]
        return y_TD


def fixed_product(x_RD: Float32Array, weight_DF: Float32Array) -> Float32Array:
    """x @ weight, each sum a halving tree over D: a row's bits do not depend on how many rows there are.

    A BLAS promises no such thing: it takes another path for one row than for many.

    Shapes:  x_RD [R, D], D a power of two; weight_DF [D, F]; returns [R, F].
    """
    terms_RDF = x_RD[:, :, None] * weight_DF
    while terms_RDF.shape[1] > 1:
        half = terms_RDF.shape[1] // 2
        terms_RDF = terms_RDF[:, :half] + terms_RDF[:, half:]
    return terms_RDF[:, 0]
