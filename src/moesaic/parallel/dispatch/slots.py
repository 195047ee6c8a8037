"""Where the experts of a plan are, as tables that a dispatcher gathers from: no search on the hot path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import ConfigError
from moesaic.placement.choice import ReplicaChoice, replica_table
from moesaic.spec.experts import ExpertPlan, IntArray, name_parts
from moesaic.spec.model import MoeSpec


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerTable:
    """One layer's slots and the copy that each token of an expert goes to.

    Slices of experts stand as experts of their own, by their ids.

    Ranks that follow each other form groups; the slots of a group are numbered rank after rank:

        group 0: rank 0  0 1 2    rank 1  3 4        group 1: rank 2  0    rank 3  (none)

    Shapes:  group_P [P], local_P [P] (the slot's number in its group); slots_EV [E, V]: token number t of
             expert e goes to slot slots_EV[e, t mod V].
    """

    spec: MoeSpec
    group_P: Tensor
    local_P: Tensor
    slots_EV: Tensor
    num_slots: tuple[int, ...]  # by rank

    def choose(self, experts_TK: Tensor, first: int) -> Tensor:
        """The slot of every choice [T, K], of tokens that are numbered from `first`."""
        num_variants = self.slots_EV.shape[1]
        if num_variants == 1:
            return self.slots_EV[:, 0][experts_TK]
        turn_T1 = (torch.arange(len(experts_TK)) + first).remainder(num_variants).unsqueeze(-1)
        return self.slots_EV[experts_TK, turn_T1]


def layer_tables(
    moe_layers: Sequence[tuple[int, MoeSpec]],
    plan: ExpertPlan,
    num_ranks: int,
    *,
    group_size: int = 1,
    group_id: int = 0,
    slots: Sequence[Tensor] | None = None,
    choice: ReplicaChoice = "turns",
    loads: Sequence[IntArray] | None = None,
) -> dict[int, LayerTable]:
    """The tables of all MoE layers; `slots` replaces the policy of `choice` by other tables.

    In groups of several ranks a copy within `group_id`, the group of those who choose, goes first. `loads`
    are the last known tokens of each expert [E], a layer each.

    Raises: ConfigError where no slot takes an expert's tokens, or a slot names a rank or an expert that there
            is not.
    """
    tables, num_slices = {}, plan.num_slices
    plan = _slices_as_experts(plan)
    for at, (layer_idx, spec) in enumerate(moe_layers):
        experts, ranks, count = plan.slot_expert[at], plan.slot_rank[at], spec.num_experts * num_slices
        lost = sorted(set(range(count)) - set(experts.tolist()))
        if lost:
            raise ConfigError(
                f"the expert plan gives no slot to {name_parts(lost, num_slices)} of layer {layer_idx}; "
                "each needs one"
            )
        if int(experts.max()) >= count or int(ranks.max()) >= num_ranks:
            raise ConfigError(
                f"layer {layer_idx} of the expert plan names expert {int(experts.max()) // num_slices} and "
                f"rank {int(ranks.max())}; the layer has {spec.num_experts} experts and the layout "
                f"{num_ranks} ranks"
            )
        local_P = np.empty_like(experts)
        order_P = np.argsort(ranks, kind="stable")
        for group in range(-(-num_ranks // group_size)):
            mine = order_P[ranks[order_P] // group_size == group]
            local_P[mine] = np.arange(len(mine))
        table_EV = replica_table(
            choice,
            plan,
            at,
            None if loads is None else np.repeat(loads[at], num_slices),
            node_id=group_id if group_size > 1 else None,
            gpus_per_node=group_size,
        )
        if (idle := np.flatnonzero(table_EV[:, 0] < 0)).size:
            names = name_parts(idle.tolist(), num_slices)
            raise ConfigError(
                f"the expert plan gives no share of tokens to any slot of {names} of layer {layer_idx}; the "
                "shares of an expert's slots sum to 1"
            )
        tables[layer_idx] = LayerTable(
            spec=spec,
            group_P=torch.from_numpy(ranks // group_size),
            local_P=torch.from_numpy(local_P),
            slots_EV=torch.from_numpy(table_EV) if slots is None else slots[at],
            num_slots=tuple(np.bincount(ranks, minlength=num_ranks).tolist()),
        )
    return tables


def _slices_as_experts(plan: ExpertPlan) -> ExpertPlan:
    if plan.num_slices == 1:
        return plan
    return replace(
        plan,
        slot_expert=plan.part_ids,
        slot_slice=tuple(np.zeros_like(parts) for parts in plan.slot_slice),
    )
