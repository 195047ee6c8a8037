"""The weights of a model on their way from the checkpoint to their places, and the memory that this takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor

from moesaic.errors import CheckpointError, ConfigError, HostMemoryShort
from moesaic.experts.blob import Part
from moesaic.experts.store import ExpertLoader, ResidentStore
from moesaic.kernels import mxfp4
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.huge_pages import map_bytes
from moesaic.kernels.panel import PANEL_ROWS, PanelWeight, Weight, check_width, pack_panels
from moesaic.models.accounting import Accounting, Filling
from moesaic.models.checkpoint import Checkpoint, check_finite
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import DTYPE_BYTES, Format, Numerics
from moesaic.spec.quantised import QUANTISED
from moesaic.units import format_bytes

Progress = Callable[[int, int], None]
"""Told the bytes of the checkpoint that were read, and all that will be."""


Held = Mapping[int, Sequence[int]]
"""The logical experts that are kept in memory here, by layer."""


def check_memory(
    checkpoint: Checkpoint,
    accounting: Accounting,
    numerics: Numerics,
    held: Held,
    available_bytes: int | None,
) -> None:
    """Refuse a load that cannot end well, before it starts; `available_bytes` None: not checked.

    Raises: HostMemoryShort with what is needed and what there is.
    """
    weight_bytes = weight_bytes_of(accounting, numerics, held)
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


def weight_bytes_of(accounting: Accounting, numerics: Numerics, held: Held) -> int:
    """Bytes of the weights in memory."""
    tied = next((one for one in accounting.fillings if one.name == "embedding"), None)
    has_head = any(one.name == "head" for one in accounting.fillings)
    format = numerics.formats.default.weight
    head_bytes = 0
    if tied is not None and not has_head and format in QUANTISED:
        head_bytes = QUANTISED[format].matrix_bytes(*tied.shape)
    return head_bytes + sum(_kept_bytes(filling, numerics, held) for filling in accounting.fillings)


def check_leaves(accounting: Accounting, numerics: Numerics) -> None:
    """Refuse a row-parallel matrix whose leaves would not be whole, before a weight is read.

    Raises: ConfigError naming the tensor, with the arithmetic.
    """
    for filling in accounting.fillings:
        if filling.name not in _INNER_NAMES:
            continue
        is_quantised = filling.half == "experts" or _is_quantised(filling, numerics)
        format = numerics.formats.default.weight if is_quantised else numerics.seam_dtype
        try:
            check_width(format, filling.shape[-1], numerics.matmul_shards)
        except ConfigError as error:
            raise ConfigError(f"{filling.key}: {error}") from error


_INNER_NAMES = ("o", "out", "down")
"""Matrices whose inner width a layout may split: those that end a mixer, a dense network, an expert."""


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


def _kept_bytes(filling: Filling, numerics: Numerics, held: Held) -> int:
    """Bytes of a parameter in memory."""
    if filling.half != "experts":
        return _bytes_in(filling, filling.shape, _kept(filling, numerics))
    assert filling.layer_idx is not None, "experts belong to a layer"
    ids = held[filling.layer_idx]
    if filling.expert_id is not None:
        is_held = filling.expert_id in ids
        return _bytes_in(filling, filling.shape, _kept(filling, numerics)) if is_held else 0
    formats = [numerics.formats.of_expert(filling.layer_idx, i).weight for i in ids]
    return sum(_bytes_in(filling, filling.shape[1:], format) for format in formats)


def _bytes_in(filling: Filling, shape: tuple[int, ...], format: Format) -> int:
    if format not in QUANTISED:
        return prod(shape) * DTYPE_BYTES[format]
    if len(shape) == 1:
        return prod(shape) * DTYPE_BYTES["float32"]  # a bias beside the integers
    halves = 2 if filling.name.startswith("gate_up") else 1  # each padded by itself
    return halves * QUANTISED[format].matrix_bytes(shape[0] // halves, shape[1])


def _kept(filling: Filling, numerics: Numerics) -> Format:
    """The format a tensor ends in."""
    if filling.half == "experts":
        assert filling.layer_idx is not None, "experts belong to a layer"
        assert filling.expert_id is not None, "of all experts at once each has a format of its own"
        return numerics.formats.of_expert(filling.layer_idx, filling.expert_id).weight
    # The per-head maps of latent attention are widened by their layer.
    if _is_wide(filling) or (filling.half == "mixer" and filling.name == "kv_b"):
        return "float32"
    return numerics.formats.default.weight if _is_quantised(filling, numerics) else numerics.seam_dtype


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
        rows, width = filling.shape[-2:]
        is_half = is_expert and filling.name in ("gate", "up")
        found[2 * rows if is_half else rows, width] = None
    return tuple(found)


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


class _Room:
    """Memory for the matrices outside the experts, one after the other in huge pages.

    Owns:    what it gave out keeps the memory alive, a chunk as long as any matrix in it.
    """

    CHUNK_BYTES = 64 * 2**20  # mapped at once: the end of each that stays unused costs no memory
    ALIGNMENT_BYTES = 64

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8.

        Raises: HostMemoryShort when the machine refuses.
        """
        taken = -(-num_bytes // self.ALIGNMENT_BYTES) * self.ALIGNMENT_BYTES
        if taken > len(self._free):
            try:
                self._free = torch.from_numpy(map_bytes(max(taken, self.CHUNK_BYTES)))
            except OSError as error:
                raise HostMemoryShort(
                    f"a weight needs {format_bytes(num_bytes)} of memory and the machine refused; use a "
                    "machine with more memory or a smaller model"
                ) from error
        room, self._free = self._free[:num_bytes], self._free[taken:]
        return room

    def keep(self, weight: Tensor) -> Tensor:
        """A copy of a matrix in here."""
        return self.take(weight.nbytes).view(weight.dtype).view(weight.shape).copy_(weight)

    def pack(self, weight_FD: Tensor, format: Format, *, name: str) -> PanelWeight:
        """A matrix rounded into an integer format, in here.

        Raises: CheckpointError as `pack_panels`.
        """
        num_rows, width = weight_FD.shape
        num_panels, panel_bytes = -(-num_rows // PANEL_ROWS), QUANTISED[format].panel_bytes(width)
        data = self.take(num_panels * panel_bytes).view(num_panels, panel_bytes)
        into = PanelWeight(format=format, data=data, num_rows=num_rows, width=width)
        return pack_panels(weight_FD, format, name=name, into=into)


def read_weights(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    numerics: Numerics,
    accounting: Accounting,
    experts: ExpertLoader | None,
    progress: Progress | None,
) -> Weights:
    """Stream the checkpoint; at most one tensor is held outside its place at any time.

    `experts` takes those of the sparse layers; what it does not need is not read.
    """
    model: dict[str, Tensor] = {}
    head_VD: Weight | None = None
    layers: tuple[dict[str, dict[str, Weight]], ...] = tuple({} for _ in spec.layers)
    room = _Room()
    num_read, total = 0, sum(_stored_bytes(checkpoint, filling) for filling in accounting.fillings)
    for filling in accounting.fillings:
        if filling.half == "experts":
            assert experts is not None, "experts are accounted for in sparse layers only"
            _read_experts(checkpoint, filling, experts)
        else:
            weight = _read(checkpoint, filling, numerics, room)
            if filling.layer_idx is not None:
                layers[filling.layer_idx].setdefault(filling.half, {})[filling.name] = weight
            elif filling.name == "head":
                head_VD = weight
            else:
                assert isinstance(weight, Tensor), "of a model's own parameters the head alone is rounded"
                model[filling.name] = weight
        num_read += _stored_bytes(checkpoint, filling)
        if progress is not None:
            progress(num_read, total)
    if accounting.tied_head is not None:
        _check_tied(checkpoint, accounting.tied_head, model["embedding"])
    if head_VD is None:
        format = numerics.formats.default.weight
        head_VD = model["embedding"]
        if format in QUANTISED:
            head_VD = room.pack(head_VD, format, name="the head, which is the embedding")
    store = None if experts is None else experts.finish()
    return Weights(model=model, head_VD=head_VD, layers=layers, store=store)


def _read(checkpoint: Checkpoint, filling: Filling, numerics: Numerics, room: _Room) -> Weight:
    """One parameter outside the experts, in the format in which it stays."""
    tensor = checkpoint.read(filling.key, shape=filling.stored_shape).view(filling.shape)
    if _is_quantised(filling, numerics):
        return room.pack(tensor, numerics.formats.default.weight, name=filling.key)
    tensor = tensor.to(torch.float32 if _is_wide(filling) else torch_dtype(numerics.seam_dtype))
    if filling.offset:
        tensor = tensor + filling.offset
    return room.keep(tensor) if tensor.dim() == 2 else tensor


def _read_experts(checkpoint: Checkpoint, filling: Filling, experts: ExpertLoader) -> None:
    layer_idx = filling.layer_idx
    assert layer_idx is not None, "experts belong to a layer"
    if filling.expert_id is not None:
        if not experts.needs(layer_idx, filling.expert_id):
            return
        tensor = checkpoint.read(filling.key, shape=filling.shape)
        experts.put(layer_idx, filling.expert_id, cast(Part, filling.name), tensor)
        return
    assert filling.stacked is not None, "a tensor that is not of one expert holds all of a layer"
    for expert_id in range(filling.shape[0]):
        if not experts.needs(layer_idx, expert_id):
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


def _check_tied(checkpoint: Checkpoint, key: str, embedding_VD: Tensor) -> None:
    head_VD = checkpoint.read(key, shape=tuple(embedding_VD.shape))
    if not torch.equal(head_VD.to(embedding_VD.dtype), embedding_VD):
        raise CheckpointError(
            f"config.json of {checkpoint.path} ties the head to the embedding, but {key} differs from it; "
            f"set tie_word_embeddings to false if {key} is the head, or remove it"
        )
