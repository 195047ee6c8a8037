"""`moesaic verify --layouts`: a model on one rank and in every layout, compared bit for bit.

All ranks of a layout live in this process and take turns in one thread; what they compute, and what they say
to each other, is what ranks in processes would. The negative control sums one partial per rank, as a layout
suggests: a comparison that did not notice would prove nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import groupby
from typing import Any

import torch

from moesaic.account.params import count_params
from moesaic.audit.layout_cells import (
    MATMUL_SHARDS,
    MICRO_BATCHES,
    NUM_RANKS,
    REPLICATED_SHARE,
    TENSOR_RANKS,
    Cell,
    Refused,
    Shape,
    count_ranks,
    find_refusal,
    make_matrix,
    make_plan,
)
from moesaic.audit.layout_trace import Trace, Work, compare, make_work, run_ranks
from moesaic.engine.config import EngineConfig
from moesaic.engine.machine import read_machine
from moesaic.errors import ConfigError, HostMemoryShort, KernelUnavailable
from moesaic.experts.contract import ExpertBatch, ExpertSide, Routing, Tag, Ticket, TokenSide
from moesaic.kernels import native
from moesaic.kernels.ops import backends
from moesaic.models.build import Dispatcher, LoadedModel, Share, TensorShare, build, read_spec
from moesaic.models.checkpoint import Checkpoint
from moesaic.parallel.dispatch.build import lane_sizes, make_dispatcher
from moesaic.parallel.dispatch.fused_ranks import FusedRanks
from moesaic.parallel.shared_memory import SharedMemoryTransport, segments_in_one_process
from moesaic.parallel.tensor import TensorRanks
from moesaic.parallel.transport import MemoryWires, Transport
from moesaic.spec.deployment import Layout
from moesaic.spec.experts import ExpertPlan, IntArray
from moesaic.spec.model import ModelSpec, MoeSpec
from moesaic.spec.numerics import DTYPE_BYTES, DType, Numerics, WireFormat
from moesaic.spec.tensor_split import Subtree, TensorSplit
from moesaic.steps import Wait

Say = Callable[[str], None]
PER_RANK = "one partial sum per rank"
FOLDED = "a sum of leaves rank after rank"
CONTROL_RANKS = 3  # with two, half of all sums of four are still right
MIN_CHOICES = 3  # two products have one order


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutResult:
    """One layout against one rank; the differing layer is None where none differs, or only the head does."""

    name: str
    ranks: int
    dispatcher: str
    returns: str
    bit_identical: bool
    max_abs_logit_diff: float
    first_differing_layer: int | None
    first_difference: str | None  # embedding, layer 3, head
    dtype: str
    backend: str
    placement: str
    num_micro_batches: int
    num_chunks: int
    is_fused: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutVerification:
    """What `moesaic verify --layouts` found."""

    model: str
    scope: str  # all, long
    layouts: tuple[LayoutResult, ...]
    expected: int
    refused: tuple[Refused, ...]
    negative_control_caught: bool | None  # None: there is no wrong order to notice
    num_rows: int
    notes: tuple[str, ...]
    seconds: float
    missed_controls: tuple[str, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """Every check that failed, in words."""
        found = [
            f"{one.name}: other bits from {one.first_difference} on, logits by up to "
            f"{one.max_abs_logit_diff:.3g}"
            for one in self.layouts
            if not one.bit_identical
        ]
        if self.refused and not self.layouts:
            first = self.refused[0]
            found.append(
                f"all {len(self.refused)} layouts were refused, so none was compared; {first.name}: "
                f"{first.reason}"
            )
        found += [f"{name} was not noticed: the comparison proves nothing" for name in self.missed_controls]
        if self.expected != len(self.layouts) + len(self.refused):
            found.append(
                f"{self.expected} layouts were expected, {len(self.layouts)} run and {len(self.refused)} "
                "refused"
            )
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the first six keys are a stable interface."""
        plain = asdict(self)
        return {
            "layouts": [asdict(one) for one in self.layouts],
            "expected": self.expected,
            "run": len(self.layouts),
            "refused": [asdict(one) for one in self.refused],
            "negative_control_caught": self.negative_control_caught,
            "ok": not self.failures,
            "failures": list(self.failures),
            **{name: plain[name] for name in ("model", "scope", "num_rows", "notes", "seconds")},
        }


