"""Grouped-query attention, and the seam between a mixer and whoever holds the KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moesaic.errors import UnsupportedModelError
from moesaic.kernels.kv_view import KvPlaces, KvRow, KvView
from moesaic.kernels.native.gqa import GqaLayer
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.ops import Ops
from moesaic.kernels.panel import Weight
from moesaic.layers.linear import SharedSum, WeightSet
from moesaic.layers.norm import RmsNorm
from moesaic.layers.rope import RopeTable
from moesaic.layers.temperature import Temperature
from moesaic.spec.model import GqaSpec, MlaSpec
from moesaic.steps import Steps

__all__ = ["Attend", "FusedGqa", "GqaAttention", "KvPlaces", "KvRow", "KvView", "NewKv", "PagedAttend"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NewKv:
    """Keys and values of a step's tokens. MLA: one group, key = latent | rope, and no value.

    Shapes:  key_TGC [T, G, C]; value_TGC [T, G, C'] or None.
    """

    key_TGC: Tensor
    value_TGC: Tensor | None


class Attend(Protocol):
    """Writes KV first, then reads only the pool: chunked = whole = prefix hit."""

    num_heads_out: int

    def __call__(self, q_THC: Tensor, new_kv: NewKv, view: KvView) -> Steps[Tensor]:
        """[T, num_heads_out, value width] in the seam dtype."""
        ...


class PagedAttend(Attend):
    """Attention on one rank that holds all of the KV.

    `value_width` is the number of leading key columns that are the value, where keys hold both (MLA).

    Shapes:  sinks_H [H], one logit per head.
    """

    def __init__(
        self,
        ops: Ops,
        *,
        num_heads: int,
        softmax_scale: float,
        window: int | None = None,
        is_chunked: bool = False,
        sinks_H: Tensor | None = None,
        value_width: int | None = None,
    ) -> None:
        self.num_heads_out = num_heads
        self._ops = ops
        self._softmax_scale = softmax_scale
        self._window = window
        self._is_chunked = is_chunked
        self.sinks_H = None if sinks_H is None else sinks_H.float()
        self._value_width = value_width

    @classmethod
    def of(cls, spec: GqaSpec | MlaSpec, ops: Ops, sinks_H: Tensor | None = None) -> PagedAttend:
        """The attention that a mixer's spec describes."""
        if isinstance(spec, MlaSpec):
            return cls(
                ops,
                num_heads=spec.num_heads,
                softmax_scale=spec.softmax_scale,
                value_width=spec.kv_lora_rank,
            )
        return cls(
            ops,
            num_heads=spec.num_heads,
            softmax_scale=spec.softmax_scale,
            window=spec.window,
            is_chunked=spec.is_chunked,
            sinks_H=sinks_H,
        )

    def __call__(self, q_THC: Tensor, new_kv: NewKv, view: KvView) -> Steps[Tensor]:
        """[T, H, value width] in the seam dtype; never waits."""
        yield from ()
        self._ops.write_kv(view, new_kv.key_TGC, new_kv.value_TGC)
        return self._ops.attention(
            q_THC,
            view,
            softmax_scale=self._softmax_scale,
            window=self._window,
            is_chunked=self._is_chunked,
            sinks_H=self.sinks_H,
            value_width=self._value_width,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShare:
    """Which of all heads one rank has, and how ranks add what comes of them."""

    all_heads: int
    all_kv_heads: int
    first_head: int
    first_kv_head: int
    shared: SharedSum


class GqaAttention:
    """Projections, norms and rotation around an `Attend`.

    Weights: q k v o, without v where keys are values, and as the spec says q_bias k_bias v_bias o_bias,
             q_norm k_norm, sinks.
    Shapes:  q [H * C, D], k and v [G * C, D], o [D, H * C]; norms [C] per head, or [H * C] and [G * C]. With
             an output gate q is [H * 2C, D]: of each head the query's rows, then the gate's. With a share H
             and G are this rank's, but for q, k and their norms where the norm is over all heads.
    """

    def __init__(
        self,
        spec: GqaSpec,
        weights: Mapping[str, Weight],
        ops: Ops,
        rope: RopeTable | None,
        attend: Attend,
        *,
        norm_eps: float,
        share: HeadShare | None = None,
    ) -> None:
        """`rope` is None where the spec has none; `norm_eps` is that of the query and key norms. `share`: the
        heads of the spec are this rank's, and others have the rest.

        Raises: UnsupportedModelError naming what the spec needs and this build lacks; ConfigError for
                weights.
        """
        _check(spec)
        self._spec = spec
        self._ops = ops
        self._rope = rope
        self._attend = attend
        owner = WeightSet("grouped-query attention", weights)
        hidden = weights["o"].shape[0] if "o" in weights else 0
        query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        out_width, value = query, key
        # A norm over all heads needs them all, on every rank; this rank's are taken out after it.
        self._own_heads: slice | None = None
        self._own_kv_heads: slice | None = None
        if share is not None and spec.qk_norm == "full":
            query, key = share.all_heads * spec.head_dim, share.all_kv_heads * spec.head_dim
            self._own_heads = slice(share.first_head, share.first_head + spec.num_heads)
            self._own_kv_heads = slice(share.first_kv_head, share.first_kv_head + spec.num_kv_heads)
        q_rows = 2 * query if spec.has_output_gate else query
        self._q = owner.linear("q", (q_rows, hidden), ops, has_bias=spec.has_qkv_bias)
        self._k = owner.linear("k", (key, hidden), ops, has_bias=spec.has_qkv_bias)
        self._v = None
        if not spec.value_is_key:
            self._v = owner.linear("v", (value, hidden), ops, has_bias=spec.has_qkv_bias)
        self._v_norm = RmsNorm(None, norm_eps, ops) if spec.has_value_norm else None
        shared = None if share is None else share.shared
        self._o = owner.inner("o", (hidden, out_width), ops, shared, has_bias=spec.has_out_bias)
        self._temperature = None if spec.temperature is None else Temperature(spec.temperature)
        self._q_norm = self._k_norm = None
        if spec.qk_norm == "l2":
            self._q_norm = self._k_norm = RmsNorm(None, norm_eps, ops)
        elif spec.qk_norm != "none":
            q_width, k_width = (query, key) if spec.qk_norm == "full" else (spec.head_dim, spec.head_dim)
            self._q_norm = RmsNorm(owner.take("q_norm", q_width), norm_eps, ops)
            self._k_norm = RmsNorm(owner.take("k_norm", k_width), norm_eps, ops)
        if spec.has_sinks:
            owner.take("sinks", spec.num_heads)  # used by `attend`
        owner.finish()

    def forward(self, x_TD: Tensor, positions_T: Tensor, view: KvView, micro_batch: int = 0) -> Steps[Tensor]:
        """[T, D] in the seam dtype; every row attends to its own sequence in the pool."""
        spec = self._spec
        q_TF, gate_TF = self._q(x_TD), None
        if spec.has_output_gate:
            both_THC = q_TF.unflatten(1, (spec.num_heads, 2 * spec.head_dim))
            q_TF, gate_TF = (half.flatten(1) for half in both_THC.chunk(2, dim=-1))
        q_THC = self._heads(q_TF, self._q_norm, self._own_heads)
        key_TF = self._k(x_TD)
        key_TGC = self._heads(key_TF, self._k_norm, self._own_kv_heads)
        value_TGC = self._heads(key_TF if self._v is None else self._v(x_TD), None)
        if self._v_norm is not None:
            value_TGC = self._v_norm(value_TGC)
        if self._rope is not None:
            q_THC = self._rope.rotate(q_THC, positions_T, self._ops)
            key_TGC = self._rope.rotate(key_TGC, positions_T, self._ops)
        if spec.qk_norm == "l2" and self._q_norm is not None and self._k_norm is not None:
            q_THC, key_TGC = self._q_norm(q_THC), self._k_norm(key_TGC)
        if self._temperature is not None:
            q_THC = self._temperature.scale(q_THC, positions_T)
        new_kv = NewKv(key_TGC=key_TGC, value_TGC=value_TGC)
        out_THC = yield from self._attend(q_THC, new_kv, view)
        out_TF = out_THC.flatten(1)
        if gate_TF is not None:
            out_TF = (out_TF.float() * self._ops.sigmoid(gate_TF)).to(out_TF.dtype)
        return (yield from self._o.forward(out_TF, micro_batch))

    def fused(self, layer_idx: int, norm: RmsNorm) -> FusedGqa | None:
        """This and the norm before it as one call; None where the layer has what such a call does not do.

        Raises: ConfigError as `NativeOps.gqa_layer`.
        """
        spec, ops, attend = self._spec, self._ops, self._attend
        if self._o.is_shared:
            return None
        maps = {"q": self._q, "k": self._k, "v": self._v}
        weights = {
            name: linear.weight_FD
            for name, linear in maps.items()
            if linear is not None and linear.bias_F is None
        }
        if self._o.bias_D is None:
            weights["o"] = self._o.weight_DF
        is_plain = len(weights) == 4 and spec.qk_norm != "l2" and spec.qkv_clip is None
        is_plain &= not (spec.has_output_gate or spec.has_value_norm or spec.temperature is not None)
        if not (is_plain and isinstance(ops, NativeOps) and isinstance(attend, PagedAttend)):
            return None
        norms = {"norm": norm, "q": self._q_norm, "k": self._k_norm}
        layer = ops.gqa_layer(
            layer_idx,
            spec,
            weights,
            {
                name: one.weight_D
                for name, one in norms.items()
                if one is not None and one.weight_D is not None
            },
            norm_eps=norm.eps,
            head_norm_eps=norm.eps if self._q_norm is None else self._q_norm.eps,
            sinks_H=attend.sinks_H,
        )
        return FusedGqa(layer, self._rope, ops)

    def _heads(self, x_TF: Tensor, norm: RmsNorm | None, own: slice | None = None) -> Tensor:
        """A projection as heads [T, H, C], normed over all heads or each, then clipped; `own` are taken out.

        Norms without a weight come after the rotation.
        """
        if norm is not None and self._spec.qk_norm == "full":
            x_TF = norm(x_TF)
        x_THC = x_TF.unflatten(1, (x_TF.shape[1] // self._spec.head_dim, self._spec.head_dim))
        if own is not None:
            x_THC = x_THC[:, own]
        if norm is not None and self._spec.qk_norm == "head":
            x_THC = norm(x_THC)
        clip = self._spec.qkv_clip
        return x_THC if clip is None else x_THC.clamp(min=-clip, max=clip)


class FusedGqa:
    """x + attention(norm(x)) in one native call: bit for bit what its parts give one after the other."""

    def __init__(self, layer: GqaLayer, rope: RopeTable | None, ops: NativeOps) -> None:
        self.layer = layer
        self.rope = rope
        self.ops = ops  # whose call it is

    def forward(self, x_TD: Tensor, positions_T: Tensor, view: KvView, micro_batch: int = 0) -> Steps[Tensor]:
        """The residual stream after it, in the seam dtype; never waits."""
        yield from ()
        cos_TC, sin_TC = (None, None) if self.rope is None else self.rope.at(positions_T)
        return self.layer(x_TD, cos_TC, sin_TC, view)


def _check(spec: GqaSpec) -> None:
    if spec.kv_from is not None:
        raise UnsupportedModelError(
            "grouped-query attention does not run keys and values of another layer (Gemma 4)"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModelError(
            f"num_kv_heads = {spec.num_kv_heads} must divide num_heads = {spec.num_heads}"
        )
