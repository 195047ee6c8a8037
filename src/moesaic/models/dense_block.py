"""A dense feed-forward network: the second half of a dense layer, or the shared expert of a sparse one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.native.shared import SharedLayer
from moesaic.kernels.ops import Ops
from moesaic.kernels.panel import Weight
from moesaic.layers.linear import SharedSum, WeightSet
from moesaic.spec.model import DenseSpec
from moesaic.steps import Steps


class DenseBlock:
    """down(act(gate(x)) * up(x)), with biases and an output gate where the spec has them.

    Our weight names: gate up down, gate_bias up_bias down_bias, output_gate.
    """

    def __init__(
        self, spec: DenseSpec, weights: Mapping[str, Weight], ops: Ops, sums: SharedSum | None = None
    ) -> None:
        """`sums`: the width of the spec is this rank's, and others have the rest.

        Raises: ConfigError for weights.
        """
        owner = WeightSet("a dense network", weights)
        hidden = weights["down"].shape[0] if "down" in weights else 0
        inner = (spec.width, hidden)
        self._spec = spec
        self._ops = ops
        self._gate = owner.linear("gate", inner, ops, has_bias=spec.has_bias) if spec.is_gated else None
        self._up = owner.linear("up", inner, ops, has_bias=spec.has_bias)
        self._down = owner.inner("down", (hidden, spec.width), ops, sums, has_bias=spec.has_bias)
        self._open = owner.linear("output_gate", (1, hidden), ops) if spec.has_output_gate else None
        owner.finish()

    def forward(self, x_TD: Tensor, micro_batch: int) -> Steps[Tensor]:
        """y_TD in the seam dtype."""
        spec, ops = self._spec, self._ops
        up_TF = self._up(x_TD)
        if self._gate is not None:
            inner_TF = ops.activation(self._gate(x_TD), up_TF, spec.activation)
        else:
            inner_TF = ops.activation(up_TF, None, spec.activation)
        y_TD = yield from self._down.forward(inner_TF, micro_batch)
        if self._open is None:
            return y_TD
        open_T1 = ops.sigmoid(self._open(x_TD))
        return (open_T1 * y_TD.float()).to(y_TD.dtype)

    def fused(self, layer_idx: int) -> SharedLayer | None:
        """This as the shared expert of a call that has the routed ones, too; None for what such a call does
        not do.

        Raises: ConfigError as `NativeOps.shared_layer`.
        """
        if self._down.is_shared or not isinstance(self._ops, NativeOps):
            return None
        linears = {"gate": self._gate, "up": self._up, "open": self._open}
        weights = {name: linear.weight_FD for name, linear in linears.items() if linear is not None}
        weights["down"] = self._down.weight_DF
        return self._ops.shared_layer(layer_idx, self._spec, weights)