def verify_layouts(
    wishes: EngineConfig, *, is_long: bool, name: str | None = None, say: Say = lambda text: None
) -> LayoutVerification:
    """Compute a checkpoint in every layout and compare each with one rank.

    `wishes` says the folder, the format of the weights, the threads, and, where it names them, the one dtype
    and the one backend; else float32 comes first, where memory holds it, then the checkpoint's own, each on
    every backend of this machine.

    Raises: ConfigError for a model without routed experts; HostMemoryShort with what is needed; what
            `models.build.build` raises.
    """
    began_s = time.monotonic()
    spec = read_spec(wishes.model)
    if not spec.moe_layers:
        raise ConfigError(f"{wishes.model} has no routed experts, so there is one layout: nothing to compare")
    dtypes, notes = _dtypes(spec, wishes)
    levels = backends() if wishes.backend is None else (wishes.backend,)
    stage = _Stage(wishes, spec, make_work(spec))
    has_shared_memory = native.module() is not None
    matrix = make_matrix(
        spec, dtypes, levels, stage.numerics, is_long=is_long, has_shared_memory=has_shared_memory
    )
    results: list[LayoutResult] = []
    unavailable: list[Refused] = []
    by_numerics = groupby(matrix.cells, lambda cell: stage.numerics(cell.dtype, cell.backend, cell.shape))
    for numerics, of_numerics in by_numerics:
        dtype, backend = numerics.seam_dtype, numerics.backend
        leaves = f", {numerics.matmul_shards} leaves" if numerics.matmul_shards > 1 else ""
        say(f"{dtype} {backend}{leaves}: alone, to compare with")
        expected = stage.alone(numerics)
        for (placement, shape), cells in groupby(of_numerics, _company):
            some = list(cells)
            plan = make_plan(stage.num_experts, shape.num_ranks, placement, shape.num_slices)
            where = f"{count_ranks(shape.num_ranks)}{f' by tp {shape.tp}' if shape.tp > 1 else ''}"
            where += f", {shape.num_slices} slices" if shape.num_slices > 1 else ""
            say(f"{dtype} {backend}, {where}, {placement}: {len(some)} layouts")
            try:
                with stage.ranks(numerics, plan, shape) as ranks:
                    results += [
                        _result(cell, wishes.dispatch_format, ranks.run(cell), expected) for cell in some
                    ]
            except KernelUnavailable as error:  # what was tried before the first of them was run
                unavailable += [Refused(name=cell.name, reason=str(error)) for cell in some]
    say("the negative controls")
    controls = {
        PER_RANK: _control(stage, dtypes[0], levels[0]),
        FOLDED: _order_control(stage, dtypes[0], levels[0]),
    }
    if controls[PER_RANK] is None:
        notes.append("no negative control of experts: a sum of at most two products has one order")
    missed = tuple(name for name, is_caught in controls.items() if is_caught is False)
    return LayoutVerification(
        model=name or wishes.model,
        scope="long" if is_long else "all",
        layouts=tuple(results),
        expected=matrix.expected,
        refused=(*matrix.refused, *unavailable),
        negative_control_caught=False if missed else controls[PER_RANK] or controls[FOLDED],
        missed_controls=missed,
        num_rows=stage.work.num_rows,
        notes=tuple(notes),
        seconds=round(time.monotonic() - began_s, 1),
    )


def dump_json(found: LayoutVerification) -> str:
    """The verification as indented JSON text."""
    return json.dumps(found.to_json(), indent=2, allow_nan=False)


