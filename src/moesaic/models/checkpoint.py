"""A Hugging Face folder of safetensors files as named tensors, read one at a time.

Knows file formats and nothing of models: which key fills which parameter is a family's business. Files are
read with plain reads into the tensor that is returned, so a load needs the memory of the weights and of one
tensor more, and a file cut short under our feet is an error, not a dead process. Pickle files are never
opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.hashing import digest
from moesaic.models.headers import Headers
from moesaic.spec.safetensors import StoredTensor

FLOAT_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
)


class Checkpoint(Headers):
    """The tensors of a folder. What is handed out was hashed and checked for NaN and infinity on the way."""

    def __init__(self, path: Path, tensors: Mapping[str, StoredTensor]) -> None:
        super().__init__(path, tensors)
        self._digests: dict[str, str] = {}

    def read(self, name: str, *, shape: tuple[int, ...] | None = None) -> Tensor:
        """The tensor, in its stored dtype and in memory of its own.

        Raises: CheckpointError as `stored` does; for a file that ends early; for NaN or infinity.
        """
        tensor = self.stored(name, shape=shape)
        return self._read_bytes(tensor, name, tensor.shape, offset=0, num_bytes=tensor.num_bytes)

    def read_item(
        self, name: str, idx: int, *, shape: tuple[int, ...] | None = None, is_packed: bool = False
    ) -> Tensor:
        """Item `idx` along the first dim; each item has a digest of its own.

        Raises: CheckpointError as `read` does.
        """
        tensor = self.stored(name, shape=shape, is_packed=is_packed)
        num_bytes = tensor.num_bytes // tensor.shape[0]
        key, offset = f"{name}[{idx}]", idx * num_bytes
        return self._read_bytes(tensor, key, tensor.shape[1:], offset=offset, num_bytes=num_bytes)

    def digests(self) -> dict[str, str]:
        """Identity (dtype, shape, SHA-256 of the bytes) of each tensor, or item of one, that was read."""
        return dict(self._digests)

    def know(self, digests: Mapping[str, str]) -> None:
        """Take over the digests of tensors that another process has read, and this one has from there."""
        self._digests = {**digests, **self._digests}

    def _read_bytes(
        self, tensor: StoredTensor, key: str, shape: tuple[int, ...], *, offset: int, num_bytes: int
    ) -> Tensor:
        out = torch.empty(shape, dtype=FLOAT_DTYPES.get(tensor.dtype, torch.uint8))
        flat: Any = out.view(-1).view(torch.uint8).numpy()  # shares out's memory
        view = memoryview(flat)
        try:
            with open(tensor.file, "rb", buffering=0) as file:
                file.seek(tensor.start + offset)
                num_read = 0
                while num_read < num_bytes and (count := file.readinto(view[num_read:])):
                    num_read += count
        except OSError as error:
            raise CheckpointError(
                f"{tensor.file} cannot be read at {tensor.name}: {error.strerror}"
            ) from error
        if num_read < num_bytes:
            raise CheckpointError(
                f"{tensor.file} ends inside {tensor.name}: {num_read} of {num_bytes} bytes read; the file "
                "was cut short, so copy or download it again"
            )
        if key not in self._digests:  # a second look does not change the identity
            self._digests[key] = digest([tensor.dtype, list(shape), hashlib.sha256(view).hexdigest()])
        if out.is_floating_point():
            check_finite(tensor, out, first=offset // out.element_size())
        return out


def check_finite(tensor: StoredTensor, values: Tensor, *, first: int) -> None:
    """One pass without temporaries: the extremes of a tensor are finite exactly when all of it is.

    `values` are those from element `first` on.

    Raises: CheckpointError counting those that are not, with the place of the first.
    """
    if values.numel() == 0:
        return
    low, high = torch.aminmax(values)
    if torch.isfinite(low) and torch.isfinite(high):
        return
    bad = (~torch.isfinite(values)).view(-1)
    position = first + int(bad.to(torch.uint8).argmax())
    raise CheckpointError(
        f"{tensor.name} in {tensor.file} holds {int(bad.sum())} values that are NaN or infinite, the first "
        f"at element {position}; the file is damaged or was saved from a diverged run"
    )
