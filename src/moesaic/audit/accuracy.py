"""How far predictions are from measured serving times, and how far another planner's are on the same rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.audit.perf_rows import PerfRow, PerfTable, read_csv, read_perf_rows, spec_of
from moesaic.cost.calibrated import predict, shipped
from moesaic.cost.layouts import Split
from moesaic.cost.ops import Formats
from moesaic.cost.serving import Traffic
from moesaic.cost.term import FloatArray
from moesaic.errors import ConfigError
from moesaic.spec.hardware import Cluster, machine
from moesaic.spec.model import ModelSpec

PEER_COLUMNS = ("id", "ttft", "tpot")
RANKED_ROWS = 4  # fewer have no rank correlation worth the name


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    """Rows that one walk prices: one model, device, backend and set of formats."""

    model: ModelSpec
    group: str
    cluster: Cluster
    split: Split
    traffic: Traffic
    formats: Formats
    backend: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Figures of one set of rows, as fractions. None where there are too few rows."""

    n: int
    median_ape: float  # of |predicted / measured - 1|
    p90_ape: float
    coverage_80: float | None  # share of rows inside the 80 % interval
    width: float | None  # median of high / low
    rank_corr: float | None  # Spearman inside a group, mean over groups weighted by rows


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """The report: both targets, for all rows and by model, device, backend and regime."""

    num_rows: int
    num_aggregated: int
    dropped: Mapping[str, int]
    moe: Mapping[str, Errors]
    dense: Mapping[str, Errors]
    decoders: Mapping[str, Errors]  # sparse models in pools that only decode; in no other figure
    ours_shared: Mapping[str, Errors]  # on the rows that the peer predicts too, sparse models only
    peer: Mapping[str, Errors]
    slices: Mapping[str, Mapping[str, Mapping[str, Errors]]]  # dimension -> value -> target

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return {
            "n": self.num_rows, "dropped": dict(self.dropped), **_plain(self.moe),
            "dense": _plain(self.dense), "decoders": _plain(self.decoders),
            "peer": _plain(self.peer) if self.peer else None,
            "shared": _plain(self.ours_shared) if self.ours_shared else None,
            "slices": {
                dim: {value: _plain(errors) for value, errors in found.items()}
                for dim, found in self.slices.items()
            },
        }  # fmt: skip


def group_of(row: PerfRow) -> str:
    """The group of a row: what is held out together."""
    return f"{row.model}|{row.machine}"


def cases_of(rows: Sequence[PerfRow]) -> Iterator[tuple[list[int], Case]]:
    """(indices of the rows, case): every row once."""
    groups: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for idx, row in enumerate(rows):
        groups[row.model, row.machine, row.backend, row.dense_format, row.expert_format].append(idx)
    for ids in groups.values():
        first = rows[ids[0]]
        model, device = spec_of(first.model), machine(first.machine)
        arrays = {
            name: np.array([getattr(rows[idx], name) for idx in ids], dtype=np.float64)
            for name in ("tp", "dp", "ep", "expert_tp", "prompt", "output", "batch")
        }
        yield ids, Case(
            model=model, group=group_of(first),
            cluster=Cluster(
                machine=device, devices_per_node=device.num_devices_per_node, num_nodes=nodes_of(device)
            ),
            split=Split(tp=arrays["tp"], dp=arrays["dp"], ep=arrays["ep"], expert_tp=arrays["expert_tp"]),
            traffic=Traffic(prompt=arrays["prompt"], output=arrays["output"], batch=arrays["batch"]),
            formats=_formats(model, first), backend=first.backend,
        )  # fmt: skip


