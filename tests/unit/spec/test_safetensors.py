from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from moesaic.errors import CheckpointError
from moesaic.spec.safetensors import read_header


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def test_names_shapes_and_sizes(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
    }
    a, b = read_header(write(tmp_path / "m.safetensors", header, bytes(26)))
    assert (a.name, a.dtype, a.shape, a.num_bytes, a.num_items) == ("a", "F32", (2, 3), 24, 6)
    assert (b.num_items, b.num_bytes) == (1, 2)


def test_headers_written_by_the_library_are_read(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"x": np.zeros((3, 4), np.float16)}, tmp_path / "x.safetensors")
    (tensor,) = read_header(tmp_path / "x.safetensors")
    assert (tensor.name, tensor.dtype, tensor.shape) == ("x", "F16", (3, 4))


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        ({}, b"", 2**63, "announce a header of 9223372036854775808"),
        ({}, b"", 1000, "announce a header of 1000"),
        (b"{", b"", None, "not the JSON of a safetensors file"),
        (b"[" * 100_000, b"", None, "not the JSON of a safetensors file"),
        ([1], b"", None, "is not a JSON object"),
        ({"a": 3}, b"", None, "lacks a sound dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", None, "lacks a sound dtype, shape or data_offsets"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8), None, "not sizes"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4), None, "cut short"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
            bytes(8),
            None,
            "takes 8 bytes, but has -8",
        ),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4), None, "takes 8 bytes"),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, header: object, data: bytes, length: int | None, words: str
) -> None:
    path = write(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=words):
        read_header(path)


def test_a_file_of_three_bytes(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="3 bytes"):
        read_header(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "absent.safetensors")
