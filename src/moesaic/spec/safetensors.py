"""Headers of safetensors files: which tensors a file holds and where, without reading a weight.

| 8 bytes: length n | n bytes: JSON {name: {dtype, shape, data_offsets}} | data |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moesaic.errors import CheckpointError, nearest
from moesaic.spec.folder import LFS_POINTER

MAX_HEADER_BYTES = 100_000_000
"""Source: the safetensors format's own limit (huggingface.co/docs/safetensors)."""


_ITEM_BITS: Mapping[str, int] = MappingProxyType(
    dict.fromkeys(("F64", "I64", "U64", "C64"), 64)
    | dict.fromkeys(("F32", "I32", "U32"), 32)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 16)
    | dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | {"F4": 4}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `num_bytes` bytes from `start` of `file`, row-major, little-endian."""

    name: str
    dtype: str  # as safetensors spells it: F32, BF16, F16, I8, ...
    shape: tuple[int, ...]
    file: Path
    start: int
    num_bytes: int

    @property
    def num_items(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def read_header(file: Path) -> tuple[StoredTensor, ...]:
    """The tensors that a safetensors file declares, checked to cover its bytes exactly.

    Raises: CheckpointError for anything that the format forbids, and for a file shorter or longer than it
            says.
    """
    try:
        file_bytes = file.stat().st_size
        with open(file, "rb") as stream:
            start = stream.read(max(8, len(LFS_POINTER)))
            if start.startswith(LFS_POINTER):
                raise CheckpointError(
                    f"{file} is a Git LFS pointer, not the weights; fetch them with `git lfs pull`"
                )
            header_bytes = int.from_bytes(start[:8], "little")
            if file_bytes < 8 or header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise CheckpointError(
                    f"{file} is not a whole safetensors file: {file_bytes} bytes, its first 8 announce a "
                    f"header of {header_bytes} (at most {MAX_HEADER_BYTES}); copy or download it again"
                )
            stream.seek(8)
            text = stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    try:
        header = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"the header of {file} is not the JSON of a safetensors file: {error}"
        ) from error
    if not isinstance(header, dict):
        raise CheckpointError(f"the header of {file} is not a JSON object")
    header.pop("__metadata__", None)
    tensors = tuple(_stored(file, name, entry, 8 + header_bytes) for name, entry in header.items())
    end = 8 + header_bytes
    for tensor in sorted(tensors, key=lambda tensor: (tensor.start, tensor.num_bytes)):
        if tensor.start != end:
            raise CheckpointError(
                f"{tensor.name} in {file} starts at byte {tensor.start} where {end} is due: tensors must "
                "neither overlap nor leave holes"
            )
        end += tensor.num_bytes
    if end != file_bytes:
        kind = "cut short" if end > file_bytes else "longer than its header says"
        raise CheckpointError(
            f"{file} is {kind}: {file_bytes} bytes, its header describes {end}; copy or download it again"
        )
    return tensors


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} appears twice")
    return found


def _stored(file: Path, name: str, entry: Any, data_start: int) -> StoredTensor:
    try:
        dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(f"{name} in {file} lacks a sound dtype, shape or data_offsets") from error
    if dtype not in _ITEM_BITS:
        raise CheckpointError(
            f"{name} in {file} has the unknown dtype {dtype!r}; {nearest(str(dtype), _ITEM_BITS)}"
        )
    numbers = (*shape, first, last)
    if not all(
        isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in numbers
    ):
        raise CheckpointError(
            f"{name} in {file} has shape {list(shape)} and data_offsets {[first, last]}: not sizes"
        )
    size = math.prod(shape) * _ITEM_BITS[dtype] // 8
    if last - first != size:
        raise CheckpointError(
            f"{name} in {file} is {dtype} {list(shape)}, which takes {size} bytes, but has {last - first}"
        )
    return StoredTensor(
        name=name, dtype=dtype, shape=shape, file=file, start=data_start + first, num_bytes=size
    )
