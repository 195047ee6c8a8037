"""What readings say, the file they make, what is refused before a minute is spent."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.audit import calibrate as verb
from moesaic.audit import child
from moesaic.audit.calibrate import CalibrationAsk, Measured, calibrate, size_buffer, warnings_of
from moesaic.audit.child import ChildFailed, run_program
from moesaic.audit.machine_facts import Reading, facts_of, fit_collectives, fit_line
from moesaic.cli.calibrate import render
from moesaic.engine.machine import Machine
from moesaic.errors import CapacityError, ConfigError
from moesaic.planner.fit import fit
from moesaic.spec.families import read_config
from moesaic.spec.hardware import cluster, read_machine
from moesaic.spec.locate import preset

GB, MIB = 10**9, 2**20
HOST = Machine(
    num_cpus=2, cpu_source="told", total_bytes=24 * GB, available_bytes=20 * GB, memory_source="told"
)
SIZES = [1e3, 1e5, 1e6, 1e7]


def said(text: str) -> None:
    assert text


def memory(threads: int, *values: float) -> dict[str, Any]:
    return {
        "case": {"threads": threads, "pages": "huge", "by": "native"},
        "unit": "bytes/s",
        "values": values,
    }


def product(dtype: str, rows: int, *values: float) -> dict[str, Any]:
    case = {"dtype": dtype, "by": "torch", "expert": "e", "rows": rows, "hidden": 64, "ffn": 32}
    return {"case": case, "unit": "flop/s", "values": values}


def message(size: float, seconds: float) -> dict[str, Any]:
    return {"case": {"op": "send_recv", "processes": 2, "bytes": size}, "unit": "s", "values": [seconds]}


def drive(order: str, *values: float) -> dict[str, Any]:
    case = {"order": order, "expert": "e", "piece_bytes": 9 * MIB, "readers": 4, "way": "O_DIRECT"}
    return {"case": case, "unit": "bytes/s", "values": values}


FOUND: dict[str, list[dict[str, Any]]] = {
    "memory": [memory(1, 9e9, 10e9, 11e9), memory(2, 19e9, 20e9, 21e9)],
    "gemm": [product("float32", 64, 3e11), product("bfloat16", 1, 1e10), product("bfloat16", 64, 4e11, 4e11)],
    "disk": [drive("sequential", 3e9), drive("random", 2e9)],
    "collectives": [message(size, 1e-4 + size / 1e9) for size in SIZES],
}


class Programs:
    """Stands in for the measuring programs: what each finds, or how it fails."""

    def __init__(self, failing: dict[str, str] | None = None, **found: list[dict[str, Any]]) -> None:
        self.found, self.failing, self.told = FOUND | found, failing or {}, dict[str, dict[str, Any]]()

    def __call__(
        self, module: str, name: str, folder: Path, told: dict[str, Any], show: Any, *, timeout_s: float
    ) -> dict[str, Any]:
        self.told[name] = told
        if name in self.failing:
            (folder / f"{name}.log").write_text(f"Traceback\n{self.failing[name]}\n")
            raise ChildFailed(self.failing[name])
        return {"readings": self.found[name], "missing": {}}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Programs:
    found = Programs()
    monkeypatch.setattr(verb, "run_program", found)
    monkeypatch.setattr(verb, "read_machine", lambda: HOST)
    return found


def measured(tmp_path: Path, **ask: Any) -> Measured:
    return calibrate(CalibrationAsk(output=tmp_path / "box.toml", **ask), said)


@settings(max_examples=25)
@given(st.floats(1e-6, 1e-1), st.floats(1e6, 1e12))
def test_alpha_and_beta_are_recovered_exactly(alpha: float, beta: float) -> None:
    line = fit_line(SIZES, [alpha + size / beta for size in SIZES])
    # 1e7 bytes at 1e12 bytes/s are 1e-4 of an alpha of 0.1 s: some digits of beta are lost by then
    assert line.alpha_s == pytest.approx(alpha, rel=1e-6, abs=1e-9)
    assert line.beta_bytes_per_s == pytest.approx(beta, rel=1e-6)
    assert line.max_error < 1e-9


def test_noise_moves_them_little_and_shows_in_the_error() -> None:
    rng = np.random.default_rng(0)
    sizes = np.repeat(SIZES, 20)
    line = fit_line(sizes.tolist(), ((1e-4 + sizes / 1e9) * rng.uniform(0.9, 1.1, len(sizes))).tolist())
    assert line.alpha_s == pytest.approx(1e-4, rel=0.1)
    assert line.beta_bytes_per_s == pytest.approx(1e9, rel=0.1)
    assert 0.04 < line.rms_error < 0.08
    assert line.max_error < 0.12


def test_short_messages_count_as_much_as_long_ones() -> None:
    """With absolute errors, 5 % of a long message would swallow an alpha of 20 us."""
    line = fit_line([1e2, 1e3, 1e8], [2e-5, 2.1e-5, 0.105])
    assert line.alpha_s == pytest.approx(2e-5, rel=0.05)


def test_no_alpha_below_zero_and_no_line_without_growth() -> None:
    line = fit_line([1e3, 1e6], [1e-7, 1e-3])
    assert (line.alpha_s, line.max_error > 0.1) == (0.0, True)
    with pytest.raises(ConfigError, match="do not grow with the size"):
        fit_line([1e3, 1e6], [1e-3, 1e-7])
    with pytest.raises(ConfigError, match="two sizes at least, got 1"):
        fit_line([1e3, 1e3], [1e-3, 1e-3])
    flat = [Reading(part="collectives", **message(size, 1.0 / size)) for size in SIZES]
    assert "do not grow" in fit_collectives(flat)[0]["why_not"]
    assert facts_of(flat, fit_collectives(flat), "measured") == {}


def test_the_file_is_read_by_the_planner(tmp_path: Path, programs: Programs) -> None:
    found = measured(tmp_path)
    box = read_machine(tmp_path / "box.toml")
    assert box == found.machine
    assert all(fact.source.startswith(f"measured {found.date}") for fact in box.facts.values())
    assert (box.memory_bytes, box.memory_bytes_per_s, box.flops_per_s("bfloat16")) == (24 * GB, 20e9, 4e11)
    assert (box.number("disk_bytes_per_s", 0), box.link_bytes_per_s) == (2e9, 1e9)
    assert box.number("link_latency_s", 0) == 1e-4
    text = (tmp_path / "box.toml").read_text()
    assert re.search(r"^# memory +1e\+10 bytes/s +10%  read by 1 thread, huge pages", text, re.MULTILINE)
    assert found.versions["numpy"] in text
    model = read_config(preset("olmoe-1b-7b").config, name="olmoe-1b-7b")
    answer = fit(model, "olmoe-1b-7b", cluster("box", tmp_path / "box.toml"), context=128)
    assert answer.verdict == "fits"
    # nearly all of a step at batch 1 is reading the active weights once
    assert answer.tokens_per_s is not None
    assert answer.tokens_per_s.value == pytest.approx(20e9 / (2 * answer.active_params), rel=0.15)


def test_rates_of_a_datasheet_are_not_taken_whole(tmp_path: Path, programs: Programs) -> None:
    """The negative control of the test above: the same numbers with another source are corrected."""
    measured(tmp_path)
    path = tmp_path / "box.toml"
    path.write_text(path.read_text().replace('source = "measured', 'source = "datasheet, not measured'))
    model = read_config(preset("olmoe-1b-7b").config, name="olmoe-1b-7b")
    answer = fit(model, "olmoe-1b-7b", cluster("box", path), context=128)
    assert answer.tokens_per_s is not None
    assert answer.tokens_per_s.value < 0.8 * 20e9 / (2 * answer.active_params)


def test_a_machine_without_torch_has_float32_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "run_program", Programs(gemm=[product("float32", 64, 1e11)]))
    monkeypatch.setattr(verb, "find_spec", lambda name: None)
    found = measured(tmp_path)
    assert "moesaic[engine]" in found.not_measured["collectives"]
    box = read_machine(tmp_path / "box.toml")
    assert (box.wide_dtype, box.has_rate("bfloat16"), box.link_bytes_per_s) == ("float32", False, None)
    model = read_config(preset("olmoe-1b-7b").config, name="olmoe-1b-7b")
    assert fit(model, "olmoe-1b-7b", cluster("box", tmp_path / "box.toml")).tokens_per_s is not None


def test_what_failed_is_named_and_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(verb, "run_program", Programs({"disk": "no space", "collectives": "no network"}))
    found = calibrate(CalibrationAsk(output=tmp_path / "box.toml"), shown.append)
    assert {"disk": "no space", "collectives": "no network"}.items() <= found.not_measured.items()
    assert "disk: Traceback" in shown
    assert {"disk_bytes", "disk_bytes_per_s", "link_bytes_per_s"}.isdisjoint(found.machine.facts)
    assert "no space" in render(found)
    assert read_machine(tmp_path / "box.toml") == found.machine


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("gemm", r"needs flops_per_s.bfloat16 or flops_per_s.float32.*\(killed\)"),
        ("memory", "needs memory_bytes_per_s"),
    ],
)
def test_no_file_that_the_planner_would_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, words: str
) -> None:
    monkeypatch.setattr(verb, "run_program", Programs({part: "killed"}))
    with pytest.raises(ConfigError, match=f"was not written: every machine {words}"):
        measured(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_slow_int8_is_no_reason_to_multiply_in_it(tmp_path: Path, programs: Programs) -> None:
    programs.found["gemm"] = [*FOUND["gemm"], product("int8", 64, 1e10)]
    found = measured(tmp_path)
    assert "flops_per_s.int8" not in found.machine.facts
    assert "slower" in found.not_measured["flops_per_s.int8"]
    programs.found["gemm"] = [*FOUND["gemm"], product("int8", 64, 1e12)]
    assert measured(tmp_path, is_overwriting=True).machine.flops_per_s("int8") == 1e12


def test_one_processor_has_no_collectives(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "find_spec", lambda name: SimpleNamespace())
    monkeypatch.setattr(verb, "read_machine", lambda: replace(HOST, num_cpus=1))
    found = measured(tmp_path)
    assert "this machine has 1" in found.not_measured["collectives"]
    assert "collectives" not in programs.told
    monkeypatch.setattr(verb, "read_machine", lambda: replace(HOST, num_cpus=24))
    measured(tmp_path, is_overwriting=True)
    assert programs.told["collectives"]["worlds"] == [2, 8]
    assert programs.told["memory"]["num_threads"] == 24


def test_the_seconds_are_shared_out(tmp_path: Path, programs: Programs) -> None:
    measured(tmp_path, seconds=20.0)
    assert sum(told["budget_s"] for told in programs.told.values()) == pytest.approx(20.0)


def test_busy_machines_and_scattered_numbers_are_called_so() -> None:
    calm = Reading(part="memory", **memory(1, 9.9e9, 10e9, 10.1e9))
    wild = Reading(part="memory", **memory(2, 5e9, 10e9, 15e9))
    once = Reading(part="memory", **memory(2, 5e9))
    assert warnings_of([calm, once], [], 0.1) == ()
    [busy] = warnings_of([calm], [], 2.0)
    assert "busy machine: 2 processes a processor" in busy
    [scatter] = warnings_of([calm, wild], [{"op": "all_reduce", "rms_error": 0.1}], 0.0)
    assert "1 of 2 numbers scatter by over 20% of their median, most read by 2 threads" in scatter
    [bent] = warnings_of([], [{"op": "all_reduce", "rms_error": 0.3}], 0.0)
    assert "for all_reduce" in bent


def test_too_little_memory_is_refused_with_the_arithmetic() -> None:
    assert size_buffer(20 * GB, 32 * MIB) == 256 * MIB
    assert size_buffer(20 * GB, 512 * MIB) == 2048 * MIB
    assert size_buffer(20 * GB, None) == 256 * MIB
    with pytest.raises(
        CapacityError, match=r"buffer of 268 MB \(4 x the 33.6 MB.*25% of the 1.00 GB.*is 250 MB"
    ):
        size_buffer(GB, 32 * MIB)


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        ({"seconds": 0}, "--seconds must be above 0 and at most 3600, got 0"),
        ({"seconds": float("nan")}, "--seconds must be above 0"),
        ({"name": "boxx2"}, "'boxx2' cannot name a machine.*counts devices"),
        ({"name": "My Box"}, "'My Box' cannot name a machine"),
    ],
)
def test_bad_wishes_are_refused(ask: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        CalibrationAsk(**ask)


def test_what_cannot_be_written_is_refused_before_measuring(
    tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "box.toml"
    path.write_text("kept")
    with pytest.raises(ConfigError, match="exists; choose another file, or --force"):
        calibrate(CalibrationAsk(output=path), said)
    with pytest.raises(ConfigError, match="is a folder; name a file"):
        calibrate(CalibrationAsk(output=tmp_path, name="box"), said)
    with pytest.raises(ConfigError, match="absent is not a folder"):
        calibrate(CalibrationAsk(output=tmp_path / "absent" / "box.toml"), said)
    with pytest.raises(ConfigError, match=r"the disk of .*absent cannot be measured.*--disk"):
        calibrate(CalibrationAsk(disk=tmp_path / "absent"), said)
    monkeypatch.setattr(verb.os, "access", lambda folder, mode: False)
    with pytest.raises(ConfigError, match="no permission to write"):
        calibrate(CalibrationAsk(output=tmp_path / "other.toml"), said)
    monkeypatch.undo()
    assert programs.told == {}
    assert path.read_text() == "kept"


def test_a_full_disk_is_refused(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb.shutil, "disk_usage", lambda folder: SimpleNamespace(free=100 * MIB))
    with pytest.raises(
        CapacityError, match=r"takes 67.1 MB, at most half.*105 MB are free; make room.*--disk"
    ):
        measured(tmp_path)
    assert programs.told == {}


def test_json_has_every_value(tmp_path: Path, programs: Programs) -> None:
    found = json.loads(json.dumps(measured(tmp_path).to_json(), allow_nan=False))
    assert found["readings"][0] == {
        "part": "memory", "threads": 1, "pages": "huge", "by": "native", "unit": "bytes/s",
        "median": 10e9, "spread": pytest.approx(0.1), "values": [9e9, 10e9, 11e9],
    }  # fmt: skip
    assert found["collectives"][0]["alpha_s"] == pytest.approx(1e-4)
    assert found["facts"]["memory_bytes_per_s"]["value"] == 20e9
    assert {"versions", "date", "warnings", "not_measured", "num_cpus", "file"} <= set(found)


def test_a_program_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "QUIET_S", 0.01)
    told = {
        "result": str(tmp_path / "memory.json"), "buffer_bytes": 2 * MIB, "num_threads": 1, "budget_s": 3e3
    }  # fmt: skip
    with pytest.raises(ChildFailed, match="the memory process was ended after"):
        run_program("moesaic.kernels.measure.memory", "memory", tmp_path, told, said, timeout_s=0.02)


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(ChildFailed, match="the disk process ended with status 1: KeyError: 'result'"):
        run_program("moesaic.kernels.measure.disk", "disk", tmp_path, {}, said, timeout_s=60)


def test_the_command_line_refuses_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moesaic", "calibrate", "--seconds", "0"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --seconds must be above 0 and at most 3600, got 0\n"


@pytest.mark.long
def test_this_machine_for_real(tmp_path: Path) -> None:
    path = tmp_path / "box.toml"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moesaic", *arguments], capture_output=True, text=True, cwd=tmp_path
        )

    done = run("calibrate", "-o", str(path), "--seconds", "2", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["part"] for row in found["readings"]} >= {"memory", "gemm"}
    assert [one.name for one in tmp_path.iterdir()] == ["box.toml"]
    own = ("--hardware", str(path), "--machine", "box")
    fits = run("fit", "olmoe-1b-7b", "--json", *own)
    assert json.loads(fits.stdout)["verdict"] in ("fits", "fits_offloaded", "does_not_fit")
    planned = run("plan", "olmoe-1b-7b", "--isl", "128", "--osl", "32", "--tpot-ms", "1e6", *own)
    assert planned.returncode in (0, 2), planned.stderr  # 2: the model is larger than this machine
