"""The collectives' program, with processes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from moesaic.audit.child import ChildFailed, run_program

pytest.importorskip("torch")


def test_every_collective_of_two_processes(tmp_path: Path) -> None:
    told = {
        "result": str(tmp_path / "collectives.json"), "worlds": [2], "sizes": [64, 65536], "budget_s": 0.05
    }  # fmt: skip
    found = run_program("moesaic.parallel.measure", "collectives", tmp_path, told, print, timeout_s=120)
    cases = [(row["case"]["op"], row["case"]["processes"], row["case"]["bytes"]) for row in found["readings"]]
    assert cases == [
        ("send_recv", 2, 64), ("send_recv", 2, 65536),
        ("all_to_all_single", 2, 32), ("all_to_all_single", 2, 32768),
        ("all_reduce", 2, 64), ("all_reduce", 2, 65536),
    ]  # fmt: skip
    assert all(value > 0 for row in found["readings"] for value in row["values"])


@pytest.mark.long
def test_a_rank_that_fails_ends_them_all(tmp_path: Path) -> None:
    told = {"result": str(tmp_path / "collectives.json"), "worlds": [2], "sizes": [-4], "budget_s": 0.2}
    with pytest.raises(ChildFailed, match="of 2 ended before it had measured anything"):
        run_program("moesaic.parallel.measure", "collectives", tmp_path, told, print, timeout_s=120)
