from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moesaic.cost.roofline import compute_dtype
from moesaic.errors import ConfigError
from moesaic.spec.hardware import MACHINES, cluster, dump_machine, machine, node_devices, read_machine

GOOD = """
name = "box"
description = "a box"
memory_bytes = { value = 1e9, source = "seen" }
memory_bytes_per_s = { value = 1e9, source = "seen" }
flops_per_s.bfloat16 = { value = 1e12, source = "seen" }
"""


def test_every_number_has_a_source() -> None:
    assert {"a100", "h100", "h200"} <= set(MACHINES)
    for name in MACHINES:
        found = machine(name)
        assert found.name == name
        for fact in found.facts.values():
            assert fact.value > 0
            assert len(fact.source) > 8


def test_datasheet_numbers_are_si() -> None:
    h100 = machine("H100")
    assert h100.memory_bytes == 80_000_000_000
    assert h100.memory_bytes_per_s == 3.35e12
    assert h100.flops_per_s("bfloat16") == 989e12
    assert h100.link_bytes_per_s == 450e9
    assert machine("epyc-2vcpu").link_bytes_per_s is None
    with pytest.raises(ConfigError, match="machine a100 has no rate for 'fp8'"):
        machine("a100").flops_per_s("fp8")


def test_unknown_machine_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown machine 'h10'; did you mean h100"):
        machine("h10")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("1e12", "-1"), "value must be a number above 0"),
        (("1e12", "inf"), "value must be a number above 0"),
        (('1e12, source = "seen"', "1e12"), "has no source"),
        (("memory_bytes_per_s", "memory_bytes_per_sec"), "unknown; did you mean memory_bytes_per_s"),
        (
            ("flops_per_s.bfloat16", "flops_per_s.fp8"),
            "flops_per_s.bfloat16 or flops_per_s.float32 is missing",
        ),
        (('{ value = 1e12, source = "seen" }', "3"), "must be a table with value and source"),
        (('name = "box"', "name = 3"), "name and description must be strings"),
        (('name = "box"', "name = "), "not a readable machine file"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, change: tuple[str, str], words: str) -> None:
    path = tmp_path / "box.toml"
    path.write_text(GOOD)
    assert read_machine(path).memory_bytes == 1_000_000_000
    path.write_text(GOOD.replace(*change))
    with pytest.raises(ConfigError, match=words):
        read_machine(path)


def test_a_machine_is_written_as_it_is_read(tmp_path: Path) -> None:
    for name in MACHINES:
        path = tmp_path / f"{name}.toml"
        path.write_text(dump_machine(machine(name), ["two", "notes"]))
        assert read_machine(path) == machine(name)
    awkward = replace(machine("h100"), description='a "box" \\ of\ttwo')
    path.write_text(dump_machine(awkward))
    assert read_machine(path) == awkward


def test_products_fall_back_to_the_rate_there_is(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(GOOD.replace("flops_per_s.bfloat16", "flops_per_s.float32"))
    wide, both = read_machine(path), machine("h100")
    assert (wide.wide_dtype, compute_dtype("bfloat16", wide), compute_dtype("int4", wide)) == ("float32",) * 3
    assert (both.wide_dtype, compute_dtype("int4", both), compute_dtype("fp8", both)) == (
        "bfloat16",
        "bfloat16",
        "fp8",
    )


def test_a_node_says_its_devices_or_its_machine_does() -> None:
    assert cluster("h200x4x2").node == "h200x4"
    assert (node_devices("h200x4"), node_devices("h200"), node_devices("mi300x")) == (4, 8, 8)
    assert (node_devices("box"), node_devices("boxx3")) == (None, 3)  # a machine of one's own
    with pytest.raises(ConfigError, match="'h200x0' names 0"):
        node_devices("h200x0")


def test_clusters_and_names_that_hold_an_x() -> None:
    found = cluster("H200x8x4")
    assert (found.machine.name, found.devices_per_node, found.num_nodes, found.num_devices) == (
        "h200",
        8,
        4,
        32,
    )
    assert str(cluster("rtx-4090")) == "rtx-4090x1x1"
    assert cluster("mi300xx8").machine.name == "mi300x"
    assert cluster("gb200x4x18").link_domain == 72
    assert cluster("gb200x4").link_domain == 4
    for text in ("h200x0", "h200x8x0", "h200x8x9999999"):
        with pytest.raises(ConfigError, match="both must be at least 1"):
            cluster(text)
    for text in ("", "x8"):
        with pytest.raises(ConfigError, match="machine"):
            cluster(text)


def test_a_machine_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"
    path.write_text(GOOD)
    assert machine("box", path) == machine("BOX", tmp_path)
    assert cluster("boxx2", tmp_path).num_devices == 2
    with pytest.raises(ConfigError, match="unknown machine 'boy'; did you mean box"):
        machine("boy", path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="a folder without a machine file"):
        machine("box", empty)


def test_the_machines_that_planning_needs() -> None:
    wanted = (
        "a100 a800 h100 h800 h200 h20 b200 b300 gb200 gb300 mi300x mi355x l20 l40s rtx-4090 rtx-5090 "
        "rtx-pro-6000"
    )
    assert set(wanted.split()) <= set(MACHINES)
    for name in wanted.split():
        found = machine(name)
        assert found.number("price", 0) > 0
        assert found.number("power_w", 0) > 0
        assert found.num_devices_per_node >= 4
        assert found.link_bytes_per_s is not None


@pytest.mark.parametrize("name", MACHINES)
def test_every_machine_takes_counts_with_its_hyphens_or_without(name: str) -> None:
    for spelled in (name, name.replace("-", ""), name.upper()):
        assert str(cluster(f"{spelled}x8x4")) == f"{name}x8x4"
        assert str(cluster(spelled)) == f"{name}x1x1"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("mi300x8", r"unknown machine 'mi300x8'; did you mean mi300xx8\? .* is called mi300x"),
        ("mi355x8x4", r"did you mean mi355xx8x4"),
        ("h2008", r"did you mean h200x8"),
        ("h2000", r"unknown machine 'h2000'; did you mean h200"),
        ("h200x8x4x2", r"machine 'h200x8x4x2': 'x8x4x2' after h200 is not x8 or x8x4"),
        ("h200x-1", r"'x-1' after h200 is not x8 or x8x4"),
        ("nosuch", r"unknown machine 'nosuch'; known: a100, .*l20, .*xeon-6980p; one of your own"),
        ("h10", r"did you mean [^;]*\? known: a100, .*xeon-6980p; one of your own"),
        ("", "names no machine"),
    ],
)
def test_near_misses_are_named(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster(text)
