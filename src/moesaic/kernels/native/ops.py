"""Matmuls, elementwise functions and routed experts over the native kernels; other ops are the reference's.

A weight is read once per call, whatever the number of rows, and rows are not padded: a result's tree is fixed
by its width alone, so nothing of it has to be proved on the machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import KernelUnavailable
from moesaic.kernels.invariance import InvarianceProof
from moesaic.kernels.kv_view import KvView
from moesaic.kernels.native import check_level, elementwise, module
from moesaic.kernels.native.attention import NativeAttention
from moesaic.kernels.native.gqa import GqaLayer
from moesaic.kernels.native.layers import L2, LAYER, RMS, NativeLayers
from moesaic.kernels.native.moe import ExpertTensors, MoeCounts, MoeLayer
from moesaic.kernels.native.moe_ranks import Counters, RankLane
from moesaic.kernels.native.router import RouterLayer
from moesaic.kernels.native.shared import SharedLayer
from moesaic.kernels.native.stack import NativeStack, StackLayer
from moesaic.kernels.panel import PanelWeight, Weight
from moesaic.kernels.reference import ReferenceOps
from moesaic.kernels.state_view import StateView
from moesaic.spec.model import Activation, DenseSpec, GateSpec, GqaSpec, MoeSpec
from moesaic.spec.numerics import Numerics


class NativeOps(ReferenceOps):
    """`Ops` of backend "native/<level>".

    Logits are float32 as the kernel summed them; the leaves of `linear_inner` stay float32 up to the root.
    Results of integer weights are those of `kernels.integer_matmul`, bit for bit.
    """

    def __init__(self, numerics: Numerics, *, num_threads: int) -> None:
        """Starts `num_threads` - 1 threads, which end with this object.

        Raises: KernelUnavailable for a level that was not built or that this machine lacks, and where the
                system does not start that many threads.
        """
        self.name = numerics.backend
        level = numerics.backend.removeprefix("native/")
        check_level(level)
        super().__init__(numerics, num_threads=num_threads)
        compiled = module()
        assert compiled is not None, "checked above"
        self._compiled = compiled
        try:
            self._kernels = compiled.Kernels(level, num_threads)
        except RuntimeError as error:
            raise KernelUnavailable(f"native kernels ({level}): {error}") from error
        self._native_attention = NativeAttention(
            self._kernels, kv_block=numerics.kv_block, num_lanes=numerics.kv_lanes, seam=self._seam
        )
        self._layers = NativeLayers(self._kernels, seam=self._seam)

    def linear(self, x_TD: Tensor, weight_FD: Weight, bias_F: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) as [T, F] in the seam dtype."""
        return self._biased(self._multiply(x_TD, weight_FD), bias_F)

    def linear_inner(self, x_TF: Tensor, weight_DF: Weight, bias_D: Tensor | None = None) -> Tensor:
        """The row-parallel matmul: matmul_shards leaves over F, neighbour tree in float32, rounded once.

        Raises: ConfigError when matmul_shards does not divide F, into whole groups of an integer weight.
        """
        num_shards = self._shards_of(weight_DF)
        return self._biased(self._multiply(x_TF, weight_DF, num_shards=num_shards), bias_D)

    def inner_root(self, x_TF: Tensor, weight_DF: Weight, num_leaves: int) -> Tensor:
        """Neighbouring leaves of a row-parallel matmul as their root [T, D] in float32."""
        return self._multiply(x_TF, weight_DF, num_shards=num_leaves, out=torch.float32)

    def linear_float32(self, x_TD: Tensor, weight_FD: Tensor) -> Tensor:
        """x @ weight.T in float32 from widened operands."""
        return self._multiply(x_TD, weight_FD.float())

    def logits(self, x_BD: Tensor, weight_VD: Weight, bias_V: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) as [B, V] float32, not rounded on the way."""
        y_BV = self._multiply(x_BD, weight_VD, out=torch.float32)
        return y_BV if bias_V is None else y_BV + bias_V

    def activation(self, gate_TF: Tensor, up_TF: Tensor | None, kind: Activation) -> Tensor:
        """act(gate) * up, or act(gate) where up is None, in the seam dtype."""
        return elementwise.act(self._kernels, kind, gate_TF, up_TF, out=self._seam)

    def swiglu_clamped(self, gate_TF: Tensor, up_TF: Tensor, *, limit: float | None, slope: float) -> Tensor:
        """(up + 1) * gate * sigmoid(slope * gate), both clamped at `limit`, in the seam dtype."""
        return elementwise.act(
            self._kernels, "swiglu_clamped", gate_TF, up_TF, out=self._seam, limit=limit, slope=slope
        )

    def sigmoid(self, x: Tensor) -> Tensor:
        """Logistic function in float32."""
        return elementwise.act(self._kernels, "sigmoid", x, out=torch.float32)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) in float32."""
        return elementwise.act(self._kernels, "softcap", x, out=torch.float32, limit=cap)

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + e^x) in float32."""
        return elementwise.act(self._kernels, "softplus", x, out=torch.float32)

    def softmax_float32(self, logits_TE: Tensor) -> Tensor:
        """Softmax over the last dim in float32."""
        return elementwise.softmax(self._kernels, logits_TE)

    def moe_layer(
        self, layer_idx: int, spec: MoeSpec, slots: Sequence[ExpertTensors], slot_of_expert: Sequence[int]
    ) -> MoeLayer:
        """The routed experts of a layer as one call.

        Raises: ConfigError as `MoeLayer`.
        """
        return MoeLayer(self._compiled, self._kernels, self.numerics, layer_idx, spec, slots, slot_of_expert)

    def router_layer(
        self,
        layer_idx: int,
        spec: MoeSpec,
        weight_ED: Tensor,
        *,
        norm_D: Tensor | None,
        norm_eps: float,
        logit_bias_E: Tensor | None,
        selection_bias_E: Tensor | None,
        expert_scale_E: Tensor | None,
    ) -> RouterLayer:
        """Norm and router of a layer, for calls that begin with them."""
        return RouterLayer(
            self._compiled,
            self.numerics,
            layer_idx,
            spec,
            weight_ED,
            norm_D=norm_D,
            norm_eps=norm_eps,
            logit_bias_E=logit_bias_E,
            selection_bias_E=selection_bias_E,
            expert_scale_E=expert_scale_E,
        )

    def shared_layer(
        self, layer_idx: int, spec: DenseSpec, weights: Mapping[str, Weight]
    ) -> SharedLayer | None:
        """The shared expert of a layer, for calls that have the routed ones too; None for weights of a kind
        that they do not take.

        Raises: ConfigError as `SharedLayer`.
        """
        floats = [one for one in weights.values() if isinstance(one, Tensor)]
        if spec.has_bias or any(one.dtype != self._seam or not one.is_contiguous() for one in floats):
            return None
        return SharedLayer(self._compiled, self.numerics, layer_idx, spec, weights)

    def rank_lane(
        self, wire: Any, lane: int, num_results: int, sent: Counters, returned: Counters
    ) -> RankLane:
        """The calls of one lane between ranks, on these threads; see `RankLane`."""
        return RankLane(self._compiled, self._kernels, wire, lane, num_results, sent, returned)

    def gqa_layer(
        self,
        layer_idx: int,
        spec: GqaSpec,
        weights: Mapping[str, Weight],
        norms: Mapping[str, Tensor],
        *,
        norm_eps: float,
        head_norm_eps: float,
        sinks_H: Tensor | None,
    ) -> GqaLayer:
        """The attention half of a layer as one call.

        Raises: ConfigError as `GqaLayer`.
        """
        return GqaLayer(
            self._compiled,
            self._kernels,
            self.numerics,
            layer_idx,
            spec,
            weights,
            norms,
            norm_eps=norm_eps,
            head_norm_eps=head_norm_eps,
            sinks_H=sinks_H,
        )

    def layer_stack(self, layers: Sequence[StackLayer], num_places: int, num_ropes: int) -> NativeStack:
        """Consecutive layers as one call; a step brings so many places and rotations.

        Raises: ValueError as `NativeStack`.
        """
        return NativeStack(self._compiled, self._kernels, layers, num_places, num_ropes)

    @property
    def moe_counts(self) -> MoeCounts:
        """Launches, jobs and weight bytes of all layers' calls so far."""
        launches, jobs, weight_bytes = self._kernels.moe_counts()
        return MoeCounts(launches=launches, jobs=jobs, weight_bytes=weight_bytes)

    def gate(
        self,
        logits_TE: Tensor,
        gate: GateSpec,
        num_chosen: int,
        selection_bias_E: Tensor | None,
        expert_scale_E: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(experts_TK, weights_TK): a router's choices by ascending id; sparsemixer is the reference's."""
        if gate.score == "sparsemixer":
            return super().gate(logits_TE, gate, num_chosen, selection_bias_E, expert_scale_E)
        return self._layers.gate(logits_TE, gate, num_chosen, selection_bias_E, expert_scale_E)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) over the last dim in float32, times any weight, in x's dtype."""
        return self._layers.norm(x_TD, weight_D, None, eps, RMS, x_TD.dtype)

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        """x / sqrt(sum(x^2) + eps) over the last dim, in float32."""
        return self._layers.norm(x, None, None, eps, L2, torch.float32)

    def layer_norm(self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight (+ bias) over the last dim in float32, in x's dtype."""
        return self._layers.norm(x_TD, weight_D, bias_D, eps, LAYER, x_TD.dtype)

    def rope(self, x_THC: Tensor, cos_TC: Tensor, sin_TC: Tensor, is_interleaved: bool) -> Tensor:
        """`x_THC` with its first 2 * C' columns rotated: the reference's bits."""
        return self._layers.rope(x_THC, cos_TC, sin_TC, is_interleaved)

    def causal_conv(self, x_TF: Tensor, weight_FX: Tensor, view: StateView) -> Tensor:
        """Each channel's latest inputs weighted and summed: the reference's bits; moves tails on."""
        return self._layers.causal_conv(x_TF, weight_FX, view)

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
        return self._layers.delta_rule(q_TGC, k_TGC, v_THC, log_decay_TH, beta_TH, view)

    def write_kv(self, view: KvView, key_TGC: Tensor, value_TGC: Tensor | None) -> None:
        """Store this step's keys and values in the pool's format; clears the blocks that it begins."""
        self._native_attention.write(view, key_TGC, value_TGC)

    def attention(
        self,
        q_THC: Tensor,
        view: KvView,
        *,
        softmax_scale: float,
        window: int | None = None,
        is_chunked: bool = False,
        sinks_H: Tensor | None = None,
        value_width: int | None = None,
    ) -> Tensor:
        """Causal attention of the batch over the pool: [T, H, value width] in the seam dtype."""
        return self._native_attention(
            q_THC,
            view,
            softmax_scale=softmax_scale,
            window=window,
            is_chunked=is_chunked,
            sinks_H=sinks_H,
            value_width=value_width,
        )

    def prove(
        self,
        weights: Iterable[tuple[int, int]] = (),
        *,
        float32_weights: Iterable[tuple[int, int]] = (),
        heads: Iterable[tuple[int, int]] = (),
    ) -> InvarianceProof:
        """Nothing: matmuls, attention and norms hold by construction; all else is of single numbers."""
        return self._table.proof()

    def prove_split(
        self,
        columns: Iterable[tuple[int, int, int]] = (),
        *,
        items: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Columns hold by construction; `bmm` is the reference's, and its items are proved."""
        super().prove_split(items=items)

    def _multiply(
        self, x_TD: Tensor, weight_FD: Weight, *, num_shards: int = 1, out: torch.dtype | None = None
    ) -> Tensor:
        """[T, F] of `out`: the weight's dtype, the seam's for integers, or float32 where it is asked for."""
        if isinstance(weight_FD, PanelWeight):
            return self._integer(x_TD, weight_FD, num_shards=num_shards, out=out)
        dtype = weight_FD.dtype
        x_TD = (x_TD if x_TD.dtype == dtype else x_TD.to(dtype)).contiguous()
        if weight_FD.stride(1) != 1:
            weight_FD = weight_FD.contiguous()
        num_rows, width = x_TD.shape
        num_columns = weight_FD.shape[0]
        assert weight_FD.shape[1] == width, f"x has rows of {width}, the weight of {weight_FD.shape[1]}"
        # Small calls are many: a tensor like another is made in half the time of one of a shape.
        y_TF = (
            x_TD.new_empty(num_rows, num_columns)
            if out is None
            else x_TD.new_empty(num_rows, num_columns, dtype=out)
        )
        self._kernels.linear(
            x_TD.data_ptr(),
            weight_FD.data_ptr(),
            y_TF.data_ptr(),
            num_rows,
            num_columns,
            width,
            weight_FD.stride(0),
            num_shards,
            dtype == torch.bfloat16,
            y_TF.dtype == torch.float32,
        )
        return y_TF

    def _integer(
        self, x_TD: Tensor, weight_FD: PanelWeight, *, num_shards: int = 1, out: torch.dtype | None = None
    ) -> Tensor:
        """[T, F] of `out`, which is the seam dtype unless float32 is asked for."""
        x_TD = x_TD.to(self._seam).contiguous()
        num_rows, width = x_TD.shape
        num_columns, kind = weight_FD.num_rows, weight_FD.kind
        assert weight_FD.width == width, f"x has rows of {width}, the weight of {weight_FD.width}"
        y_TF = torch.empty((num_rows, num_columns), dtype=out or self._seam)
        self._kernels.packed_linear(
            x_TD.data_ptr(),
            weight_FD.data.data_ptr(),
            weight_FD.data.numel(),
            y_TF.data_ptr(),
            num_rows,
            num_columns,
            width,
            weight_FD.num_sections,
            kind.group_size(width),
            kind.bits,
            kind.has_zeros,
            num_shards,
            x_TD.dtype == torch.bfloat16,
            y_TF.dtype == torch.float32,
        )
        return y_TF
