"""Where experts live: arenas that a loader fills while it reads, and the store that hands out their weights.

One arena per layer holds the blobs of this rank's experts back to back, on several NUMA nodes in a run for
each; a slot is a pointer to a blob, so that a second slot for an expert costs nothing. Where a plan cuts
experts, blobs are of slices, numbered as `ExpertPlan.part_ids` does. Knows nothing of checkpoints or keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from moesaic.errors import CheckpointError, ConfigError, HostMemoryShort
from moesaic.experts.blob import BlobLayout, ExpertBlob, ExpertWeights, Part, cut_part, vector_dtype
from moesaic.experts.contract import ExpertStore, Wave
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.panel import Weight
from moesaic.kernels.weight_memory import WeightMemory, in_huge_pages
from moesaic.spec.experts import ExpertKey, ExpertPlan, contiguous_plan, name_parts
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import FormatMap, FormatPair
from moesaic.steps import DONE, Steps
from moesaic.units import format_bytes

_SHOWN = 6  # names in one error message


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arena:
    """The blobs of one layer's experts on this rank, back to back in one allocation, or in a run per node.

    Shapes:  data [bytes] uint8; every blob starts at a multiple of 64 bytes.
    """

    layouts: Mapping[int, BlobLayout]  # by id, in the order of the blobs
    starts: Mapping[int, int]
    data: Tensor

    @classmethod
    def allocate(
        cls,
        spec: MoeSpec,
        formats: FormatMap,
        layer_idx: int,
        part_ids: Sequence[int],
        memory: WeightMemory,
        num_slices: int = 1,
    ) -> Arena:
        """Room for the experts of one layer. The pages are committed as they are written.

        Raises: HostMemoryShort when the machine refuses.
        """
        layouts = _layouts(layer_idx, spec, formats, part_ids, num_slices)
        starts, runs = _lay_out(layouts, memory.num_runs)
        end = runs[-1].stop
        try:
            data = torch.from_numpy(memory.take(end, [run.start for run in runs]))
        except OSError as error:
            raise HostMemoryShort(
                f"layer {layer_idx}: {len(layouts)} experts need {format_bytes(end)} of memory and the "
                f"machine refused ({error.strerror}); use a machine with more memory or a smaller model"
            ) from error
        arena = cls(layouts=layouts, starts=starts, data=data)
        if not memory.is_filled:
            for part_id, layout in layouts.items():
                layout.clear_gaps(arena.blob(part_id))
        return arena

    def blob(self, part_id: int) -> Tensor:
        """The bytes of one expert, or of one slice, without a copy."""
        start = self.starts[part_id]
        return self.data[start : start + self.layouts[part_id].num_bytes]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotTable:
    """What the slots of one layer on this rank hold, by slot. Never changed: another plan is another one."""

    weights: tuple[ExpertWeights, ...]
    part_ids: tuple[int, ...]  # experts, or slices of such, numbered as `ExpertPlan.part_ids` does


class ExpertLoader:
    """Fills the arenas of all MoE layers from tensors in any order, and turns into the store.

    A checkpoint is read one tensor at a time and each goes straight to its place: nothing is held twice.

        loader = ExpertLoader(spec.moe_layers, numerics.formats)
        loader.put(3, 17, "gate", gate_FD)             one key per expert: [F, D], up alike, down [D, F]
        loader.put_stack(3, "down", down_EDF)          one key for all experts of a layer
        loader.put_stack(3, "up", gate_up_EFD[:, F:])  a fused key: two puts of its halves, any strides
        store = loader.finish()

    Parts are gate (only where experts are gated), up and down, and with biases gate_bias [F], up_bias [F],
    down_bias [D]; D is MoeSpec.row_width, F is MoeSpec.expert_width. `shapes(layer_idx)` says it in numbers.
    Of experts that the plan cuts whole tensors are put, too, and what is of this rank's slices is kept.
    """

    def __init__(
        self,
        moe_layers: Sequence[tuple[int, MoeSpec]],
        formats: FormatMap,
        *,
        plan: ExpertPlan | None = None,
        rank: int = 0,
        memory: WeightMemory | None = None,
    ) -> None:
        """Allocate. Without a plan this rank holds every expert; `moe_layers` is `ModelSpec.moe_layers`.

        In a memory that is filled already nothing is missing. None: memory of this process alone.

        Raises: HostMemoryShort; ConfigError for a plan of another number of layers, for a format that no
                kernel takes, and for slices that would cut its groups.
        """
        self._specs = dict(moe_layers)
        self._formats = formats
        self._plan = _plan_or_all(moe_layers, plan)
        self._num_slices = self._plan.num_slices
        self._rank = rank
        held = held_experts(moe_layers, plan, rank)
        self._memory = memory = memory or WeightMemory()
        self._arenas = {
            layer_idx: Arena.allocate(spec, formats, layer_idx, held[layer_idx], memory, self._num_slices)
            for layer_idx, spec in moe_layers
        }
        self._missing: set[tuple[int, int, Part]] = {
            (layer_idx, part_id, part)
            for layer_idx, arena in self._arenas.items()
            for part_id, layout in arena.layouts.items()
            for part in layout.places
            if not memory.is_filled
        }
        self._down_biases = {
            layer_idx: torch.empty((spec.num_experts, spec.row_width))
            for layer_idx, spec in moe_layers
            if spec.has_bias and self._num_slices > 1
        }
        for layer_idx, bias_ED in self._down_biases.items():
            self._missing |= {(layer_idx, i * self._num_slices, "down_bias") for i in range(len(bias_ED))}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all arenas, and of biases beside them."""
        return _num_bytes(self._arenas, self._down_biases)

    def shapes(self, layer_idx: int) -> Mapping[Part, tuple[int, ...]]:
        """The parts of an expert of this layer, and their shapes."""
        layout = BlobLayout.of(self._spec(layer_idx), "float32")
        return MappingProxyType({part: place.shape for part, place in layout.places.items()})

    def needs(self, layer_idx: int, logical_id: int, part: str | None = None) -> bool:
        """Whether this rank holds any of an expert, or keeps the part of it; others need not be read."""
        if self._spec(layer_idx).num_experts <= logical_id:
            return False
        return self.keeps_all(layer_idx, part) or bool(self._slices(layer_idx, logical_id))

    def keeps_all(self, layer_idx: int, part: str | None) -> bool:
        """Whether a part is kept of all experts, outside the arenas.

        The sum of an expert's slices gets its bias where the token is.
        """
        return part == "down_bias" and layer_idx in self._down_biases

    def put(self, layer_idx: int, logical_id: int, part: Part, tensor: Tensor) -> None:
        """Round one part of one expert into its place; an expert that lives on another rank is skipped.

        Shapes:  as `shapes(layer_idx)` says; any strides, float32, bfloat16 or float16.
        Raises:  CheckpointError naming layer, expert and part, with the shape expected and found; also for an
                 expert that does not exist and for a part that was filled before.
        """
        spec = self._spec(layer_idx)
        name = f"layer {layer_idx}, expert {logical_id}, {part}"
        if not 0 <= logical_id < spec.num_experts:
            raise CheckpointError(f"{name}: the layer has experts 0 to {spec.num_experts - 1}")
        if self._num_slices > 1:
            self._put_slices(layer_idx, logical_id, part, tensor, name=name)
        elif logical_id in self._arenas[layer_idx].layouts:
            self._write(layer_idx, logical_id, part, tensor, name=name)

    def _put_slices(self, layer_idx: int, logical_id: int, part: Part, tensor: Tensor, *, name: str) -> None:
        pair, count = self._formats.of_expert(layer_idx, logical_id), self._num_slices
        whole, first = _layout(self._spec(layer_idx), pair), logical_id * count
        wanted = self._slices(layer_idx, logical_id)
        whole.check(part, tensor, name=name)
        if self.keeps_all(layer_idx, part):
            self._check_first(layer_idx, first, part, name=name)
            self._down_biases[layer_idx][logical_id] = tensor.to(torch_dtype(vector_dtype(pair.weight)))
            self._missing.discard((layer_idx, first, part))
        elif wanted:
            pieces = cut_part(part, tensor, pair.weight, count, wanted, name=name)
            for idx, piece in zip(wanted, pieces, strict=True):
                self._write(layer_idx, first + idx, part, piece, name=name)

    def _write(self, layer_idx: int, part_id: int, part: Part, tensor: Weight, *, name: str) -> None:
        arena = self._arenas[layer_idx]
        layout = arena.layouts[part_id]
        if part in layout.places:
            self._check_first(layer_idx, part_id, part, name=name)
        layout.write(arena.blob(part_id), part, tensor, name=name)
        self._missing.discard((layer_idx, part_id, part))

    def _check_first(self, layer_idx: int, part_id: int, part: Part, *, name: str) -> None:
        if (layer_idx, part_id, part) not in self._missing:
            raise CheckpointError(f"{name}: filled a second time; two keys of the checkpoint map to it")

    def _slices(self, layer_idx: int, logical_id: int) -> list[int]:
        """Those of an expert that this rank holds."""
        first, held = logical_id * self._num_slices, self._arenas[layer_idx].layouts
        return [idx for idx in range(self._num_slices) if first + idx in held]

    def put_stack(self, layer_idx: int, part: Part, tensor_E: Tensor, first_id: int = 0) -> None:
        """`put` for a tensor [n, ...] that holds the part of experts first_id .. first_id + n.

        Raises:  CheckpointError as `put`.
        """
        for i, tensor in enumerate(tensor_E.unbind(0)):
            self.put(layer_idx, first_id + i, part, tensor)

    def finish(self) -> ResidentStore:
        """The store, once every part of every expert on this rank was filled.

        Raises: CheckpointError naming what was never filled.
        """
        if self._missing:
            shown = [
                f"layer {at}, expert {i // self._num_slices}, {part}"
                for at, i, part in sorted(self._missing)[:_SHOWN]
            ]
            rest = len(self._missing) - len(shown)
            raise CheckpointError(
                f"never filled: {'; '.join(shown)}{f' and {rest} more' if rest else ''}; "
                "no key of the checkpoint maps there"
            )
        return ResidentStore(
            self._arenas,
            self._plan,
            self._rank,
            self._specs,
            self._formats,
            self._memory.private(),
            self._down_biases,
        )

    def _spec(self, layer_idx: int) -> MoeSpec:
        if layer_idx not in self._specs:
            raise CheckpointError(
                f"layer {layer_idx} has no routed experts; the layers with experts are {sorted(self._specs)}"
            )
        return self._specs[layer_idx]


