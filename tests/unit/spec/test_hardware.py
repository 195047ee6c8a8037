from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.errors import ConfigError
from moesaic.spec.hardware import MACHINES, machine, read_machine

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
        (("flops_per_s.bfloat16", "flops_per_s.float32"), "flops_per_s.bfloat16 is missing"),
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
