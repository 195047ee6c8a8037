"""Routed experts in one native call, on one rank that holds them all: bit for bit what `Staged` gives there.

Knows nothing of how rows travel, because none does; rows are still rounded to the wire format.
"""

from __future__ import annotations

from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.experts.contract import RoutedExperts, Routing, Tag
from moesaic.experts.store import ResidentStore, SlotTable
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.native.moe import MoeLayer
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.wire import round_to_wire
from moesaic.parallel.meter import Meter
from moesaic.spec.model import MoeSpec
from moesaic.steps import DONE, Steps


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
        self._meter.num_jobs += routing.experts_TK.numel()
        table = self._store.table(self._layer_idx)
        if table is not self._table:
            self._point_to(table)
        if self._is_rounded:
            x_TD = round_to_wire(x_TD, self._wire).unpack(self._seam)
        return self._layer(x_TD, routing.experts_TK, routing.weights_TK)

    def _point_to(self, table: SlotTable) -> None:
        slot_of_expert = {logical_id: slot for slot, logical_id in enumerate(table.logical_ids)}
        lost = [expert for expert in range(self._spec.num_experts) if expert not in slot_of_expert]
        if lost:
            raise ConfigError(
                f"the expert plan gives no slot to experts {lost} of layer {self._layer_idx}; each needs one"
            )
        slots = [slot_of_expert[expert] for expert in range(self._spec.num_experts)]
        self._layer: MoeLayer = self._ops.moe_layer(self._layer_idx, self._spec, table.weights, slots)
        self._table = table
