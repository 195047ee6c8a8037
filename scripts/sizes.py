"""Lines per room; `--check` fails when a file or a function outgrew its budget."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Print the table; the exit status is 1 when `--check` found something too long."""
    rooms: Counter[str] = Counter()
    too_long: list[str] = []
    for path in sorted(ROOT.glob("src/**/*.py")) + sorted(ROOT.glob("tests/**/*.py")):
        text = path.read_text()
        lines = text.count("\n")
        name = path.relative_to(ROOT)
        rooms[
            "/".join(name.parts[1:3]) if name.parts[0] == "src" and len(name.parts) > 3 else name.parts[0]
        ] += lines
        if lines > MAX_FILE_LINES:
            too_long.append(f"{name}: {lines} lines, at most {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append(
                        f"{name}:{node.lineno} {node.name}: {length} lines, at most {MAX_FUNCTION_LINES}"
                    )
    if "--check" not in sys.argv:
        for room, lines in sorted(rooms.items()):
            print(f"{lines:7d}  {room}")
        print(f"{sum(rooms.values()):7d}  all")
    for line in too_long:
        print(f"too long: {line}")
    return 1 if too_long and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
