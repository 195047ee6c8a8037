"""Which function computes which figure. A function is of the figure's inputs alone; it holds no answer."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

Compute = Callable[..., Any]
Relation = Callable[[Any], bool]
F = TypeVar("F", bound=Compute)

TOPICS = (
    "memory", "reading", "dense", "wide", "pingpong", "separate", "context", "routing", "balance", "traffic",
    "behaviour", "launch", "decisions",
)  # fmt: skip
"""Modules beside this one that register functions."""


class Computation(NamedTuple):
    """How a figure is computed. `holds` says whether the claim's relation holds where it has no tolerance."""

    compute: Compute
    holds: Relation | None


_COMPUTATIONS: dict[str, Computation] = {}


def figure(*ids: str, holds: Relation | None = None) -> Callable[[F], F]:
    """Register a function for figures that differ in their inputs only."""

    def register(compute: F) -> F:
        for name in ids:
            if name in _COMPUTATIONS:
                raise AssertionError(f"{name} is computed twice")
            _COMPUTATIONS[name] = Computation(compute, holds)
        return compute

    return register


def computations() -> dict[str, Computation]:
    """All registered functions by figure."""
    for topic in TOPICS:
        import_module(f"moesaic.audit.figures.{topic}")
    return _COMPUTATIONS
