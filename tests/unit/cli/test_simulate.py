"""`moesaic simulate gate`: the screen, the JSON, the refusals, and what it does not import."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from moesaic.cli.gate_view import render
from moesaic.cli.main import build_app
from moesaic.errors import ConfigError
from moesaic.planner.sim.case import GateCase
from moesaic.planner.sim.study import study_gates


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "moesaic", "simulate", "gate", *arguments], capture_output=True, text=True
    )


def test_one_screen_says_what_was_simulated_and_what_to_conclude() -> None:
    done = run("--tokens", "64", "--seed", "5")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("8 experts, top-2, 64 tokens")
    assert lines[0].endswith("seed 5")
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 110
    assert [line.split(":")[0] for line in lines[-2:]] == ["Holds when", "Fails when"]
    assert sum(" |" in line or "#|" in line for line in lines) >= 8


def test_json_is_the_report_and_the_same_again() -> None:
    done = CliRunner().invoke(build_app("simulate"), ["simulate", "gate", "--tokens", "32", "--json"])
    found = json.loads(done.stdout)
    again = dataclasses.asdict(study_gates(GateCase(num_tokens=32)))
    assert found == json.loads(json.dumps(again))
    assert set(found) == {
        "case", "capacity", "draws", "variants", "smooth_max_mean", "change_blas", "example_importance",
        "example_load",
    }  # fmt: skip
    assert found["case"]["num_tokens"] == 32
    assert found["case"]["seed"] == 7
    assert set(found["variants"][0]) == {
        "name", "tokens", "load", "max_mean", "importance_cv2", "load_cv2", "weight_sum", "dropped_share",
        "drop_error", "neighbours",
    }  # fmt: skip
    assert set(found["variants"][1]["neighbours"]) == {
        "change_capacity", "change_capacity_max", "change_dropless",
    }  # fmt: skip
    assert set(found["draws"][2]["dropped_share"]) == {"1", "1.25"}


@pytest.mark.parametrize(
    "arguments",
    [("--top-k", "9"), ("--share", "nan"), ("--capacity-factor", "0"), ("--strength", "-1")],
)
def test_bad_input_is_a_config_error_that_names_the_option(arguments: tuple[str, str]) -> None:
    done = CliRunner().invoke(build_app("simulate"), ["simulate", "gate", *arguments])
    assert isinstance(done.exception, ConfigError)
    assert arguments[0] in str(done.exception)


def test_bad_input_is_one_line_and_exit_2() -> None:
    done = run("--capacity-factor", "nan")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: capacity_factor (--capacity-factor) must be finite and above 0: got nan\n"
    assert run("--top-k", "two").returncode == 2


def test_many_experts_show_the_hottest_ones() -> None:
    text = render(study_gates(GateCase(num_experts=40, num_tokens=32)))
    assert "the 16 hottest of 40" in text
    assert max(map(len, text.splitlines())) <= 110


def test_a_load_that_cannot_be_evened_is_not_called_even() -> None:
    text = render(study_gates(GateCase(num_tokens=32, strength=100, share=1)))
    assert "Holds when:  not seen here: a learnt bias left the hottest expert at 4.00 x" in text


def test_neither_torch_nor_scipy_is_imported() -> None:
    code = (
        "import sys; from moesaic.planner.sim.study import study_gates; import moesaic.cli.simulate\n"
        "import moesaic.planner.sim.serve, moesaic.planner.sim.fleet, moesaic.planner.sim.burst\n"
        "assert not {'torch', 'scipy', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
