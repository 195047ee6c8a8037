"""Which experts a token goes to, and with what weights. Float32 throughout, whatever the experts use.

Knows no ranks, slots or placement: its ids are logical ids.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import Routing
from moesaic.kernels.elementwise import sum_last
from moesaic.kernels.ops import Ops
from moesaic.spec.model import MoeSpec


class Router:
    """The gate of one layer: logits, choice, weights.

    Source:  softmax of the top-k: Mixtral, arXiv:2401.04088, sec. 2.1; groups by their best expert:
             DeepSeek-V2, arXiv:2405.04434, sec. 2.1.2; sigmoid scores, selection bias, groups by their two
             best: DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2; sparsemixer: GRIN, arXiv:2409.12136.
    """

    def __init__(
        self,
        spec: MoeSpec,
        weight_ED: Tensor,
        selection_bias_E: Tensor | None,
        logit_bias_E: Tensor | None,
        ops: Ops,
        *,
        input_norm: Callable[[Tensor], Tensor] | None = None,
        expert_scale_E: Tensor | None = None,
    ) -> None:
        """Weights and biases are kept in float32; `input_norm` is applied to rows widened to it.

        Raises: ConfigError for a gate that cannot choose so many experts, with the arithmetic; for a weight
                or bias of another shape, or one that the gate's spec does not announce.
        """
        _check(spec)
        self._spec = spec
        self._ops = ops
        self._weight_ED = _float32("router weight", weight_ED, True, (spec.num_experts, weight_ED.shape[-1]))
        expected = (spec.num_experts,)
        self._selection_bias_E = _float32(
            "selection bias", selection_bias_E, spec.gate.has_selection_bias, expected
        )
        if (input_norm is not None) != spec.gate.has_input_norm:
            raise ConfigError(
                f"router: the gate's spec has {'a' if spec.gate.has_input_norm else 'no'} norm of its input, "
                f"and {'none' if input_norm is None else 'one'} was given"
            )
        self._input_norm = input_norm
        self._expert_scale_E = _float32("expert scale", expert_scale_E, spec.gate.has_expert_scale, expected)
        self._logit_bias_E = _float32("logit bias", logit_bias_E, spec.gate.has_logit_bias, expected)

    def __call__(self, x_TD: Tensor) -> Routing:
        """The choices of each row.

        Shapes:  x_TD [T, D] of the model's width, any float dtype.
        """
        assert self._weight_ED is not None, "checked at construction"
        if self._input_norm is not None:
            x_TD = self._input_norm(x_TD.float())
        logits_TE = self._ops.linear_float32(x_TD, self._weight_ED)
        if self._logit_bias_E is not None:
            logits_TE = logits_TE + self._logit_bias_E
        return self.route(logits_TE)

    def route(self, logits_TE: Tensor) -> Routing:
        """The choices that float32 logits make.

        Shapes:  logits_TE [T, E] float32, the logit bias added.
        """
        gate, num_chosen = self._spec.gate, self._spec.experts_per_token
        if gate.score == "sparsemixer":
            return self._sparsemixer(logits_TE)
        scores_TE = logits_TE if gate.order == "topk_then_score" else self._score(logits_TE)
        experts_TK = _top_ids(self._choice(scores_TE), num_chosen)
        experts_TK = experts_TK.sort(dim=-1).values
        # The bias and the groups moved the choice; the weights are the scores themselves.
        weights_TK = scores_TE.gather(-1, experts_TK)
        if gate.order == "topk_then_score":
            weights_TK = self._score(weights_TK)
        if gate.is_renormalised:
            total_T1 = sum_last(weights_TK) + gate.renormalise_epsilon
            weights_TK = weights_TK / total_T1.clamp(min=gate.renormalise_floor)
        if gate.scale != 1.0:
            weights_TK = weights_TK * gate.scale
        if self._expert_scale_E is not None:
            weights_TK = weights_TK * self._expert_scale_E[experts_TK]
        return Routing(experts_TK=experts_TK, weights_TK=weights_TK)

    def _sparsemixer(self, logits_TE: Tensor) -> Routing:
        """The two best experts, each weighed by a softmax of its own over the logits near it.

        Left out of that softmax is what lies below its expert by more than twice the jitter, relative to the
        larger of the two sizes; for the second expert so is the first.
        """
        experts_TK = _top_ids(logits_TE, 2).sort(dim=-1).values
        best_TK = logits_TE.gather(-1, experts_TK)
        is_first_T = best_TK[:, 0] >= best_TK[:, 1]  # of equals the lower id
        weights = []
        for k, is_second_T in enumerate((~is_first_T, is_first_T)):
            best_T1, other_T1 = best_TK[:, k : k + 1], experts_TK[:, 1 - k : 2 - k]
            size_TE = torch.maximum(logits_TE.abs(), best_T1)
            is_out_TE = (best_T1 - logits_TE) / size_TE > 2 * self._spec.gate.jitter
            is_other_out_T1 = is_out_TE.gather(-1, other_T1) | is_second_T.unsqueeze(-1)
            is_out_TE = is_out_TE.scatter(-1, other_T1, is_other_out_T1)
            near_TE = logits_TE.masked_fill(is_out_TE, float("-inf"))
            weights.append(self._ops.softmax_float32(near_TE).gather(-1, experts_TK[:, k : k + 1]))
        return Routing(experts_TK=experts_TK, weights_TK=torch.cat(weights, dim=-1))

    def _score(self, logits_TE: Tensor) -> Tensor:
        if self._spec.gate.score == "softmax":
            return self._ops.softmax_float32(logits_TE)
        return self._ops.sigmoid(logits_TE)

    def _choice(self, scores_TE: Tensor) -> Tensor:
        """Scores as the choice sees them: biased, and -inf in the groups that lost."""
        gate = self._spec.gate
        choice_TE = scores_TE if self._selection_bias_E is None else scores_TE + self._selection_bias_E
        if gate.groups_per_token == gate.num_groups:
            return choice_TE
        num_tokens, num_experts = choice_TE.shape
        grouped = choice_TE.view(num_tokens, gate.num_groups, num_experts // gate.num_groups)
        if gate.group_score == "max":
            group_scores = grouped.amax(dim=-1)
        else:
            best_two = grouped.topk(2, dim=-1).values
            group_scores = best_two[..., 0] + best_two[..., 1]
        has_lost = torch.ones_like(group_scores, dtype=torch.bool)
        has_lost.scatter_(-1, _top_ids(group_scores, gate.groups_per_token), False)
        return grouped.masked_fill(has_lost.unsqueeze(-1), float("-inf")).view(num_tokens, num_experts)


def _check(spec: MoeSpec) -> None:
    experts, chosen = spec.num_experts, spec.experts_per_token
    groups, kept = spec.gate.num_groups, spec.gate.groups_per_token
    if not 1 <= chosen <= experts:
        raise ConfigError(f"experts_per_token must be in 1 to num_experts: got {chosen} of {experts}")
    if groups < 1 or experts % groups:
        raise ConfigError(
            f"num_groups must divide num_experts: {experts} experts in {groups} groups"
            + (f" leave {experts % groups} over" if groups > 0 else "")
        )
    if not 1 <= kept <= groups:
        raise ConfigError(f"groups_per_token must be in 1 to num_groups: got {kept} of {groups}")
    if kept * (experts // groups) < chosen:
        raise ConfigError(
            f"{kept} groups of {experts} / {groups} = {experts // groups} experts leave "
            f"{kept * (experts // groups)} to choose from, fewer than experts_per_token = {chosen}"
        )
    if spec.gate.score == "sparsemixer" and chosen != 2:
        raise ConfigError(f"sparsemixer chooses 2 experts, and experts_per_token is {chosen}")
    if spec.gate.group_score == "top2_sum" and kept < groups and experts // groups < 2:
        raise ConfigError(f"group_score top2_sum needs two experts in a group: {experts} / {groups} = 1")


def _float32(name: str, tensor: Tensor | None, is_expected: bool, shape: tuple[int, ...]) -> Tensor | None:
    if (tensor is not None) != is_expected:
        raise ConfigError(
            f"{name}: the gate's spec {'has' if is_expected else 'has no'} such tensor, and "
            f"{'none' if tensor is None else 'one'} was given"
        )
    if tensor is None:
        return None
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    return tensor.float()


def _top_ids(scores_TE: Tensor, num_chosen: int) -> Tensor:
    """Ids of the highest scores of each row, in any order; ties go to the lowest id.

    `topk` leaves open which of equal scores it takes. That matters only where the last score taken equals the
    first one left: those rows, rare outside of tests, are sorted stably instead.
    """
    num_experts = scores_TE.shape[-1]
    if num_chosen == num_experts:
        return torch.arange(num_experts).expand(scores_TE.shape)
    top = scores_TE.topk(num_chosen + 1, dim=-1)
    ids_TK = top.indices[:, :num_chosen]
    is_tied = top.values[:, num_chosen - 1] == top.values[:, num_chosen]
    if is_tied.any():
        order = scores_TE[is_tied].sort(dim=-1, descending=True, stable=True).indices
        ids_TK = ids_TK.clone()
        ids_TK[is_tied] = order[:, :num_chosen]
    return ids_TK
