"""Routed experts in one native call, on one rank that holds them all: bit for bit what `Staged` gives there.

Knows nothing of how rows travel, because none does; rows are still rounded to the wire format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import Observe, RoutedExperts, Routing, SparseHalf, Tag
from moesaic.experts.store import ResidentStore, SlotTable
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.native.moe import HalfLayer, MoeLayer
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.native.router import RouterLayer
from moesaic.kernels.native.shared import SharedLayer
from moesaic.kernels.wire import round_to_wire
from moesaic.parallel.meter import Meter
from moesaic.spec.model import MoeSpec
from moesaic.steps import DONE, Steps

KEPT_TOKENS = 64  # guess: of steps that are short enough for an allocation to show


class Fused(RoutedExperts):
    """The experts of one layer, over a store that has every one in memory.

    The kernels hold addresses of the store's table; when the store adopts another plan, the next forward
    takes the new one.
    """

    def __init__(
        self,
        layer_idx: int,
        spec: MoeSpec,
        store: ResidentStore,
        ops: NativeOps,
        meter: Meter | None = None,
    ) -> None:
        """Checks every weight once; `meter` gets the jobs.

        Raises: ConfigError when an expert has no slot, and for shards that do not fit.
        """
        self._layer_idx = layer_idx
        self._spec = spec
        self._store = store
        self._ops = ops
        self._meter = meter or Meter()
        self._seam = torch_dtype(ops.numerics.seam_dtype)
        self._wire = ops.numerics.wire_format
        self._is_rounded = self._wire != ops.numerics.seam_dtype
        self._point_to(store.table(layer_idx))

    def forward(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Steps[Tensor]:
        """y_TD [T, D] in the seam dtype: the weighted sum over each token's choices."""
        yield DONE
        layer = self.layer()
        self.count(len(x_TD) * self._spec.experts_per_token)
        if self._is_rounded:
            x_TD = round_to_wire(x_TD, self._wire).unpack(self._seam)
        return layer(x_TD, routing.experts_TK, routing.weights_TK)

    def count(self, num_jobs: int) -> None:
        """Tell the meter of jobs."""
        self._meter.num_jobs += num_jobs

    def held(self) -> int:
        """What changes with the tables of the store, for whoever keeps layers of several calls."""
        return self._store.num_replaced

    def layer(self) -> MoeLayer:
        """The experts as the store has them now."""
        table = self._store.table(self._layer_idx)
        if table is not self._table:
            self._point_to(table)
        return self._layer

    def half(self, moe_idx: int, router: RouterLayer, shared: SharedLayer | None = None) -> FusedHalf | None:
        """The layer's sparse half in one call; None where rows are rounded before experts take them."""
        if self._is_rounded:
            return None
        return FusedHalf(self, moe_idx, router, shared, self._spec)

    def _point_to(self, table: SlotTable) -> None:
        slot_of_expert = {logical_id: slot for slot, logical_id in enumerate(table.part_ids)}
        lost = [expert for expert in range(self._spec.num_experts) if expert not in slot_of_expert]
        if lost:
            raise ConfigError(
                f"the expert plan gives no slot to experts {lost} of layer {self._layer_idx}; each needs one"
            )
        slots = [slot_of_expert[expert] for expert in range(self._spec.num_experts)]
        self._layer: MoeLayer = self._ops.moe_layer(self._layer_idx, self._spec, table.weights, slots)
        self._table = table


class FusedHalf(SparseHalf):
    """Bit for bit what its parts give one after the other."""

    def __init__(
        self,
        experts: Fused,
        moe_idx: int,
        router: RouterLayer,
        shared: SharedLayer | None,
        spec: MoeSpec,
    ) -> None:
        self.experts = experts
        self.moe_idx = moe_idx
        self.spec = spec
        self._router = router
        self._shared = shared
        self._rooms = Rooms(spec.experts_per_token)

    def forward(self, x_TD: Tensor, tag: Tag, observe: Observe | None) -> Steps[Tensor]:
        """The residual stream after it, in the seam dtype; never waits."""
        yield from ()
        num_tokens = x_TD.numel() // self.spec.row_width  # a tensor's len takes ten times as long
        room = self._rooms.of(num_tokens, tag.micro_batch)
        [routing] = room.routings
        layer = self.experts.layer()
        self.experts.count(num_tokens * self.spec.experts_per_token)
        y_TD = layer.half(self._router, self._shared, x_TD, routing.experts_TK, routing.weights_TK)
        if observe is not None:
            observe(self.moe_idx, routing)
        return y_TD

    def native(self, micro_batch: int) -> HalfLayer:
        """The half under the plan that holds now, for a call of whole layers."""
        return HalfLayer(router=self._router, shared=self._shared, experts=self.experts.layer())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Room:
    """Routings of consecutive layers without gaps, and where the first begins."""

    routings: tuple[Routing, ...]
    num_tokens: int
    experts: int
    weights: int

    @classmethod
    def of(cls, routing: Routing, num_choices: int) -> Room:
        """Of choices that were made."""
        experts_TK, weights_TK = routing.experts_TK.contiguous(), routing.weights_TK.contiguous()
        assert experts_TK.dtype == torch.int64, f"expert ids are int64, got {experts_TK.dtype}"
        assert weights_TK.dtype == torch.float32, f"weights are float32, got {weights_TK.dtype}"
        assert experts_TK.shape == weights_TK.shape == (len(experts_TK), num_choices)
        return cls(
            routings=(Routing(experts_TK=experts_TK, weights_TK=weights_TK),),
            num_tokens=len(experts_TK),
            experts=experts_TK.data_ptr(),
            weights=weights_TK.data_ptr(),
        )


class Rooms:
    """Where native calls of one layer, or of several, leave what their routers chose.

    The last room of each micro-batch is kept where it is small, and written again by a step of equal size.
    """

    def __init__(self, num_choices: int, num_layers: int = 1) -> None:
        self._num_choices = num_choices
        self._num_layers = num_layers
        self._last: dict[int, Room] = {}

    def of(self, num_tokens: int, micro_batch: int) -> Room:
        """Room for the choices of so many tokens, with whatever is in it."""
        last = self._last.get(micro_batch)
        if last is not None and last.num_tokens == num_tokens:
            return last
        shape = (self._num_layers, num_tokens, self._num_choices)
        experts = torch.empty(shape, dtype=torch.int64)
        weights = torch.empty(shape, dtype=torch.float32)
        pairs = zip(experts.unbind(), weights.unbind(), strict=True)
        room = Room(
            routings=tuple(Routing(experts_TK=one, weights_TK=other) for one, other in pairs),
            num_tokens=num_tokens,
            experts=experts.data_ptr(),
            weights=weights.data_ptr(),
        )
        if num_tokens <= KEPT_TOKENS:
            self._last[micro_batch] = room
        return room
