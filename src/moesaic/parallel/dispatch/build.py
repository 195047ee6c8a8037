"""The dispatcher that a layout names, on one rank, and the wires that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from moesaic.errors import CapacityError, ConfigError
from moesaic.parallel.dispatch.exchange import Exchange
from moesaic.parallel.dispatch.fused_ranks import FusedRanks
from moesaic.parallel.dispatch.gathered import Gathered
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.message import HEAD, largest_messages
from moesaic.parallel.dispatch.two_level import TwoLevel
from moesaic.parallel.gloo import GlooTransport
from moesaic.parallel.mesh import Mesh
from moesaic.parallel.segment import EXCHANGE, LaneSize, Segment, SegmentShape
from moesaic.parallel.shared_memory import SharedMemoryTransport
from moesaic.parallel.tensor import TensorRanks
from moesaic.parallel.tensor import largest_messages as largest_sums
from moesaic.parallel.transport import Transport
from moesaic.placement.choice import ReplicaChoice
from moesaic.spec.deployment import Layout
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.layout_rules import FUSED_RETURNS, FUSED_SLICES, TpWires, refusals
from moesaic.spec.model import ModelSpec, MoeSpec
from moesaic.spec.numerics import DTYPE_BYTES, Numerics
from moesaic.spec.tensor_split import TensorSplit

OVER_GLOO = "ask for --tp-wires gloo"


def num_lanes(layout: Layout) -> int:
    """Lanes of the transport that its dispatcher uses."""
    kinds: dict[str, type[Exchange]] = {"two_level": TwoLevel, "gathered": Gathered}
    return kinds.get(layout.dispatcher, Exchange).LANES * layout.num_micro_batches * layout.num_chunks


def connect(
    layout: Layout,
    mesh: Mesh,
    moe_layers: Sequence[tuple[int, MoeSpec]],
    numerics: Numerics,
    max_tokens: int,
    *,
    tp_wires: TpWires | None = None,
    num_slices: int = 1,
) -> Transport:
    """The wires of one rank; all ranks of the mesh call this at once.

    `tp_wires` are those of a replica, over which `gathered` goes, too.

    Units:   `max_tokens` is the largest batch of a rank.
    Raises:  as `Segment.join` for a dispatcher over shared memory.
    """
    of_replica = layout.dispatcher == "gathered"
    if not (layout.dispatcher == "shared_memory" or (of_replica and tp_wires == "shared_memory")):
        return GlooTransport(mesh, num_lanes=num_lanes(layout), num_chunks=layout.num_chunks)
    lanes = lane_sizes(layout, moe_layers, numerics, max_tokens, num_slices)
    shape = SegmentShape(num_ranks=mesh.num_ranks, lanes=tuple(lanes))
    segment = Segment.join(mesh, shape, instead=OVER_GLOO if of_replica else EXCHANGE)
    return SharedMemoryTransport(segment, num_chunks=layout.num_chunks)


def connect_replica(
    layout: Layout,
    mesh: Mesh,
    spec: ModelSpec,
    numerics: Numerics,
    max_tokens: int,
    *,
    split: TensorSplit,
    wires: TpWires,
) -> Transport:
    """The wires of one rank to the others of its replica; all ranks of the mesh call this at once.

    Units:   `max_tokens` is the largest batch of a replica.
    Raises:  as `Segment.join`, on the ranks of every replica when the memory of one is too small.
    """
    part = mesh.part(split.size)
    if wires == "gloo":
        return GlooTransport(part, num_lanes=TensorRanks.LANES * layout.num_micro_batches)
    sums, rows = largest_sums(spec, numerics, split, max_tokens)
    if layout.dispatcher == "gathered":
        rows = LaneSize(message_bytes=0)  # every rank has them all
    shape = SegmentShape(num_ranks=split.size, lanes=(sums, rows) * layout.num_micro_batches)
    made: Segment | CapacityError
    try:
        made = Segment.join(part, shape, instead=OVER_GLOO)
    except CapacityError as error:
        made = error
    refused = mesh.meet("memory of replicas", word="" if isinstance(made, Segment) else str(made))
    if isinstance(made, CapacityError) or any(refused):
        raise CapacityError(max(refused))
    return SharedMemoryTransport(made)


def lane_sizes(
    layout: Layout,
    moe_layers: Sequence[tuple[int, MoeSpec]],
    numerics: Numerics,
    max_tokens: int,
    num_slices: int = 1,
) -> list[LaneSize]:
    """What the lanes of a layout over shared memory hold: layers share them, micro-batches and chunks do not.

    A request is never split, so a micro-batch may have all tokens of a step, and they may all go to one rank.
    A chunk has an equal part of a micro-batch's rows, and its inboxes take it while others are under way.
    Of a fused layer results return to places of their own, whichever ranks they come from.
    """
    if layout.is_fused:
        seam = DTYPE_BYTES[numerics.seam_dtype]
        specs = [spec for _, spec in moe_layers]
        rows = [max_tokens * spec.row_width * seam for spec in specs]
        choices = [max_tokens * spec.experts_per_token for spec in specs]
        lane = LaneSize(
            message_bytes=max(4 * HEAD + 16 * count + row for count, row in zip(choices, rows, strict=True)),
            num_results=max(choices),
            result_bytes=max(spec.experts_per_token * row for spec, row in zip(specs, rows, strict=True)),
        )
        return [lane] * layout.num_micro_batches
    of_chunk = -(-max_tokens // layout.num_chunks)
    largest = [
        largest_messages(spec, numerics, layout.returns, of_chunk, num_slices) for _, spec in moe_layers
    ]
    send, collect = (LaneSize(message_bytes=max(sizes)) for sizes in zip(*largest, strict=True))
    lanes = [collect] if layout.dispatcher == "gathered" else [send, collect]
    return lanes * layout.num_micro_batches * layout.num_chunks


def make_dispatcher(
    layout: Layout,
    moe_layers: Sequence[tuple[int, MoeSpec]],
    numerics: Numerics,
    plan: ExpertPlan,
    transport: Transport,
    *,
    replica_choice: ReplicaChoice = "turns",
    down_biases: Mapping[int, Tensor] | None = None,
) -> Local | Exchange | FusedRanks:
    """Both sides of one rank, or what fuses them; `moe_layers` is `ModelSpec.moe_layers`.

    `down_biases` are `ResidentStore.down_biases`.

    Raises: ConfigError for a dispatcher that is not built, and for a plan that does not fit.
    """
    if layout.dispatcher == "local":
        return Local(moe_layers, numerics, plan)
    if layout.is_fused and isinstance(transport, SharedMemoryTransport):
        if layout.returns != "choices":
            raise ConfigError(FUSED_RETURNS)
        if plan.num_slices > 1:
            raise ConfigError(FUSED_SLICES)
        return FusedRanks(moe_layers, numerics, plan, transport, replica_choice=replica_choice)
    where = (moe_layers, numerics, plan, transport)
    if layout.dispatcher == "two_level" and layout.ranks_per_node is not None:
        return TwoLevel(
            *where,
            returns=layout.returns,
            ranks_per_node=layout.ranks_per_node,
            replica_choice=replica_choice,
            down_biases=down_biases,
        )
    if layout.dispatcher in ("gathered", "exchange", "shared_memory"):
        kind = Gathered if layout.dispatcher == "gathered" else Exchange
        return kind(*where, returns=layout.returns, replica_choice=replica_choice, down_biases=down_biases)
    reasons = "; ".join(one.reason for one in refusals(layout.cell()))
    raise ConfigError(f"dispatcher {layout.dispatcher} does not run: {reasons}")
