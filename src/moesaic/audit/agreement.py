"""How far two runs of one model are apart, layer by layer, and how far they may be. numpy only.

Every layer is judged on equal input: our hidden state before it, given to both sides. So a difference stays
in the layer that makes it, and a router's near tie in its token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """What may differ in one dtype. A row is one token in one layer.

    Errors are relative to what a layer adds to the residual stream; a residual that is much larger brings
    its own rounding, `eps` of itself.
    """

    row_error: (
        float | None
    )  # float32: the most a row may be off; None: judged against transformers' own error
    eps: float  # of the dtype
    far_rows: float  # part of the rows that may be off, for near ties of a router
    logits: float | None  # greatest end-to-end difference, relative to the greatest logit; None: not judged
    ratio: float | None = None  # bfloat16: our median error over theirs, both against float32


TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {
        "float32": Tolerance(row_error=1e-4, eps=2.0**-23, far_rows=0.005, logits=1e-4),
        "bfloat16": Tolerance(row_error=None, eps=2.0**-8, far_rows=0.05, logits=None, ratio=1.5),
    }
)
"""Source: measured with this verb; docs/units-and-sources.md has the figures."""

RULES: Mapping[str, str] = MappingProxyType(
    {
        "float32": "where 1e-4 is allowed, and more for one row in 200",
        "bfloat16": "where 1.5 times transformers' own rounding is allowed, and more for one row in 20",
    }
)
"""The same in words, for whoever reads that it was broken."""

FAR = 8.0  # times transformers' median error: rows beyond it took another expert, or are wrong
FLOOR = 1e-3  # bfloat16: medians below it are rounding of a value that hardly changes


@dataclass(frozen=True, kw_only=True, slots=True)
class StageError:
    """One place of comparison: the embedding, a layer, or the head.

    `median` and `worst` are relative errors over rows; `oracle_median` is transformers' own in this dtype
    against float32, None where the comparison is in float32.
    """

    name: str  # embedding, layer 0, ..., head
    median: float
    worst: float
    oracle_median: float | None
    num_rows: int
    num_far: int
    is_differing: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Outputs on equal input: ours, transformers' in this dtype, and transformers' in float32.

    Shapes:  each [T, C] float32; `before` is the residual stream that went in, None where none does.
    """

    name: str
    before: Array | None
    ours: Array
    theirs: Array
    truth: Array


def judge(stage: Stage, dtype: str) -> StageError:
    """The errors of one stage and whether it differs by more than the dtype's tolerance."""
    tolerance = TOLERANCES[dtype]
    ours_T = _relative(stage, stage.ours)
    if tolerance.row_error is not None:
        slack_T = 8 * tolerance.eps * _norm(stage.truth) / _scale(stage)
        num_far = int(np.count_nonzero(~(ours_T <= tolerance.row_error + slack_T)))
        is_differing = num_far > _allowed(tolerance, len(ours_T))
        return _error(stage, ours_T, None, num_far, is_differing)
    theirs_T = _relative(stage, stage.theirs)
    median = float(np.median(theirs_T))
    bound = max(FAR * median, FLOOR)
    num_far = int(np.count_nonzero(~(ours_T <= bound)))
    num_theirs = int(np.count_nonzero(theirs_T > bound))
    is_differing = not float(np.median(ours_T)) <= max((tolerance.ratio or 1.0) * median, FLOOR)
    is_differing |= num_far > 2 * num_theirs + _allowed(tolerance, len(ours_T))
    return _error(stage, ours_T, median, num_far, is_differing)


def _error(
    stage: Stage, ours_T: Array, oracle_median: float | None, num_far: int, is_differing: bool
) -> StageError:
    return StageError(
        name=stage.name,
        median=_finite(float(np.median(ours_T))),
        worst=_finite(float(ours_T.max())),
        oracle_median=oracle_median,
        num_rows=len(ours_T),
        num_far=num_far,
        is_differing=is_differing,
    )


def _finite(value: float) -> float:
    """A number that JSON can hold: what is not finite is as far off as can be."""
    return value if np.isfinite(value) else float(np.finfo(np.float64).max)


def _allowed(tolerance: Tolerance, num_rows: int) -> int:
    return max(1, ceil(tolerance.far_rows * num_rows))


def _relative(stage: Stage, found: Array) -> Array:
    relative_T: Array = _norm(found - stage.truth) / _scale(stage)
    return relative_T


def _scale(stage: Stage) -> Array:
    """What the stage adds, by row; never zero."""
    added = stage.truth if stage.before is None else stage.truth - stage.before
    scale_T: Array = np.maximum(_norm(added), 1e-30)
    return scale_T


def _norm(x: Array) -> Array:
    norm_T: Array = np.linalg.norm(x.astype(np.float64), axis=-1)
    return norm_T


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyCheck:
    """Tokens that both sides chose alike before they parted, and the partings that no near tie explains."""

    agreement: float  # leading equal tokens over all tokens
    unexplained: tuple[str, ...]


def compare_greedy(
    ours: Sequence[Sequence[int]],
    theirs: Sequence[Sequence[int]],
    margins: Sequence[Sequence[float]],
    logit_diff: float,
) -> GreedyCheck:
    """Greedy tokens side by side. Two sides whose logits differ by d may part where a choice was won by 2 d.

    `margins` are by how much transformers' choice was ahead of the next token.
    """
    num_equal, total, unexplained = 0, 0, list[str]()
    for i, (mine, other, won_by) in enumerate(zip(ours, theirs, margins, strict=True)):
        parted = next((at for at, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), len(mine))
        num_equal, total = num_equal + parted, total + len(mine)
        if parted < len(mine) and won_by[parted] > 2 * logit_diff:
            unexplained.append(
                f"prompt {i}, token {parted}: {mine[parted]} here, {other[parted]} there, ahead by "
                f"{won_by[parted]:.3g}"
            )
    return GreedyCheck(agreement=num_equal / max(total, 1), unexplained=tuple(unexplained))
