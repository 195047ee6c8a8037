"""Norms, rotations, gates and recurrent states over the native kernels; their trees are in the headers."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.state_view import StatePlaces, StateView
from moesaic.spec.model import GateSpec

RMS, L2, LAYER = 0, 1, 2
"""Norms as the kernels number them."""


class NativeLayers:
    """What stands between the matmuls, one call each. Whatever torch still has to do is named beside it."""

    def __init__(self, kernels: Any, *, seam: torch.dtype) -> None:
        self._kernels = kernels
        self._seam = seam

    def norm(
        self,
        x: Tensor,
        weight_D: Tensor | None,
        bias_D: Tensor | None,
        eps: float,
        kind: int,
        out: torch.dtype,
    ) -> Tensor:
        """Of x [.., D] the norm `kind` over the last dim, in `out`."""
        x = x.contiguous()
        width = x.shape[-1]
        assert weight_D is None or (weight_D.shape == (width,) and weight_D.is_contiguous())
        assert bias_D is None or (
            weight_D is not None and bias_D.shape == (width,) and bias_D.dtype == weight_D.dtype
        )
        y = torch.empty_like(x) if out == x.dtype else torch.empty_like(x, dtype=out)
        self._kernels.norm(
            x.data_ptr(),
            0 if weight_D is None else weight_D.data_ptr(),
            0 if bias_D is None else bias_D.contiguous().data_ptr(),
            y.data_ptr(),
            x.numel() // width,
            width,
            eps,
            kind,
            x.dtype == torch.bfloat16,
            weight_D is not None and weight_D.dtype == torch.bfloat16,
            out == torch.bfloat16,
        )
        return y

    def rope(self, x_THC: Tensor, cos_TC: Tensor, sin_TC: Tensor, is_interleaved: bool) -> Tensor:
        """`x_THC` with its first 2 * C' columns rotated, for tables [T, C'] float32; x's dtype."""
        if x_THC.stride(2) != 1:
            x_THC = x_THC.contiguous()
        num_tokens, num_heads, width = x_THC.shape
        half = cos_TC.shape[1]
        assert cos_TC.shape == sin_TC.shape == (num_tokens, half)
        out_THC = x_THC.new_empty(num_tokens, num_heads, width)
        self._kernels.rotate(
            x_THC.data_ptr(),
            cos_TC.contiguous().data_ptr(),
            sin_TC.contiguous().data_ptr(),
            out_THC.data_ptr(),
            num_tokens,
            num_heads,
            width,
            half,
            x_THC.stride(0),
            x_THC.stride(1),
            is_interleaved,
            x_THC.dtype == torch.bfloat16,
        )
        return out_THC

    def gate(
        self,
        logits_TE: Tensor,
        gate: GateSpec,
        num_chosen: int,
        selection_bias_E: Tensor | None,
        expert_scale_E: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Experts and weights of each row; every gate but sparsemixer."""
        logits_TE = logits_TE.contiguous()
        num_rows, num_experts = logits_TE.shape
        assert logits_TE.dtype == torch.float32
        experts_TK = torch.empty((num_rows, num_chosen), dtype=torch.int64)
        weights_TK = logits_TE.new_empty(num_rows, num_chosen)
        self._kernels.gate(
            logits_TE.data_ptr(),
            0 if selection_bias_E is None else selection_bias_E.data_ptr(),
            0 if expert_scale_E is None else expert_scale_E.data_ptr(),
            experts_TK.data_ptr(),
            weights_TK.data_ptr(),
            num_rows,
            num_experts,
            num_chosen,
            gate.num_groups,
            gate.groups_per_token,
            gate.score == "sigmoid",
            gate.order == "topk_then_score",
            gate.group_score == "top2_sum",
            gate.is_renormalised,
            gate.renormalise_epsilon,
            gate.renormalise_floor,
            gate.scale,
        )
        return experts_TK, weights_TK

    def causal_conv(self, x_TF: Tensor, weight_FX: Tensor, view: StateView) -> Tensor:
        """Each channel's latest inputs weighted and summed, as [T, F] in the seam dtype; moves tails on."""
        x_TF, weight_FX, tails = x_TF.contiguous(), weight_FX.contiguous(), view.tails
        num_channels, conv_width = weight_FX.shape
        assert x_TF.shape[1] == num_channels
        assert tails.shape[1:] == (conv_width - 1, num_channels)
        rows = _table(view.places)
        y_TF = torch.empty(x_TF.shape, dtype=self._seam)
        self._kernels.causal_conv(
            x_TF.data_ptr(),
            weight_FX.data_ptr(),
            tails.data_ptr(),
            y_TF.data_ptr(),
            rows.buffer_info()[0],
            len(rows) // STATE_NUMBERS,
            len(x_TF),
            len(tails),
            num_channels,
            conv_width,
            x_TF.dtype == torch.bfloat16,
            weight_FX.dtype == torch.bfloat16,
            tails.dtype == torch.bfloat16,
            self._seam == torch.bfloat16,
        )
        return y_TF

    def delta_rule(
        self,
        q_TGC: Tensor,
        k_TGC: Tensor,
        v_THC: Tensor,
        log_decay_TH: Tensor,
        beta_TH: Tensor,
        view: StateView,
    ) -> Tensor:
        """The gated delta rule's readings [T, H, C'] in the seam dtype, float32 inside; moves states on."""
        inputs = [x.float().contiguous() for x in (q_TGC, k_TGC, v_THC, log_decay_TH, beta_TH)]
        num_slots, num_heads, key_width, value_width = view.states.shape
        num_tokens, num_groups = q_TGC.shape[:2]
        assert q_TGC.shape == k_TGC.shape == (num_tokens, num_groups, key_width)
        assert v_THC.shape == (num_tokens, num_heads, value_width)
        assert log_decay_TH.shape == beta_TH.shape == (num_tokens, num_heads)
        rows = _table(view.places)
        out_THC = torch.empty(v_THC.shape, dtype=self._seam)
        self._kernels.delta_rule(
            *(x.data_ptr() for x in inputs),
            view.states.data_ptr(),
            out_THC.data_ptr(),
            rows.buffer_info()[0],
            len(rows) // STATE_NUMBERS,
            num_tokens,
            num_slots,
            num_heads,
            num_groups,
            key_width,
            value_width,
            self._seam == torch.bfloat16,
        )
        return out_THC


STATE_NUMBERS = 4
"""Of a sequence: its first row, how many, the slot it reads or -1, and the slot it writes."""


def _table(places: StatePlaces) -> array[int]:
    """The sequences of a step as the kernels read them; made at the first call."""
    found = places.plans.get(_table)
    if found is None:
        found = places.plans[_table] = array("q")
        for row in places.rows:
            slot_from = -1 if row.slot_from is None else row.slot_from
            found.extend((row.first_row, row.num_tokens, slot_from, row.slot_to))
    return found
