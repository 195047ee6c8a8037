"""Routed experts over the ranks of one machine, a layer in one native call on each: bit for bit `Staged`.

    rank 0:  [ send | slot 3 | slot 0 | slot 3 again, for rank 1's rows | combine ]
    rank 1:            [ send | slot 0 | slot 2 | combine ]                          no Python in between

The call may begin with norm and router and end with the residual. Which copy serves a token is the same table
that other dispatchers have. Knows nothing of how rows travel: kernels/native/moe_ranks.hpp does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.errors import ConfigError, PeerLost
from moesaic.experts.contract import Observe, RoutedExperts, Routing, SparseHalf, Tag
from moesaic.experts.store import ResidentStore, SlotTable
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.native.moe_ranks import RankLane, RankLayer
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.native.router import RouterLayer
from moesaic.kernels.native.shared import SharedLayer
from moesaic.kernels.ops import Ops
from moesaic.kernels.wire import round_to_wire
from moesaic.parallel.dispatch.following import Following
from moesaic.parallel.dispatch.fused import Room, Rooms
from moesaic.parallel.dispatch.slots import LayerTable
from moesaic.parallel.meter import Meter, Reading
from moesaic.parallel.segment import compiled_wires
from moesaic.parallel.shared_memory import SharedMemoryTransport
from moesaic.placement.choice import ReplicaChoice
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import Numerics
from moesaic.steps import Steps, Wait


class FusedRanks(Following):
    """One rank of expert parallelism, for all layers: what makes each layer's `RoutedExperts`."""

    def __init__(
        self,
        moe_layers: Sequence[tuple[int, MoeSpec]],
        numerics: Numerics,
        plan: ExpertPlan,
        transport: SharedMemoryTransport,
        *,
        slots: Sequence[Tensor] | None = None,
        replica_choice: ReplicaChoice = "turns",
    ) -> None:
        """`slots` replaces the plan's own choice of copies: [E, V] a layer, see `LayerTable`.

        Raises: ConfigError for one sum per rank, and as `layer_tables` for the plan.
        """
        if numerics.combine != "tree":
            raise ConfigError(
                f"a fused layer sums by the tree only, got combine = {numerics.combine}; dispatcher exchange "
                "has it"
            )
        self.transport = transport
        super().__init__(moe_layers, plan, transport.num_ranks, slots=slots, replica_choice=replica_choice)
        self._lanes: list[RankLane] = []

    @property
    def lanes(self) -> Sequence[RankLane]:
        """By micro-batch; none before the first layer was made."""
        return self._lanes

    def layer(
        self, layer_idx: int, spec: MoeSpec, store: ResidentStore, ops: Ops, meter: Meter | None = None
    ) -> FusedLayer:
        """The experts of one layer over this rank's store; `meter` is told what the calls count.

        Raises: ConfigError for a backend that is not native, and for shards that do not fit.
        """
        if not isinstance(ops, NativeOps):
            raise ConfigError(
                f"a fused layer is one call of native kernels, the backend is {ops.name}: use dispatcher "
                "shared_memory without is_fused"
            )
        if not self._lanes:
            segment, traffic = self.transport.segment, self.transport.traffic
            self._lanes = [
                ops.rank_lane(segment.wire, at, lane.num_results, traffic.send_bytes, traffic.collect_bytes)
                for at, lane in enumerate(segment.shape.lanes)
            ]
            if meter is not None:
                meter.others.append(self._reading)
        return FusedLayer(self, layer_idx, spec, store, ops)

    def _reading(self) -> Reading:
        counts = [lane.counts for lane in self._lanes]
        return Reading(
            num_jobs=sum(one.jobs for one in counts),
            transfer_s=sum(one.send_s for one in counts),
            wait_s=sum(one.wait_s for one in counts),
        )


