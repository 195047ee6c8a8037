"""Files of `torch.save`, read and written without torch and without running anything that is in them.

    zip: NAME/data.pkl (the objects), NAME/data/0, 1, ... (the bytes of the storages), NAME/version, ...

The pickle is a program. Ours is a small machine with the instructions that data need and five names; a file
with any other instruction or name is refused before anything of it is built. Storages are mapped, not read.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from moesaic.errors import ConfigError
from moesaic.units import format_bytes

MAX_PICKLE_BYTES = 64 * 2**20  # guess: objects beside the tensors; a dump of counts has kilobytes
MAX_STEPS = 2**24  # guess: instructions; a small file can unpack to many, at a microsecond or so each
MAX_ORDER_BYTES = 16  # "little" or "big"

_DTYPES: Mapping[str, str] = MappingProxyType(
    {
        "DoubleStorage": "<f8", "FloatStorage": "<f4", "HalfStorage": "<f2", "LongStorage": "<i8",
        "IntStorage": "<i4", "ShortStorage": "<i2", "CharStorage": "|i1", "ByteStorage": "|u1",
        "BoolStorage": "|b1",
    }
)  # fmt: skip
_REBUILD = ("torch._utils", "_rebuild_tensor_v2")
_ORDERED = ("collections", "OrderedDict")


@dataclass(frozen=True, slots=True)
class _Name:
    module: str
    name: str


@dataclass(frozen=True, slots=True)
class _Storage:
    dtype: str
    key: str
    num_items: int


_MARK = object()


def read_torch(path: Path) -> Any:
    """The objects of a file, tensors as read-only numpy arrays that are mapped from it.

    Raises: ConfigError when it is no file of `torch.save`, is damaged, or asks for anything but plain data.
    """
    try:
        with open(path, "rb") as stream:
            start = stream.read(4)
        if not start:
            raise ConfigError(f"{path}: empty; record or copy it again")
        if start != b"PK\x03\x04":
            raise ConfigError(
                f"{path}: not a zip file of torch.save but "
                f"{'a bare pickle' if start[:1] == bytes([128]) else 'other data'}, "
                "which can run code when it is opened, so it was not; save it anew with a torch of 1.6 or "
                "later"
            )
        with zipfile.ZipFile(path) as archive:
            return _read_archive(path, archive)
    except zipfile.BadZipFile as error:
        raise ConfigError(f"{path}: a damaged zip file: {error}; copy it again") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_archive(path: Path, archive: zipfile.ZipFile) -> Any:
    entries = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in entries if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ConfigError(
            f"{path}: a file of torch.save has one data.pkl, this one {len(pickles)}; is it a dump at all?"
        )
    root = pickles[0].removesuffix("data.pkl")
    order = entries.get(f"{root}byteorder")
    if order is not None and (
        order.file_size > MAX_ORDER_BYTES or archive.read(order).strip() not in (b"little", b"")
    ):
        raise ConfigError(f"{path}: its numbers are big-endian; only little-endian files are read")
    size = entries[pickles[0]].file_size
    if size > MAX_PICKLE_BYTES:
        raise ConfigError(
            f"{path}: its objects take {format_bytes(size)} beside the tensors, and "
            f"{format_bytes(MAX_PICKLE_BYTES)} "
            "are read; record fewer passes, or in the mode stat"
        )
    program = archive.read(pickles[0])
    return _Machine(path, {name.removeprefix(root): info for name, info in entries.items()}).run(program)


class _Machine:
    """Runs the part of pickle that data need. Knows no import and calls two functions, both of this file."""

    def __init__(self, path: Path, entries: Mapping[str, zipfile.ZipInfo]) -> None:
        self.path, self.entries = path, entries
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        """The object that the program leaves.

        Raises: ConfigError for an instruction or a name that is not data, and for a damaged program.
        """
        try:
            with warnings.catch_warnings():  # about escapes in strings of a kind that is refused here
                warnings.simplefilter("ignore")
                self.look_through(program)
                for opcode, argument, _ in pickletools.genops(program):
                    self.step(opcode.name, argument)
            if len(self.stack) != 1 or self.stack[0] is _MARK:
                raise ValueError(f"{len(self.stack)} objects are left where one is due")
        except (ValueError, IndexError, KeyError, TypeError, AttributeError, struct.error) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self.path}: its objects are damaged: {error!r}; copy it again") from error
        return self.stack[-1]

    def look_through(self, program: bytes) -> None:
        """Refuse what is no data, before any of it is built."""
        for number, (opcode, argument, _) in enumerate(pickletools.genops(program)):
            if opcode.name not in _KNOWN:
                raise self.refusal(f"the instruction {opcode.name}")
            if opcode.name == "GLOBAL":
                self.check(_Name(*str(argument).split(" ", 1)))
            if number == MAX_STEPS:
                raise ConfigError(f"{self.path}: over {MAX_STEPS:,} objects; record fewer passes")

    def refusal(self, what: str) -> ConfigError:
        """The error for what data do not need."""
        return ConfigError(
            f"{self.path}: it wants to use {what}, which a dump of counts does not need and which can run "
            "code, so "
            "the file was not opened; get a dump from the engine itself"
        )

    def check(self, name: _Name) -> _Name:
        """The name, if it is one of data."""
        is_storage = name.module == "torch" and name.name in _DTYPES
        if not is_storage and (name.module, name.name) not in (_REBUILD, _ORDERED):
            raise self.refusal(f"{name.module}.{name.name}")
        return name

    def step(self, name: str, argument: Any) -> None:
        """One instruction."""
        stack = self.stack
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _LITERALS:
            stack.append(argument)
        elif name in _STACK:
            _STACK[name](self)
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            self.memo[int(argument)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(self.memo[int(argument)])
        elif name == "GLOBAL":
            stack.append(_Name(*str(argument).split(" ", 1)))

    def pop_mark(self) -> list[Any]:
        """What lies above the last mark."""
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("no mark on the stack")
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    def fill(self, items: list[Any]) -> None:
        """Keys and values into the dictionary on top."""
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[key] = value

    def extend(self, items: list[Any]) -> None:
        """Items onto the list on top."""
        self.stack[-1].extend(items)

    def named(self) -> None:
        """A name from two strings."""
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self.check(_Name(str(module), str(name))))

    def call(self) -> None:
        """Rebuild a tensor, or make an empty ordered dictionary."""
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name):
            raise self.refusal("a call of what is no name")
        if (name.module, name.name) == _ORDERED and not arguments:
            self.stack.append({})
        elif (name.module, name.name) == _REBUILD:
            self.stack.append(self.tensor(*arguments[:4]))
        else:
            raise self.refusal(f"a call of {name.module}.{name.name}")

    def storage(self) -> None:
        """The storage that a persistent id names: (storage, class, key, place, items)."""
        _, kind, key, _, num_items = self.stack.pop()
        self.stack.append(_Storage(_DTYPES[self.check(kind).name], str(key), int(num_items)))

    def tensor(self, storage: _Storage, start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """A view of a storage, checked to lie within it."""
        info = self.entries.get(f"data/{storage.key}")
        dtype = np.dtype(storage.dtype)
        if info is None or info.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"storage {storage.key} is missing or compressed")
        if info.file_size < storage.num_items * dtype.itemsize:
            raise ValueError(
                f"storage {storage.key} has {info.file_size} bytes for {storage.num_items} items"
            )
        numbers = (start, *shape, *strides)
        if len(shape) != len(strides) or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise ValueError(f"a tensor of shape {shape} and strides {strides}")
        last = start + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if 0 in shape:
            return np.zeros(shape, dtype)
        if last >= storage.num_items or math.prod(shape) > storage.num_items:  # strides of 0 repeat items
            raise ValueError(f"a tensor of shape {shape} reaches item {last} of {storage.num_items}")
        with open(self.path, "rb") as stream:
            stream.seek(info.header_offset)
            header = stream.read(30)
        skip = 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
        flat = np.memmap(self.path, dtype, "r", info.header_offset + skip, (storage.num_items,))
        bytes_apart = tuple(stride * dtype.itemsize for stride in strides)
        return np.lib.stride_tricks.as_strided(flat[start:], shape, bytes_apart, writeable=False)


def _tuple_of(count: int) -> Callable[[_Machine], None]:
    def make(machine: _Machine) -> None:
        items = machine.stack[len(machine.stack) - count :]
        del machine.stack[len(machine.stack) - count :]
        machine.stack.append(tuple(items))

    return make


_CONSTANTS: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple, "NONE": lambda: None,
        "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "MARK": lambda: _MARK,
    }
)  # fmt: skip
_LITERALS = frozenset(
    {
        "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE",
        "BINUNICODE8",
    }
)  # fmt: skip
_STACK: Mapping[str, Callable[[_Machine], Any]] = MappingProxyType(
    {
        "TUPLE": lambda m: m.stack.append(tuple(m.pop_mark())),
        "TUPLE1": _tuple_of(1), "TUPLE2": _tuple_of(2), "TUPLE3": _tuple_of(3),
        "APPENDS": lambda m: m.extend(m.pop_mark()), "APPEND": lambda m: m.extend([m.stack.pop()]),
        "SETITEMS": lambda m: m.fill(m.pop_mark()),
        "SETITEM": lambda m: m.fill([m.stack.pop(-2), m.stack.pop()]),
        "MEMOIZE": lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
        "POP": lambda m: m.stack.pop(),
        "STACK_GLOBAL": lambda m: m.named(), "REDUCE": lambda m: m.call(),
        "BINPERSID": lambda m: m.storage(),
    }
)  # fmt: skip
_SILENT = frozenset({"PROTO", "FRAME", "STOP"})
_KNOWN = (
    frozenset(_CONSTANTS)
    | _LITERALS
    | frozenset(_STACK)
    | _SILENT
    | {"BINPUT", "LONG_BINPUT", "PUT", "BINGET", "LONG_BINGET", "GET", "GLOBAL"}
)


def torch_bytes(tensors: Mapping[str, Any], root: str = "archive") -> bytes:
    """A file that `torch.load(..., weights_only=True)` reads as a dictionary.

    Values are strings, whole numbers, lists of these, dictionaries, or numpy arrays of int32, int64, float32
    and float64, which become tensors.
    """
    storages: list[np.ndarray[Any, Any]] = []
    program = b"\x80\x02" + _pickled(tensors, storages) + b"."
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr(f"{root}/data.pkl", program)
        archive.writestr(f"{root}/byteorder", "little")
        for key, array in enumerate(storages):
            archive.writestr(f"{root}/data/{key}", array.tobytes())
        archive.writestr(f"{root}/version", "3\n")
    return buffer.getvalue()


def _pickled(value: Any, storages: list[np.ndarray[Any, Any]]) -> bytes:
    if isinstance(value, Mapping):
        items = b"".join(_pickled(key, storages) + _pickled(item, storages) for key, item in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, list | tuple):
        items = b"".join(_pickled(item, storages) for item in value)
        return b"](" + items + b"e" if isinstance(value, list) else b"(" + items + b"t"
    if isinstance(value, str):
        text = value.encode()
        return b"X" + struct.pack("<I", len(text)) + text
    if isinstance(value, int):
        return b"\x8a\x08" + struct.pack("<q", value)
    if isinstance(value, np.ndarray):
        return _pickled_tensor(np.ascontiguousarray(value), storages)
    raise ConfigError(f"a torch file of ours holds no {type(value).__name__}")


def _pickled_tensor(array: np.ndarray[Any, Any], storages: list[np.ndarray[Any, Any]]) -> bytes:
    kind = {"<i4": "IntStorage", "<i8": "LongStorage", "<f4": "FloatStorage", "<f8": "DoubleStorage"}[
        array.dtype.str
    ]
    strides = tuple(stride // array.itemsize for stride in array.strides)
    storage = b"(" + _pickled("storage", storages) + b"ctorch\n" + kind.encode() + b"\n"
    storage += _pickled(str(len(storages)), storages) + _pickled("cpu", storages)
    storage += _pickled(array.size, storages) + b"tQ"
    storages.append(array)
    head = b"c" + "\n".join(_REBUILD).encode() + b"\n(" + storage + _pickled(0, storages)
    hooks = b"ccollections\nOrderedDict\n)R"
    return head + _pickled(array.shape, storages) + _pickled(strides, storages) + b"\x89" + hooks + b"tR"
