"""Row-parallel matmuls over several ranks: each sends the roots of its leaves, and all add them by the tree.

    leaves     0   1   2   3        rank 0 has 0 1, rank 1 has 2, rank 2 has 3
    sent       01       2   3       to every rank of the replica, in float32
    added      01  +  (2 + 3)       by each rank by itself: the same bits as on one rank

Not a sum over ranks, whose order would follow the layout. Knows nothing of heads, weights or layers' kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import RoutedExperts, Routing, Tag
from moesaic.parallel.segment import LaneSize
from moesaic.parallel.transport import Purpose, Transport
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import DTYPE_BYTES, Numerics
from moesaic.spec.tensor_split import Subtree, TensorSplit, subtrees
from moesaic.steps import Steps


class TreeSum:
    """The sums of one layer on one rank: a `SharedSum` of linear maps; made by `TensorRanks`."""

    def __init__(self, ranks: TensorRanks, layer_idx: int) -> None:
        self._ranks = ranks
        self._purpose = Purpose(layer_idx=layer_idx, stage="sum")
        self.leaf_counts = tuple(one.num_leaves for one in ranks.subtrees[ranks.wires.rank])

    def join(self, roots: Sequence[Tensor], micro_batch: int) -> Steps[Tensor]:
        """The root over all leaves, of this rank's subtrees [T, D] float32 in order of `leaf_counts`.

        Raises: ConfigError when another rank computed other rows.
        """
        ranks, shape = self._ranks, roots[0].shape
        assert all(root.dtype == torch.float32 for root in roots), "partials are float32"
        message = torch.cat([root.reshape(-1) for root in roots]).view(torch.uint8)
        nothing = message[:0]
        wires = ranks.wires
        parts = [nothing if rank == wires.rank else message for rank in range(wires.num_ranks)]
        arrival = wires.exchange(parts, lane=TensorRanks.LANES * micro_batch, purpose=self._purpose)
        yield arrival
        nodes: dict[Subtree, Tensor] = {}
        for rank, received in enumerate(arrival.take()):
            owned = ranks.subtrees[rank]
            if rank == wires.rank:
                nodes |= zip(owned, roots, strict=True)
                continue
            if received.numel() != 4 * len(owned) * shape.numel():
                raise ConfigError(
                    f"tensor-parallel ranks are out of step: rank {wires.rank} adds {shape[0]} rows of layer "
                    f"{self._purpose.layer_idx}, rank {rank} sent {received.numel()} bytes"
                )
            values = received.view(torch.float32).view(len(owned), *shape)
            nodes |= zip(owned, values.unbind(0), strict=True)
        return ranks.add(nodes)


class TensorRanks:
    """One rank's end of its replica's tensor parallelism; the transport has that replica's ranks only."""

    LANES = 2
    """Of the transport, per micro-batch: sums, and rows that are put together again."""

    def __init__(self, wires: Transport, split: TensorSplit) -> None:
        assert (wires.rank, wires.num_ranks) == (split.rank, split.size), "the transport is of the replica"
        self.wires = wires
        self.num_leaves = split.num_leaves
        self.subtrees = tuple(subtrees(split.leaves_of(rank)) for rank in range(split.size))

    def sums(self, layer_idx: int) -> TreeSum:
        """The sums of a layer."""
        return TreeSum(self, layer_idx)

    def add(self, nodes: Mapping[Subtree, Tensor]) -> Tensor:
        """The root, from all ranks' subtrees in the order of the ranks."""
        return add_roots(nodes, self.num_leaves)


def largest_messages(
    spec: ModelSpec, numerics: Numerics, split: TensorSplit, num_tokens: int
) -> tuple[LaneSize, LaneSize]:
    """What the lanes of a micro-batch hold: the roots of the rank that has most, and a part of the rows.

    Units:   `num_tokens` is the largest batch of a replica.
    """
    num_roots = max(len(subtrees(split.leaves_of(rank))) for rank in range(split.size))
    width = max([spec.hidden, *(moe.row_width for _, moe in spec.moe_layers)])
    rows = -(-num_tokens // split.size)
    return (
        LaneSize(message_bytes=4 * num_roots * num_tokens * width),
        LaneSize(message_bytes=rows * width * DTYPE_BYTES[numerics.seam_dtype]),
    )


def add_roots(nodes: Mapping[Subtree, Tensor], num_leaves: int) -> Tensor:
    """The root of the tree, from subtrees that together have every leaf once; neighbours meet."""
    here: dict[int, Tensor] = {}
    for level in range(num_leaves.bit_length()):
        here |= {one.node: value for one, value in nodes.items() if one.level == level}
        if 1 << level == num_leaves:
            break
        here = {node // 2: here[node] + here[node + 1] for node in sorted(here) if node % 2 == 0}
    assert list(here) == [0], f"subtrees leave gaps: {sorted(nodes)}"
    return here[0]


class SplitRows(RoutedExperts):
    """Routed experts where every rank of a replica has all its rows: each sends a part, and all gather.

    Shapes:  rank r of n takes rows T * r // n to T * (r + 1) // n.
    """

    def __init__(self, routed: RoutedExperts, ranks: TensorRanks, seam: torch.dtype) -> None:
        """`routed` is over all ranks of the layout, `ranks` are those of the replica."""
        self._routed = routed
        self._ranks = ranks
        self._seam = seam

    def forward(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Steps[Tensor]:
        """y_TD [T, D] in the seam dtype."""
        wires, num_tokens = self._ranks.wires, len(x_TD)
        bounds = [num_tokens * rank // wires.num_ranks for rank in range(wires.num_ranks + 1)]
        rows = slice(bounds[wires.rank], bounds[wires.rank + 1])
        part = Routing(experts_TK=routing.experts_TK[rows], weights_TK=routing.weights_TK[rows])
        y_TD = yield from self._routed.forward(x_TD[rows], part, tag, hint_E)
        assert y_TD.dtype == self._seam, f"rows are {y_TD.dtype}, the seam is {self._seam}"
        message = y_TD.contiguous().view(-1).view(torch.uint8)
        arrival = wires.exchange(
            [message] * wires.num_ranks,
            lane=TensorRanks.LANES * tag.micro_batch + 1,
            purpose=Purpose(layer_idx=tag.layer_idx, stage="sum"),
        )
        yield arrival
        width = x_TD.shape[1]
        return torch.cat([one.view(self._seam).view(-1, width) for one in arrival.take()])
