"""How large the static buffers of experts are, as a factor of an even share: fixed, or by a controller.

Nothing is dropped: a step that overflows its buffers runs again with buffers of its own size, and is counted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from moesaic.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorPolicy:
    """The rule by which the capacity factor moves, once a window.

    factor + overflow_gain x overflow - fill_gain x (fill - target), between `least` and `most`: overflows
    raise it within one window, windows without lower it. `overflow` is the share of steps that ran again,
    `fill` the rows kept by the places that they had.

    A target of 1 / most or above is refused: rows fill 1 / factor of the places, so an idle factor would run
    away from 1 / target on either side, up as well as down.

    Source:  gains, window and bounds of lecture notes on MoE serving, whose formula has the signs reversed.
    Raises:  ConfigError for gains, bounds or a target out of range.
    """

    window_s: float = 0.5
    start: float = 1.3
    least: float = 1.0
    most: float = 2.0
    fill_gain: float = 0.1
    overflow_gain: float = 0.3
    target: float = 0.4  # guess: of the places; below 1 / most

    def __post_init__(self) -> None:
        for name in ("window_s", "start", "least", "most", "fill_gain", "overflow_gain", "target"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a finite number above 0, got {getattr(self, name):g}")
        if not self.least <= self.start <= self.most:
            raise ConfigError(f"the factor starts at {self.start:g}, outside {self.least:g} to {self.most:g}")
        if self.target >= 1.0 / self.most:
            raise ConfigError(
                f"target {self.target:g} must be below 1 / most = {1.0 / self.most:g}: from there on an idle "
                "factor rises instead of falling"
            )

    def after(self, factor: float, *, fill: float | None, overflow: float) -> float:
        """The factor of the next window; `fill` None: no step ran, which is like one that fills its share."""
        seen = 1.0 / factor if fill is None else fill
        moved = factor + self.overflow_gain * overflow - self.fill_gain * (seen - self.target)
        return min(max(moved, self.least), self.most)


def captured(factor: float, factors: Sequence[float]) -> float | None:
    """The smallest of the factors that buffers were captured for that is enough; None: none is.

    Shapes:  factors ascending.
    """
    idx = bisect_left(factors, factor - 1e-9)
    return factors[idx] if idx < len(factors) else None
