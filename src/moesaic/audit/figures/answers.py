"""What can be asked for by name beside figures: exercises, demonstrations, tables."""

from __future__ import annotations

from collections.abc import Mapping

from moesaic.audit.figures.decisions import decisions
from moesaic.audit.figures.demos import DEMOS
from moesaic.audit.figures.exercises import EXERCISES
from moesaic.audit.figures.misconceptions import misconceptions
from moesaic.audit.figures.selftest import selftest
from moesaic.audit.figures.sheet import Make, Sheet
from moesaic.errors import ConfigError, nearest

NAMED: Mapping[str, Make] = {
    **DEMOS, "selftest": selftest, "misconceptions": misconceptions, "decisions": decisions,
}  # fmt: skip


def demo(name: str) -> tuple[Sheet, ...]:
    """A demonstration or a set of tables by name.

    Raises: ConfigError for an unknown name, with the nearest.
    """
    if name not in NAMED:
        raise ConfigError(f"unknown demonstration {name!r}; {nearest(name, NAMED)}")
    return NAMED[name]()


def exercise(number: int) -> tuple[Sheet, ...]:
    """A worked exercise.

    Raises: ConfigError for a number without one.
    """
    if number not in EXERCISES:
        raise ConfigError(f"there is no exercise {number}; there are {min(EXERCISES)} to {max(EXERCISES)}")
    return EXERCISES[number]()
