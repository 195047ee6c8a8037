"""Which experts a token goes to, and with what weights. Float32 throughout, whatever the experts use.

Knows no ranks, slots or placement: its ids are logical ids.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import Routing
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.native.router import RouterLayer
from moesaic.kernels.ops import Ops
from moesaic.spec.model import MoeSpec


class Router:
    """The gate of one layer: logits here, choice and weights by the ops."""

    def __init__(
        self,
        spec: MoeSpec,
        weight_ED: Tensor,
        selection_bias_E: Tensor | None,
        logit_bias_E: Tensor | None,
        ops: Ops,
        *,
        input_norm: Callable[[Tensor], Tensor] | None = None,
        expert_scale_E: Tensor | None = None,
    ) -> None:
        """Weights and biases are kept in float32; `input_norm` is applied to rows widened to it.

        Raises: ConfigError for a gate that cannot choose so many experts, with the arithmetic; for a weight
                or bias of another shape, or one that the gate's spec does not announce.
        """
        _check(spec)
        self._spec = spec
        self._ops = ops
        self._weight_ED = _float32("router weight", weight_ED, True, (spec.num_experts, weight_ED.shape[-1]))
        expected = (spec.num_experts,)
        self._selection_bias_E = _float32(
            "selection bias", selection_bias_E, spec.gate.has_selection_bias, expected
        )
        if (input_norm is not None) != spec.gate.has_input_norm:
            raise ConfigError(
                f"router: the gate's spec has {'a' if spec.gate.has_input_norm else 'no'} norm of its input, "
                f"and {'none' if input_norm is None else 'one'} was given"
            )
        self._input_norm = input_norm
        self._expert_scale_E = _float32("expert scale", expert_scale_E, spec.gate.has_expert_scale, expected)
        self._logit_bias_E = _float32("logit bias", logit_bias_E, spec.gate.has_logit_bias, expected)

    def __call__(self, x_TD: Tensor) -> Routing:
        """The choices of each row.

        Shapes:  x_TD [T, D] of the model's width, any float dtype.
        """
        assert self._weight_ED is not None, "checked at construction"
        if self._input_norm is not None:
            x_TD = self._input_norm(x_TD.float())
        logits_TE = self._ops.linear_float32(x_TD, self._weight_ED)
        if self._logit_bias_E is not None:
            logits_TE = logits_TE + self._logit_bias_E
        return self.route(logits_TE)

    def route(self, logits_TE: Tensor) -> Routing:
        """The choices that float32 logits make.

        Shapes:  logits_TE [T, E] float32, the logit bias added.
        """
        experts_TK, weights_TK = self._ops.gate(
            logits_TE,
            self._spec.gate,
            self._spec.experts_per_token,
            self._selection_bias_E,
            self._expert_scale_E,
        )
        return Routing(experts_TK=experts_TK, weights_TK=weights_TK)

    def fused(self, layer_idx: int, norm_D: Tensor | None, norm_eps: float) -> RouterLayer | None:
        """This and a root-mean-square norm before it, for calls that begin with them; None for what they do
        not do."""
        assert self._weight_ED is not None, "checked at construction"
        is_plain = self._input_norm is None and self._spec.gate.score != "sparsemixer"
        is_plain &= self._weight_ED.shape[1] == self._spec.row_width
        if not (is_plain and isinstance(self._ops, NativeOps)):
            return None
        return self._ops.router_layer(
            layer_idx,
            self._spec,
            self._weight_ED,
            norm_D=norm_D,
            norm_eps=norm_eps,
            logit_bias_E=self._logit_bias_E,
            selection_bias_E=self._selection_bias_E,
            expert_scale_E=self._expert_scale_E,
        )


def _check(spec: MoeSpec) -> None:
    experts, chosen = spec.num_experts, spec.experts_per_token
    groups, kept = spec.gate.num_groups, spec.gate.groups_per_token
    if not 1 <= chosen <= experts:
        raise ConfigError(f"experts_per_token must be in 1 to num_experts: got {chosen} of {experts}")
    if groups < 1 or experts % groups:
        raise ConfigError(
            f"num_groups must divide num_experts: {experts} experts in {groups} groups"
            + (f" leave {experts % groups} over" if groups > 0 else "")
        )
    if not 1 <= kept <= groups:
        raise ConfigError(f"groups_per_token must be in 1 to num_groups: got {kept} of {groups}")
    if kept * (experts // groups) < chosen:
        raise ConfigError(
            f"{kept} groups of {experts} / {groups} = {experts // groups} experts leave "
            f"{kept * (experts // groups)} to choose from, fewer than experts_per_token = {chosen}"
        )
    if spec.gate.score == "sparsemixer" and chosen != 2:
        raise ConfigError(f"sparsemixer chooses 2 experts, and experts_per_token is {chosen}")
    if spec.gate.group_score == "top2_sum" and kept < groups and experts // groups < 2:
        raise ConfigError(f"group_score top2_sum needs two experts in a group: {experts} / {groups} = 1")


def _float32(name: str, tensor: Tensor | None, is_expected: bool, shape: tuple[int, ...]) -> Tensor | None:
    if (tensor is not None) != is_expected:
        raise ConfigError(
            f"{name}: the gate's spec {'has' if is_expected else 'has no'} such tensor, and "
            f"{'none' if tensor is None else 'one'} was given"
        )
    if tensor is None:
        return None
    if tuple(tensor.shape) != shape:
        raise ConfigError(f"{name}: expected shape {list(shape)}, got {list(tensor.shape)}")
    return tensor.float()
