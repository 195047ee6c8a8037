"""Bytes that several processes map: who fills them, who waits, who takes over, who removes the file."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from moesaic.errors import ConfigError
from moesaic.kernels.huge_pages import HUGE_BYTES
from moesaic.kernels.shared_bytes import SharedBytes, find_abandoned, held_bytes, leave_all, remove_abandoned

SIZE = HUGE_BYTES


class Waited(Exception):
    """Somebody else has the file."""


def give_up(done: int, total: int) -> None:
    raise Waited(done, total)


def fill(path: Path, value: int = 7) -> SharedBytes:
    shared = SharedBytes(path, SIZE, give_up)
    assert shared.record is None
    shared.populate(0, SIZE)
    shared.data[:] = value
    shared.finish(b"seven")
    return shared


def in_child(act: Callable[[], object]) -> int:
    """The id of a process that does this, keeps what it gives, and waits to be killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            kept = act()
            os.write(writer, b"done" if kept else b"none")
            signal.pause()
        finally:
            os._exit(3)
    os.close(writer)
    assert os.read(reader, 4) == b"done"
    os.close(reader)
    return child


def kill(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_second_maps_what_the_first_has_filled_and_the_last_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    first = fill(path)
    second = SharedBytes(path, SIZE, give_up)
    assert second.record == b"seven"
    view = second.data[100:200]
    assert np.array_equal(view, np.full(100, 7, dtype=np.uint8))
    assert held_bytes(path) >= SIZE
    first.leave()
    first.leave()  # nothing more
    assert path.exists()
    del second
    assert path.exists(), "a view of the bytes keeps them"
    del view
    assert not path.exists()
    assert held_bytes(path) == 0


@pytest.mark.parametrize("role", ["filled it", "found it"])
def test_what_is_whole_cannot_be_written(tmp_path: Path, role: str) -> None:
    shared = fill(tmp_path / "weights")
    if role == "found it":
        shared = SharedBytes(tmp_path / "weights", SIZE, give_up)
    data = shared.data
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        data[0] = 1
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_who_comes_while_it_is_filled_waits_and_is_told_how_far_it_is(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    filling = SharedBytes(path, SIZE, give_up)
    with pytest.raises(Waited, match=r"\(0, 0\)"):
        SharedBytes(path, SIZE, give_up)
    filling.tell(30, 100)
    told = []

    def wait(done: int, total: int) -> None:
        told.append((done, total))
        if len(told) == 2:
            filling.finish(b"")

    assert SharedBytes(path, SIZE, wait).record == b""
    assert told == [(30, 100), (30, 100)]


def test_whoever_waits_takes_over_from_a_process_that_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "weights"

    def half() -> SharedBytes:
        shared = SharedBytes(path, SIZE, give_up)
        shared.data[: SIZE // 2] = 9
        shared.tell(1, 2)
        return shared

    child = in_child(half)
    waits = []

    def wait(done: int, total: int) -> None:
        if not waits:
            kill(child)
        waits.append((done, total))

    shared = SharedBytes(path, SIZE, wait)
    assert waits[0] == (1, 2)
    assert shared.record is None
    assert not shared.data.any(), "it begins anew"


def test_a_whole_file_of_a_killed_process_is_used(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    child = in_child(lambda: fill(path, 5))
    kill(child)
    shared = SharedBytes(path, SIZE, give_up)
    assert shared.record == b"seven"
    assert shared.data[-1] == 5


def test_a_file_that_was_cut_short_is_filled_again(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    kill(in_child(lambda: fill(path)))
    os.truncate(path, path.stat().st_size - 1)
    assert SharedBytes(path, SIZE, give_up).record is None


def test_one_that_fails_leaves_no_file_to_those_who_wait(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    filling: list[SharedBytes] = [SharedBytes(path, SIZE, give_up)]

    def wait(done: int, total: int) -> None:
        filling.clear()

    taken = SharedBytes(path, SIZE, wait)
    assert taken.record is None
    assert path.exists()


def test_abandoned_files_are_removed_and_others_are_not(tmp_path: Path) -> None:
    kill(in_child(lambda: [fill(tmp_path / "w-old"), fill(tmp_path / "w-mine-x"), fill(tmp_path / "other")]))
    used = fill(tmp_path / "w-used")
    assert [path.name for path in find_abandoned(tmp_path, "w-")] == ["w-mine-x", "w-old"]
    assert remove_abandoned(tmp_path / "w-old") >= SIZE
    assert remove_abandoned(tmp_path / "w-old") == 0
    assert remove_abandoned(used.path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "w-mine-x", "w-used"]
    leave_all()
    assert not used.path.exists()
    assert used.data[0] == 7, "the mapping is still there"


def test_a_forked_child_has_no_part_in_the_lock(tmp_path: Path) -> None:
    shared = fill(tmp_path / "weights")
    child = os.fork()
    if child == 0:
        leave_all()
        os._exit(0)
    os.waitpid(child, 0)
    assert SharedBytes(shared.path, SIZE, give_up).record == b"seven"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_somebody_else_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to user 12345, not to 0, .*have it removed"):
        SharedBytes(path, SIZE, give_up)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(OSError, match="symbolic links"):
        SharedBytes(link, SIZE, give_up)


def test_many_processes_at_once_fill_it_once(tmp_path: Path) -> None:
    path, count = tmp_path / "weights", tmp_path / "count"

    def act() -> None:
        shared = SharedBytes(path, SIZE, lambda done, total: None)
        if shared.record is None:
            with count.open("a") as file:
                file.write("x")
            time.sleep(0.05)
            shared.data[:] = 1
            shared.finish(b"")
        assert shared.data[-1] == 1

    children = []
    for _ in range(6):
        child = os.fork()
        if child == 0:
            try:
                act()
            except BaseException:  # noqa: BLE001 - the exit code tells the test
                os._exit(1)
            leave_all()
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert count.read_text().startswith("x")
    assert not path.exists()
