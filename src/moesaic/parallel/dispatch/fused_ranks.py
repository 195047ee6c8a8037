"""Routed experts over the ranks of one machine, a layer in one native call on each: bit for bit `Staged`.

    rank 0:  [ send | slot 3 | slot 0 | slot 3 again, for rank 1's rows | combine ]
    rank 1:            [ send | slot 0 | slot 2 | combine ]                          no Python in between

Which copy serves a token is the same table that other dispatchers have. Knows nothing of how rows travel:
kernels/native/moe_ranks.hpp does.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import ConfigError, PeerLost
from moesaic.experts.contract import RoutedExperts, Routing, Tag
from moesaic.experts.store import ResidentStore, SlotTable
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.native.moe import MoeLayer
from moesaic.kernels.native.moe_ranks import RankLane
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.ops import Ops
from moesaic.kernels.wire import round_to_wire
from moesaic.parallel.dispatch.following import Following
from moesaic.parallel.dispatch.slots import LayerTable
from moesaic.parallel.meter import Meter
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
    ) -> RoutedExperts:
        """The experts of one layer over this rank's store; `meter` is told where jobs are counted.

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
                meter.counters.append(lambda: sum(lane.counts.jobs for lane in self._lanes))
        return _FusedLayer(self, layer_idx, spec, store, ops)


class _FusedLayer(RoutedExperts):
    """One layer. The kernels hold addresses of the store's table, and a copy of the table of slots; where
    one was replaced the next forward takes the new one."""

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
        self._first = ranks.transport.rank + layer_idx  # turns among copies start elsewhere, as in `Exchange`
        self._point_to(store.table(layer_idx), ranks._layers[layer_idx])

    def forward(self, x_TD: Tensor, routing: Routing, tag: Tag, hint_E: Tensor | None) -> Steps[Tensor]:
        """y_TD [T, D] in the seam dtype: the weighted sum over each token's choices."""
        table, slots = self._store.table(self._layer_idx), self._ranks._layers[self._layer_idx]
        if table is not self._table or slots is not self._slots:
            self._point_to(table, slots)
        if self._is_rounded:
            x_TD = round_to_wire(x_TD, self._wire).unpack(self._seam)
        call = _Call(self, x_TD.contiguous(), routing, tag)
        yield call
        return call.y_TD

    def _point_to(self, table: SlotTable, slots: LayerTable) -> None:
        self._layer: MoeLayer = self._ops.moe_layer(self._layer_idx, self._spec, table.weights, ())
        self._native_slots: Any = compiled_wires().SlotTable(
            self._spec.num_experts,
            slots.slots_EV.flatten().tolist(),
            slots.group_P.tolist(),
            self._ranks.transport.num_ranks,
        )
        self._table, self._slots = table, slots


class _Call(Wait):
    """The call of one forward: made by whoever waits for it, and over when it returns."""

    def __init__(self, layer: _FusedLayer, x_TD: Tensor, routing: Routing, tag: Tag) -> None:
        self._layer = layer
        self._lane = layer._ranks.lanes[tag.micro_batch]
        self._held = (layer._layer, layer._native_slots, x_TD)  # the call has their addresses
        self._experts_TK, self._weights_TK = routing.experts_TK.contiguous(), routing.weights_TK.contiguous()
        self._tag = tag
        self._is_over: bool | None = None  # None: not begun
        self.y_TD = torch.empty_like(x_TD)

    def ready(self) -> bool:
        """Whether it is over, after all that can be done without waiting."""
        return self._go_on(0.0)

    def wait(self, timeout_s: float) -> None:
        began_s = time.monotonic()
        if not self._go_on(timeout_s):
            rank, stage = self._lane.late()
            waited_s = time.monotonic() - began_s
            seconds = waited_s if waited_s >= timeout_s else 0.0  # before that time: its process has ended
            raise PeerLost(rank=rank, layer_idx=self._tag.layer_idx, stage=stage, seconds=seconds)

    def _go_on(self, timeout_s: float) -> bool:
        if self._is_over is None:
            layer, slots, x_TD = self._held
            tag = self._tag
            self._is_over = self._lane.begin(
                layer,
                slots,
                x_TD,
                self._experts_TK,
                self._weights_TK,
                self.y_TD,
                first=self._layer._first,
                step=(tag.epoch, tag.plan_version, tag.step_id),
                timeout_s=timeout_s,
            )
        elif not self._is_over:
            self._is_over = self._lane.advance(timeout_s)
        return self._is_over