def nodes_of(device: Any) -> int:
    """Nodes of one fast-link domain."""
    return max(1, int(device.number("num_devices_per_link_domain", 1)) // device.num_devices_per_node)


def _formats(model: ModelSpec, row: PerfRow) -> Formats:
    """What the row says; a checkpoint of one's own 4-bit experts keeps its 16-bit attention (gpt-oss)."""
    formats = Formats(dense=row.dense_format, experts=row.expert_format)
    if model.weight_format == "mxfp4" and row.expert_format == "nvfp4":
        return replace(formats, dense=None, experts=None)
    return formats


def accuracy(rows_path: Path, peer_path: Path | None = None) -> Accuracy:
    """Errors on the cleaned rows of a file. Groups that were fitted to are predicted by a fit without them.

    Raises: ConfigError when a file cannot be read, lacks columns, or leaves no usable row.
    """
    table = read_perf_rows(rows_path)
    found = _predicted(table.rows)
    found.pop("decode")
    sparse = np.array([bool(spec_of(row.model).moe_layers) for row in table.rows])
    groups = np.array([group_of(row) for row in table.rows])
    shared: dict[str, Errors] = {}
    peer: dict[str, Errors] = {}
    if peer_path is not None:
        theirs = _read_peer(peer_path, table)
        for target in ("tpot", "ttft"):
            mask = sparse & np.isfinite(theirs["tpot"]) & np.isfinite(theirs["ttft"])
            if mask.any():
                measured, value, low, high = (one[mask] for one in found[target])
                shared[target] = _errors(measured, value, low, high, groups[mask])
                peer[target] = _errors(measured, theirs[target][mask], None, None, groups[mask])
    return Accuracy(
        num_rows=len(table.rows), num_aggregated=table.num_aggregated, dropped=table.dropped,
        moe=_both(found, sparse, groups), dense=_both(found, ~sparse, groups), ours_shared=shared, peer=peer,
        decoders=_decoders(table.decoders), slices=_slices(table, found, sparse, groups),
    )  # fmt: skip


def _decoders(rows: Sequence[PerfRow]) -> dict[str, Errors]:
    """Errors of the time per token of pools that only decode."""
    sparse = np.array([bool(spec_of(row.model).moe_layers) for row in rows], dtype=bool)
    groups = np.array([group_of(row) for row in rows])
    return _both({"tpot": _predicted(rows)["decode"]}, sparse, groups)


def _predicted(rows: Sequence[PerfRow]) -> dict[str, tuple[FloatArray, ...]]:
    """By target: measured, value, low, high of every row; "decode" is time per token without prompts."""
    found = {target: np.zeros((4, len(rows))) for target in ("tpot", "ttft", "decode")}
    for ids, case in cases_of(rows):
        one = predict(
            case.model, case.cluster, case.split, case.traffic, backend=case.backend, formats=case.formats,
            calibration=shipped(without=case.group),
        )  # fmt: skip
        for target, interval in (("tpot", one.tpot_s), ("ttft", one.ttft_s), ("decode", one.decode_s)):
            measured = [rows[idx].ttft_s if target == "ttft" else rows[idx].tpot_s for idx in ids]
            found[target][:, ids] = measured, interval.value, interval.low, interval.high
    return {target: tuple(values) for target, values in found.items()}


def _both(
    found: Mapping[str, tuple[FloatArray, ...]], mask: FloatArray, groups: FloatArray
) -> dict[str, Errors]:
    if not mask.any():
        return {}
    both = {}
    for target, values in found.items():
        measured, value, low, high = (one[mask] for one in values)
        both[target] = _errors(measured, value, low, high, groups[mask])
    return both


def _errors(
    measured: FloatArray,
    value: FloatArray,
    low: FloatArray | None,
    high: FloatArray | None,
    groups: FloatArray,
) -> Errors:
    ape = np.abs(value / measured - 1.0)
    ranks = []
    for name in np.unique(groups):
        mask = groups == name
        if mask.sum() >= RANKED_ROWS:
            ranks.append((_spearman(value[mask], measured[mask]), float(mask.sum())))
    coverage = width = None
    if low is not None and high is not None:
        coverage = float(np.mean((measured >= low) & (measured <= high)))
        width = float(np.median(high / low))
    return Errors(
        n=len(measured), median_ape=float(np.median(ape)), p90_ape=float(np.quantile(ape, 0.9)),
        coverage_80=coverage, width=width,
        rank_corr=sum(r * w for r, w in ranks) / sum(w for _, w in ranks) if ranks else None,
    )  # fmt: skip


def _spearman(a: FloatArray, b: FloatArray) -> float:
    """Correlation of ranks, ties at their mean rank; 0 when one side is constant."""
    ranks = []
    for values in (a, b):
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(counts) - (counts - 1) / 2.0)[inverse])
    if any(np.ptp(one) == 0 for one in ranks):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _slices(
    table: PerfTable, found: Mapping[str, tuple[FloatArray, ...]], sparse: FloatArray, groups: FloatArray
) -> dict[str, dict[str, dict[str, Errors]]]:
    """By model and device over all rows, by backend and regime over sparse models."""
    rows = table.rows
    labels = {
        "model": [row.model for row in rows], "gpu": [row.machine for row in rows],
        "backend": [row.backend for row in rows], "regime": [regime_of(row) for row in rows],
    }  # fmt: skip
    found_slices: dict[str, dict[str, dict[str, Errors]]] = {}
    for dim, names in labels.items():
        column = np.array(names)
        found_slices[dim] = {}
        for name in sorted(set(names)):
            mask = (column == name) & (sparse if dim != "model" else True)
            if mask.any():
                found_slices[dim][name] = _both(found, mask, groups)
    return found_slices


def regime_of(row: PerfRow) -> str:
    """Few or many sequences at once, short or long prompts."""
    size = "small batch" if row.batch * row.dp <= 16 else "large batch"
    return f"{size}, {'long' if row.prompt >= 4000 else 'short'} prompt"


def _read_peer(path: Path, table: PerfTable) -> dict[str, FloatArray]:
    """Another planner's times by row in seconds; NaN where it has none."""
    lines = {line["id"]: line for line in read_csv(path, PEER_COLUMNS)}
    times = {target: np.full(len(table.rows), np.nan) for target in ("tpot", "ttft")}
    for idx, row in enumerate(table.rows):
        line = lines.get(row.row_id)
        for target in times:
            text = "" if line is None else line[target]
            try:
                value = float(text) if text else float("nan")
            except ValueError as error:
                raise ConfigError(f"{path}: {target} of {row.row_id} is no number: {text!r}") from error
            if value > 0:
                times[target][idx] = value / 1e3
    return times


def _plain(errors: Mapping[str, Errors]) -> dict[str, Any]:
    return {
        target: {name: getattr(one, name) for name in Errors.__dataclass_fields__}
        for target, one in errors.items()
    }
