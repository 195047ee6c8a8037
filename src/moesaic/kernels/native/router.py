"""Norm and router of one layer for native calls that begin with them: see router_layer.hpp.

Weights are checked and turned into addresses once. Knows nothing of where they come from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.formats import torch_dtype
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import Numerics


class RouterLayer:
    """Which experts the rows of a residual stream choose; `native` is what the calls of experts take."""

    def __init__(  # noqa: PLR0913 - each is a parameter of the layer
        self,
        compiled: Any,
        numerics: Numerics,
        layer_idx: int,
        spec: MoeSpec,
        weight_ED: Tensor,
        *,
        norm_D: Tensor | None,
        norm_eps: float,
        logit_bias_E: Tensor | None,
        selection_bias_E: Tensor | None,
        expert_scale_E: Tensor | None,
    ) -> None:
        """All are kept; but for the norm's weight they are float32.

        Raises: ValueError from the kernels for a gate that cannot choose so many experts.
        """
        gate = spec.gate
        assert gate.score != "sparsemixer", "the reference has that gate"
        assert not gate.has_input_norm, "rows are normed once"
        floats = [weight_ED, logit_bias_E, selection_bias_E, expert_scale_E]
        assert all(one is None or one.dtype == torch.float32 for one in floats), "routers are float32"
        assert weight_ED.shape == (spec.num_experts, spec.row_width), "a row of the weight for each expert"
        assert norm_D is None or norm_D.shape == (spec.row_width,), "the norm is of these rows"
        kept = [None if one is None else one.contiguous() for one in (norm_D, *floats)]
        norm, weight, logit_bias, selection_bias, expert_scale = (
            0 if one is None else one.data_ptr() for one in kept
        )
        self._kept = kept
        self.native = compiled.RouterLayer(
            layer_idx=layer_idx,
            width=spec.row_width,
            experts=spec.num_experts,
            chosen=spec.experts_per_token,
            norm=norm,
            is_norm_bfloat16=norm_D is not None and norm_D.dtype == torch.bfloat16,
            norm_eps=norm_eps,
            weight=weight,
            logit_bias=logit_bias,
            selection_bias=selection_bias,
            expert_scale=expert_scale,
            groups=gate.num_groups,
            groups_kept=gate.groups_per_token,
            is_sigmoid=gate.score == "sigmoid",
            is_topk_first=gate.order == "topk_then_score",
            is_top2_sum=gate.group_score == "top2_sum",
            is_renormalised=gate.is_renormalised,
            epsilon=gate.renormalise_epsilon,
            floor=gate.renormalise_floor,
            scale=gate.scale,
            is_bfloat16=torch_dtype(numerics.seam_dtype) == torch.bfloat16,
        )
