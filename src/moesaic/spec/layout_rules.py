"""Which combinations of a layout's choices there are and which of them this engine runs: the one table.

`Layout` refuses contradictions by it, `Deployment.not_runnable` and `moesaic verify --layouts` what is not
built, and docs/parallel.md prints it. Which numbers of ranks a layout may have is the layout's own rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

Dispatcher = Literal["local", "gathered", "exchange", "two_level", "shared_memory", "remote"]
DISPATCHERS: tuple[Dispatcher, ...] = get_args(Dispatcher)
TpWires = Literal["shared_memory", "gloo"]
TP_WIRES: tuple[TpWires, ...] = get_args(TpWires)
"""What the ranks of a replica sum and gather over."""
Returns = Literal["choices", "subtrees"]

NOT_BUILT: Mapping[Dispatcher, str] = MappingProxyType(
    {
        "remote": "no rank serves experts alone",
    }
)

FUSED: tuple[Dispatcher, ...] = ("local", "shared_memory")
"""Those whose layers can be one native call."""
FUSED_RETURNS = "a fused layer returns each choice to its place, and no subtrees"
FUSED_CHUNKS = "a fused layer sends its rows at once and computes slot by slot what has arrived"
LOCAL_CHUNKS = "one rank sends nothing, so there is nothing to send in parts"
FUSED_SLICES = "a fused layer adds up whole results, and slices of experts return parts of their sums"
LOCAL_SLICES = "one rank has every expert whole"
SLICE_RETURNS = "slices of experts return the roots of their sums one by one: choices, added by the tree"
GATHERED_RULE = "every rank must have every row: one replica whose attention is split over all ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutCell:
    """One combination."""

    dispatcher: Dispatcher
    is_fused: bool = False  # a layer's routed experts in one native call
    num_micro_batches: int = 1
    num_chunks: int = 1
    has_expert_tiers: bool = False  # experts in memory below the device's
    has_graph: bool = False  # the step captured as a graph
    has_slices: bool = False  # experts are cut along their inner width, and ranks hold parts of them
    returns: Returns = "choices"
    is_native: bool = True  # the backend


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why a cell is not run: the field that would have to change."""

    field: str
    reason: str
    is_contradiction: bool = False  # no build could run it


def refusals(cell: LayoutCell) -> tuple[Refusal, ...]:
    """Every reason against a cell; none: it runs."""
    found = []
    if cell.dispatcher in NOT_BUILT:
        found.append(Refusal(field="dispatcher", reason=NOT_BUILT[cell.dispatcher]))
    if cell.is_fused and cell.dispatcher not in FUSED:
        reason = f"a fused layer is one native call; what {cell.dispatcher} sends, Python hands over"
        found.append(Refusal(field="is_fused", reason=reason, is_contradiction=True))
    elif cell.is_fused and not cell.is_native:
        found.append(Refusal(field="is_fused", reason="a fused layer is one call of native kernels"))
    if cell.num_chunks > 1 and (cell.is_fused or cell.dispatcher == "local"):
        reason = LOCAL_CHUNKS if cell.dispatcher == "local" else FUSED_CHUNKS
        found.append(Refusal(field="num_chunks", reason=reason, is_contradiction=True))
    if cell.has_slices:
        found += _slice_refusals(cell)
    if cell.has_expert_tiers:
        found.append(Refusal(field="has_expert_tiers", reason="all experts are resident"))
    if cell.has_graph:
        found.append(Refusal(field="has_graph", reason="no step is captured as a graph"))
    return tuple(found)


def _slice_refusals(cell: LayoutCell) -> list[Refusal]:
    found = []
    if cell.dispatcher == "local":
        found.append(Refusal(field="has_slices", reason=LOCAL_SLICES))
    elif cell.is_fused:
        found.append(Refusal(field="is_fused", reason=FUSED_SLICES))
    if cell.returns != "choices":
        found.append(Refusal(field="returns", reason=SLICE_RETURNS))
    return found
