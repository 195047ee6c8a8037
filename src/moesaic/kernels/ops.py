"""One door per op. An `Ops` is chosen once at start and handed to every layer; nobody else picks a kernel.

The promise every op keeps: the bits of a result row depend on that row's own inputs, never on the number of
rows, their order, padding, or neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from torch import Tensor

from moesaic.errors import KernelUnavailable
from moesaic.kernels import native
from moesaic.kernels.invariance import InvarianceProof
from moesaic.kernels.kv_view import KvView
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.panel import Weight
from moesaic.kernels.reference import ReferenceOps
from moesaic.kernels.state_view import StateView
from moesaic.spec.model import Activation, GateSpec
from moesaic.spec.numerics import Numerics

NATIVE = "native/"
"""Prefix of the backends that are native kernels at one instruction level."""


class Ops(Protocol):
    """The ops of one backend under one `Numerics`. "Seam" is numerics.seam_dtype.

    Shapes:  rows are [T, ...]; T may be 0 everywhere.
    """

    name: str
    numerics: Numerics

    def linear(self, x_TD: Tensor, weight_FD: Weight, bias_F: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) as [T, F] in the seam dtype."""
        ...

    def linear_inner(self, x_TF: Tensor, weight_DF: Weight, bias_D: Tensor | None = None) -> Tensor:
        """Row-parallel matmul: matmul_shards leaves over F, neighbour tree in partial_dtype, rounded once."""
        ...

    def inner_root(self, x_TF: Tensor, weight_DF: Weight, num_leaves: int) -> Tensor:
        """Neighbouring leaves of a row-parallel matmul as their root [T, D] in partial_dtype.

        The weight has the columns of these leaves alone.
        """
        ...

    def from_root(self, root_TD: Tensor, bias_D: Tensor | None) -> Tensor:
        """[T, D] as `linear_inner` makes it of the root over all its leaves."""
        ...

    def linear_float32(self, x_TD: Tensor, weight_FD: Tensor) -> Tensor:
        """x @ weight.T in float32 from operands widened to float32 (routers)."""
        ...

    def logits(self, x_BD: Tensor, weight_VD: Weight, bias_V: Tensor | None = None) -> Tensor:
        """x @ weight.T (+ bias) as [B, V] float32."""
        ...

    def bmm(self, a_NTC: Tensor, b_NCM: Tensor) -> Tensor:
        """[N, T, M] in the seam dtype, multiplied in float32; the promise holds along T."""
        ...

    def activation(self, gate_TF: Tensor, up_TF: Tensor | None, kind: Activation) -> Tensor:
        """act(gate) * up, or act(gate) where up is None, in the seam dtype."""
        ...

    def swiglu_clamped(self, gate_TF: Tensor, up_TF: Tensor, *, limit: float | None, slope: float) -> Tensor:
        """(up + 1) * gate * sigmoid(slope * gate), both clamped at `limit`, in the seam dtype."""
        ...

    def sigmoid(self, x: Tensor) -> Tensor:
        """Logistic function in float32."""
        ...

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) in float32."""
        ...

    def softplus(self, x: Tensor) -> Tensor:
        """log(1 + e^x) in float32."""
        ...

    def softmax_float32(self, logits_TE: Tensor) -> Tensor:
        """Softmax over the last dim in float32."""
        ...

    def gate(
        self,
        logits_TE: Tensor,
        gate: GateSpec,
        num_chosen: int,
        selection_bias_E: Tensor | None,
        expert_scale_E: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(experts_TK, weights_TK): a router's choices by ascending id, and their weights, float32.

        Ties go to the lowest id. The bias moves the choice alone; the scale multiplies the weights last.

        Shapes:  logits_TE [T, E], selection_bias_E and expert_scale_E [E], all float32 and contiguous.
        """
        ...

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) over the last dim in float32, times any weight, in x's dtype.

        Before the weight it is rounded to the weight's dtype.
        """
        ...

    def l2_norm(self, x: Tensor, eps: float) -> Tensor:
        """x / sqrt(sum(x^2) + eps) over the last dim, in float32."""
        ...

    def layer_norm(self, x_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight (+ bias) over the last dim in float32, in x's dtype."""
        ...

    def rope(self, x_THC: Tensor, cos_TC: Tensor, sin_TC: Tensor, is_interleaved: bool) -> Tensor:
        """`x_THC` with its first 2 * C' columns rotated, for tables [T, C'] float32; x's dtype."""
        ...

    def write_kv(self, view: KvView, key_TGC: Tensor, value_TGC: Tensor | None) -> None:
        """Store this step's keys and values in the pool's format; clears the blocks that it begins."""
        ...

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
        """Causal attention of the batch over the pool: [T, H, value width] in the seam dtype.

        `window` counts visible positions, the query's own included; `is_chunked` starts it at a multiple of
        itself instead of letting it trail. `value_width` is the number of leading
        key columns that are the value, where the view has no value pool.
        """
        ...

    def causal_conv(self, x_TF: Tensor, weight_FX: Tensor, view: StateView) -> Tensor:
        """Each channel's latest inputs weighted and summed, as [T, F] in the seam dtype; moves tails on.

        Shapes:  weight_FX [F, conv width], oldest input first.
        """
        ...

    def delta_rule(
        self,
        q_TGC: Tensor,
        k_TGC: Tensor,
        v_THC: Tensor,
        log_decay_TH: Tensor,
        beta_TH: Tensor,
        view: StateView,
    ) -> Tensor:
        """The gated delta rule's readings [T, H, C'] in the seam dtype, float32 inside; moves states on.

        Shapes:  q and k [T, G, C], v [T, H, C']; consecutive value heads share a key head.
        """
        ...

    def prove(
        self,
        weights: Iterable[tuple[int, int]] = (),
        *,
        float32_weights: Iterable[tuple[int, int]] = (),
        heads: Iterable[tuple[int, int]] = (),
    ) -> InvarianceProof:
        """Prove the promise for what a model has, ahead of use; other shapes are proved when first met.

        Shapes:  weights and float32_weights (routers) as [out, in]; heads as (key width, value width).
        Raises:  KernelUnavailable when no way of calling the backend gives equal bits.
        """
        ...

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
        ...


def choose(numerics: Numerics, *, num_threads: int) -> Ops:
    """The ops of `numerics.backend`; sets torch's number of threads, for which the proofs hold.

    Raises: KernelUnavailable naming the backend, or what it cannot do.
    """
    if numerics.backend == "reference":
        return ReferenceOps(numerics, num_threads=num_threads)
    if numerics.backend.startswith(NATIVE):
        return NativeOps(numerics, num_threads=num_threads)
    raise KernelUnavailable(
        f"backend {numerics.backend!r} is not built; known: {', '.join(backends())}. Set numerics.backend to "
        "one of them"
    )


def backends() -> tuple[str, ...]:
    """All that run in this installation on this machine."""
    return ("reference", *(f"{NATIVE}{level}" for level in native.levels()))


def default_backend() -> str:
    """The best native level of this machine among those that were timed: of x86 processors, from AVX2 on."""
    best = native.levels()[-1:]
    return f"{NATIVE}{best[0]}" if best and best[0].startswith("avx") else "reference"
