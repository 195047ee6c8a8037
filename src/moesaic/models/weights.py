"""The weights of a model on their way from the checkpoint to their places, and the memory that this takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor

from moesaic.errors import CheckpointError, HostMemoryShort
from moesaic.experts.blob import Part
from moesaic.experts.store import ExpertLoader, ResidentStore
from moesaic.kernels import mxfp4
from moesaic.kernels.panel import PanelWeight, Weight, pack_panels, slice_columns
from moesaic.kernels.weight_memory import WeightMemory
from moesaic.models.accounting import Accounting, Filling
from moesaic.models.checkpoint import Checkpoint, check_finite
from moesaic.models.room import Room, in_lines
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import DTYPE_BYTES, Format, Numerics
from moesaic.spec.quantised import QUANTISED
from moesaic.units import format_bytes

Progress = Callable[[int, int], None]
"""Told the bytes of the checkpoint that were read, and all that will be."""


Held = Mapping[int, Sequence[int]]
"""The experts that are kept in memory here, or the slices of such, by layer."""


def check_memory(
    checkpoint: Checkpoint,
    accounting: Accounting,
    numerics: Numerics,
    weight_bytes: int,
    available_bytes: int | None,
) -> None:
    """Refuse a load that cannot end well, before it starts; `available_bytes` None: not checked.

    Units:  weight_bytes are those that are not in memory yet.
    Raises: HostMemoryShort with what is needed and what there is.
    """
    read_bytes = max(_read_bytes(checkpoint, filling) for filling in accounting.fillings)
    need = weight_bytes + read_bytes
    kept = numerics.formats.default.weight
    if available_bytes is not None and need > available_bytes:
        raise HostMemoryShort(
            f"{checkpoint.path} needs {format_bytes(need)} of memory (weights in {kept} "
            f"{format_bytes(weight_bytes)}, one tensor while it is read {format_bytes(read_bytes)}), and "
            f"{format_bytes(available_bytes)} are available; free memory, use a larger machine or a smaller "
            "model"
        )


def _stored_bytes(checkpoint: Checkpoint, filling: Filling) -> int:
    return sum(checkpoint.tensors[key].num_bytes for key in filling.tensors)


def _read_bytes(checkpoint: Checkpoint, filling: Filling) -> int:
    """What is held while a parameter is read: all of it; of stacked experts one, and its decoded form."""
    num_bytes = _stored_bytes(checkpoint, filling)
    if filling.stacked is None:
        return num_bytes
    decoded = 0 if filling.packed is None else mxfp4.DECODE_BYTES * filling.num_elements
    return (num_bytes + decoded) // filling.shape[0]


def weight_bytes_of(accounting: Accounting, numerics: Numerics, held: Held, num_slices: int = 1) -> int:
    """Bytes of the weights in memory; `num_slices` are those of an expert."""
    tied, head_bytes = _tied_head(accounting, numerics), 0
    if tied is not None:
        head_bytes = QUANTISED[numerics.formats.default.weight].matrix_bytes(*tied.shape)
    return head_bytes + sum(
        _kept_bytes(filling, numerics, held, num_slices) for filling in accounting.fillings
    )


def _tied_head(accounting: Accounting, numerics: Numerics) -> Filling | None:
    """The embedding where the head is a rounded copy of it."""
    if numerics.formats.default.weight not in QUANTISED or any(
        one.name == "head" for one in accounting.fillings
    ):
        return None
    return next((one for one in accounting.fillings if one.name == "embedding"), None)


def rest_bytes_of(accounting: Accounting, numerics: Numerics) -> int:
    """Bytes that `Room` gives for all that is no expert, as it is read."""
    sizes = [
        _bytes_in(filling, filling.kept_shape, _placed(filling, numerics))
        for filling in accounting.fillings
        if filling.half != "experts"
    ]
    if (tied := _tied_head(accounting, numerics)) is not None:
        sizes.append(QUANTISED[numerics.formats.default.weight].matrix_bytes(*tied.shape))
    return sum(in_lines(size) for size in sizes)


def widened_bytes_of(accounting: Accounting, numerics: Numerics) -> int:
    """Bytes that layers keep beside the weights they were given: the per-head maps of latent attention."""
    maps = [filling for filling in accounting.fillings if _is_widened(filling)]
    return sum(_bytes_in(filling, filling.kept_shape, "float32") for filling in maps)


def decoding_note(checkpoint: Checkpoint, accounting: Accounting, numerics: Numerics) -> str | None:
    """What packed weights become in memory; None where there are none."""
    packed = [filling for filling in accounting.fillings if filling.packed is not None]
    if not packed:
        return None
    stored = sum(_stored_bytes(checkpoint, filling) for filling in packed)
    everything = {i: range(filling.shape[0]) for filling in packed if (i := filling.layer_idx) is not None}
    kept = sum(_kept_bytes(filling, numerics, everything) for filling in packed)
    formats = ", ".join(sorted({str(filling.packed) for filling in packed}))
    weight = numerics.formats.default.weight
    how = "and rounded to" if weight in QUANTISED else "exactly, to"
    return (
        f"expert weights: {format_bytes(stored)} of {formats} in the checkpoint are decoded, {how} "
        f"{format_bytes(kept)} of {weight} in memory"
    )


def _kept_bytes(filling: Filling, numerics: Numerics, held: Held, num_slices: int = 1) -> int:
    """Bytes of a parameter in memory."""
    if filling.half != "experts":
        kept = "float32" if _is_widened(filling) else _placed(filling, numerics)
        return _bytes_in(filling, filling.kept_shape, kept)
    assert filling.layer_idx is not None, "experts belong to a layer"
    if num_slices > 1 and filling.name == "down_bias":
        return filling.num_elements * DTYPE_BYTES["float32"]  # of all experts, beside the slices
    shape = filling.shape[1:] if filling.expert_id is None else filling.shape
    if filling.name == "down":
        shape = (shape[0], shape[1] // num_slices)
    else:
        shape = (shape[0] // num_slices, *shape[1:])
    ids = held[filling.layer_idx]
    if (expert_id := filling.expert_id) is not None:
        first = expert_id * num_slices
        ids = [i for i in range(first, first + num_slices) if i in ids]
    formats = [numerics.formats.of_expert(filling.layer_idx, i // num_slices).weight for i in ids]
    return sum(_bytes_in(filling, shape, format) for format in formats)


def _bytes_in(filling: Filling, shape: tuple[int, ...], format: Format) -> int:
    if format not in QUANTISED:
        return prod(shape) * DTYPE_BYTES[format]
    if len(shape) == 1:
        return prod(shape) * DTYPE_BYTES["float32"]  # a bias beside the integers
    halves = 2 if filling.name.startswith("gate_up") else 1  # each padded by itself
    return halves * QUANTISED[format].matrix_bytes(shape[0] // halves, shape[1])


def _placed(filling: Filling, numerics: Numerics) -> Format:
    """The format in which a parameter outside the experts is given to its layer."""
    if _is_wide(filling):
        return "float32"
    return numerics.formats.default.weight if _is_quantised(filling, numerics) else numerics.seam_dtype


def _is_widened(filling: Filling) -> bool:
    """The per-head maps of latent attention, of which their layer keeps copies in float32."""
    return filling.half == "mixer" and filling.name == "kv_b"


def _is_quantised(filling: Filling, numerics: Numerics) -> bool:
    """Whether a parameter outside the experts is rounded to the numerics' integer format."""
    is_integer = numerics.formats.default.weight in QUANTISED
    return is_integer and _is_matmul(filling) and filling.name not in _GATE_NAMES


