"""What every dispatcher between ranks does when the plan or the loads change. Knows no messages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moesaic.parallel.dispatch.slots import layer_tables
from moesaic.placement.choice import ReplicaChoice
from moesaic.spec.experts import ExpertPlan, IntArray
from moesaic.spec.model import MoeSpec


class Following:
    """A dispatcher's plan, the loads of late, and the table of each MoE layer that follows from the two."""

    def __init__(
        self,
        moe_layers: Sequence[tuple[int, MoeSpec]],
        plan: ExpertPlan,
        num_ranks: int,
        *,
        group_size: int = 1,
        group_id: int = 0,
        slots: Sequence[Tensor] | None = None,
        replica_choice: ReplicaChoice = "turns",
    ) -> None:
        """`slots` replaces the choice of copies, until another plan comes: [E, V] a layer, see `LayerTable`.

        Raises: as `layer_tables` for the plan.
        """
        self._moe_layers = tuple(moe_layers)
        self._num_ranks = num_ranks
        self._group_size = group_size
        self._group_id = group_id
        self._replica_choice = replica_choice
        self._loads: Sequence[IntArray] | None = None
        self.num_placed = 0  # how often tables were made anew
        self._place(plan, slots)

    def adopt(self, plan: ExpertPlan) -> None:
        """Send rows to where another plan has the experts, from the next step on.

        Raises: as the constructor.
        """
        self._place(plan, None)

    def observe(self, loads: Sequence[IntArray]) -> None:
        """The tokens that chose each expert of late, over all ranks: what `least-loaded` goes by.

        Shapes:  per MoE layer [E].
        """
        self._loads = loads
        if self._replica_choice == "least-loaded":
            self._place(self._plan, None)

    def _place(self, plan: ExpertPlan, slots: Sequence[Tensor] | None) -> None:
        self._layers = layer_tables(
            self._moe_layers,
            plan,
            self._num_ranks,
            group_size=self._group_size,
            group_id=self._group_id,
            slots=slots,
            choice=self._replica_choice,
            loads=self._loads,
        )
        self._plan, self._num_slices = plan, plan.num_slices
        self.num_placed += 1
