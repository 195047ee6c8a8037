from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from moesaic.audit.safetensors import read_headers
from moesaic.errors import CheckpointError


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
    a, b = read_headers(write(tmp_path / "m.safetensors", header, bytes(26)))
    assert (a.name, a.dtype, a.shape, a.num_bytes, a.num_items) == ("a", "F32", (2, 3), 24, 6)
    assert (b.num_items, b.num_bytes) == (1, 2)


def test_headers_written_by_the_library_are_read(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    save_file({"x": np.zeros((3, 4), np.float16)}, tmp_path / "x.safetensors")
    (tensor,) = read_headers(tmp_path / "x.safetensors")
    assert (tensor.name, tensor.dtype, tensor.shape) == ("x", "F16", (3, 4))


@pytest.mark.parametrize(
    ("header", "data", "length", "words"),
    [
        ({}, b"", 2**63, "its header claims"),
        ({}, b"", 1000, "its header claims 1000 bytes"),
        (b"{", b"", None, "not valid JSON"),
        (b"[" * 100_000, b"", None, "not valid JSON"),
        ([1], b"", None, "must be a JSON object, got a list"),
        ({"a": 3}, b"", None, "tensor 'a' must be a JSON object"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", None, "needs dtype, shape and two data_offsets"),
        ({"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}, bytes(8), None, "needs dtype"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4), None, "it is cut short"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
            bytes(8),
            None,
            "lies at bytes 8 to 0",
        ),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4), None, "takes 8 bytes"),
    ],
)
def test_damaged_files_are_refused(
    tmp_path: Path, header: object, data: bytes, length: int | None, words: str
) -> None:
    path = write(tmp_path / "m.safetensors", header, data, length)
    with pytest.raises(CheckpointError, match=words):
        read_headers(path)


def test_a_file_of_three_bytes(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="3 bytes are too few"):
        read_headers(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_headers(tmp_path / "absent.safetensors")
