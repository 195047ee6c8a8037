"""Expert load as JSON: every field of `ExpertLoad`, with layer indices and the figures of unevenness."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from moesaic.obs.load import skew, total_counts
from moesaic.spec.experts import ExpertLoad, IntArray


def expert_report(
    loads: Iterable[ExpertLoad], moe_layers: Sequence[int], window_s: float | None
) -> dict[str, Any]:
    """One entry per phase, and the skew of both together. Expert ids are positions in `counts`.

    Units:  since_s and until_s are Unix times.
    """
    loads = tuple(loads)
    return {
        "window_s": window_s,
        "layer_idxs": list(moe_layers),
        "loads": [
            {
                "phase": load.phase,
                "num_tokens": load.num_tokens,
                "num_steps": load.num_steps,
                "since_s": load.since_s,
                "until_s": load.until_s,
                "plan_version": load.plan_version,
                "source": load.source,
                "counts": [counts.tolist() for counts in load.counts],
            }
            for load in loads
        ],
        "skew": [_skew_of(counts) for counts in total_counts(loads)],
    }


def _skew_of(counts: IntArray) -> dict[str, Any] | None:
    found = skew(counts)
    return None if found is None else dataclasses.asdict(found)
