"""The measuring programs: what they read is read, what is not here is named, nothing is left behind."""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from marks import needs_native

from moesaic.kernels import native
from moesaic.kernels.huge_pages import HUGE_BYTES
from moesaic.kernels.measure import child, disk, gemm, memory

MIB = 2**20
needs_drive = pytest.mark.skipif(
    not hasattr(os, "posix_fadvise") or disk.file_system(Path("/tmp")) in disk.IN_MEMORY,
    reason="the folder of temporary files is not on a drive",
)


def say(phase: str) -> None:
    assert phase


@needs_native
def test_the_native_loop_reads_every_byte() -> None:
    buffer = np.zeros(2 * MIB, np.uint8)

    def checksum() -> int:
        loop = native.module().Reader(buffer.ctypes.data, buffer.nbytes, 2)
        assert loop.read() > 0
        return loop.checksum()

    before = checksum()
    assert before == checksum()
    for place in (0, 8, 127, MIB - 1, MIB, buffer.nbytes - 1):
        buffer[place] ^= 1
        assert checksum() != before
        buffer[place] ^= 1


@needs_native
def test_the_native_loop_refuses_what_it_cannot_read_whole() -> None:
    buffer = np.zeros(2 * MIB, np.uint8)
    with pytest.raises(ValueError, match="whole tasks of 1048576 bytes, got 1048577"):
        native.module().Reader(buffer.ctypes.data, MIB + 1, 1)
    with pytest.raises(ValueError, match="num_threads must be in 1 to 1024, got 0"):
        native.module().Reader(buffer.ctypes.data, MIB, 0)


@pytest.mark.parametrize("has_native", [True, False])
def test_memory_by_threads_and_pages(monkeypatch: pytest.MonkeyPatch, has_native: bool) -> None:
    if not has_native:
        monkeypatch.setattr(native, "module", lambda: None)
    found = memory.measure({"buffer_bytes": 4 * MIB, "num_threads": 2, "budget_s": 0.01}, say)
    cases = [row["case"] for row in found["readings"]]
    pages = ["normal"] if found["missing"] else ["normal", "huge"]
    assert [(case["threads"], case["pages"]) for case in cases] == [
        (n, kind) for kind in pages for n in (1, 2)
    ]
    by = "native" if has_native and native.module() else "numpy"
    assert {case["by"] for case in cases} == {by}
    assert all(value > 1e7 for row in found["readings"] for value in row["values"])


@pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="needs madvise of Linux")
def test_pages_are_what_they_are_called() -> None:
    buffer, why_not = memory.allocate(4 * MIB, "normal", 1)
    assert why_not is None
    assert memory.huge_bytes_at(buffer.ctypes.data) == 0
    huge, why_not = memory.allocate(4 * MIB, "huge", 1)
    assert (memory.huge_bytes_at(huge.ctypes.data) >= 2 * MIB) == (why_not is None)
    assert huge.ctypes.data % HUGE_BYTES == 0


def test_thread_counts_end_with_all() -> None:
    assert [memory.thread_counts(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


TINY = {"num_threads": 1, "cycle_bytes": 1, "experts": {"tiny": (64, 32)}, "rows": (1, 3), "budget_s": 0.02}


def test_products_by_every_library_that_is_here() -> None:
    pytest.importorskip("torch")
    found = gemm.measure(TINY, say)
    ways = {(row["case"]["by"].split("/")[0], row["case"]["dtype"]) for row in found["readings"]}
    expected = {("torch", dtype) for dtype in gemm.WIDTH}
    if native.levels():
        expected |= {("native", "float32"), ("native", "bfloat16")}
    assert ways >= {way for way in expected if not any(way[1] in name for name in found["missing"])}
    assert {row["case"]["rows"] for row in found["readings"]} == {1, 3}


def test_products_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(native, "module", lambda: None)
    found = gemm.measure(TINY, say)
    assert {(row["case"]["by"], row["case"]["dtype"]) for row in found["readings"]} == {("numpy", "float32")}
    assert "pip install 'moesaic[engine]'" in found["missing"]["products by torch (bfloat16, int8)"]
    assert "not built" in found["missing"]["products by the native kernels"]


def test_rows_that_take_too_long_are_named_and_not_invented(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = gemm.measure({**TINY, "budget_s": 1e-9}, say)
    assert {row["case"]["rows"] for row in found["readings"]} == {1}
    assert any("above 1 rows" in name for name in found["missing"])


def test_a_call_beyond_its_budget_is_made_once() -> None:
    calls: list[int] = []
    assert len(child.timed(lambda: calls.append(1), 0.0)) == len(calls) == 1
    assert len(child.timed(lambda: calls.append(1), 1e9)) == child.MAX_SAMPLES


@needs_drive
@pytest.mark.parametrize("has_direct", [True, False])
def test_a_drive_is_read_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_direct: bool
) -> None:
    if not has_direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    found = disk.measure({"folder": str(tmp_path), "max_bytes": 16 * MIB, "budget_s": 0.02}, say)
    assert [row["case"]["order"] for row in found["readings"]] == ["sequential"] + ["random"] * 4
    ways = {row["case"]["way"] for row in found["readings"]}
    assert ways <= ({"O_DIRECT", "posix_fadvise(DONTNEED)"} if has_direct else {"posix_fadvise(DONTNEED)"})
    assert list(tmp_path.iterdir()) == []


@needs_drive
def test_pieces_are_the_bytes_that_were_written(tmp_path: Path) -> None:
    store = disk.Store(str(tmp_path), 16 * MIB, 60.0)
    assert list(tmp_path.iterdir()) == []
    rng = np.random.default_rng(0)
    written = rng.bytes(disk.BLOCK_BYTES) + rng.bytes(disk.BLOCK_BYTES)
    into = mmap.mmap(-1, MIB)
    store.read(7 * MIB + 4096, into)
    assert into[:] == written[7 * MIB + 4096 : 8 * MIB + 4096]
    with pytest.raises(OSError, match="gave nothing"):
        store.read(16 * MIB, into)
    store.close()


def test_a_folder_in_memory_is_no_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/a / ext4 rw 0 0\nnone {tmp_path} tmpfs rw 0 0\n")
    assert disk.file_system(tmp_path / "x", mounts) == "tmpfs"
    assert disk.file_system(Path("/usr"), mounts) == "ext4"
    assert disk.file_system(Path("/usr"), tmp_path / "absent") is None
    monkeypatch.setattr(disk, "file_system", lambda folder: "tmpfs")
    found = disk.measure({"folder": str(tmp_path), "max_bytes": 16 * MIB, "budget_s": 0.1}, say)
    assert found["readings"] == []
    assert "--disk" in found["missing"]["disk"]
