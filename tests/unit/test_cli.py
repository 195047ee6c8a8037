"""The command line: help, exit codes, one-line errors, extras that are missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moesaic.cli import main as cli


def run(*arguments: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    start = ["-c", code] if code else ["-m", "moesaic"]
    return subprocess.run([sys.executable, *start, *arguments], capture_output=True, text=True)


def test_help_names_every_verb() -> None:
    done = run("--help")
    assert done.returncode == 0
    for verb in cli.VERBS:
        assert verb.name in done.stdout
        assert verb.summary.rstrip(".") in done.stdout.replace("\n", " ")


@pytest.mark.parametrize("verb", cli.VERBS, ids=lambda verb: verb.name)
def test_every_verb_has_help(verb: cli.Verb) -> None:
    done = run(verb.name, "--help")
    assert done.returncode == 0, done.stderr
    assert verb.summary.split(".")[0].split(":")[0] in " ".join(done.stdout.split())


def test_unknown_verb_and_unknown_option_exit_2() -> None:
    assert run("srve", "demo").returncode == 2
    assert run("inspect", "deepseek-v3", "--jsno").returncode == 2


def test_expected_error_is_one_line_and_exit_2(tmp_path: Path) -> None:
    done = run("inspect", str(tmp_path / "absent"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert "absent" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    done = run("--debug", "inspect", str(tmp_path / "absent"))
    assert "Traceback" in done.stderr


def test_missing_extra_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules.update({name: None for name in ('torch', 'fastapi', 'uvicorn')})\n"
        "sys.argv[0] = 'moesaic'; from moesaic.cli.main import main; main()"
    )
    done = run("serve", "demo", code=code)
    assert done.returncode == 2
    assert "pip install 'moesaic[" in done.stderr


def test_broken_pipe_is_silent() -> None:
    done = subprocess.run(
        f"{sys.executable} -m moesaic inspect deepseek-v3 | head -n 1",
        shell=True,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
