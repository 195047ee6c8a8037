"""Linear maps over the ops: a weight, its bias, and which of the two matmuls it is."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.kernels.ops import Ops
from moesaic.kernels.panel import PanelWeight, Weight


class Linear:
    """x @ weight.T + bias. `is_inner` marks the row-parallel ones, whose inner dim a layout may split.

    Shapes:  weight_FD [F, D]; bias_F [F].
    """

    def __init__(self, weight_FD: Weight, bias_F: Tensor | None, ops: Ops, *, is_inner: bool = False) -> None:
        self.weight_FD = weight_FD
        self.bias_F = bias_F
        self._ops = ops
        self._is_inner = is_inner

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, F] in the seam dtype."""
        apply = self._ops.linear_inner if self._is_inner else self._ops.linear
        return apply(x_TD, self.weight_FD, self.bias_F)


class WeightSet:
    """The weights of one layer by our names, taken one by one, each with the shape it must have."""

    def __init__(self, owner: str, weights: Mapping[str, Weight]) -> None:
        self._owner = owner
        self._weights = weights
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        """The weight `name`, as floats.

        Raises: ConfigError when it is missing, of another shape or in an integer format.
        """
        weight = self._take(name, *shape)
        if isinstance(weight, PanelWeight):
            raise ConfigError(f"{self._owner}: weight {name!r} must be floats, it is {weight.format}")
        return weight

    def _take(self, name: str, *shape: int) -> Weight:
        if name not in self._weights:
            raise ConfigError(
                f"{self._owner} needs the weight {name!r}; given: {', '.join(sorted(self._weights))}"
            )
        weight = self._weights[name]
        if tuple(weight.shape) != shape:
            raise ConfigError(
                f"{self._owner}: weight {name!r} has shape {list(weight.shape)}, its spec says {list(shape)}"
            )
        self._taken.add(name)
        return weight

    def linear(
        self, name: str, shape: tuple[int, int], ops: Ops, *, has_bias: bool = False, is_inner: bool = False
    ) -> Linear:
        """The linear map of the weight `name` and, with `has_bias`, of `name`_bias.

        Raises: ConfigError as `take`.
        """
        bias_F = self.take(f"{name}_bias", shape[0]) if has_bias else None
        return Linear(self._take(name, *shape), bias_F, ops, is_inner=is_inner)

    def finish(self) -> None:
        """Every weight must have been taken: what is not used would be an error nobody sees.

        Raises: ConfigError naming those that were not.
        """
        unused = sorted(set(self._weights) - self._taken)
        if unused:
            raise ConfigError(
                f"{self._owner} has no use for the weights {', '.join(unused)}; its spec lacks them"
            )
