"""An expert as ONE contiguous run of bytes in one format: what is placed, moved, copied, tiered and checked.

Knows where the parts of an expert lie in its blob; not where blobs come from or go.

    | gate F*D | up F*D |.| down D*F |.| gate_bias F | up_bias F |.| down_bias D |.|    . up to 64 bytes

gate and up touch, so that both are one matmul of [2F, D]; an integer format pads the rows of each by itself.
A slice of an expert is a blob, too: of a part of F, and without down_bias, which is added to the sum of all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from moesaic.errors import CheckpointError, nearest
from moesaic.hashing import digest_bytes
from moesaic.kernels.formats import torch_dtype
from moesaic.kernels.panel import PanelWeight, Weight, pack_panels, slice_columns
from moesaic.spec.experts import ExpertKey
from moesaic.spec.model import MoeSpec
from moesaic.spec.numerics import DTYPE_BYTES, DType, Format
from moesaic.spec.quantised import QUANTISED, check_shards_of

Part = Literal["gate", "up", "down", "gate_bias", "up_bias", "down_bias"]

ALIGNMENT_BYTES = 64
"""A cache line and the widest vector: kernels may give other bits for a weight that starts elsewhere."""


class Place(NamedTuple):
    """Where a part begins in its blob, and its shape."""

    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertWeights:
    """Views of one blob, as the feed-forward wants them. Valid as long as the blob.

    Shapes:  inner_FD [2F, D] (gate rows, then up rows) for a gated expert, else [F, D]; down_DF [D, F].
    """

    format: Format
    inner_FD: Weight
    down_DF: Weight
    inner_bias_F: Tensor | None
    down_bias_D: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class BlobLayout:
    """Where the parts of an expert lie. Equal layouts make blobs interchangeable."""

    format: Format
    is_gated: bool
    places: Mapping[Part, Place]
    gaps: tuple[tuple[int, int], ...]  # bytes [start, stop) between parts
    num_bytes: int

    @classmethod
    def of(cls, spec: MoeSpec, format: Format, num_slices: int = 1) -> BlobLayout:
        """The layout of an expert of `spec` stored in `format`, or of one of its equal slices.

        Raises: ConfigError when slices would cut a group of the format.
        """
        check_shards_of(format, spec.expert_width, num_slices)
        inner, width = spec.expert_width // num_slices, spec.row_width
        inners = ("gate", "up") if spec.is_gated else ("up",)
        runs: list[list[tuple[str, tuple[int, ...]]]] = [
            [(name, (inner, width)) for name in inners],
            [("down", (width, inner))],
        ]
        if spec.has_bias:
            runs.append([(f"{name}_bias", (inner,)) for name in inners])
            runs += [[("down_bias", (width,))]] * (num_slices == 1)
        places: dict[Part, Place] = {}
        gaps: list[tuple[int, int]] = []
        end = 0
        for run in runs:
            for name, shape in run:
                places[cast(Part, name)] = Place(end, shape)
                end += _part_bytes(format, shape)
            aligned = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            gaps += [(end, aligned)] * (aligned > end)
            end = aligned
        return cls(
            format=format,
            is_gated=spec.is_gated,
            places=MappingProxyType(places),
            gaps=tuple(gaps),
            num_bytes=end,
        )

    def clear_gaps(self, data: Tensor) -> None:
        """Zero the bytes between parts, so that equal experts have equal bytes whatever was in the memory."""
        for start, stop in self.gaps:
            data[start:stop].zero_()

    def view(self, data: Tensor, part: Part) -> Weight:
        """The part inside the blob's bytes, without a copy.

        Shapes:  data [num_bytes] uint8.
        """
        place = self.places[part]
        if len(place.shape) == 1:
            return self._vector(data, place)
        return self._matrix(data, place)

    def unpack(self, data: Tensor) -> dict[Part, Weight]:
        """All parts, as views of the blob's bytes."""
        return {part: self.view(data, part) for part in self.places}

    def weights(self, data: Tensor) -> ExpertWeights:
        """The views that the feed-forward uses."""
        return ExpertWeights(
            format=self.format,
            inner_FD=self._matrix(data, self._inner(""), num_sections=2 if self.is_gated else 1),
            down_DF=self._matrix(data, self.places["down"]),
            inner_bias_F=self._vector(data, self._inner("_bias")) if "up_bias" in self.places else None,
            down_bias_D=self._vector(data, self.places["down_bias"]) if "down_bias" in self.places else None,
        )

    def write(self, data: Tensor, part: Part, tensor: Weight, *, name: str) -> None:
        """Round `tensor` into its place; any strides will do, so slices and transposes stream in.

        Panels, as `cut_part` makes them, are rounded already.

        Raises: CheckpointError, calling the tensor `name`, for an unknown part, shape or dtype, and for
                numbers that an integer format cannot hold.
        """
        self.check(part, tensor, name=name)
        view = self.view(data, part)
        if isinstance(tensor, PanelWeight):
            assert isinstance(view, PanelWeight), "panels are of the blob's format"
            view.data.copy_(tensor.data)
        elif isinstance(view, PanelWeight):
            pack_panels(tensor, self.format, name=name, into=view)
        else:
            view.copy_(tensor)

    def check(self, part: Part, tensor: Weight, *, name: str) -> None:
        """Whether a tensor can be written as this part.

        Raises: CheckpointError as `write`, but for its numbers.
        """
        if part not in self.places:
            raise CheckpointError(
                f"{name}: an expert of this model has no part {part!r}; {nearest(part, self.places)}"
            )
        shape = self.places[part].shape
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name}: expected shape {list(shape)}, found {list(tensor.shape)}")
        if isinstance(tensor, Tensor) and (not tensor.is_floating_point() or tensor.element_size() < 2):
            raise CheckpointError(
                f"{name}: expected float32, bfloat16 or float16, found {tensor.dtype}; unpack it first"
            )

    def _inner(self, suffix: str) -> Place:
        """Where gate and up lie as one, or up alone."""
        if not self.is_gated:
            return self.places[cast(Part, f"up{suffix}")]
        start, (rows, *rest) = self.places[cast(Part, f"gate{suffix}")]
        return Place(start, (2 * rows, *rest))

    def _vector(self, data: Tensor, place: Place) -> Tensor:
        dtype = vector_dtype(self.format)
        stop = place.start + place.shape[0] * DTYPE_BYTES[dtype]
        return data[place.start : stop].view(torch_dtype(dtype))

    def _matrix(self, data: Tensor, place: Place, *, num_sections: int = 1) -> Weight:
        rows, width = place.shape
        num_bytes = num_sections * _part_bytes(self.format, (rows // num_sections, width))
        part = data[place.start : place.start + num_bytes]
        if self.format not in QUANTISED:
            return part.view(torch_dtype(self.format)).view(place.shape)
        panels = part.view(-1, QUANTISED[self.format].panel_bytes(width))
        return PanelWeight(
            format=self.format, data=panels, num_rows=rows, width=width, num_sections=num_sections
        )


def cut_part(
    part: Part, tensor: Tensor, format: Format, num_slices: int, wanted: Sequence[int], *, name: str
) -> Iterator[Weight]:
    """What some slices of an expert have of one of its parts: rows of gate and up, columns of down.

    Columns of an integer format are rounded with their row, which may have one scale.

    Raises: CheckpointError as `pack_panels`.
    """
    size = tensor.shape[1 if part == "down" else 0] // num_slices
    runs = [range(size * idx, size * (idx + 1)) for idx in wanted]
    if part != "down":
        yield from (tensor[run.start : run.stop] for run in runs)
    elif format not in QUANTISED:
        yield from (tensor[:, run.start : run.stop] for run in runs)
    else:
        whole = pack_panels(tensor, format, name=name)
        yield from (slice_columns(whole, run) for run in runs)


def vector_dtype(format: Format) -> DType:
    """Of biases: beside integer weights they stay float32, which holds those of every checkpoint."""
    return "float32" if format in QUANTISED else cast(DType, format)


def _part_bytes(format: Format, shape: tuple[int, ...]) -> int:
    if len(shape) == 2 and format in QUANTISED:
        return QUANTISED[format].matrix_bytes(*shape)
    return math.prod(shape) * DTYPE_BYTES[vector_dtype(format)]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertBlob:
    """One expert on its way: bytes and their identity.

    Shapes:  data [num_bytes] uint8; may be a view of an arena.
    """

    key: ExpertKey
    format: Format
    data: Tensor
    digest: str

    @classmethod
    def of(cls, key: ExpertKey, format: Format, data: Tensor) -> ExpertBlob:
        """The blob with its digest, which reads every byte."""
        return cls(key=key, format=format, data=data, digest=_digest(format, data))

    def verify(self) -> None:
        """Check the bytes against the digest.

        Raises: CheckpointError naming the expert when they differ.
        """
        found = _digest(self.format, self.data)
        if found != self.digest:
            raise CheckpointError(
                f"expert {self.key.logical_id} of layer {self.key.layer_idx}: its bytes have digest {found}, "
                f"expected {self.digest}; the copy is damaged, send it again"
            )


def pack_expert(layout: BlobLayout, parts: Mapping[Part, Tensor]) -> Tensor:
    """A new blob from its parts. Loading a model does not come here: it writes straight into an arena.

    Shapes:  returns [num_bytes] uint8.
    Raises:  CheckpointError for a missing or unknown part, or another shape.
    """
    missing = [part for part in layout.places if part not in parts]
    if missing:
        raise CheckpointError(f"an expert needs {', '.join(layout.places)}; missing: {', '.join(missing)}")
    data = torch.empty(layout.num_bytes, dtype=torch.uint8)
    layout.clear_gaps(data)
    for part, tensor in parts.items():
        layout.write(data, part, tensor, name=part)
    return data


def _digest(format: Format, data: Tensor) -> str:
    return digest_bytes(format.encode(), data.numpy().data).hex()
