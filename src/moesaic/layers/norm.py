"""Normalisation over the ops."""

from __future__ import annotations

from torch import Tensor

from moesaic.kernels.ops import Ops


class RmsNorm:
    """Root-mean-square norm over the last dim.

    Shapes:  weight_D [D]; None scales nothing.
    Source:  arXiv:1910.07467.
    """

    def __init__(self, weight_D: Tensor | None, eps: float, ops: Ops) -> None:
        self.weight_D = weight_D
        self.eps = eps
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """Of x [.., D], the same shape and dtype."""
        return self._ops.rms_norm(x, self.weight_D, self.eps)


class LayerNorm:
    """Norm of the last dim around its mean.

    Shapes:  weight_D [D]; bias_D [D] or None.
    Source:  arXiv:1607.06450.
    """

    def __init__(self, weight_D: Tensor, bias_D: Tensor | None, eps: float, ops: Ops) -> None:
        self.weight_D = weight_D
        self.bias_D = bias_D
        self.eps = eps
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        """Of x [.., D], the same shape and dtype."""
        return self._ops.layer_norm(x, self.weight_D, self.bias_D, self.eps)
