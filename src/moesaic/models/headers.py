"""The headers of a Hugging Face folder of safetensors files: which tensors it holds, and where. No torch.

Pickle files are never opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

from moesaic.errors import CheckpointError, nearest
from moesaic.hashing import digest
from moesaic.spec.folder import INDEX_FILE, explain_adapter, explain_pickles, pickle_names
from moesaic.spec.safetensors import StoredTensor, read_header

SINGLE_FILE = "model.safetensors"
FLOATS = ("F32", "BF16", "F16")
"""The dtypes of weights that are read, as safetensors spells them."""


class Headers:
    """The tensors that a folder declares."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.path = path
        self.tensors = tensors

    def header_digest(self) -> str:
        """Identity of what is declared: names, dtypes and shapes; the bytes are not read."""
        return digest([[name, one.dtype, list(one.shape)] for name, one in sorted(self.tensors.items())])

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Read the index and every header; no weights yet.

        Raises: CheckpointError for a missing folder, file or shard, a folder without safetensors, an adapter,
                a damaged header, a file cut short, and a key that is stored twice.
        """
        folder = Path(path)
        files, placed = _find_files(folder)
        tensors: dict[str, StoredTensor] = {}
        for file in files:
            for tensor in read_header(file):
                if (other := tensors.get(tensor.name)) is not None:
                    raise CheckpointError(
                        f"{tensor.name} is stored twice: in {other.file.name} and in {file.name} "
                        f"of {folder}; which one is meant cannot be known, so remove one"
                    )
                tensors[tensor.name] = tensor
        if placed is not None:
            _check_index(folder, placed, tensors)
        return cls(folder, MappingProxyType(tensors))

    @property
    def names(self) -> frozenset[str]:
        """All keys."""
        return frozenset(self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def stored(
        self, name: str, *, shape: tuple[int, ...] | None = None, is_packed: bool = False
    ) -> StoredTensor:
        """Where `name` lies, checked to have `shape` and to be floats, or bytes that numbers are packed in.

        Raises: CheckpointError for an unknown key, another dtype or another shape.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} has no tensor {name}; {nearest(name, self.tensors)}")
        if is_packed and tensor.dtype != "U8":
            raise CheckpointError(
                f"{name} in {tensor.file} has dtype {tensor.dtype} where bytes of packed numbers (U8) are "
                "due; the file was rewritten, so copy or download it again"
            )
        if not is_packed and tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{name} in {tensor.file} has dtype {tensor.dtype} where a float weight is due; this build "
                f"reads {', '.join(FLOATS)}, so use an unquantised checkpoint"
            )
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(
                f"{name} in {tensor.file} has shape {list(tensor.shape)}, but config.json implies "
                f"{list(shape)}; the config and the weights are of different models"
            )
        return tensor


def _find_files(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The safetensors files of a folder in order, and the index's map of key to file name if there is one."""
    if folder.is_file():
        raise CheckpointError(
            f"{folder} is a file; give the folder that holds config.json and the safetensors files"
        )
    if not folder.is_dir():
        raise CheckpointError(
            f"there is no folder {folder}; weights are read from a local folder, so download the model first "
            "(`hf download NAME --local-dir FOLDER`)"
        )
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} {explain_adapter(folder)}")
    single, index = folder / SINGLE_FILE, folder / INDEX_FILE
    if index.exists():
        placed = _read_index(index)
        names = sorted(set(placed.values()))
        if single.exists() and SINGLE_FILE not in names:
            raise CheckpointError(
                f"{folder} holds both {SINGLE_FILE} and {INDEX_FILE}, which lists other files; remove the "
                "stale one"
            )
        for name in names:
            if not (folder / name).is_file():
                keys = sorted(key for key, file in placed.items() if file == name)
                raise CheckpointError(
                    f"{index} lists {name}, which is not in the folder; it holds {len(keys)} tensors "
                    f"({', '.join(keys[:3])}{', ...' if len(keys) > 3 else ''}): copy or download it"
                )
        return [folder / name for name in names], placed
    if single.exists():
        return [single], None
    raise CheckpointError(_no_safetensors(folder))


def _no_safetensors(folder: Path) -> str:
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if found:
        return (
            f"{folder} holds {', '.join(found[:3])} but neither {SINGLE_FILE} nor {INDEX_FILE}; add the index"
        )
    if pickles := pickle_names(folder):
        return explain_pickles(folder, pickles)
    names = sorted(file.name for file in folder.iterdir())
    return (
        f"{folder} holds no safetensors files (it has: {', '.join(names[:6]) or 'nothing'}); "
        f"{SINGLE_FILE} or {INDEX_FILE} is needed"
    )


def _read_index(index: Path) -> dict[str, str]:
    try:
        content = json.loads(index.read_bytes())
        placed = content["weight_map"]
        is_sound = (
            isinstance(placed, dict) and placed and all(isinstance(file, str) for file in placed.values())
        )
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{index} is not the JSON of an index: {error!r}") from error
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}") from error
    if not is_sound:
        raise CheckpointError(f"{index} needs a weight_map from tensor names to file names")
    for file in set(placed.values()):
        if not re.fullmatch(r"[^/\\\0]+\.safetensors", file):
            raise CheckpointError(
                f"{index} lists {file!r}: only safetensors files of the same folder are read"
            )
    return placed


def _check_index(folder: Path, placed: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    for name, file in placed.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.file.name != file:
            where = "no shard has it" if tensor is None else f"it is in {tensor.file.name}"
            raise CheckpointError(f"{folder / INDEX_FILE} places {name} in {file}, but {where}")
    extra = sorted(set(tensors) - set(placed))
    if extra:
        raise CheckpointError(
            f"{folder / INDEX_FILE} does not list {len(extra)} tensors that its shards hold, such as "
            f"{extra[0]} in {tensors[extra[0]].file.name}; the index and the shards are of different exports"
        )
