"""The page about emit and lint shows what the commands print."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from deployments import deployment, instance, model
from typer.testing import CliRunner

from moesaic.cli.main import build_app

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "emit.md").read_text()
SAMPLES = {"results.txt": "alltoall_h100x8.txt", "topo.txt": "h100x8.txt"}


def shown() -> list[tuple[str, str]]:
    """(command, output) of every block, but for plans, what writes files, and input that is not here."""
    found = []
    for block in re.findall(r"^```\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        for part in re.split(r"^(?=\$ )", block, flags=re.MULTILINE):
            command, _, output = part.partition("\n")
            if command.startswith("$ moesaic") and output and "requests.jsonl" not in command:
                found.append((command.removeprefix("$ moesaic "), output.partition("...\n")[0]))
    return [one for one in found if not one[0].startswith("plan")]


@pytest.mark.parametrize(("command", "output"), shown(), ids=[command[:40] for command, _ in shown()])
def test_shown_output_is_what_is_printed(command, output, tmp_path, monkeypatch):
    if command.startswith("emit"):
        v3 = model("deepseek-v3")
        one = instance(v3, dp=16, ep=16, redundant=16, micro=2)
        formats = "weights=fp8 kv=bfloat16 dispatch=fp8"
        (tmp_path / "deployment.json").write_text(deployment(v3, one, formats=formats).to_json())
    for name, sample in SAMPLES.items():
        shutil.copy(ROOT / "tests" / "samples" / sample, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    done = CliRunner().invoke(build_app(words[0]), words)
    printed = done.output if done.exit_code in (0, 3) else f"error: {done.exception}\n"
    assert printed.startswith(output)


def test_the_page_shows_every_kind_of_command():
    assert len(shown()) >= 7
    verbs = {command.split()[0] for command, _ in shown()}
    assert verbs == {"emit", "lint", "inspect"}
