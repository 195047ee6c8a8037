"""Gated delta-rule linear attention: a state of constant size instead of keys and values of every token.

    x -> qkv -> causal convolution, activation -> q, k (each of length 1), v
      -> a, b -> decay and beta of each value head          S <- decay S;  S moves towards v at k by beta
      -> z                                                  o = norm(S at q) * silu(z) -> out projection

Source:  Gated DeltaNet, arXiv:2412.06464, sec. 3; Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.errors import UnsupportedModelError
from moesaic.kernels.ops import Ops
from moesaic.kernels.panel import Weight
from moesaic.kernels.state_view import StateView
from moesaic.layers.linear import Linear, WeightSet
from moesaic.layers.norm import RmsNorm
from moesaic.spec.model import LinearSpec
from moesaic.steps import Steps

L2_EPS = 1e-6
"""Under the root of the lengths of queries and keys. Source: flash-linear-attention's default, as in
transformers 5."""


class Projected(NamedTuple):
    """What a layer makes of its input rows.

    Shapes:  mixed_TF [T, q | k | v], the convolution's channels; z_THC [T, H, C']; b_TH and a_TH [T, H].
    """

    mixed_TF: Tensor
    z_THC: Tensor
    b_TH: Tensor
    a_TH: Tensor


class GatedDelta:
    """Projections, convolution and norms around the recurrent step.

    Weights: qkv z b a, or qkvz ba where they are fused; conv decay_log decay_bias out_norm out.
    Shapes:  G key heads of C, H value heads of C'. qkv [2 * G * C + H * C', D], z [H * C', D], b and a
             [H, D]; qkvz and ba have the same rows by key head: of each its q | k | v | z, or b | a. conv
             [channels, 1, width]; decay_log and decay_bias [H]; out_norm [C']; out [D, H * C'].
    """

    def __init__(self, spec: LinearSpec, weights: Mapping[str, Weight], ops: Ops, *, norm_eps: float) -> None:
        """Raises: UnsupportedModelError for another form than the recurrent one; ConfigError for weights."""
        if ops.numerics.forms.state != "recurrent":
            raise UnsupportedModelError(
                f"linear attention runs recurrent; numerics.forms.state is {ops.numerics.forms.state!r}"
            )
        self._spec = spec
        self._ops = ops
        owner = WeightSet("linear attention", weights)
        hidden = weights["out"].shape[0] if "out" in weights else 0
        heads, channels = spec.num_value_heads, spec.conv_channels
        value = heads * spec.value_dim
        rows = (
            {"qkvz": channels + value, "ba": 2 * heads}
            if spec.is_fused
            else {"qkv": channels, "z": value, "b": heads, "a": heads}
        )
        self._in: dict[str, Linear] = {
            name: owner.linear(name, (count, hidden), ops) for name, count in rows.items()
        }
        self._conv_FX = owner.take("conv", channels, 1, spec.conv_width).squeeze(1)
        # exp(log rate) in float64, rounded once.
        self._rate_H = owner.take("decay_log", heads).double().exp().float()
        self._decay_bias_H = owner.take("decay_bias", heads).float()
        self._norm = RmsNorm(owner.take("out_norm", spec.value_dim), norm_eps, ops)
        self._out = owner.inner("out", (hidden, value), ops)
        owner.finish()

    def forward(
        self, x_TD: Tensor, positions_T: Tensor, view: StateView, micro_batch: int = 0
    ) -> Steps[Tensor]:
        """[T, D] in the seam dtype; never waits. Positions count only through the order of the rows."""
        spec, ops = self._spec, self._ops
        projected = self._project(x_TD)
        mixed_TF = ops.causal_conv(projected.mixed_TF, self._conv_FX, view)
        mixed_TF = ops.activation(mixed_TF, None, spec.activation)
        key_width = spec.num_key_heads * spec.key_dim
        q_TF, k_TF, v_TF = mixed_TF.split((key_width, key_width, mixed_TF.shape[1] - 2 * key_width), dim=1)
        q_TGC, k_TGC = (
            ops.l2_norm(x_TF.unflatten(1, (spec.num_key_heads, spec.key_dim)), L2_EPS)
            for x_TF in (q_TF, k_TF)
        )
        log_decay_TH = -self._rate_H * ops.softplus(projected.a_TH.float() + self._decay_bias_H)
        out_THC = ops.delta_rule(
            q_TGC * spec.key_dim**-0.5,
            k_TGC,
            v_TF.unflatten(1, (spec.num_value_heads, spec.value_dim)),
            log_decay_TH,
            ops.sigmoid(projected.b_TH),
            view,
        )
        out_TF = ops.activation(projected.z_THC, self._norm(out_THC), "silu").flatten(1)
        return (yield from self._out.forward(out_TF, micro_batch))

    def _project(self, x_TD: Tensor) -> Projected:
        spec, found = self._spec, {name: linear(x_TD) for name, linear in self._in.items()}
        heads = (spec.num_value_heads, spec.value_dim)
        if not spec.is_fused:
            return Projected(found["qkv"], found["z"].unflatten(1, heads), found["b"], found["a"])
        groups, shared = spec.num_key_heads, spec.num_value_heads // spec.num_key_heads
        widths = (spec.key_dim, spec.key_dim, shared * spec.value_dim, shared * spec.value_dim)
        q, k, v, z = found["qkvz"].unflatten(1, (groups, -1)).split(widths, dim=-1)
        b, a = found["ba"].unflatten(1, (groups, -1)).chunk(2, dim=-1)
        mixed_TF = torch.cat([part.flatten(1) for part in (q, k, v)], dim=1)
        return Projected(mixed_TF, z.flatten(1).unflatten(1, heads), b.flatten(1), a.flatten(1))
