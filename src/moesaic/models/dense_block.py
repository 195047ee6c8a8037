"""A dense feed-forward network: the second half of a dense layer, or the shared expert of a sparse one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moesaic.kernels.ops import Ops
from moesaic.spec.model import DenseSpec


class DenseBlock:
    """down(act(gate(x)) * up(x)), with biases and an output gate where the spec has them.

    Our weight names: gate up down, gate_bias up_bias down_bias, output_gate.
    """

    def __init__(self, spec: DenseSpec, weights: Mapping[str, Tensor], ops: Ops) -> None:
        self.spec = spec
        self.weights = weights
        self.ops = ops

    def __call__(self, x_TD: Tensor) -> Tensor:
        """y_TD in the seam dtype."""
        spec, weights, ops = self.spec, self.weights, self.ops
        up_TF = ops.linear(x_TD, weights["up"], weights.get("up_bias"))
        if spec.is_gated:
            gate_TF = ops.linear(x_TD, weights["gate"], weights.get("gate_bias"))
            inner_TF = ops.activation(gate_TF, up_TF, spec.activation)
        else:
            inner_TF = ops.activation(up_TF, None, spec.activation)
        y_TD = ops.linear_inner(inner_TF, weights["down"], weights.get("down_bias"))
        if not spec.has_output_gate:
            return y_TD
        open_T1 = ops.sigmoid(ops.linear(x_TD, weights["output_gate"]))
        return (open_T1 * y_TD.float()).to(y_TD.dtype)
