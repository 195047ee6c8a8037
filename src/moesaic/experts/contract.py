"""The seam between tokens and experts: four verbs, two sides, and the values that pass between them.

`parallel/dispatch/*` implements `TokenSide` and `ExpertSide`; a model sees only `RoutedExperts`. An expert
that returns its input makes any dispatcher the identity (weights summing to one): that is every dispatcher's
first test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from moesaic.experts.blob import ExpertWeights
from moesaic.kernels.formats import Packed
from moesaic.spec.experts import ExpertKey, ExpertPlan
from moesaic.steps import Steps, Wait

BlobTable = Sequence[ExpertWeights]
"""What each slot of a rank points to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tag:
    """Which step, layer and part of it a message belongs to."""

    epoch: int
    plan_version: int
    step_id: int
    micro_batch: int
    chunk: int
    layer_idx: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Routing:
    """A router's choices. Ids ascend along K: choice order is id order, and ties went to the lowest id.

    Shapes:  experts_TK [T, K] int64 (logical); weights_TK [T, K] float32.
    """

    experts_TK: Tensor
    weights_TK: Tensor


Observe = Callable[[int, Routing], None]
"""Told the MoE layer's number (counted over the MoE layers, from 0) and what its router chose: tensors that
may be written again in the next step."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertBatch:
    """What one rank's experts got to do; valid until `reply`. The rows may be the sender's own memory.

    J jobs are sorted by (slot, source rank, token):

        offsets_L1   0     2     2           5        slot s has jobs offsets[s] .. offsets[s + 1]
        row_J        7  9        0  3  9              job -> row of x_RD

    Shapes:  x_RD [R, D] in the wire format; row_J [J] int64; offsets_L1 [L + 1] int64; weight_J [J] float32;
             hint_L [L] int64: jobs the senders predict for these slots in the next MoE layer.
    """

    tag: Tag
    x_RD: Packed
    row_J: Tensor
    offsets_L1: Tensor
    weight_J: Tensor  # read only by weight_on="input" and by subtree returns
    num_jobs: int | None  # None under graph capture: known on the device only, bounded by the bucket
    hint_L: Tensor | None


class Ticket(Protocol):
    """Receipt of one `send`; all but `returned` is private to its dispatcher."""

    returned: Wait


class TokenSide(Protocol):
    """Ranks with attention."""

    @property
    def num_chunks(self) -> int:
        """Parts in which a layer's rows travel; the same on every rank."""
        return 1

    def send(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Ticket:
        """Hand the rows to the ranks that hold their experts; returns at once. T may be 0."""
        ...

    def collect(self, ticket: Ticket) -> Tensor:
        """y_TD [T, D] in the seam dtype: evaluates the combine tree and spends the ticket."""
        ...


class ExpertSide(Protocol):
    """Ranks with experts; nothing here knows T, requests or attention."""

    def next(self, tag: Tag | None) -> Wait:
        """Over when the headers of every live token rank for `tag`, or for whatever is next, are in."""
        ...

    def receive(self, tag: Tag | None) -> ExpertBatch:
        """The batch of `tag`, or whatever is next."""
        ...

    def reply(self, batch: ExpertBatch, out_JD: Tensor) -> None:
        """Send results back: unweighted, also when J is 0. Frees the batch.

        In the seam dtype, of slices of experts the roots of their sums in float32.
        """
        ...


class ExpertFfn(Protocol):
    """Computes every job of a batch."""

    def __call__(self, batch: ExpertBatch) -> Steps[Tensor]:
        """out_JD [J, D] as `ExpertSide.reply` takes it, one row per job."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Wave:
    """Slots whose experts can be computed together, once `ready` is over."""

    ready: Wait
    slots: tuple[int, ...]
    table: BlobTable  # by slot; only `slots` are sure to be there
    site: Literal[
        "device", "host"
    ]  # where these slots are computed: a property of the expert, never of its heat


class ExpertStore(Protocol):
    """The experts of one rank, of all layers, in one budget of memory."""

    def adopt(self, plan: ExpertPlan) -> Steps[None]:
        """Make this rank's slots what `plan` says; called between steps.

        Raises: ConfigError naming the experts that the store cannot get.
        """
        ...

    def waves(self, layer_idx: int, offsets_L1: Tensor) -> Iterator[Wave]:
        """Each slot that has jobs once, those in memory first."""
        ...

    def prefetch(self, keys: Sequence[ExpertKey]) -> None:
        """Experts that are likely to be asked for soon; a hint, never a promise."""
        ...


class RoutedExperts(Protocol):
    """The outer seam, all that `moe_block` sees: `Staged`, or `Fused` in one native call."""

    def forward(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Steps[Tensor]:
        """y_TD [T, D] in the seam dtype: the weighted sum over each token's choices.

        Yields at least once, after the rows are sent: the caller's shared expert runs there.
        """
        ...


class SparseHalf(Protocol):
    """x + experts(norm(x)) as one: norm, router, routed experts and the residual."""

    def forward(self, x_TD: Tensor, tag: Tag, observe: Observe | None) -> Steps[Tensor]:
        """The residual stream after it, in the seam dtype."""
        ...
