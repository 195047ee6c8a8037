"""GGUF files: metadata and tensor infos, over all parts of a split file. Weights are never read.

    | "GGUF" | version u32 | tensors u64 | pairs u64 | pairs: key, type, value | tensor infos | pad | data |

Every length is checked against what is left of the file before anything is read or made for it.
Source: the GGUF description in ggml's docs, versions 2 and 3.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from moesaic.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
MAX_TENSORS = 1_000_000
MAX_KEPT = 4096  # items of an array that are kept; a vocabulary is only counted
MAX_DEPTH = 4  # of arrays in arrays
MAX_METADATA_BYTES = 256 * 2**20  # guess: a hundred times the largest; vocabularies are skipped
DEFAULT_ALIGNMENT = 32

_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING, _ARRAY = 8, 9
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = MappingProxyType(
    {
        0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
        7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
        11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
        15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
        19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
        23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
        28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
        35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    }
)  # fmt: skip
"""Number in the file: name, numbers in a block, bytes of a block. Source: ggml's block structs."""

Scalar = bool | int | float | str
_Part = tuple[dict[str, "Scalar | tuple[Scalar, ...] | Omitted"], list["GgufTensor"], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Omitted:
    """An array too long to keep, such as a vocabulary."""

    num_items: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GgufTensor:
    """One tensor's info. `shape` is as GGUF has it: the fastest dim first."""

    name: str
    kind: str
    shape: tuple[int, ...]
    num_bytes: int
    file: Path

    @property
    def num_items(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gguf:
    """What a GGUF file says, all its parts together."""

    path: Path  # the first part
    metadata: Mapping[str, Scalar | tuple[Scalar, ...] | Omitted]
    tensors: tuple[GgufTensor, ...]
    files: tuple[Path, ...]
    missing: tuple[str, ...]  # parts that are named and not there
    cut: tuple[str, ...] = ()  # of each part whose data ends early: what is cut short

    @property
    def file_bytes(self) -> int:
        """Bytes of all parts that are there."""
        return sum(file.stat().st_size for file in self.files)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file, or is called one."""
    try:
        if not path.is_file():
            return False
        with open(path, "rb") as file:
            return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC
    except OSError:
        return path.suffix == ".gguf"


def read_gguf(path: Path) -> Gguf:
    """A GGUF file and the other parts of it, whichever part is given. Data may be cut short: `cut` says so.

    Raises: CheckpointError for metadata that are cut short or damaged, and for a version that is not read;
            for a first part that is missing, which alone holds the metadata.
    """
    match = _SPLIT.fullmatch(path.name)
    names = [path.name]
    if match is not None:
        count = int(match[3])
        if not 0 < int(match[2]) <= count <= 10_000:
            raise CheckpointError(f"{path} calls itself part {int(match[2])} of {count}: rename it")
        names = [f"{match[1]}-{i + 1:05d}-of-{match[3]}.gguf" for i in range(count)]
        if not (path.parent / names[0]).is_file():
            raise CheckpointError(
                f"{path.parent / names[0]} is missing: the first part of a split GGUF file holds its metadata"
            )
    files = [path.parent / name for name in names if (path.parent / name).is_file()]
    metadata: Mapping[str, Scalar | tuple[Scalar, ...] | Omitted] = {}
    tensors: dict[str, GgufTensor] = {}
    cut = []
    for file in files or [path]:
        pairs, infos, short = _read_part(file)
        metadata = metadata or pairs
        cut += short
        for tensor in infos:
            if tensor.name in tensors:
                raise CheckpointError(f"{tensor.name} is in {tensors[tensor.name].file} and again in {file}")
            tensors[tensor.name] = tensor
    return Gguf(
        path=files[0],
        metadata=MappingProxyType(dict(metadata)),
        tensors=tuple(tensors.values()),
        files=tuple(files),
        missing=tuple(name for name in names if not (path.parent / name).is_file()),
        cut=tuple(cut),
    )


def _read_part(path: Path) -> _Part:
    try:
        with open(path, "rb") as file:
            return _Reader(path, file).part()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


class _Reader:
    """A cursor over one file that never reads, or makes room, beyond its end."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.size = path.stat().st_size
        self.at = 0
        self.kept = 0

    def part(self) -> _Part:
        """The pairs, the tensor infos, and what is cut short."""
        if self.take(4, "its first word") != MAGIC:
            raise CheckpointError(f"{self.path} is not a GGUF file: it does not begin with {MAGIC.decode()}")
        version = self.number("I")
        if version not in VERSIONS:
            hint = "it is big-endian" if version > 0xFFFF else "convert it again with a newer llama.cpp"
            raise CheckpointError(f"{self.path} has GGUF version {version}; 2 and 3 are read: {hint}")
        num_tensors, num_pairs = self.number("Q"), self.number("Q")
        # The shortest pair is an empty key (8), a type (4) and a byte; the shortest info has no dims.
        self.check_count(num_pairs, 13, "pairs")
        self.check_count(num_tensors, 24, "tensors")
        if num_tensors > MAX_TENSORS:
            raise self.damaged(f"announces {num_tensors} tensors, more than {MAX_TENSORS}")
        pairs: dict[str, Scalar | tuple[Scalar, ...] | Omitted] = {}
        for _ in range(num_pairs):
            key = self.text("a key")
            pairs[key] = self.value(self.number("I"), key, 0)
        alignment = pairs.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
            raise self.damaged(f"has general.alignment {alignment!r}, not a multiple of 8")
        infos = [self.info() for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        end = max((start + offset + tensor.num_bytes for tensor, offset in infos), default=0)
        cut = []
        if end > self.size:
            cut.append(
                f"{self.path} is cut short: its tensors end at byte {end}, the file at {self.size}; copy or "
                "download it again"
            )
        return pairs, [tensor for tensor, _ in infos], cut

    def info(self) -> tuple[GgufTensor, int]:
        """One tensor and its offset."""
        name = self.text("a tensor's name")
        num_dims = self.number("I")
        if num_dims > MAX_DIMS:
            raise self.damaged(f"gives {name[:80]!r} {num_dims} dims, more than {MAX_DIMS}")
        shape = tuple(self.number("Q") for _ in range(num_dims))
        number, offset = self.number("I"), self.number("Q")
        if number not in TENSOR_TYPES:
            raise CheckpointError(
                f"{self.path} stores {name[:80]!r} as tensor type {number}, which this version does not know"
            )
        kind, block, block_bytes = TENSOR_TYPES[number]
        if shape and shape[0] % block:
            raise self.damaged(f"gives {name[:80]!r} rows of {shape[0]} in blocks of {block}")
        num_bytes = math.prod(shape) // block * block_bytes
        return (
            GgufTensor(name=name, kind=kind, shape=shape, num_bytes=num_bytes, file=self.path),
            offset,
        )

    def value(self, number: int, key: str, depth: int) -> Scalar | tuple[Scalar, ...] | Omitted:
        """One value; long arrays, and arrays of arrays, are skipped and counted."""
        if number in _SCALARS:
            return self.scalar(number)
        if number == _STRING:
            return self.text(f"the value of {key[:80]!r}")
        if number != _ARRAY:
            raise self.damaged(f"has value type {number} at {key[:80]!r}")
        if depth == MAX_DEPTH:
            raise self.damaged(f"nests arrays deeper than {MAX_DEPTH} at {key[:80]!r}")
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            width = struct.calcsize(_SCALARS[item])
            self.check_count(count, width, f"items of {key[:80]!r}")
            if count > MAX_KEPT:
                self.skip(count * width)
                return Omitted(num_items=count)
            return tuple(self.scalar(item) for _ in range(count))
        self.check_count(count, 8 if item == _STRING else 12, f"items of {key[:80]!r}")
        if item == _STRING and count <= MAX_KEPT:
            return tuple(self.text(f"an item of {key[:80]!r}") for _ in range(count))
        for _ in range(count):
            if item == _STRING:
                self.skip(self.number("Q"))
            else:
                self.value(item, key, depth + 1)
        return Omitted(num_items=count)

    def scalar(self, number: int) -> Scalar:
        """A number or a flag."""
        code = _SCALARS[number]
        data = self.take(struct.calcsize(code), "a value")
        found: Scalar = struct.unpack(f"<{code}", data)[0]
        return found

    def number(self, code: str) -> int:
        """An unsigned number of the format itself."""
        found: int = struct.unpack(f"<{code}", self.take(struct.calcsize(code), "its header"))[0]
        return found

    def text(self, what: str) -> str:
        """A string; bytes that are no UTF-8 are replaced, since keys and names compare the same."""
        return self.take(self.number("Q"), what).decode("utf-8", errors="replace")

    def take(self, num_bytes: int, what: str) -> bytes:
        """Bytes from here on."""
        if num_bytes > self.size - self.at:
            raise CheckpointError(
                f"{self.path} is cut short or damaged: {num_bytes} bytes of {what[:120]} are due at byte "
                f"{self.at}, the file has {self.size}; copy or download it again"
            )
        self.kept += num_bytes
        if self.kept > MAX_METADATA_BYTES:
            raise self.damaged(f"has more than {MAX_METADATA_BYTES} bytes of metadata")
        data = self.file.read(num_bytes)
        if len(data) < num_bytes:
            raise CheckpointError(f"{self.path} became shorter while it was read; copy it again")
        self.at += num_bytes
        return data

    def skip(self, num_bytes: int) -> None:
        """Go on behind bytes that are not needed."""
        if num_bytes > self.size - self.at:
            raise self.damaged(f"has {num_bytes} bytes at byte {self.at} of {self.size}")
        self.file.seek(num_bytes, 1)
        self.at += num_bytes

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        """Refuse a count whose items cannot fit in what is left."""
        if count * least_bytes > self.size - self.at:
            raise self.damaged(f"announces {count} {what} in {self.size - self.at} bytes")

    def damaged(self, what: str) -> CheckpointError:
        """The error for a file that contradicts itself."""
        return CheckpointError(f"{self.path} is cut short or damaged: it {what}; copy or download it again")