class Moves(Protocol):
    """What a rank gives to others and gets from them while one plan takes the place of another."""

    def layer(
        self, layer_idx: int, give: Callable[[int], Tensor], size: Callable[[int], int]
    ) -> Steps[Mapping[int, Tensor]]:
        """The blobs that this rank was missing, by id; valid until the next layer.

        `give` has the bytes of an expert, or slice, held here, `size` says how many one of this layer has.
        """
        ...


class ResidentStore(ExpertStore):
    """All experts of this rank in memory: one wave, never a wait. Made by `ExpertLoader.finish`."""

    def __init__(
        self,
        arenas: Mapping[int, Arena],
        plan: ExpertPlan,
        rank: int,
        specs: Mapping[int, MoeSpec],
        formats: FormatMap,
        memory: WeightMemory,
        down_biases: Mapping[int, Tensor],
    ) -> None:
        """`memory` is for the arenas that `adopt` makes anew.

        Shapes:  down_biases by layer [E, D] float32: of cut experts, whose slices have none.
        """
        self.num_slices = plan.num_slices
        self.down_biases = down_biases
        self._memory = memory
        self._arenas = dict(arenas)
        self._rank = rank
        self._specs = specs
        self._formats = formats
        self._weights = {layer_idx: _weights(arena) for layer_idx, arena in self._arenas.items()}
        self._check_held(plan, slots := self._slots(plan))
        self._tables = {layer_idx: self._table(layer_idx, ids) for layer_idx, ids in slots.items()}
        self.num_replaced = 0  # tables, by plans that were adopted

    @property
    def weight_bytes(self) -> int:
        """Bytes of all arenas, and of biases beside them."""
        return _num_bytes(self._arenas, self.down_biases)

    def adopt(self, plan: ExpertPlan, moves: Moves | None = None) -> Steps[None]:
        """Point the slots at the plan's experts, a layer after the other.

        With `moves` experts come from other ranks and go there, and what the plan has elsewhere is freed: a
        layer's memory is there twice until the new one is filled. Without, nothing is copied or freed.

        Raises: ConfigError naming the experts of the plan that this rank does not hold and nobody moves, and
                for a plan that cuts experts otherwise.
        """
        if plan.num_slices != self.num_slices:
            raise ConfigError(
                f"expert plan version {plan.version} cuts experts into {plan.num_slices} slices, and those "
                f"in memory are in {self.num_slices}; start with that plan"
            )
        slots = self._slots(plan)
        if moves is None:
            self._check_held(plan, slots)
        for layer_idx, ids in slots.items():
            if moves is not None:
                yield from self._refill(layer_idx, tuple(sorted(set(ids))), moves)
            table = self._tables[layer_idx]
            if tuple(ids) != table.part_ids or any(
                self._weights[layer_idx][i] is not one for i, one in zip(ids, table.weights, strict=True)
            ):
                self._tables[layer_idx] = self._table(layer_idx, ids)
                self.num_replaced += 1
        yield from ()

    def held(self, layer_idx: int) -> tuple[int, ...]:
        """The experts of a layer, or the slices of such, that are in memory here."""
        return tuple(self._arenas[layer_idx].layouts)

    def table(self, layer_idx: int) -> SlotTable:
        """What the slots of a layer hold under the plan last adopted; the same object as long as it holds."""
        return self._tables[layer_idx]

    def waves(self, layer_idx: int, offsets_L1: Tensor) -> Iterator[Wave]:
        """One wave with every slot that has jobs; none when no slot has."""
        ranges = pairwise(offsets_L1.tolist())
        slots = tuple(slot for slot, (start, stop) in enumerate(ranges) if stop > start)
        if slots:
            yield Wave(ready=DONE, slots=slots, table=self._tables[layer_idx].weights, site="host")

    def prefetch(self, keys: Sequence[ExpertKey]) -> None:
        """Nothing to do: all is here."""

    def blob(self, key: ExpertKey) -> ExpertBlob:
        """One expert with its digest; the bytes are the arena's own.

        Raises: ConfigError when this rank does not hold it.
        """
        arena, part_id = self._arenas.get(key.layer_idx), key.part_id(self.num_slices)
        if arena is None or part_id not in arena.layouts:
            named = name_parts([part_id], self.num_slices)
            raise ConfigError(f"rank {self._rank} does not hold {named} of layer {key.layer_idx}")
        return ExpertBlob.of(key, arena.layouts[part_id].format, arena.blob(part_id))

    def _refill(self, layer_idx: int, wanted: tuple[int, ...], moves: Moves) -> Steps[None]:
        """Exchange blobs with the other ranks, and hold the wanted ones and no other."""
        old, spec, count = self._arenas[layer_idx], self._specs[layer_idx], self.num_slices

        def size(part_id: int) -> int:
            return _layout(spec, self._formats.of_expert(layer_idx, part_id // count), count).num_bytes

        arrived = yield from moves.layer(layer_idx, old.blob, size)
        if wanted == tuple(old.layouts):
            return
        new = Arena.allocate(spec, self._formats, layer_idx, wanted, self._memory, count)
        for part_id in wanted:
            blob = arrived[part_id] if part_id in arrived else old.blob(part_id)
            new.blob(part_id).copy_(blob)
        self._arenas[layer_idx], self._weights[layer_idx] = new, _weights(new)

    def _slots(self, plan: ExpertPlan) -> dict[int, list[int]]:
        return _slots_of_rank(plan, self._rank, tuple(self._arenas))

    def _check_held(self, plan: ExpertPlan, slots: Mapping[int, Sequence[int]]) -> None:
        lacking = {
            layer_idx: sorted(set(ids) - set(self._weights[layer_idx])) for layer_idx, ids in slots.items()
        }
        named = [f"layer {layer_idx}: {ids}" for layer_idx, ids in lacking.items() if ids]
        if named:
            raise ConfigError(
                f"expert plan version {plan.version} puts experts on rank {self._rank} that are not in its "
                f"memory ({'; '.join(named[:_SHOWN])}); load them, or keep them where they are"
            )

    def _table(self, layer_idx: int, ids: Sequence[int]) -> SlotTable:
        held = self._weights[layer_idx]
        return SlotTable(weights=tuple(held[part_id] for part_id in ids), part_ids=tuple(ids))


def _weights(arena: Arena) -> dict[int, ExpertWeights]:
    return {i: layout.weights(arena.blob(i)) for i, layout in arena.layouts.items()}


def held_experts(
    moe_layers: Sequence[tuple[int, MoeSpec]], plan: ExpertPlan | None, rank: int
) -> dict[int, tuple[int, ...]]:
    """The experts that a rank holds, or slices of such, ascending, by layer; without a plan all.

    Raises: ConfigError for a plan of another number of layers.
    """
    layer_idxs = tuple(layer_idx for layer_idx, _ in moe_layers)
    slots = _slots_of_rank(_plan_or_all(moe_layers, plan), rank, layer_idxs)
    return {layer_idx: tuple(sorted(set(ids))) for layer_idx, ids in slots.items()}


def _plan_or_all(moe_layers: Sequence[tuple[int, MoeSpec]], plan: ExpertPlan | None) -> ExpertPlan:
    return contiguous_plan(tuple(spec.num_experts for _, spec in moe_layers), 1) if plan is None else plan


def arena_runs(
    moe_layers: Sequence[tuple[int, MoeSpec]],
    formats: FormatMap,
    held: Mapping[int, Sequence[int]],
    num_runs: int,
    num_slices: int = 1,
) -> list[list[int]]:
    """Bytes of each run of each layer's arena, in whole huge pages: what an allocation will take."""
    layers = []
    for layer_idx, spec in moe_layers:
        layouts = _layouts(layer_idx, spec, formats, held[layer_idx], num_slices)
        layers.append([in_huge_pages(len(run)) for run in _lay_out(layouts, num_runs)[1]])
    return layers


def _lay_out(layouts: Mapping[int, BlobLayout], num_runs: int) -> tuple[dict[int, int], list[range]]:
    """Where each blob begins, and where runs of neighbours lie, as many experts in one as in another.

    A run begins at a huge page, since pages are what lies on a node.
    """
    ids = list(layouts)
    starts: dict[int, int] = {}
    runs = []
    end = 0
    for idx in range(num_runs):
        begin = end = in_huge_pages(end)
        for logical_id in ids[idx * len(ids) // num_runs : (idx + 1) * len(ids) // num_runs]:
            starts[logical_id] = end
            end += layouts[logical_id].num_bytes
        runs.append(range(begin, end))
    return starts, runs


def _layouts(
    layer_idx: int, spec: MoeSpec, formats: FormatMap, part_ids: Sequence[int], num_slices: int
) -> dict[int, BlobLayout]:
    return {i: _layout(spec, formats.of_expert(layer_idx, i // num_slices), num_slices) for i in part_ids}


def _num_bytes(arenas: Mapping[int, Arena], beside: Mapping[int, Tensor]) -> int:
    return sum(arena.data.numel() for arena in arenas.values()) + sum(one.nbytes for one in beside.values())


@lru_cache
def _layout(spec: MoeSpec, pair: FormatPair, num_slices: int = 1) -> BlobLayout:
    if pair != (known := FormatPair.of(pair.weight)):
        raise ConfigError(
            f"experts with {pair.weight} weights and {pair.activation} rows: no kernel multiplies these; "
            f"use {known.activation} rows"
        )
    return BlobLayout.of(spec, pair.weight, num_slices)


def _slots_of_rank(plan: ExpertPlan, rank: int, layer_idxs: tuple[int, ...]) -> dict[int, list[int]]:
    """The expert, or the slice, of each slot of a rank, by layer."""
    if len(plan.slot_expert) != len(layer_idxs):
        raise ConfigError(
            f"expert plan version {plan.version} has {len(plan.slot_expert)} layers, the model has "
            f"{len(layer_idxs)} with experts"
        )
    return {
        layer_idx: ids[np.flatnonzero(ranks == rank)].tolist()
        for layer_idx, ids, ranks in zip(layer_idxs, plan.part_ids, plan.slot_rank, strict=True)
    }