def _is_matmul(filling: Filling) -> bool:
    """Whether a matmul in the seam dtype sees a parameter as its weight."""
    is_vector = len(filling.shape) < 2 or filling.name.endswith("_bias")
    return not (is_vector or filling.half == "router" or filling.name in ("embedding", "kv_b", "conv"))


_GATE_NAMES = ("output_gate", "a", "b", "ba")
"""Matrices of a few rows that open or decay all others: they stay floats beside integer weights."""


def _is_wide(filling: Filling) -> bool:
    """Whether a tensor is read as float32: routers, norm weights with an offset, rates of decay."""
    return filling.half == "router" or filling.offset != 0.0 or filling.name in _WIDE_NAMES


_WIDE_NAMES = ("decay_log", "decay_bias", "out_norm")
"""Small vectors of recurrent mixers, which checkpoints store in float32 beside bfloat16 matrices."""


def matmul_shapes(accounting: Accounting, numerics: Numerics) -> tuple[tuple[int, int], ...]:
    """The shapes [F, D] of the floats that a matmul will see; gate and up of an expert are one matmul."""
    found: dict[tuple[int, int], None] = {}
    for filling in accounting.fillings:
        is_expert = filling.half == "experts"
        is_integer = is_expert and numerics.formats.default.weight in QUANTISED
        if not _is_matmul(filling) or is_integer or _is_quantised(filling, numerics):
            continue
        rows, width = filling.kept_shape[-2:]
        is_half = is_expert and filling.name in ("gate", "up")
        found[2 * rows if is_half else rows, width] = None
    return tuple(found)


