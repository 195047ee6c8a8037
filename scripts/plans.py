"""Renew what shows plans: examples and picture of docs/planner.md, and the golden plans of the tests."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planner.md"
PICTURE = ROOT / "docs" / "planner.svg"
BLOCK = re.compile(r"```\n\$ moesaic (plan [^\n]+)\n.*?```", re.DOTALL)


def shown(arguments: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "moesaic", *shlex.split(arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Run every example again, draw the first one, and plan the golden cases."""
    page = PAGE.read_text(encoding="utf-8")
    first = BLOCK.search(page)
    if first is None:
        raise SystemExit(f"{PAGE}: no example that begins with $ moesaic plan")
    PAGE.write_text(
        BLOCK.sub(lambda match: f"```\n$ moesaic {match[1]}\n{shown(match[1]).rstrip()}\n```", page),
        encoding="utf-8",
    )
    shown(f"{first[1]} --report {shlex.quote(str(PICTURE))}")
    runpy.run_path(str(ROOT / "tests" / "golden" / "test_plans.py"), run_name="__main__")


if __name__ == "__main__":
    main()