def need_bytes(spec: ModelSpec, dtype: str) -> int:
    """Memory of the largest layout: what is no expert once a rank, experts once and their copies."""
    total = count_params(spec).total
    experts = total["routed_experts"]
    rest = sum(total.values()) - experts
    return int(DTYPE_BYTES[dtype] * (max(NUM_RANKS) * rest + (1 + REPLICATED_SHARE) * experts))


def _dtypes(spec: ModelSpec, wishes: EngineConfig) -> tuple[list[str], list[str]]:
    """The dtypes to compare in, float32 first, and why it is left out.

    Raises: HostMemoryShort when none fits.
    """
    wished = wishes.dtype or (
        spec.dtype if wishes.format or wishes.kv_format or wishes.dispatch_format else None
    )
    dtypes: list[str] = list(dict.fromkeys([wished] if wished else ["float32", spec.dtype]))
    have = read_machine().available_bytes
    fitting = [dtype for dtype in dtypes if need_bytes(spec, dtype) <= have]
    notes = [
        f"not compared in {dtype}: {max(NUM_RANKS)} ranks in one process take about "
        f"{need_bytes(spec, dtype) / 1e9:.1f} GB of memory and {have / 1e9:.1f} GB are available"
        for dtype in dtypes
        if dtype not in fitting
    ]
    if not fitting:
        raise HostMemoryShort(
            f"{wishes.model} is {notes[-1]}; use a larger machine, or a model of the family with fewer layers"
        )
    return fitting, notes


def _company(cell: Cell) -> tuple[Any, Shape]:
    """What cells have in common that run on the same loaded ranks."""
    if cell.shape.is_fused:
        return cell.placement, cell.shape
    return cell.placement, Shape(
        dispatcher="local"
        if cell.shape.num_ranks == 1
        else "gathered"
        if cell.shape.dispatcher == "gathered"
        else "exchange",
        num_ranks=cell.shape.num_ranks,
        tp=cell.shape.tp,
        num_slices=cell.shape.num_slices,
        returns="choices",
        is_fused=False,
    )


def _result(cell: Cell, wire: WireFormat | None, found: Trace, expected: Trace) -> LayoutResult:
    difference = compare(found, expected)
    kind, _, number = (difference.first or "").partition(" ")
    shape = cell.shape
    return LayoutResult(
        name=cell.name if wire is None else f"{cell.name}, rows in {wire}",
        ranks=shape.num_ranks,
        dispatcher=shape.dispatcher,
        returns=shape.returns,
        bit_identical=difference.first is None,
        max_abs_logit_diff=difference.max_abs_logit_diff,
        first_differing_layer=int(number) if kind == "layer" else None,
        first_difference=difference.first,
        dtype=cell.dtype,
        backend=cell.backend,
        placement=cell.placement,
        num_micro_batches=cell.num_micro_batches,
        num_chunks=shape.num_chunks,
        is_fused=shape.is_fused,
    )


def _control(stage: _Stage, dtype: str, backend: str) -> bool | None:
    """Whether one partial sum per rank is noticed; None where no model of this kind could show it."""
    num_ranks = min(CONTROL_RANKS, min(stage.num_experts))
    if num_ranks < 2 or max(moe.experts_per_token for _, moe in stage.spec.moe_layers) < MIN_CHOICES:
        return None
    shape = Shape(dispatcher="exchange", num_ranks=num_ranks, returns="choices", is_fused=False)
    cell = Cell(dtype=dtype, backend=backend, shape=shape, num_micro_batches=1, placement="random")
    numerics = stage.numerics(dtype, backend, shape)
    expected = stage.alone(numerics)
    wrong = replace(numerics, combine="per_rank")
    with stage.ranks(wrong, make_plan(stage.num_experts, num_ranks, "random"), shape) as ranks:
        return compare(ranks.run(cell), expected).first is not None


