"""How uneven expert load is: figures of one `ExpertLoad`, each with its definition."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moesaic.errors import ConfigError
from moesaic.spec.experts import ExpertLoad, IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Skew:
    """Unevenness over the experts of one layer; every expert counts, the unused ones too."""

    max_mean: float  # load of the hottest by the mean load; 1 is even, the number of experts the worst
    variation: float  # population standard deviation by the mean; 0 is even
    hottest_id: int  # ties to the lowest id
    hottest_share: float  # of all choices of the layer
    num_unused: int


def skew(counts: IntArray) -> Skew | None:
    """The figures of one layer; None when nothing was counted, for then no ratio exists.

    Shapes:  counts [E] int64.
    """
    total = int(counts.sum())
    if total == 0:
        return None
    mean = total / len(counts)
    hottest = int(counts.argmax())
    return Skew(
        max_mean=float(counts[hottest] / mean),
        variation=float(counts.std() / mean),
        hottest_id=hottest,
        hottest_share=float(counts[hottest] / total),
        num_unused=int((counts == 0).sum()),
    )


def total_counts(loads: Iterable[ExpertLoad]) -> tuple[IntArray, ...]:
    """Counts per layer, summed over loads of the same model (its phases, say).

    Raises: ConfigError when the loads disagree in layers or experts.
    """
    sums: list[IntArray] = []
    for load in loads:
        shapes = [len(counts) for counts in load.counts]
        if sums and shapes != [len(counts) for counts in sums]:
            raise ConfigError(f"loads of different models cannot be added: experts per layer {shapes}")
        sums = (
            [a + b for a, b in zip(sums, load.counts, strict=True)]
            if sums
            else [np.array(counts, dtype=np.int64) for counts in load.counts]
        )
    return tuple(sums)
