"""Linear maps over the ops: by whole rows, or row-parallel, with an inner width that ranks may share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.kernels.ops import Ops
from moesaic.kernels.panel import PanelWeight, Weight, slice_columns
from moesaic.steps import Steps


class Linear:
    """x @ weight.T + bias.

    Shapes:  weight_FD [F, D]; bias_F [F].
    """

    def __init__(self, weight_FD: Weight, bias_F: Tensor | None, ops: Ops) -> None:
        self.weight_FD = weight_FD
        self.bias_F = bias_F
        self._ops = ops

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, F] in the seam dtype."""
        return self._ops.linear(x_TD, self.weight_FD, self.bias_F)


class SharedSum(Protocol):
    """How ranks that share the inner width of row-parallel matmuls add their parts.

    Each has a run of leaves, which is some whole subtrees of so many leaves each.
    """

    @property
    def leaf_counts(self) -> Sequence[int]:
        """Of this rank's subtrees, in order."""
        ...

    def join(self, roots: Sequence[Tensor], micro_batch: int) -> Steps[Tensor]:
        """The root over all leaves of all ranks, from those of this rank's subtrees [T, D]."""
        ...


class InnerLinear:
    """x @ weight.T + bias, where x and the columns of the weight may be a rank's part of the inner width.

    Shapes:  weight_DF [D, F]; bias_D [D], of which every rank has the whole.
    """

    def __init__(
        self, weight_DF: Weight, bias_D: Tensor | None, ops: Ops, shared: SharedSum | None = None
    ) -> None:
        """`shared` None: this rank has the whole width."""
        self.weight_DF = weight_DF
        self.bias_D = bias_D
        self._ops = ops
        self._shared = shared
        self._parts = [] if shared is None else _parts(weight_DF, shared.leaf_counts)

    @property
    def is_shared(self) -> bool:
        """Whether other ranks have parts of the inner width."""
        return self._shared is not None

    def forward(self, x_TF: Tensor, micro_batch: int = 0) -> Steps[Tensor]:
        """[T, D] in the seam dtype; waits for the other ranks."""
        if self._shared is None:
            return self._ops.linear_inner(x_TF, self.weight_DF, self.bias_D)
        roots = [
            self._ops.inner_root(x_TF[:, columns.start : columns.stop], weight_DF, num_leaves)
            for columns, weight_DF, num_leaves in self._parts
        ]
        root_TD = yield from self._shared.join(roots, micro_batch)
        return self._ops.from_root(root_TD, self.bias_D)


def _parts(weight_DF: Weight, leaf_counts: Sequence[int]) -> list[tuple[range, Weight, int]]:
    """The columns of each subtree, the weight there, and how many leaves it has."""
    leaf, found, start = weight_DF.shape[1] // sum(leaf_counts), [], 0
    for count in leaf_counts:
        columns = range(start, start + count * leaf)
        if len(leaf_counts) == 1:
            part = weight_DF
        elif isinstance(weight_DF, PanelWeight):
            part = slice_columns(weight_DF, columns)
        else:
            part = weight_DF[:, columns.start : columns.stop]
        found.append((columns, part, count))
        start = columns.stop
    return found


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

    def linear(self, name: str, shape: tuple[int, int], ops: Ops, *, has_bias: bool = False) -> Linear:
        """The linear map of the weight `name` and, with `has_bias`, of `name`_bias.

        Raises: ConfigError as `take`.
        """
        bias_F = self.take(f"{name}_bias", shape[0]) if has_bias else None
        return Linear(self._take(name, *shape), bias_F, ops)

    def inner(
        self,
        name: str,
        shape: tuple[int, int],
        ops: Ops,
        shared: SharedSum | None = None,
        *,
        has_bias: bool = False,
    ) -> InnerLinear:
        """The row-parallel map of the weight `name`, as `linear`.

        Raises: ConfigError as `take`.
        """
        bias_D = self.take(f"{name}_bias", shape[0]) if has_bias else None
        return InnerLinear(self._take(name, *shape), bias_D, ops, shared)

    def finish(self) -> None:
        """Every weight must have been taken: what is not used would be an error nobody sees.

        Raises: ConfigError naming those that were not.
        """
        unused = sorted(set(self._weights) - self._taken)
        if unused:
            raise ConfigError(
                f"{self._owner} has no use for the weights {', '.join(unused)}; its spec lacks them"
            )
