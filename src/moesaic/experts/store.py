"""Where experts live: arenas that a loader fills while it reads, and the store that hands out their weights.

One arena per layer holds the blobs of this rank's experts back to back, on several NUMA nodes in a run for
each; a slot is a pointer to a blob, so that a second slot for an expert costs nothing. Knows nothing of
checkpoints, key names or other ranks.
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
from moesaic.experts.blob import BlobLayout, ExpertBlob, ExpertWeights, Part
from moesaic.experts.contract import ExpertStore, Wave
from moesaic.kernels.weight_memory import WeightMemory, in_huge_pages
from moesaic.spec.experts import ExpertKey, ExpertPlan, contiguous_plan
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

    layouts: Mapping[int, BlobLayout]  # by logical id, in the order of the blobs
    starts: Mapping[int, int]
    data: Tensor

    @classmethod
    def allocate(
        cls,
        spec: MoeSpec,
        formats: FormatMap,
        layer_idx: int,
        logical_ids: Sequence[int],
        memory: WeightMemory,
    ) -> Arena:
        """Room for the experts of one layer. The pages are committed as they are written.

        Raises: HostMemoryShort when the machine refuses.
        """
        layouts = {i: _layout(spec, formats.of_expert(layer_idx, i)) for i in logical_ids}
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
            for logical_id, layout in layouts.items():
                layout.clear_gaps(arena.blob(logical_id))
        return arena

    def blob(self, logical_id: int) -> Tensor:
        """The bytes of one expert, without a copy."""
        start = self.starts[logical_id]
        return self.data[start : start + self.layouts[logical_id].num_bytes]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotTable:
    """What the slots of one layer on this rank hold, by slot. Never changed: another plan is another one."""

    weights: tuple[ExpertWeights, ...]
    logical_ids: tuple[int, ...]


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

        Raises: HostMemoryShort; ConfigError for a plan of another number of layers or with sliced experts,
                and for a format that no kernel takes.
        """
        self._specs = dict(moe_layers)
        self._formats = formats
        self._plan = _plan_or_all(moe_layers, plan)
        self._rank = rank
        held = held_experts(moe_layers, plan, rank)
        self._memory = memory = memory or WeightMemory()
        self._arenas = {
            layer_idx: Arena.allocate(spec, formats, layer_idx, held[layer_idx], memory)
            for layer_idx, spec in moe_layers
        }
        self._missing = {
            (layer_idx, logical_id, part)
            for layer_idx, arena in self._arenas.items()
            for logical_id, layout in arena.layouts.items()
            for part in layout.places
            if not memory.is_filled
        }

    @property
    def weight_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.data.numel() for arena in self._arenas.values())

    def shapes(self, layer_idx: int) -> Mapping[Part, tuple[int, ...]]:
        """The parts of an expert of this layer, and their shapes."""
        layout = BlobLayout.of(self._spec(layer_idx), "float32")
        return MappingProxyType({part: place.shape for part, place in layout.places.items()})

    def needs(self, layer_idx: int, logical_id: int) -> bool:
        """Whether this rank holds the expert; a loader need not read the others."""
        return (
            self._spec(layer_idx).num_experts > logical_id and logical_id in self._arenas[layer_idx].layouts
        )

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
        arena = self._arenas[layer_idx]
        if logical_id not in arena.layouts:
            return
        layout, key = arena.layouts[logical_id], (layer_idx, logical_id, part)
        if part in layout.places and key not in self._missing:
            raise CheckpointError(f"{name}: filled a second time; two keys of the checkpoint map to it")
        layout.write(arena.blob(logical_id), part, tensor, name=name)
        self._missing.discard(key)

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
            shown = [f"layer {at}, expert {i}, {part}" for at, i, part in sorted(self._missing)[:_SHOWN]]
            rest = len(self._missing) - len(shown)
            raise CheckpointError(
                f"never filled: {'; '.join(shown)}{f' and {rest} more' if rest else ''}; "
                "no key of the checkpoint maps there"
            )
        return ResidentStore(
            self._arenas, self._plan, self._rank, self._specs, self._formats, self._memory.private()
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
        """The blobs that this rank was missing, by logical id; valid until the next layer.

        `give` has the bytes of an expert held here, `size` says how many an expert of this layer has.
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
    ) -> None:
        """`memory` is for the arenas that `adopt` makes anew."""
        self._memory = memory
        self._arenas = dict(arenas)
        self._rank = rank
        self._specs = specs
        self._formats = formats
        self._weights = {layer_idx: _weights(arena) for layer_idx, arena in self._arenas.items()}
        self._check_held(plan, slots := self._slots(plan))
        self._tables = {layer_idx: self._table(layer_idx, ids) for layer_idx, ids in slots.items()}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all arenas."""
        return sum(arena.data.numel() for arena in self._arenas.values())

    def adopt(self, plan: ExpertPlan, moves: Moves | None = None) -> Steps[None]:
        """Point the slots at the plan's experts, a layer after the other.

        With `moves` experts come from other ranks and go there, and what the plan has elsewhere is freed: a
        layer's memory is there twice until the new one is filled. Without, nothing is copied or freed.

        Raises: ConfigError naming the experts of the plan that this rank does not hold and nobody moves.
        """
        slots = self._slots(plan)
        if moves is None:
            self._check_held(plan, slots)
        for layer_idx, ids in slots.items():
            if moves is not None:
                yield from self._refill(layer_idx, tuple(sorted(set(ids))), moves)
            table = self._tables[layer_idx]
            if tuple(ids) != table.logical_ids or any(
                self._weights[layer_idx][i] is not one for i, one in zip(ids, table.weights, strict=True)
            ):
                self._tables[layer_idx] = self._table(layer_idx, ids)
        yield from ()

    def held(self, layer_idx: int) -> tuple[int, ...]:
        """The logical experts of a layer that are in memory here."""
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
        arena = self._arenas.get(key.layer_idx)
        if arena is None or key.logical_id not in arena.layouts:
            raise ConfigError(f"rank {self._rank} holds no expert {key.logical_id} of layer {key.layer_idx}")
        return ExpertBlob.of(key, arena.layouts[key.logical_id].format, arena.blob(key.logical_id))

    def _refill(self, layer_idx: int, wanted: tuple[int, ...], moves: Moves) -> Steps[None]:
        """Exchange blobs with the other ranks, and hold the wanted ones and no other."""
        old, spec = self._arenas[layer_idx], self._specs[layer_idx]

        def size(logical_id: int) -> int:
            return _layout(spec, self._formats.of_expert(layer_idx, logical_id)).num_bytes

        arrived = yield from moves.layer(layer_idx, old.blob, size)
        if wanted == tuple(old.layouts):
            return
        new = Arena.allocate(spec, self._formats, layer_idx, wanted, self._memory)
        for logical_id in wanted:
            blob = arrived[logical_id] if logical_id in arrived else old.blob(logical_id)
            new.blob(logical_id).copy_(blob)
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
        return SlotTable(weights=tuple(held[logical_id] for logical_id in ids), logical_ids=tuple(ids))


def _weights(arena: Arena) -> dict[int, ExpertWeights]:
    return {i: layout.weights(arena.blob(i)) for i, layout in arena.layouts.items()}


def held_experts(
    moe_layers: Sequence[tuple[int, MoeSpec]], plan: ExpertPlan | None, rank: int
) -> dict[int, tuple[int, ...]]:
    """The logical experts that a rank holds, ascending, by layer; without a plan all.

    Raises: ConfigError for a plan of another number of layers or with sliced experts.
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
) -> list[list[int]]:
    """Bytes of each run of each layer's arena, in whole huge pages: what an allocation will take."""
    layers = []
    for layer_idx, spec in moe_layers:
        layouts = {i: _layout(spec, formats.of_expert(layer_idx, i)) for i in held[layer_idx]}
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


@lru_cache
def _layout(spec: MoeSpec, pair: FormatPair) -> BlobLayout:
    if pair != (known := FormatPair.of(pair.weight)):
        raise ConfigError(
            f"experts with {pair.weight} weights and {pair.activation} rows: no kernel multiplies these; "
            f"use {known.activation} rows"
        )
    return BlobLayout.of(spec, pair.weight)


def _slots_of_rank(plan: ExpertPlan, rank: int, layer_idxs: tuple[int, ...]) -> dict[int, list[int]]:
    """The logical expert of each slot of a rank, by layer."""
    if len(plan.slot_expert) != len(layer_idxs):
        raise ConfigError(
            f"expert plan version {plan.version} has {len(plan.slot_expert)} layers, the model has "
            f"{len(layer_idxs)} with experts"
        )
    if any(slices.any() for slices in plan.slot_slice):
        raise ConfigError(
            f"expert plan version {plan.version} slices experts, and this store holds whole ones; "
            "use slice 0 only"
        )
    return {
        layer_idx: plan.slot_expert[at][np.flatnonzero(plan.slot_rank[at] == rank)].tolist()
        for at, layer_idx in enumerate(layer_idxs)
    }
