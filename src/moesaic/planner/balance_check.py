"""Whether a dump of expert counts is sound, and what changed between two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from moesaic.interop.dump import Dump
from moesaic.placement.slots import Placement, balancedness
from moesaic.placement.trigger import MIN_SAMPLES, replication_reasons
from moesaic.spec.experts import FloatArray
from moesaic.spec.model import ModelSpec

Level = Literal["fault", "warning", "note"]
SAME_TOTALS = 1e-6  # layers of one recording count the same tokens
CLOSE_TOTALS = 0.01  # guess: snapshots of a running engine differ by that much between layers
SAMPLES_PER_EXPERT = 100  # guess: 10 % of noise in the count of a mean expert
PADDED_LAYERS = 0.9  # guess: part of the layers in which the lowest ids are the hottest


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something about a dump. A fault makes plans from it wrong; a warning may; a note does not."""

    level: Level
    kind: str
    message: str


def check_dump(dump: Dump, model: ModelSpec | None = None) -> tuple[Finding, ...]:
    """Everything found, faults first. `dump` is matched with the model already."""
    rows = dump.counts_LE[list(dump.sparse_rows)]
    top_k = model.moe_layers[0][1].experts_per_token if model and model.moe_layers else dump.top_k
    found = [*_reading(dump, model)]
    if len(rows):
        found += [*_totals(dump, rows, top_k), *_experts(dump, rows, top_k)]
    else:
        found.append(Finding(level="fault", kind="all zero", message="no layer counted anything"))
    order = ("fault", "warning", "note")
    return tuple(sorted(found, key=lambda one: order.index(one.level)))


def _reading(dump: Dump, model: ModelSpec | None) -> list[Finding]:
    """What reading dropped, and what the file cannot hold."""
    found = [Finding(level="note", kind="reading", message=note) for note in dump.notes]
    if dump.num_zero_steps:
        text = (
            f"{dump.num_zero_steps} of {dump.num_steps + dump.num_zero_steps} steps counted nothing "
            "and were dropped"
        )
        found.append(Finding(level="note", kind="zero steps", message=text))
    dense = len(dump.counts_LE) - len(dump.sparse_rows)
    if dense:
        text = f"{dense} of {len(dump.counts_LE)} layers count nothing: taken as dense and left out"
        found.append(Finding(level="note", kind="dense layers", message=text))
    if model is not None:
        silent = sorted(set(dict(model.moe_layers)) - set(dump.sparse_layers))
        if silent and dump.sparse_layers:
            have = "has" if len(silent) == 1 else "have"
            text = f"{_first(silent)} {have} experts in the model and counted nothing"
            found.append(Finding(level="fault", kind="silent layers", message=text))
    if dump.num_padded:
        are, were = ("y is", "was") if dump.num_padded == 1 else ("ies are", "were")
        text = f"{dump.num_padded} entr{are} no choice (padding) and {were} left out"
        found.append(Finding(level="note", kind="padding", message=text))
    top_k = model.moe_layers[0][1].experts_per_token if model and model.moe_layers else None
    if dump.columns is not None and top_k is not None and dump.columns < top_k:
        text = f"{dump.columns} choices of a token are recorded, the model makes {top_k}: the rest is missing"
        found.append(Finding(level="fault", kind="truncated top-k", message=text))
    gaps = sorted(set(range(max(dump.ranks, default=-1) + 1)) - set(dump.ranks))
    if gaps:
        text = f"no file of rank {', '.join(map(str, gaps))}; ranks up to {max(dump.ranks)} are there"
        found.append(Finding(level="fault", kind="missing rank", message=text))
    if dump.short_ranks:
        text = f"rank {', '.join(map(str, dump.short_ranks))} lacks iterations or layers that another has"
        found.append(Finding(level="fault", kind="short rank", message=text))
    return found


def _totals(dump: Dump, rows: FloatArray, top_k: int | None) -> list[Finding]:
    """Every layer counts each token's choices once."""
    found = []
    totals = rows.sum(axis=1)
    spread = float(totals.max() / totals.min() - 1.0)
    if spread > SAME_TOTALS:
        level: Level = "fault" if spread > CLOSE_TOTALS else "warning"
        low, high = (dump.sparse_layers[int(pick(totals))] for pick in (np.argmin, np.argmax))
        text = (
            f"layers count up to {spread:.2%} apart ({totals.min():g} in layer {low}, {totals.max():g} in "
            f"layer {high}); "
            "each token makes as many choices in every layer: "
            + (
                "tokens were lost or counted twice"
                if level == "fault"
                else "layers were read at different moments?"
            )
        )
        found.append(Finding(level=level, kind="unequal layers", message=text))
    if top_k is not None:
        uneven = np.flatnonzero(totals % top_k)
        if len(uneven) and spread <= SAME_TOTALS:
            layer = dump.sparse_layers[int(uneven[0])]
            text = (
                f"layer {layer} counts {totals[uneven[0]]:g} choices, which {top_k} experts a token do "
                "not divide"
            )
            found.append(Finding(level="fault", kind="wrong top-k", message=text))
        if dump.num_tokens and dump.layout.startswith("moesaic"):
            times = float(totals.max() / (dump.num_tokens * top_k))
            if abs(times - 1.0) > CLOSE_TOTALS:
                text = (
                    f"{totals.max():g} choices of {dump.num_tokens} tokens are {times:.2f} times "
                    f"{top_k} a token"
                )
                found.append(Finding(level="fault", kind="wrong top-k", message=text))
    mean = float(totals.mean() / rows.shape[1])
    if mean < SAMPLES_PER_EXPERT:
        text = (
            f"{mean:.1f} choices an expert: chance alone moves a count by "
            f"{100 / np.sqrt(max(mean, 1e-9)):.0f}%"
        )
        found.append(Finding(level="warning", kind="few samples", message=text))
    return found


