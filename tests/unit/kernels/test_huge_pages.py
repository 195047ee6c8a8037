"""Memory that begins at a huge page, and what is said where there are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moesaic.kernels.huge_pages import HUGE_BYTES, map_bytes, why_none, why_none_in
from moesaic.kernels.measure.memory import huge_bytes_at


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_BYTES, 3 * HUGE_BYTES + 5])
def test_bytes_begin_at_a_huge_page_and_are_zero(num_bytes: int) -> None:
    data = map_bytes(num_bytes)
    assert data.shape == (num_bytes,)
    assert data.ctypes.data % HUGE_BYTES == 0
    assert not data.any()
    data[:] = 255  # all of it is ours


@pytest.mark.skipif(why_none() is not None, reason="this machine gives no huge pages")
def test_huge_pages_come_when_they_are_asked_for_and_only_then() -> None:
    huge, normal = map_bytes(8 * HUGE_BYTES), map_bytes(8 * HUGE_BYTES, "normal")
    huge[:] = 1
    normal[:] = 1
    assert huge_bytes_at(huge.ctypes.data) >= 4 * HUGE_BYTES
    assert huge_bytes_at(normal.ctypes.data) == 0


def test_memory_outlives_whoever_asked_for_it() -> None:
    part = map_bytes(HUGE_BYTES)[100:200]
    np.testing.assert_array_equal(part, np.zeros(100, dtype=np.uint8))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("always [madvise] never", None), ("[always] madvise never", None), ("always madvise [never]", "never")],
)
def test_a_system_without_huge_pages_says_why(tmp_path: Path, text: str, expected: str | None) -> None:
    setting = tmp_path / "enabled"
    setting.write_text(text)
    found = why_none(setting)
    assert (found is None) == (expected is None)
    assert found is None or f"{setting} is set to {expected}" in found
    assert why_none(tmp_path / "absent") == "this system has no transparent huge pages"


@pytest.mark.parametrize(
    ("setting", "options", "expected"),
    [
        ("always within_size advise [never] deny force", "rw,size=24683656k", "remount,huge=advise /dev/shm"),
        ("always within_size advise [never] deny force", "rw,huge=advise", None),
        ("always within_size advise [never] deny force", "rw,huge=never", "is mounted without them"),
        ("always within_size advise never [deny] force", "rw,huge=always", "is set to deny"),
        ("always within_size advise never deny [force]", "rw", None),
    ],
)
def test_how_a_folder_in_memory_is_mounted_decides(
    tmp_path: Path, setting: str, options: str, expected: str | None
) -> None:
    enabled, mounts = tmp_path / "shmem_enabled", tmp_path / "mountinfo"
    enabled.write_text(setting)
    mounts.write_text(
        f"""20 1 8:1 / / rw - ext4 /dev/sda rw
25 24 0:23 / /dev/shm rw,relatime - tmpfs tmpfs rw,huge=always
30 25 0:27 / /dev/shm rw,relatime shared:3 - tmpfs tmpfs {options}
"""
    )
    found = why_none_in(Path("/dev/shm"), setting=enabled, mounts=mounts)
    assert (found is None) == (expected is None)
    assert found is None or expected is None or expected in found
    assert "no transparent huge pages" in str(why_none_in(tmp_path, setting=tmp_path / "absent"))
