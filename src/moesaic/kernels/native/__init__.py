"""Native CPU kernels: C++ behind one module that an installation without a compiler leaves out.

Levels are instruction sets. A result's bits belong to its level: each keeps the promise of `kernels.ops` by
itself.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

from moesaic.errors import KernelUnavailable, nearest


@cache
def module() -> Any | None:
    """The compiled module; None where it was not built."""
    try:
        return importlib.import_module("moesaic.kernels.native._native")
    except ModuleNotFoundError:
        return None


def levels() -> tuple[str, ...]:
    """Levels that were built and that this machine has, slowest first."""
    compiled = module()
    return () if compiled is None else tuple(compiled.levels())


def check_level(level: str) -> None:
    """Refuse a level that cannot run here.

    Raises: KernelUnavailable naming what is missing.
    """
    if module() is None:
        raise KernelUnavailable(
            f"native kernels ({level}) are not built in this installation: it had no C++17 compiler. Install "
            "one and run pip install again, or use the reference backend"
        )
    if level not in levels():
        raise KernelUnavailable(f"this machine has no native level {level!r}; {nearest(level, levels())}")
