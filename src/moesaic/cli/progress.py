"""How far something long is: one line on stderr, written over, and only when it takes more than 2 s."""

from __future__ import annotations

import sys
import time
from typing import Self

QUIET_S = 2.0
EVERY_S = 0.5  # on a terminal
EVERY_PLAIN_S = 10.0  # in a file, where lines stay


class Progress:
    """Called with the part done and a few words, inside a `with` that clears the line at its end."""

    def __init__(self) -> None:
        self._start_s = time.monotonic()
        self._next_s = self._start_s + QUIET_S
        self._is_terminal = sys.stderr.isatty()
        self._width = 0

    def __call__(self, part: float, text: str) -> None:
        """Say so, if it is time."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (EVERY_S if self._is_terminal else EVERY_PLAIN_S)
        line = f"{part:4.0%} {text}, {now_s - self._start_s:.0f} s"
        if self._is_terminal:
            print(f"\r{line:<{self._width}}", end="", file=sys.stderr, flush=True)
            self._width = len(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the line as it was found."""
        if self._width:
            print(f"\r{'':<{self._width}}\r", end="", file=sys.stderr, flush=True)
