"""NUMA nodes read from a fake machine, and pages bound to the first node of the real one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from moesaic.kernels.huge_pages import HUGE_BYTES, map_bytes
from moesaic.kernels.nodes import Node, bind, read_nodes


def fake_machine(root: Path, nodes: dict[int, tuple[str, int]], *, allowed: str | None = None) -> Path:
    """Nodes with (processors, bytes in kB); of each a quarter is free and an eighth is page cache."""
    for node_id, (cpus, total) in nodes.items():
        folder = root / "nodes" / f"node{node_id}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n")
        fields = {
            "MemTotal": total,
            "MemFree": total // 4,
            "Active(file)": total // 16,
            "Inactive(file)": total // 16,
            "FilePages": total // 2,
        }
        lines = [f"Node {node_id} {name + ':':<15} {value:>10} kB" for name, value in fields.items()]
        (folder / "meminfo").write_text("\n".join([*lines, f"Node {node_id} HugePages_Total:     0"]))
    (root / "nodes" / "possible").write_text("0-63")
    if allowed is not None:
        (root / "self").mkdir()
        (root / "self" / "status").write_text(f"Name:\tpython\nMems_allowed_list:\t{allowed}\n")
    return root


def found(root: Path, cpus: set[int]) -> tuple[Node, ...]:
    return read_nodes(sys=root / "nodes", proc=root, cpus=cpus)


def test_nodes_are_those_with_memory_that_the_process_may_use(tmp_path: Path) -> None:
    nodes = {0: ("0-3,8", 8000), 1: ("4-7", 16000), 2: ("", 64000), 3: ("12-15", 0), 10: ("9", 32000)}
    root = fake_machine(tmp_path, nodes)
    everything = set(range(16))
    assert [node.node_id for node in found(root, everything)] == [
        0,
        1,
        10,
    ]  # 2 has no processors, 3 no memory
    assert found(root, everything)[1].available_bytes == 1024 * (4000 + 2000)
    assert [node.node_id for node in found(root, {8, 9})] == [0, 10]
    assert found(root, {99}) == ()
    assert read_nodes(sys=tmp_path / "absent", proc=root) == ()


def test_the_cpuset_of_a_container_counts(tmp_path: Path) -> None:
    root = fake_machine(tmp_path, {0: ("0", 8), 1: ("1", 8), 2: ("2", 8)}, allowed="1-2")
    assert [node.node_id for node in found(root, {0, 1, 2})] == [1, 2]


def test_pages_are_bound_or_the_system_says_why_not() -> None:
    data = map_bytes(HUGE_BYTES)
    try:
        bind(data, (0,))
        bind(data, (0, *(node.node_id for node in read_nodes())))
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOSYS):
            raise
        pytest.skip(f"the system binds no pages: {error}")
    data[:] = 1
    with pytest.raises(OSError, match="Invalid argument"):
        bind(data, (1000,))