def slice_shapes(spec: ModelSpec, numerics: Numerics, num_slices: int) -> tuple[tuple[int, int, int], ...]:
    """(rows of the whole, rows of a slice, width) of the floats of experts that are cut."""
    if num_slices == 1 or numerics.formats.default.weight in QUANTISED:
        return ()
    inners = [((2 if moe.is_gated else 1) * moe.expert_width, moe.row_width) for _, moe in spec.moe_layers]
    return tuple({(rows, rows // num_slices, width): None for rows, width in inners})


def split_shapes(accounting: Accounting, numerics: Numerics) -> tuple[tuple[int, int, int], ...]:
    """(rows of the whole, rows kept, width) of the floats of which this rank keeps some rows."""
    return tuple(
        (filling.shape[0], len(filling.cut.rows), filling.shape[1])
        for filling in accounting.fillings
        if filling.cut.rows is not None and _is_matmul(filling) and not _is_quantised(filling, numerics)
    )


def router_shapes(accounting: Accounting) -> tuple[tuple[int, int], ...]:
    """The shapes [E, D] of the matmuls in float32."""
    shapes = [filling.shape for filling in accounting.fillings if filling.half == "router"]
    return tuple({(shape[0], shape[1]): None for shape in shapes if len(shape) == 2})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Weights:
    """Every tensor of a model in its final place."""

    model: dict[str, Tensor]
    head_VD: Weight  # the embedding itself where the two are tied and neither is rounded
    layers: tuple[dict[str, dict[str, Weight]], ...]  # by half, by our name
    store: ResidentStore | None

    def floats(self, layer_idx: int, half: str) -> dict[str, Tensor]:
        """The parameters of half a layer that are in no integer format."""
        found = self.layers[layer_idx].get(half, {})
        return {name: weight for name, weight in found.items() if isinstance(weight, Tensor)}


class Reading:
    """A checkpoint on its way into memory, and how far it is."""

    def __init__(
        self, checkpoint: Checkpoint, accounting: Accounting, progress: Progress | None = None
    ) -> None:
        self.checkpoint, self._progress = checkpoint, progress
        self._num_read = 0
        self._total = sum(_stored_bytes(checkpoint, filling) for filling in accounting.fillings)

    def into(self, memory: WeightMemory, fillings: Iterable[Filling]) -> Iterator[Filling]:
        """The fillings one by one, each to be read unless the memory is filled, counted when it was.

        After the last one `memory` is whole.
        """
        known = set(self.checkpoint.digests())
        for filling in fillings:
            yield filling
            self._num_read += _stored_bytes(self.checkpoint, filling)
            memory.tell(self._num_read, self._total)
            if self._progress is not None:
                self._progress(self._num_read, self._total)
        digests = {key: one for key, one in self.checkpoint.digests().items() if key not in known}
        self.checkpoint.know(memory.finish(digests))


def read_experts(
    reading: Reading, accounting: Accounting, experts: ExpertLoader, memory: WeightMemory
) -> ResidentStore:
    """Stream the experts of the sparse layers in; what `experts` does not need is not read."""
    fillings = [filling for filling in accounting.fillings if filling.half == "experts"]
    for filling in reading.into(memory, fillings):
        assert filling.layer_idx is not None, "experts belong to a layer"
        if not memory.is_filled or experts.keeps_all(filling.layer_idx, filling.name):
            _read_experts(reading.checkpoint, filling, experts)
    return experts.finish()


def read_rest(
    reading: Reading,
    spec: ModelSpec,
    numerics: Numerics,
    accounting: Accounting,
    store: ResidentStore | None,
    room: Room,
) -> Weights:
    """Stream all else in; at most one tensor is held outside its place at any time."""
    model: dict[str, Weight] = {}
    layers: tuple[dict[str, dict[str, Weight]], ...] = tuple({} for _ in spec.layers)
    checkpoint, is_filled = reading.checkpoint, room.memory.is_filled
    tied = _tied_head(accounting, numerics)
    for filling in reading.into(room.memory, [one for one in accounting.fillings if one.half != "experts"]):
        weight = room.place(filling.kept_shape, _placed(filling, numerics))
        if filling.layer_idx is not None:
            layers[filling.layer_idx].setdefault(filling.half, {})[filling.name] = weight
        else:
            model[filling.name] = weight
        if not is_filled:
            _fill(checkpoint, filling, weight)
        if filling is tied:
            model["head"] = room.place(filling.shape, numerics.formats.default.weight)
            if not is_filled:
                _round(weight, model["head"], name="the head, which is the embedding")
        if filling.name == "embedding" and accounting.tied_head is not None and not is_filled:
            _check_tied(checkpoint, accounting.tied_head, weight)
    head_VD = model.pop("head", None)
    if head_VD is None:
        head_VD = model["embedding"]
    floats = {name: weight for name, weight in model.items() if isinstance(weight, Tensor)}
    assert len(floats) == len(model), "of a model's own parameters the head alone is rounded"
    return Weights(model=floats, head_VD=head_VD, layers=layers, store=store)


def _fill(checkpoint: Checkpoint, filling: Filling, weight: Weight) -> None:
    """Read one parameter outside the experts, in the format in which it stays."""
    tensor = checkpoint.read(filling.key, shape=filling.stored_shape).view(filling.shape)
    rows, columns = filling.cut
    if rows is not None:
        tensor = tensor[rows.start : rows.stop]
    if columns is not None and isinstance(weight, PanelWeight):
        # Rounded with the whole row, which may have one scale.
        whole = pack_panels(tensor, weight.format, name=filling.key)
        weight.data.copy_(slice_columns(whole, columns).data)
        return
    if columns is not None:
        tensor = tensor[:, columns.start : columns.stop]
    _round(tensor, weight, name=filling.key)
    if filling.offset:
        assert isinstance(weight, Tensor), "a weight with an offset is a vector"
        weight += filling.offset


def _round(tensor: Weight, into: Weight, *, name: str) -> None:
    assert isinstance(tensor, Tensor), "what is rounded are floats"
    if isinstance(into, PanelWeight):
        pack_panels(tensor, into.format, name=name, into=into)
    else:
        into.copy_(tensor)


def _read_experts(checkpoint: Checkpoint, filling: Filling, experts: ExpertLoader) -> None:
    layer_idx = filling.layer_idx
    assert layer_idx is not None, "experts belong to a layer"
    if filling.expert_id is not None:
        if not experts.needs(layer_idx, filling.expert_id, filling.name):
            return
        tensor = checkpoint.read(filling.key, shape=filling.shape)
        experts.put(layer_idx, filling.expert_id, cast(Part, filling.name), tensor)
        return
    assert filling.stacked is not None, "a tensor that is not of one expert holds all of a layer"
    for expert_id in range(filling.shape[0]):
        if not experts.needs(layer_idx, expert_id, filling.name):
            continue
        tensor = _read_stacked(checkpoint, filling, expert_id)
        if not filling.name.startswith("gate_up"):
            experts.put(layer_idx, expert_id, cast(Part, filling.name), tensor)
            continue
        halves = (tensor[0::2], tensor[1::2]) if filling.stacked.is_interleaved else tensor.chunk(2)
        for part, half in zip(("gate", "up"), halves, strict=True):
            name = filling.name.replace("gate_up", part)
            experts.put(layer_idx, expert_id, cast(Part, name), half)


def _read_stacked(checkpoint: Checkpoint, filling: Filling, expert_id: int) -> Tensor:
    """One expert's rows as we hold them, [rows, width] or [rows]."""
    is_packed, stacked = filling.packed is not None, filling.stacked
    parts = [
        checkpoint.read_item(key, expert_id, shape=shape, is_packed=is_packed)
        for key, shape in filling.tensors.items()
    ]
    if is_packed:
        decoded = mxfp4.decode(*parts)
        blocks = checkpoint.tensors[next(iter(filling.tensors))]
        check_finite(blocks, decoded, first=expert_id * decoded.numel())
        return decoded
    is_turned = stacked is not None and stacked.is_transposed and parts[0].dim() == 2
    return parts[0].t() if is_turned else parts[0]


def _check_tied(checkpoint: Checkpoint, key: str, embedding_VD: Weight) -> None:
    assert isinstance(embedding_VD, Tensor), "embeddings stay floats"
    head_VD = checkpoint.read(key, shape=tuple(embedding_VD.shape))
    if not torch.equal(head_VD.to(embedding_VD.dtype), embedding_VD):
        raise CheckpointError(
            f"config.json of {checkpoint.path} ties the head to the embedding, but {key} differs from it; "
            f"set tie_word_embeddings to false if {key} is the head, or remove it"
        )