def _order_control(stage: _Stage, dtype: str, backend: str) -> bool | None:
    """Whether leaves that are added rank after rank are noticed; None where tp cannot be three."""
    for tp in sorted(TENSOR_RANKS, reverse=True):
        shape = Shape(dispatcher="gathered", num_ranks=tp, returns="choices", is_fused=False, tp=tp)
        numerics = stage.numerics(dtype, backend, shape)
        if tp < CONTROL_RANKS or find_refusal(shape, backend, stage.spec, numerics) is not None:
            continue
        cell = Cell(dtype=dtype, backend=backend, shape=shape, num_micro_batches=1, placement="contiguous")
        expected, plan = stage.alone(numerics), make_plan(stage.num_experts, tp, "contiguous")
        try:
            with stage.ranks(numerics, plan, shape, kind=_FoldedRanks) as ranks:
                return compare(ranks.run(cell), expected).first is not None
        except KernelUnavailable:  # its layouts are refused with the reason
            return None
    return None


class _FoldedRanks(TensorRanks):
    """Ranks that add as they come: what a layout suggests."""

    def add(self, nodes: Mapping[Subtree, torch.Tensor]) -> torch.Tensor:
        return reduce(torch.add, nodes.values())


class _Stage:
    """A checkpoint, and what is computed with it."""

    def __init__(self, wishes: EngineConfig, spec: ModelSpec, work: Work) -> None:
        machine = read_machine()
        self.spec = spec
        self.work = work
        self.num_experts = tuple(moe.num_experts for _, moe in spec.moe_layers)
        self._wishes = wishes
        # A rank has few rows a step; on a busy machine threads would mostly wait for each other.
        self._num_threads = 1 if wishes.num_threads is None else wishes.threads(machine)
        self._available_bytes = machine.available_bytes

    def numerics(self, dtype: str, backend: str, shape: Shape) -> Numerics:
        """As an engine would resolve them, with leaves to split where the shape splits sums."""
        kind: DType = dtype  # type: ignore[assignment]  # one of the two, as it came from them
        numerics = self._wishes.numerics(dtype=kind, backend=backend)
        if not shape.splits:
            return numerics
        return numerics.with_leaves(matmul_shards=max(MATMUL_SHARDS, numerics.matmul_shards))

    def alone(self, numerics: Numerics) -> Trace:
        """What one rank computes that holds the whole model, all rows of a step in one batch."""
        return run_ranks([self._build(numerics, None)], self.work, num_micro_batches=1)

    @contextmanager
    def ranks(
        self, numerics: Numerics, plan: ExpertPlan, shape: Shape, kind: type[TensorRanks] = TensorRanks
    ) -> Iterator[_Ranks]:
        """Ranks with their shares of the model, in memory within the block."""
        seats = [_Seat() for _ in range(shape.num_ranks)]
        layout, layers = shape.layout(max(MICRO_BATCHES)), self.spec.moe_layers
        ends = _wires(layout, layers, numerics, self.work)[0] if shape.is_fused else []
        models, tensors = [], []
        for rank, seat in enumerate(seats):

            def dispatcher(
                spec: ModelSpec,
                numerics: Numerics,
                down_biases: Mapping[int, torch.Tensor],
                rank: int = rank,
                seat: _Seat = seat,
            ) -> Dispatcher | FusedRanks:
                if shape.is_fused:  # its layers are the dispatcher
                    return make_dispatcher(layout, spec.moe_layers, numerics, plan, ends[rank])
                seat.down_biases = down_biases
                return seat

            tensor = None if shape.tp == 1 else _tensor_share(shape, numerics, rank, kind)
            tensors.append(tensor)
            share = Share(rank=rank, plan=plan, dispatcher=dispatcher, tensor=tensor)
            models.append(self._build(numerics, share))
        yield _Ranks(models, seats, tensors, numerics, plan, self.work)

    def _build(self, numerics: Numerics, share: Share | None) -> LoadedModel:
        return build(
            Checkpoint.open(self._wishes.model),
            self.spec,
            numerics,
            num_threads=self._num_threads,
            available_bytes=self._available_bytes,
            share=share,
        )


