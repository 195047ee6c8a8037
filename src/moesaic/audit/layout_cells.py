"""The layouts of `moesaic verify --layouts`: which there are, which are refused and why, which are run. No
torch here.

    shape       dispatcher, ranks, what returns, fused or not, chunks, slices of experts: legal or refused
    cell        a legal shape with a dtype, a backend, micro-batches and a placement of experts
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Literal

import numpy as np

from moesaic.engine.layout import check_layout, check_split
from moesaic.errors import ConfigError
from moesaic.spec.deployment import Grid, Layout
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.layout_rules import DISPATCHERS, FUSED_RETURNS, Dispatcher, LayoutCell, Returns, refusals
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import Numerics

Placement = Literal["contiguous", "random", "replicated"]
RETURNS: tuple[Returns, ...] = ("choices", "subtrees")
PLACEMENTS: tuple[Placement, ...] = ("contiguous", "random", "replicated")
NUM_RANKS = (1, 2, 3, 4)
MICRO_BATCHES = (1, 2)
CHUNKS = (1, 3)  # some are empty: of an idle rank's rows, and of one token
TENSOR_RANKS = (2, 3, 4)  # of a replica: 3 have 2, 1 and 1 of four leaves
NUM_SLICES = (2, 4)  # of an expert; the first where not all are compared
MATMUL_SHARDS = 4  # where sums are split over ranks
REPLICATED_SHARE = 0.5  # of the experts get a second copy
NO_SHARED_MEMORY = "ranks share memory by native kernels, which are not built in this installation"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What decides whether a layout is run."""

    dispatcher: Dispatcher
    num_ranks: int
    returns: Returns
    is_fused: bool
    tp: int = 1
    num_chunks: int = 1
    num_slices: int = 1  # of an expert, placed one by one

    @property
    def splits(self) -> list[str]:
        """How it splits sums, in words."""
        parts = [f"tp {self.tp}"] if self.tp > 1 else []
        return parts + ([f"{self.num_slices} slices"] if self.num_slices > 1 else [])

    def layout(self, num_micro_batches: int = 1) -> Layout:
        """Attention by replicas of `tp` ranks, experts over all ranks; two ranks share a node.

        Raises: ConfigError for what contradicts itself.
        """
        ranks = tuple(range(self.num_ranks))
        is_far = self.dispatcher == "two_level"
        return Layout(
            attention=Grid(axes={"dp": self.num_ranks // self.tp, "tp": self.tp}, ranks=ranks),
            experts=Grid(axes={"ep": self.num_ranks}, ranks=ranks),
            dispatcher=self.dispatcher,
            returns=self.returns,
            num_micro_batches=num_micro_batches,
            num_chunks=self.num_chunks,
            is_fused=self.is_fused,
            ranks_per_node=(2 if self.num_ranks > 2 else 1) if is_far else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One way of computing a model."""

    dtype: str
    backend: str
    shape: Shape
    num_micro_batches: int
    placement: Placement

    @property
    def name(self) -> str:
        """`float32 native/avx2, 3 ranks, exchange, subtrees, replicated, 2 micro-batches`."""
        shape, parts = self.shape, self.num_micro_batches
        words = [f"{self.dtype} {self.backend}", count_ranks(shape.num_ranks), shape.dispatcher]
        words += ["fused"] if shape.is_fused else []
        words += shape.splits
        words += [] if shape.dispatcher == "local" else [shape.returns]
        words += [self.placement, "1 micro-batch" if parts == 1 else f"{parts} micro-batches"]
        words += [] if shape.num_chunks == 1 else [f"{shape.num_chunks} chunks"]
        return ", ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A layout, or a kind of layouts, that is not run."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrix:
    """What is to be run, in the order of running, and what is not."""

    cells: tuple[Cell, ...]
    refused: tuple[Refused, ...]

    @property
    def expected(self) -> int:
        """All that the report must account for."""
        return len(self.cells) + len(self.refused)


def make_matrix(
    spec: ModelSpec,
    dtypes: Sequence[str],
    backends: Sequence[str],
    numerics_of: Callable[[str, str, Shape], Numerics],
    *,
    is_long: bool,
    has_shared_memory: bool = True,
) -> Matrix:
    """All cells of a model, or a set of them in which every two values of any two axes meet.

    `numerics_of` is of a dtype, a backend and a shape. Ranks share memory where native kernels are built,
    whatever they compute with.
    """
    legal: list[tuple[str, Shape]] = []
    refused: dict[str, str] = {}
    for backend, shape in product(backends, _shapes(is_long=is_long)):
        why = find_refusal(shape, backend, spec, numerics_of(dtypes[0], backend, shape))
        if shape.dispatcher == "shared_memory" and not has_shared_memory:
            why = Refused(name="shared_memory", reason=NO_SHARED_MEMORY)
        if why is None:
            legal.append((backend, shape))
        else:
            refused.setdefault(why.name, why.reason)
    cells: list[Cell] = []
    for dtype in dtypes:
        found = [
            Cell(dtype=dtype, backend=backend, shape=shape, num_micro_batches=parts, placement=placement)
            for (backend, shape), parts, placement in product(legal, MICRO_BATCHES, PLACEMENTS)
            if is_long or shape.num_slices == 1 or placement == PLACEMENTS[-1]
        ]
        cells += found if is_long else _covering(found)
    # Ranks with one placement on one backend are made once.
    cells.sort(key=lambda cell: (dtypes.index(cell.dtype), *_group(cell, backends)))
    return Matrix(
        cells=tuple(cells),
        refused=tuple(Refused(name=name, reason=reason) for name, reason in refused.items()),
    )


def _shapes(*, is_long: bool) -> Iterator[Shape]:
    whole = [*_data_parallel_shapes(), *_tensor_shapes(is_long=is_long)]
    yield from whole
    for num_chunks, shape in product(CHUNKS[1:], whole):
        if is_long or _stands_for_chunks(shape):
            yield replace(shape, num_chunks=num_chunks)


def _stands_for_chunks(shape: Shape) -> bool:
    """Of those in which rows travel in parts, where not all are compared."""
    is_plain = shape.tp == 1 and shape.returns == "choices" and shape.num_ranks == max(NUM_RANKS)
    return is_plain and shape.dispatcher in ("exchange", "shared_memory")


def _tensor_shapes(*, is_long: bool) -> Iterator[Shape]:
    for tp, num_ranks, returns in product(TENSOR_RANKS if is_long else (2,), NUM_RANKS, RETURNS):
        if num_ranks % tp:
            continue
        if num_ranks == tp:
            yield Shape(dispatcher="gathered", num_ranks=tp, returns=returns, is_fused=False, tp=tp)
        if is_long or (num_ranks > tp and returns == "choices"):
            for dispatcher in ("exchange", "two_level") if is_long else ("exchange",):
                yield Shape(
                    dispatcher=dispatcher, num_ranks=num_ranks, returns=returns, is_fused=False, tp=tp
                )
    yield from _sliced_shapes(is_long=is_long)


def _sliced_shapes(*, is_long: bool) -> Iterator[Shape]:
    """Slices over ranks with requests of their own, and over those that share attention."""
    kinds: list[tuple[Dispatcher, int]] = [("exchange", 3), ("gathered", 2)]
    if is_long:
        far: tuple[Dispatcher, ...] = ("exchange", "two_level", "shared_memory")
        kinds = list(product(far, NUM_RANKS)) + [("gathered", num_ranks) for num_ranks in TENSOR_RANKS]
    for (dispatcher, num_ranks), num_slices in product(kinds, NUM_SLICES if is_long else NUM_SLICES[:1]):
        if num_ranks == 1 or num_ranks not in NUM_RANKS:
            continue
        yield Shape(
            dispatcher=dispatcher,
            num_ranks=num_ranks,
            returns="choices",
            is_fused=False,
            tp=num_ranks if dispatcher == "gathered" else 1,
            num_slices=num_slices,
        )


def _data_parallel_shapes() -> Iterator[Shape]:
    for is_fused, dispatcher, num_ranks, returns in product((False, True), DISPATCHERS, NUM_RANKS, RETURNS):
        if dispatcher != "gathered":  # it is for the tokens of tensor parallelism
            yield Shape(dispatcher=dispatcher, num_ranks=num_ranks, returns=returns, is_fused=is_fused)


def find_refusal(shape: Shape, backend: str, spec: ModelSpec, numerics: Numerics) -> Refused | None:
    """Why a shape is not run, under the shortest name that all of its kind share; None: it runs."""
    cell = LayoutCell(
        dispatcher=shape.dispatcher,
        is_fused=shape.is_fused,
        num_chunks=shape.num_chunks,
        has_slices=shape.num_slices > 1,
        returns=shape.returns,
        is_native=backend.startswith("native/"),
    )
    for refusal in refusals(cell):
        name: str = shape.dispatcher
        if refusal.field == "is_fused":
            name += " fused" if refusal.is_contradiction else f" fused, {backend}"
        if refusal.field == "num_chunks":
            name += " fused, in chunks" if shape.is_fused else ", in chunks"
        return Refused(name=name, reason=refusal.reason)
    try:
        layout = shape.layout()
    except ConfigError as error:
        return Refused(name=f"{shape.dispatcher}, {count_ranks(shape.num_ranks)}", reason=str(error))
    try:
        check_layout(layout, spec, shape.num_slices)
    except ConfigError as error:
        return Refused(name=count_ranks(shape.num_ranks), reason=str(error))
    try:
        check_split(layout, spec, numerics, shape.num_slices)
    except ConfigError as error:
        return Refused(name=", ".join(shape.splits) or "leaves", reason=str(error))
    if shape.dispatcher == "local" and shape.returns != "choices":
        return Refused(name=f"local, {shape.returns}", reason="nothing is returned where nothing is sent")
    if shape.is_fused and shape.returns != "choices":
        return Refused(name=f"{shape.dispatcher} fused, {shape.returns}", reason=FUSED_RETURNS)
    return None


def count_ranks(count: int) -> str:
    """`1 rank`, `3 ranks`."""
    return "1 rank" if count == 1 else f"{count} ranks"


def _group(cell: Cell, backends: Sequence[str]) -> tuple[int, bool, int, int, int, int, bool, str]:
    shape = cell.shape
    return (
        backends.index(cell.backend),
        bool(shape.splits),
        PLACEMENTS.index(cell.placement),
        shape.num_ranks,
        shape.tp,
        shape.num_slices,
        shape.dispatcher == "gathered",
        shape.dispatcher if shape.is_fused else "",
    )


def _covering(cells: Sequence[Cell]) -> list[Cell]:
    """Few of the cells, which hold every pair of values that any cell holds. Greedy, so not the fewest."""
    left = set().union(*(_pairs(cell) for cell in cells))
    found = []
    while left:
        best = max(cells, key=lambda cell: len(_pairs(cell) & left))
        found.append(best)
        left -= _pairs(best)
    return found


def _pairs(cell: Cell) -> set[tuple[object, object]]:
    """A shape counts as one choice. Shared memory carries the messages of exchange, so it meets every other
    choice and the choices need not meet each other there once more. Slices are sent as experts are, and meet
    dispatchers and backends alone."""
    shape, others = cell.shape, (cell.backend, f"{cell.num_micro_batches} parts", cell.placement)
    if shape.num_slices > 1:
        return {(shape.num_slices, value) for value in (cell.backend, shape.dispatcher)}
    if shape.dispatcher == "shared_memory" and not shape.is_fused:
        kind = shape.dispatcher, shape.num_chunks
        return {(kind, value) for value in (shape.num_ranks, shape.returns, *others)}
    return set(combinations((shape, *others), 2))


def make_plan(
    num_experts: tuple[int, ...], num_ranks: int, placement: Placement, num_slices: int = 1
) -> ExpertPlan:
    """contiguous; random: any expert on any rank, ranks of any size; replicated: random with more copies.

    Slices are placed like experts.
    """
    parts = tuple(count * num_slices for count in num_experts)
    if placement == "contiguous":
        return _cut(contiguous_plan(parts, num_ranks), num_slices)
    rng = np.random.default_rng(num_ranks)
    slot_expert, slot_rank = [], []
    for count in parts:
        copies = int(count * REPLICATED_SHARE) if placement == "replicated" else 0
        experts = np.concatenate([rng.permutation(count), rng.permutation(count)[:copies]])
        slot_expert.append(experts.astype(np.int64))
        slot_rank.append(rng.integers(0, num_ranks, len(experts)))
    plan = ExpertPlan(
        version=1,
        slot_rank=tuple(slot_rank),
        slot_expert=tuple(slot_expert),
        slot_slice=tuple(np.zeros_like(slots) for slots in slot_expert),
        slot_share=tuple(np.ones(len(slots)) for slots in slot_expert),
    )
    return _cut(plan, num_slices)


def _cut(plan: ExpertPlan, num_slices: int) -> ExpertPlan:
    """A plan of parts as one of slices of experts."""
    return replace(
        plan,
        slot_expert=tuple(ids // num_slices for ids in plan.slot_expert),
        slot_slice=tuple(ids % num_slices for ids in plan.slot_expert),
    )
