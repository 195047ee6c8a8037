"""The expert of a layer that every token shares, for native calls that have the routed ones, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.native.elementwise import code_of
from moesaic.kernels.native.gqa import matrix_of
from moesaic.kernels.panel import Weight, check_shards
from moesaic.spec.model import DenseSpec
from moesaic.spec.numerics import Numerics


class SharedLayer:
    """down(act(gate(x)) * up(x)), opened by a gate of its own where it has one; `native` is for calls."""

    def __init__(
        self,
        compiled: Any,
        numerics: Numerics,
        layer_idx: int,
        spec: DenseSpec,
        weights: Mapping[str, Weight],
    ) -> None:
        """`weights` are up and down, and gate and open where the spec has them; all are kept.

        Raises: ConfigError when matmul_shards does not divide the inner width, into whole groups of an
                integer weight; ValueError from the kernels for weights that do not fit `spec`.
        """
        assert not spec.has_bias, "a shared expert with biases goes part by part"
        self._kept = dict(weights)
        seam = torch_dtype(numerics.seam_dtype)
        check_shards(weights["down"], numerics.matmul_shards)
        self.native = compiled.SharedLayer(
            layer_idx=layer_idx,
            width=weights["down"].shape[0],
            inner_width=spec.width,
            is_gated=spec.is_gated,
            function=code_of(spec.activation),
            is_bfloat16=seam == torch.bfloat16,
        )
        for name, weight in weights.items():
            shards = numerics.matmul_shards if name == "down" else 1
            self.native.set_matrix(name, *matrix_of(weight, shards, seam))
