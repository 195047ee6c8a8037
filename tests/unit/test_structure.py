"""The shape of the project itself: names, docs, sizes, what imports what."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import moesaic

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "moesaic"
MODULES = sorted(SOURCE.rglob("*.py"))


def test_public_names_are_importable() -> None:
    for name in moesaic.__all__:
        assert getattr(moesaic, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = moesaic.LMM  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_module_says_what_it_holds(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring, f"{path} has no docstring"
    assert len(docstring.splitlines()) <= 40


def test_source_is_ascii() -> None:
    for path in MODULES:
        path.read_text().encode("ascii")


def test_torch_free_half_imports_no_torch() -> None:
    rooms = ["spec", "account", "sched", "placement", "obs", "text", "interop", "cost", "planner"]
    names = [
        ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
        for room in rooms
        for path in sorted((SOURCE / room).rglob("*.py"))
        if path.name != "__init__.py"
    ]
    code = "\n".join(
        [
            "import sys, importlib",
            f"for name in {names!r}: importlib.import_module(name)",
            "assert 'torch' not in sys.modules",
        ]
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_module_runs_like_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moesaic", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"moesaic {moesaic.__version__}\n"


def test_every_family_is_kept_from_importing_another() -> None:
    """The linter's list of families is written by hand; here it meets the files."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [listed] = [contract["modules"] for contract in contracts if contract["id"] == "families"]
    built = {
        f"moesaic.models.{path.stem}"
        for path in (ROOT / "src/moesaic/models").glob("*.py")
        if re.search(r"^[A-Z0-9_]+ = (WeightMap|replace)\(", path.read_text(), re.MULTILINE)
    }
    assert set(listed) == built


def test_runnable_families_are_the_ones_that_are_built() -> None:
    from moesaic.spec.families import RUNNABLE

    build = importlib.import_module("moesaic.models.build")
    assert set(build.FAMILIES) == set(RUNNABLE)
