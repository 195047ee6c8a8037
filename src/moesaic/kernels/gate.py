"""A router's gate in torch: from logits to the experts of each row and their weights, float32 throughout.

Source:  softmax of the top-k: Mixtral, arXiv:2401.04088, sec. 2.1; groups by their best expert: DeepSeek-V2,
         arXiv:2405.04434, sec. 2.1.2; sigmoid scores, selection bias, groups by their two best: DeepSeek-V3,
         arXiv:2412.19437, sec. 2.1.2; sparsemixer: GRIN, arXiv:2409.12136.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moesaic.kernels.elementwise import sigmoid, softmax_last, sum_last
from moesaic.spec.model import GateSpec


def choose_experts(
    logits_TE: Tensor,
    gate: GateSpec,
    num_chosen: int,
    selection_bias_E: Tensor | None,
    expert_scale_E: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(experts_TK, weights_TK): the choices of each row by ascending id, and their weights.

    Shapes:  logits_TE [T, E], selection_bias_E and expert_scale_E [E], all float32.
    """
    if gate.score == "sparsemixer":
        return _sparsemixer(logits_TE, gate.jitter)
    score = softmax_last if gate.score == "softmax" else sigmoid
    scores_TE = logits_TE if gate.order == "topk_then_score" else score(logits_TE)
    experts_TK = _top_ids(_choice(scores_TE, gate, selection_bias_E), num_chosen).sort(dim=-1).values
    # The bias and the groups moved the choice; the weights are the scores themselves.
    weights_TK = scores_TE.gather(-1, experts_TK)
    if gate.order == "topk_then_score":
        weights_TK = score(weights_TK)
    if gate.is_renormalised:
        total_T1 = sum_last(weights_TK) + gate.renormalise_epsilon
        weights_TK = weights_TK / total_T1.clamp(min=gate.renormalise_floor)
    if gate.scale != 1.0:
        weights_TK = weights_TK * gate.scale
    if expert_scale_E is not None:
        weights_TK = weights_TK * expert_scale_E[experts_TK]
    return experts_TK, weights_TK


def _sparsemixer(logits_TE: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
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
        is_out_TE = (best_T1 - logits_TE) / size_TE > 2 * jitter
        is_other_out_T1 = is_out_TE.gather(-1, other_T1) | is_second_T.unsqueeze(-1)
        is_out_TE = is_out_TE.scatter(-1, other_T1, is_other_out_T1)
        near_TE = logits_TE.masked_fill(is_out_TE, float("-inf"))
        weights.append(softmax_last(near_TE).gather(-1, experts_TK[:, k : k + 1]))
    return experts_TK, torch.cat(weights, dim=-1)


def _choice(scores_TE: Tensor, gate: GateSpec, selection_bias_E: Tensor | None) -> Tensor:
    """Scores as the choice sees them: biased, and -inf in the groups that lost."""
    choice_TE = scores_TE if selection_bias_E is None else scores_TE + selection_bias_E
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
