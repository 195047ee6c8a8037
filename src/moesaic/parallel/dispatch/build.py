"""The dispatcher that a layout names, on one rank."""

from __future__ import annotations

from collections.abc import Sequence

from moesaic.errors import ConfigError
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.two_level import TwoLevel
from moesaic.parallel.transport import Transport
from moesaic.placement.choice import ReplicaChoice
from moesaic.spec.deployment import Layout
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.layout_rules import refusals
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import Numerics


def num_lanes(layout: Layout) -> int:
    """Lanes of the transport that its dispatcher uses."""
    kind = TwoLevel if layout.dispatcher == "two_level" else Exchange
    return kind.LANES * layout.num_micro_batches


def make_dispatcher(
    layout: Layout,
    moe_layers: Sequence[tuple[int, MoeSpec]],
    numerics: Numerics,
    plan: ExpertPlan,
    transport: Transport,
    *,
    replica_choice: ReplicaChoice = "turns",
) -> Local | Exchange:
    """Both sides of one rank; `moe_layers` is `ModelSpec.moe_layers`.

    Raises: ConfigError for a dispatcher that is not built, and for a plan that does not fit.
    """
    if layout.dispatcher == "local":
        return Local(moe_layers, numerics, plan)
    if layout.dispatcher == "exchange":
        return Exchange(
            moe_layers, numerics, plan, transport, returns=layout.returns, replica_choice=replica_choice
        )
    if layout.dispatcher == "two_level" and layout.ranks_per_node is not None:
        return TwoLevel(
            moe_layers,
            numerics,
            plan,
            transport,
            returns=layout.returns,
            ranks_per_node=layout.ranks_per_node,
            replica_choice=replica_choice,
        )
    reasons = "; ".join(one.reason for one in refusals(layout.cell()))
    raise ConfigError(f"dispatcher {layout.dispatcher} does not run: {reasons}")