class FusedLayer(RoutedExperts):
    """One layer; made by `FusedRanks`.

    The kernels hold addresses of the store's table, and a copy of the table of slots; where one was replaced
    the next forward takes the new one.
    """

    def __init__(
        self, ranks: FusedRanks, layer_idx: int, spec: MoeSpec, store: ResidentStore, ops: NativeOps
    ) -> None:
        self._ranks = ranks
        self._layer_idx = layer_idx
        self._spec = spec
        self._store = store
        self._ops = ops
        self._seam = torch_dtype(ops.numerics.seam_dtype)
        self._wire = ops.numerics.wire_format
        self._is_rounded = self._wire != ops.numerics.seam_dtype
        self._bound = self.bind()

    def forward(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Steps[Tensor]:
        """y_TD [T, D] in the seam dtype: the weighted sum over each token's choices."""
        if not self.holds(self._bound):
            self._bound = self.bind()
        if self._is_rounded:
            x_TD = round_to_wire(x_TD, self._wire).unpack(self._seam)
        assert len(x_TD) == len(routing.experts_TK), "choices for each row"
        call = self._bound.calls[tag.micro_batch]
        y_TD = call.start(x_TD, Room.of(routing, self._spec.experts_per_token), tag)
        yield call
        return y_TD

    def half(
        self, moe_idx: int, router: RouterLayer, shared: SharedLayer | None = None
    ) -> FusedRanksHalf | None:
        """The layer's sparse half in one call; None where rows are rounded before experts take them."""
        if self._is_rounded:
            return None
        return FusedRanksHalf(self, moe_idx, router, shared, self._spec)

    def count(self, num_jobs: int) -> None:
        """Nothing to tell: lanes count their jobs."""

    def held(self) -> tuple[int, int]:
        """What changes with the tables of store or dispatcher, for whoever keeps layers of several calls."""
        return self._store.num_replaced, self._ranks.num_placed

    def holds(self, bound: _Bound) -> bool:
        """Whether the plan is still the one that calls were bound under."""
        at = self._layer_idx
        return self._store.table(at) is bound.table and self._ranks._layers[at] is bound.slots

    def bind(self, router: RouterLayer | None = None, shared: SharedLayer | None = None) -> _Bound:
        """Calls under the plan that holds now; with a router they are of the whole half."""
        ranks, at, spec = self._ranks, self._layer_idx, self._spec
        table, slots = self._store.table(at), ranks._layers[at]
        experts = self._ops.moe_layer(at, spec, table.weights, ())
        native_slots = compiled_wires().SlotTable(
            spec.num_experts,
            slots.slots_EV.flatten().tolist(),
            slots.group_P.tolist(),
            ranks.transport.num_ranks,
        )
        first = ranks.transport.rank + at  # turns among copies start elsewhere, as in `Exchange`
        calls = [
            _Call(lane, lane.layer(router, shared, experts, native_slots, first), at, self._seam)
            for lane in ranks.lanes
        ]
        return _Bound(calls=calls, table=table, slots=slots)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Bound:
    """The calls of a layer, by micro-batch, and the tables that they were made from."""

    calls: Sequence[_Call]
    table: SlotTable
    slots: LayerTable


class FusedRanksHalf(SparseHalf):
    """Bit for bit what its parts give one after the other."""

    def __init__(
        self,
        experts: FusedLayer,
        moe_idx: int,
        router: RouterLayer,
        shared: SharedLayer | None,
        spec: MoeSpec,
    ) -> None:
        self.experts = experts
        self.moe_idx = moe_idx
        self.spec = spec
        self._parts = router, shared
        self._rooms = Rooms(spec.experts_per_token)
        self._bound = experts.bind(router, shared)

    def forward(self, x_TD: Tensor, tag: Tag, observe: Observe | None) -> Steps[Tensor]:
        """The residual stream after it, in the seam dtype."""
        num_tokens = x_TD.numel() // self.spec.row_width  # a tensor's len takes ten times as long
        room = self._rooms.of(num_tokens, tag.micro_batch)
        call = self._call(tag.micro_batch)
        y_TD = call.start(x_TD, room, tag)
        yield call
        if observe is not None:
            observe(self.moe_idx, room.routings[0])
        return y_TD

    def native(self, micro_batch: int) -> RankLayer:
        """The half under the plan that holds now, for a call of whole layers."""
        return self._call(micro_batch).layer

    def _call(self, micro_batch: int) -> _Call:
        if not self.experts.holds(self._bound):
            self._bound = self.experts.bind(*self._parts)
        return self._bound.calls[micro_batch]


class _Call(Wait):
    """The calls of a layer on one lane, one for each forward: made by whoever waits for it, and over when it
    returns."""

    def __init__(self, lane: RankLane, layer: RankLayer, layer_idx: int, seam: torch.dtype) -> None:
        self._lane = lane
        self.layer = layer
        self._layer_idx = layer_idx
        self._seam = seam
        self._held: tuple[Tensor, Room, Tensor, Tag] | None = None  # the call has their addresses
        self._is_over: bool | None = None  # None: not begun

    def start(self, x_TD: Tensor, room: Room, tag: Tag) -> Tensor:
        """Where the result will be, once this has been waited for."""
        assert x_TD.dtype == self._seam, f"rows are {x_TD.dtype}, the seam is {self._seam}"
        x_TD = x_TD.contiguous()
        y_TD = torch.empty_like(x_TD)
        self._held = x_TD, room, y_TD, tag
        self._is_over = None
        return y_TD

    def ready(self) -> bool:
        """Whether it is over, after all that can be done without waiting."""
        return self._go_on(0.0)

    def wait(self, timeout_s: float) -> None:
        began_s = time.monotonic()
        if not self._go_on(timeout_s):
            rank, stage = self._lane.late()
            waited_s = time.monotonic() - began_s
            seconds = waited_s if waited_s >= timeout_s else 0.0  # before that time: its process has ended
            raise PeerLost(rank=rank, layer_idx=self._layer_idx, stage=stage, seconds=seconds)

    def _go_on(self, timeout_s: float) -> bool:
        if self._held is None:
            return True
        if self._is_over is None:
            x_TD, room, y_TD, tag = self._held
            self._is_over = self.layer.begin(
                x_TD.data_ptr(),
                x_TD.numel(),
                room.experts,
                room.weights,
                y_TD.data_ptr(),
                room.num_tokens,
                tag.epoch,
                tag.plan_version,
                tag.step_id,
                timeout_s,
            )
        else:
            self._is_over = self._lane.advance(timeout_s)
        if self._is_over:
            self._held = None
        return bool(self._is_over)