def _wires(
    layout: Layout,
    layers: Sequence[tuple[int, MoeSpec]],
    numerics: Numerics,
    work: Work,
    num_slices: int = 1,
) -> tuple[list[Transport], MemoryWires]:
    """One end a rank, and the wires in this process that are no shared memory."""
    wires = MemoryWires(layout.num_ranks, num_chunks=layout.num_chunks)
    if layout.dispatcher != "shared_memory":
        return [wires.transport(rank) for rank in range(layout.num_ranks)], wires
    sizes = lane_sizes(layout, layers, numerics, work.num_rows, num_slices)
    ends = segments_in_one_process(layout.num_ranks, sizes)
    return [SharedMemoryTransport(end, num_chunks=layout.num_chunks) for end in ends], wires


class _Ranks:
    """Ranks that were loaded once, for layouts that differ in their dispatcher."""

    def __init__(
        self,
        models: Sequence[LoadedModel],
        seats: Sequence[_Seat],
        tensors: Sequence[TensorShare | None],
        numerics: Numerics,
        plan: ExpertPlan,
        work: Work,
    ) -> None:
        self._models = models
        self._seats = seats
        self._tensors = tensors
        self._numerics = numerics
        self._plan = plan
        self._work = work

    def run(self, cell: Cell) -> Trace:
        """The whole work in one layout."""
        layout = cell.shape.layout(cell.num_micro_batches)
        layers = self._models[0].spec.moe_layers
        ends, wires = _wires(layout, layers, self._numerics, self._work, self._plan.num_slices)
        for seat, end in zip(self._seats, ends, strict=True):
            found = make_dispatcher(
                layout, layers, self._numerics, self._plan, end, down_biases=seat.down_biases
            )
            if not isinstance(found, FusedRanks):  # whose layers were made with the model
                seat.dispatcher = found
        replicas = [MemoryWires(cell.shape.tp) for _ in range(layout.attention.size("dp"))]
        for rank, tensor in enumerate(self._tensors):
            if tensor is not None:
                replica, part = divmod(rank, cell.shape.tp)
                tensor.ranks.wires = replicas[replica].transport(part)
        trace = run_ranks(
            self._models, self._work, num_micro_batches=cell.num_micro_batches, tp=cell.shape.tp
        )
        if wires.boxes or any(replica.boxes for replica in replicas):
            raise AssertionError("a message was sent that nobody took")
        return trace


def _tensor_share(shape: Shape, numerics: Numerics, rank: int, kind: type[TensorRanks]) -> TensorShare:
    """A rank's part of its replica; its wires are laid anew for each layout."""
    split = TensorSplit(rank=rank % shape.tp, size=shape.tp, num_leaves=numerics.matmul_shards)
    ranks = kind(MemoryWires(shape.tp).transport(split.rank), split)
    return TensorShare(split=split, ranks=ranks, has_own_rows=shape.dispatcher != "gathered")


class _Seat(TokenSide, ExpertSide):
    """Where a loaded rank finds its dispatcher: another one for each layout."""

    dispatcher: Dispatcher
    down_biases: Mapping[int, torch.Tensor] | None = None  # None: its layers were made with the model

    @property
    def num_chunks(self) -> int:
        return self.dispatcher.num_chunks

    def send(self, x_TD: torch.Tensor, routing: Routing, tag: Tag, hint_E: torch.Tensor | None) -> Ticket:
        return self.dispatcher.send(x_TD, routing, tag, hint_E)

    def collect(self, ticket: Ticket) -> torch.Tensor:
        return self.dispatcher.collect(ticket)

    def next(self, tag: Tag | None) -> Wait:
        return self.dispatcher.next(tag)

    def receive(self, tag: Tag | None) -> ExpertBatch:
        return self.dispatcher.receive(tag)

    def reply(self, batch: ExpertBatch, out_JD: torch.Tensor) -> None:
        self.dispatcher.reply(batch, out_JD)

    def adopt(self, plan: ExpertPlan) -> None:
        self.dispatcher.adopt(plan)

    def observe(self, loads: Sequence[IntArray]) -> None:
        self.dispatcher.observe(loads)
