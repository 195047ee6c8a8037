from __future__ import annotations

from pathlib import Path

from moesaic.engine.machine import last_level_cache_bytes


def cache(
    root: Path, cpu: int, index: int, level: int, size: str, shared: str, kind: str = "Unified"
) -> None:
    folder = root / f"cpu{cpu}/cache/index{index}"
    folder.mkdir(parents=True)
    for name, text in (("level", level), ("size", size), ("shared_cpu_list", shared), ("type", kind)):
        (folder / name).write_text(f"{text}\n")


def test_slices_of_the_last_level_are_counted_once_each(tmp_path: Path) -> None:
    for cpu in range(4):
        shared = "0-1" if cpu < 2 else "2-3"
        cache(tmp_path, cpu, 0, 1, "32K", str(cpu), "Instruction")
        cache(tmp_path, cpu, 2, 2, "1024K", str(cpu))
        cache(tmp_path, cpu, 3, 3, "32768K", shared)
    assert last_level_cache_bytes(tmp_path) == 64 * 2**20
    assert last_level_cache_bytes(tmp_path / "absent") is None
