"""Headers of safetensors files: names, dtypes and shapes without reading a weight, and without torch."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from moesaic.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000
"""Source: the limit that the safetensors format sets itself."""

ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorHeader:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    @property
    def num_items(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


def read_headers(path: Path) -> tuple[TensorHeader, ...]:
    """The tensors of one file, from its header alone.

        | 8 bytes: length n | n bytes: JSON {name: {dtype, shape, data_offsets}} | data |

    Raises: CheckpointError when the file is cut short, its header absurd, or an entry runs past the end.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if len(start) < 8:
                raise CheckpointError(f"{path}: {size} bytes are too few for a safetensors file")
            length = int.from_bytes(start, "little")
            if length > MAX_HEADER_BYTES or length > size - 8:
                raise CheckpointError(
                    f"{path}: its header claims {length} bytes, but the file has {size} and a header at most "
                    f"{MAX_HEADER_BYTES}; the file is damaged or not a safetensors file"
                )
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: its header is not valid JSON: {error}") from error
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: its header must be a JSON object, got a {type(entries).__name__}")
    entries.pop("__metadata__", None)
    return tuple(_tensor(path, name, entry, size - 8 - length) for name, entry in entries.items())


def _tensor(path: Path, name: str, entry: object, data_bytes: int) -> TensorHeader:
    if not isinstance(entry, dict):
        raise CheckpointError(f"{path}: tensor {name[:80]!r} must be a JSON object, got {entry!r}")
    dtype, shape, offsets = (
        entry.get("dtype"),
        _counts(entry.get("shape")),
        _counts(entry.get("data_offsets")),
    )
    if not isinstance(dtype, str) or shape is None or offsets is None or len(offsets) != 2:
        raise CheckpointError(f"{path}: tensor {name[:80]!r} needs dtype, shape and two data_offsets")
    begin, end = offsets
    num_bytes = math.prod(shape) * ITEM_BITS.get(dtype, 0) // 8
    if not begin <= end <= data_bytes:
        raise CheckpointError(
            f"{path}: tensor {name[:80]!r} lies at bytes {begin} to {end}, but the file has {data_bytes} "
            "of data; "
            f"it is cut short"
        )
    if dtype in ITEM_BITS and num_bytes != end - begin:
        raise CheckpointError(
            f"{path}: tensor {name[:80]!r} of shape {list(shape)} in {dtype} takes {num_bytes} bytes, its "
            "offsets "
            f"say {end - begin}"
        )
    return TensorHeader(name=name, dtype=dtype, shape=shape, num_bytes=end - begin)


def _counts(value: object) -> tuple[int, ...] | None:
    """A list of whole numbers from 0 up; None for anything else."""
    if isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value
    ):
        return tuple(value)
    return None
