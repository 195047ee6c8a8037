"""The reference backend: torch ops on the CPU, float32 inside, a row's bits independent of its neighbours."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from moesaic.errors import ConfigError, KernelUnavailable
from moesaic.kernels import elementwise, paged, recurrent
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.gate import choose_experts
from moesaic.kernels.integer_matmul import integer_linear
from moesaic.kernels.invariance import InvarianceProof, ProofTable
from moesaic.kernels.kv_view import KvView
from moesaic.kernels.matmul import TiledMatmul
from moesaic.kernels.panel import PanelWeight, Weight, check_shards
from moesaic.kernels.row_sum import RowSum
from moesaic.kernels.state_view import StateView
from moesaic.spec.model import Activation, GateSpec
from moesaic.spec.numerics import Numerics


class ReferenceOps:
    """`Ops` over torch. See `kernels.ops.Ops` for what each op promises.

    In bfloat16 a matmul is one call in bfloat16, rounded once by the kernel; a bias is added after that.
    Where matmul_shards splits a row-parallel matmul, its leaves are float32 from widened operands (a copy of
    the weight per call), so that only the root is rounded. An integer weight is unpacked in each call.
    """

    name = "reference"

    def __init__(self, numerics: Numerics, *, num_threads: int) -> None:
        """Sets torch's thread count to `num_threads`: proofs hold for one count.

        Raises: KernelUnavailable for numerics that this backend does not compute.
        """
        if numerics.backend != self.name:
            raise KernelUnavailable(
                f"numerics ask for backend {numerics.backend!r}, these are the reference ops"
            )
        if numerics.partial_dtype != "float32":
            raise KernelUnavailable(
                f"linear_inner on the reference backend adds in float32; numerics.partial_dtype is "
                f"{numerics.partial_dtype!r}"
            )
        if num_threads < 1:
            raise ConfigError(f"num_threads must be at least 1, got {num_threads}")
        torch.set_num_threads(num_threads)
        self.numerics = numerics
        self._seam = torch_dtype(numerics.seam_dtype)
        self._table = ProofTable()
        self._matmul = TiledMatmul(self._table)
        self._row_sum = RowSum(self._table)
        self._attention = paged.PagedAttention(
            self._table, kv_block=numerics.kv_block, num_lanes=numerics.kv_lanes
        )

    def linear(self, x_TD: Tensor, weight_FD: Weight, bias_F: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) as [T, F] in the seam dtype."""
        if isinstance(weight_FD, PanelWeight):
            return self._biased(self._integer(x_TD, weight_FD), bias_F)
        y_TF = self._matmul.linear(x_TD.to(weight_FD.dtype), weight_FD)
        return self._biased(y_TF, bias_F)

    def linear_inner(self, x_TF: Tensor, weight_DF: Weight, bias_D: Tensor | None = None) -> Tensor:
        """The row-parallel matmul: matmul_shards leaves over F, neighbour tree in float32, rounded once.

        Raises: ConfigError when matmul_shards does not divide F, into whole groups of an integer weight.
        """
        num_shards = self._shards_of(weight_DF)
        if num_shards == 1 and isinstance(weight_DF, Tensor):
            return self.linear(x_TF, weight_DF, bias_D)
        return self.from_root(self.inner_root(x_TF, weight_DF, num_shards), bias_D)

    def inner_root(self, x_TF: Tensor, weight_DF: Weight, num_leaves: int) -> Tensor:
        """Neighbouring leaves of a row-parallel matmul as their root [T, D] in float32."""
        if isinstance(weight_DF, PanelWeight):
            return integer_linear(x_TF.to(self._seam), weight_DF, num_shards=num_leaves)
        size = weight_DF.shape[1] // num_leaves
        # Each leaf is copied out, so that a rank that has some alone calls what one with all calls.
        leaves = [
            self._matmul.linear(x.float(), weight.float().contiguous())
            for x, weight in zip(x_TF.split(size, dim=1), weight_DF.split(size, dim=1), strict=True)
        ]
        while len(leaves) > 1:
            leaves = [leaves[i] + leaves[i + 1] for i in range(0, len(leaves), 2)]
        return leaves[0]

    def from_root(self, root_TD: Tensor, bias_D: Tensor | None) -> Tensor:
        """[T, D] as `linear_inner` makes it of the root over all its leaves."""
        return self._biased(root_TD.to(self._seam), bias_D)

    def linear_float32(self, x_TD: Tensor, weight_FD: Tensor) -> Tensor:
        """x @ weight.T in float32 from widened operands."""
        return self._matmul.linear(x_TD.float(), weight_FD.float())

    def logits(self, x_BD: Tensor, weight_VD: Weight, bias_V: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) as [B, V] float32."""
        if isinstance(weight_VD, PanelWeight):
            y_BV = self._integer(x_BD, weight_VD, out=torch.float32)
        else:
            y_BV = self._matmul.linear(x_BD.to(weight_VD.dtype), weight_VD).float()
        return y_BV if bias_V is None else y_BV + bias_V

    def bmm(self, a_NTC: Tensor, b_NCM: Tensor) -> Tensor:
        """[N, T, M] in the seam dtype, multiplied in float32."""
        return self._matmul.bmm(a_NTC.float(), b_NCM.float().contiguous()).to(self._seam)

    def activation(self, gate_TF: Tensor, up_TF: Tensor | None, kind: Activation) -> Tensor:
        """act(gate) * up, or act(gate) where up is None, in the seam dtype."""
        return elementwise.activate(gate_TF, up_TF, kind).to(self._seam)

    def swiglu_clamped(self, gate_TF: Tensor, up_TF: Tensor, *, limit: float | None, slope: float) -> Tensor:
        """(up + 1) * gate * sigmoid(slope * gate), both clamped at `limit`, in the seam dtype."""
        return elementwise.swiglu_clamped(gate_TF, up_TF, limit=limit, slope=slope).to(self._seam)

    def sigmoid(self, x: Tensor) -> Tensor:
        """Logistic function in float32."""
        return elementwise.sigmoid(x)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) in float32."""
        return elementwise.softcap(x, cap)

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + e^x) in float32."""
        return elementwise.softplus(x)

    def softmax_float32(self, logits_TE: Tensor) -> Tensor:
        """Softmax over the last dim in float32."""
        return elementwise.softmax_last(logits_TE)

    def gate(
        self,
        logits_TE: Tensor,
        gate: GateSpec,
        num_chosen: int,
        selection_bias_E: Tensor | None,
        expert_scale_E: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(experts_TK, weights_TK): a router's choices by ascending id, and their weights."""
        return choose_experts(logits_TE, gate, num_chosen, selection_bias_E, expert_scale_E)

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) over the last dim in float32, times any weight, in x's dtype.

        Before the weight it is rounded to the weight's dtype.
        """
        wide = x_TD.float()
        mean = self._row_sum(wide * wide) / wide.shape[-1]
        normed_TD = wide * (mean + eps).sqrt().reciprocal()
        if weight_D is not None:
            normed_TD = normed_TD.to(weight_D.dtype) * weight_D
        return normed_TD.to(x_TD.dtype)

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        """x / sqrt(sum(x^2) + eps) over the last dim, in float32."""
        wide = x.float()
        return wide * (self._row_sum(wide * wide) + eps).sqrt().reciprocal()

    def layer_norm(self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight (+ bias) over the last dim in float32, in x's dtype."""
        wide, width = x_TD.float(), x_TD.shape[-1]
        centred = wide - self._row_sum(wide) / width
        variance = self._row_sum(centred * centred) / width
        normed = centred * (variance + eps).sqrt().reciprocal() * weight_D
        return (normed if bias_D is None else normed + bias_D).to(x_TD.dtype)

    def rope(self, x_THC: Tensor, cos_TC: Tensor, sin_TC: Tensor, is_interleaved: bool) -> Tensor:
        """`x_THC` with its first 2 * C' columns rotated, for tables [T, C'] float32; x's dtype."""
        half = cos_TC.shape[-1]
        cos, sin = cos_TC.unsqueeze(1), sin_TC.unsqueeze(1)
        turned = x_THC[..., : 2 * half].float()
        if is_interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned[..., :half], turned[..., half:]
        out_THC = torch.empty_like(x_THC)
        low, high = first * cos - second * sin, second * cos + first * sin
        if is_interleaved:
            out_THC[..., 0 : 2 * half : 2], out_THC[..., 1 : 2 * half : 2] = low, high
        else:
            out_THC[..., :half], out_THC[..., half : 2 * half] = low, high
        out_THC[..., 2 * half :] = x_THC[..., 2 * half :]
        return out_THC

    def write_kv(self, view: KvView, key_TGC: Tensor, value_TGC: Tensor | None) -> None:
        """Store this step's keys and values in the pool's format; clears the blocks that it begins."""
        paged.write(view, key_TGC, value_TGC)

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
        return self._attention(
            q_THC,
            view,
            softmax_scale=softmax_scale,
            window=window,
            is_chunked=is_chunked,
            sinks_H=sinks_H,
            value_width=value_width,
        ).to(self._seam)

    def causal_conv(self, x_TF: Tensor, weight_FX: Tensor, view: StateView) -> Tensor:
        """Each channel's latest inputs weighted and summed, as [T, F] in the seam dtype; moves tails on."""
        return recurrent.causal_conv(x_TF, weight_FX, view).to(self._seam)

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
        q_TGC, k_TGC, v_THC = q_TGC.float(), k_TGC.float(), v_THC.float()
        return recurrent.delta_rule(q_TGC, k_TGC, v_THC, log_decay_TH, beta_TH, view).to(self._seam)

    def prove(
        self,
        weights: Iterable[tuple[int, int]] = (),
        *,
        float32_weights: Iterable[tuple[int, int]] = (),
        heads: Iterable[tuple[int, int]] = (),
    ) -> InvarianceProof:
        """Prove the promise for what a model has, ahead of use; other shapes are proved when first met.

        Shapes:  weights and float32_weights (routers) as [out, in]; heads as (key width, value width).
        Raises:  KernelUnavailable when no way of calling gives equal bits.
        """
        num_shards = self.numerics.matmul_shards
        for num_columns, width in set(weights):
            self._matmul.prove_linear(num_columns, width, self._seam)
            if num_shards > 1 and width % num_shards == 0:
                self._matmul.prove_leaf(num_columns, width, num_shards)
        for num_columns, width in set(float32_weights):
            self._matmul.prove_linear(num_columns, width, torch.float32)
        for key_width, value_width in set(heads):
            self._attention.prove(key_width, value_width)
        return self._table.proof()

    def prove_split(
        self,
        columns: Iterable[tuple[int, int, int]] = (),
        *,
        items: Iterable[tuple[int, int]] = (),
    ) -> None:
        """Prove that a matmul of some columns, or of some items of a batch, has the bits of the whole.

        Shapes:  columns as (out of the whole, out of the part, in); items, of `bmm`, as (in, out).
        Raises:  KernelUnavailable when they differ, so that ranks cannot share a matmul.
        """
        for whole, part, width in set(columns):
            self._matmul.prove_columns(whole, part, width, self._seam)
        for width, num_columns in set(items):
            self._matmul.prove_items(width, num_columns)

    def _integer(
        self, x_TD: Tensor, weight_FD: PanelWeight, *, num_shards: int = 1, out: torch.dtype | None = None
    ) -> Tensor:
        """The matmul of an integer weight, as [T, F] of `out`, which is the seam dtype unless it is said."""
        y_TF = integer_linear(x_TD.to(self._seam), weight_FD, num_shards=num_shards)
        return y_TF.to(out or self._seam)

    def _shards_of(self, weight_DF: Weight) -> int:
        num_shards = self.numerics.matmul_shards
        check_shards(weight_DF, num_shards)
        return num_shards

    def _biased(self, y_TF: Tensor, bias_F: Tensor | None) -> Tensor:
        return elementwise.biased(y_TF, bias_F, self._seam)
