"""Queries that grow with their position, by a table computed in float64 and rounded once."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moesaic.spec.model import TemperatureSpec


class Temperature:
    """Times 1 + scale * log(1 + floor((position + 1) / interval)): a function of the position alone."""

    def __init__(self, spec: TemperatureSpec) -> None:
        self._spec = spec
        self._factors = torch.ones(1)  # by floor((position + 1) / interval), grown as it is asked for

    def scale(self, q_THC: Tensor, positions_T: Tensor) -> Tensor:
        """`q_THC` scaled in float32 and rounded to its dtype."""
        step_T = (positions_T + 1) // self._spec.interval
        if step_T.numel():
            self._grow(int(step_T.max()) + 1)
        factor_T = self._factors.index_select(0, step_T)
        return (q_THC.float() * factor_T[:, None, None]).to(q_THC.dtype)

    def _grow(self, count: int) -> None:
        if count > len(self._factors):
            steps = range(max(count, 2 * len(self._factors)))
            self._factors = torch.tensor([1.0 + self._spec.scale * math.log1p(step) for step in steps])
