"""Multi-head latent attention in the absorbed form, for every row: heads meet in the latent, in one KV group.

    cache of a token   latent (normed) | rope key (rotated)          kv_lora_rank + rope_dim numbers
    query of a head    q_nope @ W_uk   | q_rope (rotated)            against that row; the value is the latent
    result of a head   (softmax-weighted latents) @ W_uv

Source:  DeepSeek-V2, arXiv:2405.04434, sec. 2.1 and app. C.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from moesaic.errors import UnsupportedModelError
from moesaic.kernels.kv_view import KvView
from moesaic.kernels.ops import Ops
from moesaic.kernels.panel import Weight
from moesaic.layers.attention import Attend, NewKv
from moesaic.layers.linear import SharedSum, WeightSet
from moesaic.layers.norm import RmsNorm
from moesaic.layers.rope import RopeTable
from moesaic.spec.model import MlaSpec
from moesaic.steps import Steps


class MlaAttention:
    """Projections, latent norms and rotation around an `Attend` over one KV group.

    Weights: q, or q_a q_a_norm q_b with a query rank; kv_a kv_a_norm kv_b o; q_a_bias kv_a_bias o_bias.
    Shapes:  q or q_b [H * (nope + rope), ..]; kv_a [latent + rope, D]; kv_b [H * (nope + value), latent];
             o [D, H * value].
    Owns:    a float32 copy of kv_b, 4 bytes a number: the per-head maps are multiplied in float32.
    """

    def __init__(
        self,
        spec: MlaSpec,
        weights: Mapping[str, Weight],
        ops: Ops,
        rope: RopeTable,
        attend: Attend,
        *,
        norm_eps: float,
        shared: SharedSum | None = None,
    ) -> None:
        """`norm_eps` is that of the latent norms, which need not be the model's. `shared`: the heads of the
        spec are this rank's, and others have the rest.

        Raises: UnsupportedModelError naming what the spec needs and this build lacks; ConfigError for
                weights.
        """
        if spec.index is not None:
            raise UnsupportedModelError(
                "latent attention does not run a sparse-attention index (DeepSeek-V3.2)"
            )
        if ops.numerics.forms.mla != "absorbed":
            raise UnsupportedModelError(
                f"latent attention runs absorbed; numerics.forms.mla is {ops.numerics.forms.mla!r}"
            )
        self._spec = spec
        self._ops = ops
        self._rope = rope
        self._attend = attend
        owner = WeightSet("latent attention", weights)
        hidden = weights["o"].shape[0] if "o" in weights else 0
        heads, latent = spec.num_heads, spec.kv_lora_rank
        query = heads * (spec.nope_dim + spec.rope_dim)
        self._q_a = self._q_a_norm = None
        if spec.q_lora_rank is None:
            self._q = owner.linear("q", (query, hidden), ops)
        else:
            self._q_a = owner.linear("q_a", (spec.q_lora_rank, hidden), ops, has_bias=spec.has_bias)
            self._q_a_norm = RmsNorm(owner.take("q_a_norm", spec.q_lora_rank), norm_eps, ops)
            self._q = owner.linear("q_b", (query, spec.q_lora_rank), ops)
        self._kv_a = owner.linear("kv_a", (latent + spec.rope_dim, hidden), ops, has_bias=spec.has_bias)
        self._kv_a_norm = RmsNorm(owner.take("kv_a_norm", latent), norm_eps, ops)
        out_shape = (hidden, heads * spec.value_dim)
        self._o = owner.inner("o", out_shape, ops, shared, has_bias=spec.has_bias)
        kv_b = owner.take("kv_b", heads * (spec.nope_dim + spec.value_dim), latent).float()
        kv_b = kv_b.view(heads, spec.nope_dim + spec.value_dim, latent)
        self._key_map_HCM = kv_b[:, : spec.nope_dim].contiguous()
        self._value_map_HMC = kv_b[:, spec.nope_dim :].transpose(1, 2).contiguous()
        owner.finish()

    def forward(self, x_TD: Tensor, positions_T: Tensor, view: KvView, micro_batch: int = 0) -> Steps[Tensor]:
        """[T, D] in the seam dtype; every row attends to its own sequence in the pool."""
        q_THC = self._queries(x_TD, positions_T)
        out_THM = yield from self._attend(q_THC, self._new_kv(x_TD, positions_T), view)
        out_HTC = self._ops.bmm(out_THM.transpose(0, 1), self._value_map_HMC)
        return (yield from self._o.forward(out_HTC.transpose(0, 1).flatten(1), micro_batch))

    def _queries(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """Queries [T, H, latent + rope] against the cached rows."""
        spec = self._spec
        if self._q_a is not None and self._q_a_norm is not None:
            x_TD = self._q_a_norm(self._q_a(x_TD))
        q_THC = self._q(x_TD).view(-1, spec.num_heads, spec.nope_dim + spec.rope_dim)
        nope_THC, rope_THC = q_THC.split((spec.nope_dim, spec.rope_dim), dim=-1)
        latent_HTM = self._ops.bmm(nope_THC.transpose(0, 1), self._key_map_HCM)
        rope_THC = self._rope.rotate(rope_THC, positions_T, self._ops)
        return torch.cat((latent_HTM.transpose(0, 1), rope_THC), dim=-1)

    def _new_kv(self, x_TD: Tensor, positions_T: Tensor) -> NewKv:
        """Rows [T, 1, latent + rope] for the cache."""
        spec = self._spec
        latent_TM, rope_TC = self._kv_a(x_TD).split((spec.kv_lora_rank, spec.rope_dim), dim=-1)
        rope_TGC = self._rope.rotate(rope_TC.unsqueeze(1), positions_T, self._ops)
        key_TGC = torch.cat((self._kv_a_norm(latent_TM).unsqueeze(1), rope_TGC), dim=-1)
        return NewKv(key_TGC=key_TGC, value_TGC=None)
