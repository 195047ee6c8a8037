"""Placements as files of other engines and ours, both ways. What a target cannot carry is refused by name.

sglang   `--init-expert-location`: {"physical_to_logical_map": [layer][slot]}, dense layers too
trtllm   the load balancer's YAML: num_slots, layer_updates_per_iter, initial_global_assignments
kt       hottest experts by layer (.json), or the counts as a recorder's `stat` file (.pt), which its strategy
         `frequency` reads
moesaic  our `ExpertPlan`
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import numpy as np

from moesaic.errors import ConfigError, nearest
from moesaic.interop.dump import MAX_JSON_BYTES, read_json
from moesaic.interop.torch_file import torch_bytes
from moesaic.placement.plan import placement_of
from moesaic.placement.shares import even_shares
from moesaic.placement.slots import Placement
from moesaic.spec.codec import from_plain, to_plain
from moesaic.spec.deployment import check_plan, from_json
from moesaic.spec.experts import ExpertPlan, FloatArray, IntArray
from moesaic.units import format_bytes

Target = Literal["moesaic", "sglang", "trtllm", "kt"]
MAX_BLANK = 4096  # characters in which a file has to begin
TARGETS: tuple[Target, ...] = get_args(Target)
ENDINGS: Mapping[Target, tuple[str, ...]] = MappingProxyType(
    {"moesaic": (".json",), "sglang": (".json",), "trtllm": (".yaml", ".yml"), "kt": (".json", ".pt")}
)


def parse_target(name: str) -> Target:
    """The target of that name.

    Raises: ConfigError with the nearest.
    """
    for target in TARGETS:
        if name == target:
            return target
    if name == "vllm":
        raise ConfigError(
            "vLLM reads no placement file: it places at run time, with --enable-eplb and --eplb-config"
        )
    raise ConfigError(f"unknown target {name!r}; {nearest(name, TARGETS)}")


def check_ending(target: Target, path: Path) -> None:
    """Nothing, if the ending of a file says what would be written.

    Raises: ConfigError naming the endings of the target.
    """
    if path.suffix.lower() not in ENDINGS[target]:
        raise ConfigError(
            f"{path}: a placement for {target} ends in {' or '.join(ENDINGS[target])}, this name in "
            f"{path.suffix or 'nothing'!r}"
        )


def placement_bytes(
    target: Target,
    plan: ExpertPlan,
    load_LE: FloatArray,
    layer_idxs: Sequence[int],
    num_layers: int,
    suffix: str,
) -> bytes:
    """The file of a plan for a target.

    Shapes:  load_LE [L, E] is the load planned for, layer_idxs [L] the model's indices of its sparse layers.
    Raises:  ConfigError for what the target cannot carry.
    """
    if target == "moesaic":
        return (json.dumps(to_plain(plan)) + "\n").encode()
    ids_LP = _whole_even(target, plan)
    if target == "kt":
        return _kt(load_LE, layer_idxs, num_layers, suffix.lower())
    if target == "sglang":
        rows = np.tile(np.arange(ids_LP.shape[1]) % load_LE.shape[1], (num_layers, 1))
        rows[list(layer_idxs)] = ids_LP
        return (json.dumps({"physical_to_logical_map": rows.tolist()}) + "\n").encode()
    lines = [f"num_slots: {ids_LP.shape[1]}", "layer_updates_per_iter: 0", "initial_global_assignments:"]
    lines += [f"  {idx}: {row.tolist()}" for idx, row in zip(layer_idxs, ids_LP, strict=True)]
    return ("\n".join(lines) + "\n").encode()


def _whole_even(target: str, plan: ExpertPlan) -> IntArray:
    """Experts by slot, if the plan says nothing else."""
    placement = placement_of(plan)
    if placement.num_slices > 1:
        raise ConfigError(
            f"{target} places whole experts: it cannot carry slices of them; write another policy's plan"
        )
    num_experts = 1 + int(placement.ids_LGC.max())
    even = even_shares(placement, num_experts).reshape(len(placement.ids_LGC), -1)
    if not np.allclose(even, np.stack(plan.slot_share)):
        raise ConfigError(
            f"{target} splits an expert's tokens evenly over its copies: it cannot carry replica shares; "
            "give --shares even"
        )
    flat: IntArray = placement.ids_LGC.reshape(len(placement.ids_LGC), -1)
    return flat


def _kt(load_LE: FloatArray, layer_idxs: Sequence[int], num_layers: int, suffix: str) -> bytes:
    if suffix == ".pt":
        counts = np.zeros((1, num_layers, load_LE.shape[1]))
        counts[0, list(layer_idxs)] = load_LE
        counts *= min(1.0, (2**31 - 1) / max(counts.max(), 1.0))
        return torch_bytes({"rank": 0, "logical_count": np.rint(counts).astype(np.int32)})
    order = np.argsort(-load_LE, axis=1, kind="stable")
    hot = {str(idx): row.tolist() for idx, row in zip(layer_idxs, order, strict=True)}
    return (json.dumps({"hottest_first": hot}) + "\n").encode()


def read_placement(
    path: Path, num_gpus: int | None, layer_idxs: Sequence[int]
) -> tuple[Placement, FloatArray]:
    """The placement in a file, and the shares of its copies; only the sparse layers asked for.

    An ExpertPlan or a deployment of ours, SGLang's map or TensorRT-LLM's YAML; the latter two do not name
    GPUs, so `num_gpus` says among how many the slots are shared.

    Raises: ConfigError naming the file and what is wrong with it.
    """
    if _starts_with(path) not in ("{", "["):
        return _from_map(path, _read_yaml(path, layer_idxs), num_gpus)
    data = read_json(path)
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a placement is a JSON object, got a {type(data).__name__}")
    if "physical_to_logical_map" in data:
        rows = _rows(path, data["physical_to_logical_map"])
        if layer_idxs and max(layer_idxs) < len(rows) and len(rows) != len(layer_idxs):
            rows = rows[list(layer_idxs)]
        return _from_map(path, rows, num_gpus)
    if "instances" in data:
        plan = from_json(json.dumps(data), name=str(path)).instances[0].plan
    elif "slot_expert" in data:
        plan = from_plain(ExpertPlan, data, where=str(path))
        check_plan(plan, num_ranks=max(plan.num_ranks, 1))
    else:
        keys = ", ".join(sorted(data)[:5]) or "none"
        hint = "; it is a load" if {"logical_count", "counts"} & set(data) else ""
        raise ConfigError(
            f"{path}: no placement: it needs slot_expert, physical_to_logical_map or instances, and its "
            "keys are "
            f"{keys}{hint}"
        )
    placement = placement_of(plan)
    shares = np.stack(
        [
            share[np.argsort(r, kind="stable")]
            for share, r in zip(plan.slot_share, plan.slot_rank, strict=True)
        ]
    )
    return placement, shares.reshape(placement.ids_LGC.shape)


def _starts_with(path: Path) -> str:
    """The first character that is no space, which tells JSON from YAML whatever the file is called."""
    try:
        with open(path, encoding="utf-8-sig") as stream:
            return stream.read(MAX_BLANK).lstrip()[:1]
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no placement: neither JSON nor YAML, but other data") from error


def _from_map(path: Path, rows_LP: IntArray, num_gpus: int | None) -> tuple[Placement, FloatArray]:
    if num_gpus is None:
        raise ConfigError(f"{path}: a map of slots does not say on how many GPUs they are; give --gpus")
    layers, num_slots = rows_LP.shape
    if num_slots % num_gpus:
        raise ConfigError(
            f"{path}: {num_slots} slots on {num_gpus} GPUs: {num_slots} mod {num_gpus} = "
            f"{num_slots % num_gpus}"
        )
    placement = Placement(ids_LGC=rows_LP.reshape(layers, num_gpus, -1))
    return placement, even_shares(placement, 1 + int(rows_LP.max()))


def _rows(path: Path, rows: Any) -> IntArray:
    try:
        array = np.asarray(rows)
    except ValueError:
        array = np.empty(0)
    if array.ndim != 2 or array.dtype.kind not in "iu" or 0 in array.shape or array.min() < 0:
        raise ConfigError(
            f"{path}: a map of slots must be lists of expert ids, all equally long, one a layer"
        )
    if array.max() >= array.shape[1]:
        raise ConfigError(f"{path}: a map of {array.shape[1]} slots names expert {array.max()}")
    return array.astype(np.int64)


def _read_yaml(path: Path, layer_idxs: Sequence[int]) -> IntArray:
    """The assignments of a load balancer's YAML, lists in brackets or one entry a line."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ConfigError(f"{path}: {format_bytes(size)}; up to {format_bytes(MAX_JSON_BYTES)} are read")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    _, found, body = text.partition("initial_global_assignments:")
    layers: dict[int, list[int]] = {}
    for match in re.finditer(
        r"^\s+(\d+):((?:\s*\[[\d,\s]*\])|(?:\s*\n(?:\s*-\s*\d+\s*(?:\n|$))+))", body, re.MULTILINE
    ):
        layers[int(match[1])] = [int(number) for number in re.findall(r"\d+", match[2])]
    if not found or not layers:
        raise ConfigError(
            f"{path}: no placement: neither JSON nor a YAML with initial_global_assignments, lists "
            "of experts by layer"
        )
    wanted = list(layer_idxs) or sorted(layers)
    missing = [idx for idx in wanted if idx not in layers]
    if missing:
        raise ConfigError(f"{path}: no assignment for layer {missing[0]}; the load counts in it")
    return _rows(path, [layers[idx] for idx in wanted])
