"""SGLang's recorder files and `--init-expert-location`: every layout, with its traps.

Source: the recorder of SGLang 0.5.23 (expert_distribution_recorder_<time>[_<rank>].pt).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import ConfigError
from moesaic.interop.dump import Dump, checked, sum_steps
from moesaic.interop.torch_file import read_torch
from moesaic.spec.experts import FloatArray, IntArray

MAX_EXPERTS = 100_000  # guess: a hundred times the most of any model


def read_sglang_pt(path: Path) -> Dump:
    """A recorder's file.

    Raises: ConfigError when it is none, is damaged, or wants to run code.
    """
    data = read_torch(path)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{path}: a recorder's file is a dictionary, this one a {type(data).__name__}")
    if "logical_count" in data:
        return _stat(path, data)
    if "records" not in data:
        keys = ", ".join(sorted(map(str, data))[:5]) or "none"
        raise ConfigError(f"{path}: neither logical_count nor records; its keys are {keys}")
    records = data["records"]
    if not isinstance(records, Sequence) or not records or not all(isinstance(r, Mapping) for r in records):
        raise ConfigError(f"{path}: records must be a list of passes, with at least one")
    slots = _map(path, data.get("last_physical_to_logical_map"))
    kind = "topk_ids_of_layer" if "topk_ids_of_layer" in records[0] else "global_physical_count"
    if any(kind not in record for record in records):
        raise ConfigError(
            f"{path}: its records have neither global_physical_count nor topk_ids_of_layer throughout"
        )
    ranks = tuple(sorted({_integer(path, record["rank"], "rank") for record in records if "rank" in record}))
    if kind == "topk_ids_of_layer":
        return replace(_per_token(path, records, slots), ranks=ranks)
    return replace(_per_pass(path, records, slots), ranks=ranks)


def _stat(path: Path, data: Mapping[str, Any]) -> Dump:
    """Steps of the ring buffer that were never filled are zero rows."""
    return sum_steps(str(path), "SGLang stat", _array(path, data["logical_count"], "logical_count"))


def _array(path: Path, value: Any, what: str) -> Any:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        raise ConfigError(f"{path}: {what} must be a tensor of numbers, got a {type(value).__name__}")
    return value


def _integer(path: Path, value: Any, what: str) -> int:
    if not isinstance(value, int):
        raise ConfigError(f"{path}: {what} must be a whole number, got a {type(value).__name__}")
    return value


def _map(path: Path, slots: Any) -> IntArray | None:
    if slots is None:
        return None
    array = _array(path, slots, "last_physical_to_logical_map")
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "iu" or array.min() < 0:
        raise ConfigError(
            f"{path}: last_physical_to_logical_map must be [layers][slots] of ids, got shape "
            f"{list(array.shape)}"
        )
    if array.max() >= array.shape[1]:
        raise ConfigError(
            f"{path}: last_physical_to_logical_map names expert {array.max()} in {array.shape[1]} slots"
        )
    found: IntArray = array.astype(np.int64)
    return found


def _per_pass(path: Path, records: Sequence[Mapping[str, Any]], slots: IntArray | None) -> Dump:
    if slots is None:
        raise ConfigError(
            f"{path}: per_pass counts are of physical slots, and last_physical_to_logical_map is missing"
        )
    total = np.zeros(slots.shape)
    passes: dict[int, bool] = {}
    for number, record in enumerate(records):
        counts = _array(path, record["global_physical_count"], f"global_physical_count of record {number}")
        if counts.shape != slots.shape:
            raise ConfigError(
                f"{path}: record {number} has counts of shape {list(counts.shape)}, the map of slots has "
                f"{list(slots.shape)}"
            )
        total += counts
        key = _integer(path, record.get("forward_pass_id", number), "forward_pass_id")
        passes[key] = passes.get(key, False) or bool(counts.any())
    zero = sum(not is_used for is_used in passes.values())
    dump = Dump(
        source=str(path), layout="SGLang per_pass", counts_LE=_logical(total, slots),
        num_steps=len(passes) - zero, num_zero_steps=zero,
        notes=() if slots.shape[1] == 1 + slots.max() else ("slots were added up to logical experts",),
    )  # fmt: skip
    return checked(dump)


def _per_token(path: Path, records: Sequence[Mapping[str, Any]], slots: IntArray | None) -> Dump:
    parts: list[IntArray] = []
    for number, record in enumerate(records):
        ids = _array(path, record["topk_ids_of_layer"], f"topk_ids_of_layer of record {number}")
        if ids.ndim != 3 or ids.dtype.kind not in "iu" or (parts and ids.shape[::2] != parts[0].shape[::2]):
            raise ConfigError(
                f"{path}: record {number} has topk_ids_of_layer of shape {list(ids.shape)} and type "
                f"{ids.dtype}; it "
                "must be whole numbers by layer, token and choice, alike in all records"
            )
        parts.append(ids.astype(np.int64))
    routes = np.concatenate(parts, axis=1)
    num_slots = 1 + int(routes.max(initial=-1)) if slots is None else slots.shape[1]
    if num_slots > MAX_EXPERTS:
        raise ConfigError(f"{path}: topk_ids name expert {num_slots - 1}; ids below {MAX_EXPERTS} are read")
    if routes.max(initial=-1) >= num_slots or (slots is not None and len(slots) != len(routes)):
        raise ConfigError(
            f"{path}: topk_ids name slot {int(routes.max())} of {len(routes)} layers, the map has "
            f"{list(slots.shape) if slots is not None else []}"
        )
    if slots is not None:
        rows = np.arange(len(routes))[:, None, None]
        routes = np.where(routes >= 0, slots[rows, np.maximum(routes, 0)], -1)
        num_slots = 1 + int(slots.max())
    counts = np.stack([np.bincount(row[row >= 0], minlength=max(num_slots, 1)) for row in routes])
    per_token = (routes >= 0).sum(axis=2)
    zero = sum(not (part >= 0).any() for part in parts)
    used = per_token[counts.sum(axis=1) > 0]
    top_k = int(used.max(initial=0)) or None
    return checked(
        Dump(
            source=str(path),
            layout="SGLang per_token",
            counts_LE=counts.astype(np.float64),
            num_steps=len(records) - zero,
            num_zero_steps=zero,
            routes_LTK=routes,
            top_k=top_k,
            columns=routes.shape[2],
            num_tokens=int((used > 0).any(axis=0).sum()) if len(used) else 0,
            num_padded=int((used == 0).sum()),
        )
    )


def _logical(counts_LP: FloatArray, slots_LP: IntArray) -> FloatArray:
    """Slots added up to the experts they hold."""
    num_experts = 1 + int(slots_LP.max())
    rows = [
        np.bincount(ids, weights=row, minlength=num_experts)
        for ids, row in zip(slots_LP, counts_LP, strict=True)
    ]
    return np.stack(rows)
