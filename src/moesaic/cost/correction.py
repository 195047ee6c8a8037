"""What measured runs say beyond the physics: effects of engine, model, formats and load on the log error.

A mixed-effects model. log(measured / physical) of a run is a sum of effects, one for each level that the run
belongs to: all runs, its backend, its model, its weights' format, its generation, and pairs of these. An
effect is an offset and slopes over the load, shrunk towards 0 by a prior, so a level with few runs says
little (partial pooling; Gelman and Hill 2007, ch. 12) and a level that was never seen says nothing: a run of
a new model is corrected by what is known of its backend and format alone. With normal priors the effects are
the mean of a Bayesian linear regression (Rasmussen and Williams 2006, sec. 2.1). Knows no physics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from moesaic.cost.term import FloatArray, Number
from moesaic.spec.model import ModelSpec

LOAD = 5  # columns of the basis that every level has: an offset and slopes
BENDS = 7  # further columns of the broad levels: squares and products
FLAGS = 2  # and whether experts are spread, and attention replicated
LIMIT = 0.7  # no correction is more than a factor of exp(0.7) = 2, however far from what was measured

LEVELS: Mapping[str, tuple[str, ...]] = {
    "all": (), "backend": ("backend",), "model": ("model",), "format": ("format",),
    "backend+format": ("backend", "format"), "backend+model": ("backend", "model"),
    "backend+generation": ("backend", "generation"), "format+generation": ("format", "generation"),
    "backend+model+format": ("backend", "model", "format"),
    "backend+model+machine": ("backend", "model", "machine"),
}  # fmt: skip
"""Levels and the facts of a run that they go by."""
BROAD = ("all", "backend")  # levels whose effects bend and have flags
OFFSET = {"model": 0.1, "backend+model": 0.2}  # standard deviations of offsets; 0.15 for the other levels
SLOPE, BEND, FLAG = 0.07, 0.05, 0.1
"""Standard deviations of the other columns. guess: only their ratios; how large they are is `Priors`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Priors:
    """How far effects may go: factors on the standard deviations of offsets and of all other columns."""

    offsets: float = 1.0
    slopes: float = 1.0

    def of(self, level: str, width: int) -> list[float]:
        """Standard deviations of a level's columns."""
        other = [SLOPE] * (LOAD - 1) + [BEND] * BENDS + [FLAG] * FLAGS
        return [self.offsets * OFFSET.get(level, 0.15), *(self.slopes * one for one in other)][:width]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The facts of a run that levels go by."""

    backend: str
    model: str
    format: str
    generation: str
    machine: str

    def levels(self) -> list[str]:
        """Names of the levels that a run belongs to."""
        return [
            f"{level}:{'|'.join(getattr(self, fact) for fact in facts)}" for level, facts in LEVELS.items()
        ]

    @property
    def known_by(self) -> str:
        """The level that says whether this model was measured in this engine."""
        return f"backend+model:{self.backend}|{self.model}"


def model_key(model: ModelSpec) -> str:
    """A model by its shape, so that every checkpoint of an architecture is the same one."""
    moe = [spec for _, spec in model.moe_layers]
    experts = f" {moe[0].num_experts}x{moe[0].expert_width}" if moe else ""
    return f"{len(model.layers)}x{model.hidden}{experts}"


def basis(
    *, batch: Number, prompt: Number, output: Number, ranks: Number, ep: Number, dp: Number
) -> FloatArray:
    """What effects are linear in.

    Shapes:  numbers or arrays over runs; returns [runs, LOAD + BENDS + FLAGS].
    Units:   logs by scales that leave most of what was measured within -2.5 and 2.5, and clipped there: an
             effect is not extrapolated.
    """
    arrays = np.broadcast_arrays(*(np.atleast_1d(one) for one in (batch, prompt, output, ranks, ep, dp)))
    scales = ((16.0, 1.5), (2048.0, 1.0), (1024.0, 1.0), (4.0, 0.8))
    b, p, o, r = (
        np.clip((np.log(np.maximum(one, 1.0)) - np.log(middle)) / scale, -2.5, 2.5)
        for one, (middle, scale) in zip(arrays[:4], scales, strict=True)
    )
    bends = (b * b - 1, p * p - 1, r * r - 1, b * p, b * o, b * r, p * r)
    flags = (arrays[4] > 1, arrays[5] > 1)
    return np.stack([np.ones(len(b)), b, p, o, r, *bends, *flags], axis=1).astype(np.float64)


def middle_load(*, prompt: Number, output: Number) -> FloatArray:
    """The basis of these requests where nothing else is known: everything else in its middle, no flags."""
    return basis(batch=16.0, prompt=prompt, output=output, ranks=4.0, ep=1.0, dp=1.0)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Correction:
    """Effects by level: as many weights as the level has columns of the basis."""

    effects: Mapping[str, Sequence[float]]

    def log_ratio(self, setting: Setting, load: FloatArray) -> FloatArray:
        """Log of measured by physical time that is expected.

        Shapes:  load as `basis` gives it; returns [runs].
        """
        total = np.zeros(load.shape[1])
        for key in setting.levels():
            weights = self.effects.get(key, ())
            total[: len(weights)] += weights
        return np.clip(load @ total, -LIMIT, LIMIT)

    def knows(self, setting: Setting) -> bool:
        """Whether runs of this model in this engine were measured."""
        return setting.known_by in self.effects


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Regression:
    """The normal equations of some runs, to be solved under any priors.

    Shapes:  starts are the first column of each level's block and the end; normal [columns, columns] and
             right [columns].
    """

    keys: Sequence[str]
    starts: Sequence[int]
    normal: FloatArray
    right: FloatArray

    def under(self, priors: Priors, noise: float) -> Correction:
        """The effects; noise is the standard deviation of a run of weight 1 about them."""
        spread: list[float] = []
        for key, (start, end) in zip(self.keys, pairwise(self.starts), strict=True):
            spread += priors.of(key.split(":", 1)[0], end - start)
        found = np.linalg.solve(self.normal + np.diag((noise / np.array(spread)) ** 2), self.right)
        return Correction(
            effects={
                key: tuple(found[start:end].tolist())
                for key, (start, end) in zip(self.keys, pairwise(self.starts), strict=True)
            }
        )


def regression(
    settings: Sequence[Setting], load: FloatArray, log_ratios: FloatArray, weights: FloatArray
) -> Regression:
    """The equations for effects that explain log ratios of measured by physical time.

    Shapes:  load [runs, columns of `basis`]; log_ratios and weights [runs].
    """
    members: dict[str, list[int]] = {}
    for idx, setting in enumerate(settings):
        for key in setting.levels():
            members.setdefault(key, []).append(idx)
    blocks, starts = [], [0]
    for key, rows in members.items():  # a block of columns for each level that occurs
        width = LOAD + (BENDS + FLAGS if key.split(":", 1)[0] in BROAD else 0)
        block = np.zeros((len(settings), width))
        block[rows] = load[rows, :width]
        blocks.append(block)
        starts.append(starts[-1] + width)
    matrix = np.hstack(blocks)
    weighted = matrix * weights[:, None]
    return Regression(
        keys=list(members), starts=starts, normal=weighted.T @ matrix, right=weighted.T @ log_ratios
    )