def _first(layers: Sequence[int]) -> str:
    return f"layer {layers[0]}" + (f" and {len(layers) - 1} more" if len(layers) > 1 else "")


def _experts(dump: Dump, rows: FloatArray, top_k: int | None) -> list[Finding]:
    """What a router does not do by itself."""
    found = []
    layers = dump.sparse_layers
    constant = np.flatnonzero(rows.max(axis=1) == rows.min(axis=1))
    if len(constant):
        text = f"all experts count the same in {_first([layers[idx] for idx in constant])}: made up?"
        found.append(Finding(level="fault", kind="constant layers", message=text))
    twins = [i for i in range(1, len(rows)) if i not in constant and np.array_equal(rows[i], rows[i - 1])]
    if twins:
        text = (
            f"layers {layers[twins[0] - 1]} and {layers[twins[0]]} have the same counts, {len(twins)} "
            f"such pair{'s' if len(twins) > 1 else ''}"
        )
        found.append(Finding(level="fault", kind="repeated layers", message=text))
    dead = rows == 0
    always = np.flatnonzero(dead.all(axis=0))
    runs = np.split(always, np.flatnonzero(np.diff(always) > 1) + 1) if len(always) else []
    for run in runs:
        size = len(run)
        if size >= 2 and rows.shape[1] % size == 0 and run[0] % size == 0 and size < rows.shape[1]:
            text = (
                f"experts {run[0]} to {run[-1]} count nothing in any layer: a rank of {size} experts "
                "is missing?"
            )
            found.append(Finding(level="fault", kind="missing rank", message=text))
    if dead.any():
        text = (
            f"{int(dead.sum())} of {dead.size} experts never chosen, in {int(dead.any(axis=1).sum())} of "
            f"{len(rows)} layers"
        )
        found.append(Finding(level="warning", kind="dead experts", message=text))
    for k in (top_k,) if top_k else (2, 4, 6, 8):
        if k < rows.shape[1] // 2:
            lowest = (rows[:, :k].min(axis=1) > rows[:, k:].max(axis=1)).mean()
            if lowest >= PADDED_LAYERS:
                text = (
                    f"experts 0 to {k - 1} are the hottest in {lowest:.0%} of the layers: padding rows "
                    "were counted? "
                    "(equal scores choose the lowest ids)"
                )
                found.append(Finding(level="fault", kind="padding", message=text))
                break
    reasons = [replication_reasons(row.astype(np.int64)) for row in rows]
    if any("skew" in one for one in reasons):
        text = (
            f"in {sum('skew' in one for one in reasons)} of {len(rows)} layers the hottest expert has "
            "twice the "
            f"coldest's load or more, over {MIN_SAMPLES:,} choices: copies help"
        )
        found.append(Finding(level="note", kind="skew", message=text))
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Shift:
    """One expert whose share changed."""

    layer_idx: int
    expert: int
    share_before: float
    share_after: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """What changed from one load to another, and what it does to a placement made for the first.

    Distance is the part of all choices that went elsewhere: half the sum of |share after - share before|.
    """

    distance: float  # mean over layers
    distance_max: float
    distance_max_layer: int
    shifts: tuple[Shift, ...]  # the largest, over all layers
    old_on_old: float  # balancedness of the old placement under the first load
    old_on_new: float
    new_on_new: float

    @property
    def loss(self) -> float:
        """How much longer the busiest GPU takes if the old placement stays, beside a new one."""
        return self.new_on_new / self.old_on_new - 1.0


def difference(
    loads_SLE: FloatArray, layer_idxs: tuple[int, ...], old: Placement, new: Placement, num_shifts: int = 8
) -> Difference:
    """From the first load to the second.

    Shapes:  loads_SLE [2, L, E].
    """
    share = loads_SLE / loads_SLE.sum(axis=2, keepdims=True)
    change = share[1] - share[0]
    distance = np.abs(change).sum(axis=1) / 2
    order = np.argsort(-np.abs(change), axis=None, kind="stable")[:num_shifts]
    shifts = tuple(
        Shift(
            layer_idx=layer_idxs[layer], expert=expert, share_before=float(share[0, layer, expert]),
            share_after=float(share[1, layer, expert]),
        )
        for layer, expert in (divmod(int(one), share.shape[2]) for one in order)
    )  # fmt: skip
    even = [
        float(balancedness(placement.gpu_load(load)).mean())
        for placement, load in ((old, share[0]), (old, share[1]), (new, share[1]))
    ]
    return Difference(
        distance=float(distance.mean()), distance_max=float(distance.max()),
        distance_max_layer=layer_idxs[int(distance.argmax())], shifts=shifts, old_on_old=even[0],
        old_on_new=even[1], new_on_new=even[2],
    )  # fmt: skip
