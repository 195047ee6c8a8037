"""Gates in numpy: which experts each token goes to, with what weights, and how even that is.

The same choices as `experts.router`, described by the same `GateSpec`; float64, no torch, no groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moesaic.errors import ConfigError
from moesaic.spec.experts import FloatArray, IntArray
from moesaic.spec.model import GateSpec

SOFTMAX_OF_TOP_K = GateSpec(score="softmax", order="topk_then_score", is_renormalised=False)
TOP_K_OF_SOFTMAX = GateSpec(score="softmax", is_renormalised=False)
SIGMOID_RENORMALISED = GateSpec(score="sigmoid", has_selection_bias=True)
"""Source:  Mixtral, arXiv:2401.04088, sec. 2.1; DeepSeek-V2, arXiv:2405.04434, sec. 2.1.2; DeepSeek-V3,
arXiv:2412.19437, sec. 2.1.2."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """The experts of each token, ids ascending, and their weights.

    Shapes:  experts_TK [T, K] int64; weights_TK [T, K] float64.
    """

    experts_TK: IntArray
    weights_TK: FloatArray
    num_experts: int

    def load(self) -> IntArray:
        """Tokens of each expert [E]; they sum to T * K."""
        return np.bincount(self.experts_TK.ravel(), minlength=self.num_experts).astype(np.int64)

    def importance(self) -> FloatArray:
        """Sum of the gate weights of each expert [E]."""
        experts, weights = self.experts_TK.ravel(), self.weights_TK.ravel()
        return np.bincount(experts, weights=weights, minlength=self.num_experts).astype(np.float64)


def route(
    logits_TE: FloatArray, gate: GateSpec, num_chosen: int, bias_E: FloatArray | None = None
) -> Choices:
    """The choices that logits make; ties go to the lowest id.

    A bias moves the choice only: the weights are those of the scores without it.

    Shapes:  logits_TE [T, E] float64; bias_E [E], for a gate with a selection bias (None: zeros).
    Raises: ConfigError when a token cannot choose so many experts, when the bias is not the gate's, and for a
            gate with groups, a logit bias or another score.
    """
    num_experts = logits_TE.shape[-1]
    if not 1 <= num_chosen <= num_experts:
        raise ConfigError(
            f"num_chosen must be in 1 to the number of experts: got {num_chosen} of {num_experts}"
        )
    if bias_E is not None and not gate.has_selection_bias:
        raise ConfigError("bias_E was given to a gate whose spec has no selection bias: leave it out")
    if gate.num_groups > 1 or gate.has_logit_bias:
        raise ConfigError("a gate with expert groups or a logit bias is not simulated: give one without")
    scores_TE = logits_TE if gate.order == "topk_then_score" else _score(logits_TE, gate)
    experts_TK = top_ids(scores_TE if bias_E is None else scores_TE + bias_E, num_chosen)
    weights_TK = np.take_along_axis(scores_TE, experts_TK, axis=-1)
    if gate.order == "topk_then_score":
        weights_TK = _score(weights_TK, gate)
    if gate.is_renormalised:
        weights_TK = weights_TK / (weights_TK.sum(axis=-1, keepdims=True) + gate.renormalise_epsilon)
    return Choices(experts_TK=experts_TK, weights_TK=weights_TK * gate.scale, num_experts=num_experts)


def top_ids(scores_TE: FloatArray, num_chosen: int) -> IntArray:
    """Ids of the highest scores of each row, ascending; ties go to the lowest id."""
    order = np.argsort(-scores_TE, axis=-1, kind="stable")[:, :num_chosen]
    return np.sort(order, axis=-1).astype(np.int64)


def cv_squared(amounts_E: NDArray[Any]) -> float:
    """Squared coefficient of variation: population variance by the squared mean; 0 is even.

    Source:  Shazeer et al., arXiv:1701.06538, sec. 4.
    """
    mean = float(amounts_E.mean())
    return float(amounts_E.var()) / mean**2 if mean else 0.0


def learn_bias(
    batches: Iterable[FloatArray], gate: GateSpec, num_chosen: int, *, num_experts: int, rate: float
) -> FloatArray:
    """The selection bias after all batches: each lowers it for busy experts and raises it for idle ones.

    No loss and no gradient take part. What a token chooses depends on the batches before it, so a bias that
    goes on learning while it serves is `batch_dependent`; a frozen one is not.

    Shapes:  each batch logits_TE [T, E]; returns bias_E [E].
    Units:   rate is the step of one batch, on the scale of the scores.
    Source:  DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2.
    """
    bias_E = np.zeros(num_experts)
    for logits_TE in batches:
        load_E = route(logits_TE, gate, num_chosen, bias_E).load()
        bias_E = bias_E + rate * np.sign(load_E.mean() - load_E)
    return bias_E


def equal_importance_example() -> FloatArray:
    """Logits of six tokens on three experts: top-2 gives all the importance 2, and the loads 6, 3, 3.

    Expert 0 has a third of every token, experts 1 and 2 two thirds of half the tokens each: a loss on the
    importance alone sees nothing to even out.

    Shapes:  returns logits_TE [6, 3] float64.
    """
    minor, major, never = np.log(1 / 3), np.log(2 / 3), -9.0
    return np.array([[minor, major, never]] * 3 + [[minor, never, major]] * 3)


def _score(logits: FloatArray, gate: GateSpec) -> FloatArray:
    if gate.score == "sigmoid":
        scores: FloatArray = np.exp(-np.logaddexp(0.0, -logits))
        return scores
    if gate.score == "softmax":
        powers: FloatArray = np.exp(logits - logits.max(axis=-1, keepdims=True))
        powers /= powers.sum(axis=-1, keepdims=True)
        return powers
    raise ConfigError(f"score {gate.score} is not simulated: give a gate with softmax or sigmoid")
