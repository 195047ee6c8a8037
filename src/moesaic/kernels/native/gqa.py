"""Grouped-query attention of one layer as one native call, norm and residual with it: see door_gqa.cpp.

Weights are checked and turned into addresses once. Knows nothing of where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.kv_format import POOL_KINDS
from moesaic.kernels.kv_view import KvView
from moesaic.kernels.native.attention import pointers
from moesaic.kernels.panel import PanelWeight, Weight, check_shards
from moesaic.spec.model import GqaSpec
from moesaic.spec.numerics import Numerics


class GqaLayer:
    """x + o(attention(q, k, v of norm(x))) for one layer."""

    def __init__(  # noqa: PLR0913 - each is a parameter of the layer
        self,
        compiled: Any,
        kernels: Any,
        numerics: Numerics,
        layer_idx: int,
        spec: GqaSpec,
        weights: Mapping[str, Weight],
        norms: Mapping[str, Tensor],
        *,
        norm_eps: float,
        head_norm_eps: float,
        sinks_H: Tensor | None,
    ) -> None:
        """`weights` are q k v o; `norms` are norm, and q and k where heads are normed. All are kept.

        Raises: ConfigError when matmul_shards does not divide the heads' width, into whole groups of an
                integer weight; ValueError from the kernels for weights that do not fit `spec`.
        """
        self._kernels = kernels
        self._seam = torch_dtype(numerics.seam_dtype)
        self._kept = (dict(weights), dict(norms), sinks_H)
        check_shards(weights["o"], numerics.matmul_shards)
        self.native = compiled.GqaLayer(
            layer_idx=layer_idx,
            width=weights["o"].shape[0],
            heads=spec.num_heads,
            groups=spec.num_kv_heads,
            head_width=spec.head_dim,
            is_normed_whole=spec.qk_norm == "full",
            norm_eps=norm_eps,
            head_norm_eps=head_norm_eps,
            half=0 if spec.rope is None else spec.rope.dim // 2,
            is_interleaved=spec.rope is not None and spec.rope.is_interleaved,
            kv_block=numerics.kv_block,
            kv_lanes=numerics.kv_lanes,
            window=spec.window or 0,
            is_chunked=spec.is_chunked,
            softmax_scale=spec.softmax_scale,
            sinks=0 if sinks_H is None else sinks_H.data_ptr(),
            is_bfloat16=self._seam == torch.bfloat16,
        )
        for name, weight in weights.items():
            shards = numerics.matmul_shards if name == "o" else 1
            self.native.set_matrix(name, *matrix_of(weight, shards, self._seam))
        for name, norm in norms.items():
            assert norm.is_contiguous(), "the weight of a norm has no gaps"
            self.native.set_norm(name, norm.data_ptr(), norm.numel(), norm.dtype == torch.bfloat16)

    def __call__(self, x_TD: Tensor, cos_TC: Tensor | None, sin_TC: Tensor | None, view: KvView) -> Tensor:
        """The residual stream after the layer's attention; writes the step's keys and values first.

        Shapes:  x_TD [T, D] in the seam dtype; the tables [T, C'] float32, None without a rotation.
        """
        assert x_TD.dtype == self._seam, f"rows are {x_TD.dtype}, the seam is {self._seam}"
        keys, values = view.key_pool, view.value_pool
        assert values is not None, "keys and values have a pool each"
        assert keys.dtype == values.dtype, "the pools of a layer have one format"
        x_TD = x_TD.contiguous()
        y_TD = torch.empty_like(x_TD)
        self._kernels.gqa(
            self.native,
            x_TD.data_ptr(),
            x_TD.numel(),
            y_TD.data_ptr(),
            0 if cos_TC is None else cos_TC.data_ptr(),
            0 if sin_TC is None else sin_TC.data_ptr(),
            0 if cos_TC is None else cos_TC.numel(),
            keys.data_ptr(),
            keys.nbytes,
            values.data_ptr(),
            values.nbytes,
            POOL_KINDS[keys.dtype],
            *pointers(view.places),
        )
        return y_TD


def matrix_of(weight: Weight, shards: int, seam: torch.dtype) -> tuple[int, int, int, int, int, bool]:
    """Address, bytes, leaves, bits, group and zero points of a weight."""
    if isinstance(weight, PanelWeight):
        kind = weight.kind
        assert weight.num_sections == 1, "a projection is of one section"
        group = kind.group_size(weight.width)
        return weight.data.data_ptr(), weight.data.nbytes, shards, kind.bits, group, kind.has_zeros
    assert weight.dtype == seam, "floats are of the seam dtype"
    assert weight.is_contiguous(), "a projection has no gaps"
    return weight.data_ptr(), weight.nbytes, shards, 0, 0, False
