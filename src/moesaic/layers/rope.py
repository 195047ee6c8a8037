"""Rotary position embeddings as tables by position, computed in float64 and rounded once.

A table depends on positions alone: a token's rotation never depends on how long its sequence has become.

Source:  RoPE arXiv:2104.09864; YaRN arXiv:2309.00071; LongRoPE arXiv:2402.13753; Llama 3.1's own code.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moesaic.errors import UnsupportedModelError
from moesaic.kernels.ops import Ops
from moesaic.spec.model import RopeScaling, RopeSpec

FIRST_ROWS = 4096  # positions computed at first; a table doubles from there when a longer one comes


class RopeTable:
    """Cosines and sines of positions 0 .. max_position - 1, grown as they are asked for."""

    def __init__(self, spec: RopeSpec, max_position: int) -> None:
        """`max_position` is what is served; longrope takes its long factors when it exceeds the original.

        Raises: UnsupportedModelError for frequencies that depend on the length of the sequence.
        """
        self.spec = spec
        self.max_position = max_position
        self._frequencies, self._factor = frequencies(spec, max_position)
        self._cos = self._sin = torch.empty((0, len(self._frequencies)))
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, dim / 2] float32, times the attention factor.

        The layers of a step ask with the same tensor and get the same rows.
        """
        if self._last is not None and self._last[0] is positions_T:
            return self._last[1], self._last[2]
        if positions_T.numel():
            self._grow(int(positions_T.max()) + 1)
        cos_TC, sin_TC = self._cos.index_select(0, positions_T), self._sin.index_select(0, positions_T)
        self._last = (positions_T, cos_TC, sin_TC)
        return cos_TC, sin_TC

    def rows(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions 0 .. num_positions - 1 and maybe more: [n, dim / 2] float32."""
        self._grow(num_positions)
        return self._cos, self._sin

    def rotate(self, x_THC: Tensor, positions_T: Tensor, ops: Ops) -> Tensor:
        """`x_THC` with its first `spec.dim` columns turned to their positions."""
        cos_TC, sin_TC = self.at(positions_T)
        return ops.rope(x_THC, cos_TC, sin_TC, self.spec.is_interleaved)

    def _grow(self, num_rows: int) -> None:
        have = len(self._cos)
        if num_rows <= have:
            return
        assert num_rows <= self.max_position, f"position {num_rows - 1} of at most {self.max_position}"
        wanted = min(self.max_position, max(num_rows, FIRST_ROWS, 2 * have))
        positions = torch.arange(have, wanted, dtype=torch.float64)
        angles = positions[:, None] * self._frequencies
        self._cos = torch.cat((self._cos, (angles.cos() * self._factor).float()))
        self._sin = torch.cat((self._sin, (angles.sin() * self._factor).float()))


def frequencies(spec: RopeSpec, max_position: int) -> tuple[Tensor, float]:
    """Angle per position of each pair [dim / 2] float64, and the factor on cosines and sines.

    Raises: UnsupportedModelError for a scaling that is not run.
    """
    base = spec.theta ** -(torch.arange(0, spec.dim, 2, dtype=torch.float64) / spec.dim)
    scaling = spec.scaling
    if scaling is None:
        return base, 1.0
    if scaling.kind == "linear":
        return base / scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(base, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(base, spec, scaling), _yarn_factor(scaling)
    if scaling.kind == "longrope":
        return _longrope(base, scaling, max_position)
    if scaling.kind == "proportional":
        turning = int(scaling.proportion * spec.dim // 2)  # the other pairs stand still
        return torch.where(torch.arange(len(base)) < turning, base / scaling.factor, 0.0), 1.0
    raise UnsupportedModelError(
        f"rope scaling {scaling.kind!r} is not run"
        + (
            ": its frequencies follow the length of the sequence, so a token's keys would change as it grows"
            if scaling.kind == "dynamic"
            else ""
        )
        + "; known: linear, llama3, yarn, longrope, proportional"
    )


def _original(scaling: RopeScaling) -> int:
    if scaling.original_max_position is None:
        raise UnsupportedModelError(
            f"rope scaling {scaling.kind!r} needs original_max_position_embeddings, and the config has none"
        )
    return scaling.original_max_position


def _llama3(base: Tensor, scaling: RopeScaling) -> Tensor:
    """Long waves slowed by the factor, short ones kept, a ramp between the two."""
    turns = _original(scaling) * base / (2 * math.pi)  # turns over the original length
    ramp = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0.0, 1.0)
    return base * kept + base / scaling.factor * (1.0 - kept)


def _yarn(base: Tensor, spec: RopeSpec, scaling: RopeScaling) -> Tensor:
    """Pairs of fewer than beta_slow turns over the original length are interpolated, a ramp to beta_fast."""

    def pair_of(turns: float) -> float:
        return spec.dim * math.log(_original(scaling) / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    # A ramp of no width is a step.
    width = high - low if high != low else 0.001
    slowed = ((torch.arange(spec.dim // 2, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    return base * (1.0 - slowed) + base / scaling.factor * slowed


def _yarn_factor(scaling: RopeScaling) -> float:
    """On cosines and sines. DeepSeek's mscale_all_dim also acts on the softmax scale, in the mixer's spec."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(scale: float) -> float:
        return 1.0 if scaling.factor <= 1.0 else 0.1 * scale * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _longrope(base: Tensor, scaling: RopeScaling, max_position: int) -> tuple[Tensor, float]:
    original = _original(scaling)
    factors = scaling.long_factor if max_position > original else scaling.short_factor
    factor = scaling.attention_factor
    if factor is None:
        factor = (
            1.0 if scaling.factor <= 1.0 else math.sqrt(1 + math.log(scaling.factor) / math.log(original))
        )
    return base / torch.tensor(factors, dtype=torch.float64), factor
