"""What a model is, in numbers: layers, experts, bytes, needs, and whether this engine runs it. No torch."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moesaic.account.flops import token_flops
from moesaic.account.memory import (
    devices_for_weights,
    expert_bytes,
    kv_footprint,
    rounded_bytes,
    weight_bytes,
)
from moesaic.account.params import count_params, mtp_params
from moesaic.account.traffic import BalancePoint, StepTraffic, balance_point, sparsity, step_traffic
from moesaic.errors import CheckpointError, UnsupportedModelError
from moesaic.interop.gguf import Gguf, is_gguf, read_gguf
from moesaic.interop.gguf_config import component_bytes, read_spec, type_bytes
from moesaic.models.accounting import account
from moesaic.models.families import FAMILIES
from moesaic.models.headers import Headers
from moesaic.spec.families import read_config
from moesaic.spec.folder import INDEX_FILE, missing_files, pickle_names
from moesaic.spec.hardware import Machine, machine
from moesaic.spec.locate import Located, locate
from moesaic.spec.model import ModelSpec
from moesaic.spec.quantised import QUANTISED
from moesaic.spec.safetensors import StoredTensor, read_header

CONTEXT_LEN = 1024
"""Tokens of context that the per-token operations and a step's KV are shown for."""
STATE_NOTE = "no prefix is reused between requests: a running state cannot be cut at a block"

_FLOATS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_EXPERT_NAME = re.compile(r"(^|\.)experts(\.|_|$)|(^|\.)block_sparse_moe\.|_experts?\.\d+\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineView:
    """The model on one kind of machine."""

    machine: str
    memory_bytes: int
    devices_for_weights: int  # as stored, without KV, 0.9 of each device's memory used
    balance: BalancePoint | None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointView:
    """The weight files of a folder."""

    num_files: int
    file_bytes: int
    num_tensors: int
    num_items: int  # numbers over all tensors; packed formats hold several weights in one
    missing_files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """Everything `moesaic inspect` says. Scalars over layers are the maximum; lists stand beside them.

    `runnable` is of the config and, in a folder, of the names, shapes and dtypes of the weights beside it.
    """

    name: str
    kind: Literal["folder", "config_file", "preset", "gguf"]
    model_type: str
    family: str
    reader: Literal["exact", "generic"]
    runnable: bool
    reasons: tuple[str, ...]
    total_params: int
    active_params: int
    params_by_component: Mapping[str, int]
    mtp_params: int
    other_parts: tuple[str, ...]
    hidden: int
    vocab: int
    max_position: int
    num_layers: int
    num_moe_layers: int
    moe_layers: tuple[int, ...]
    num_experts: int
    num_experts_per_layer: tuple[int, ...]
    experts_per_token: int
    experts_per_token_per_layer: tuple[int, ...]
    sparsity: float  # E / k
    dtype: str
    weight_format: str
    weight_bytes: int
    weight_bytes_by_component: Mapping[str, int]
    rounded_bytes: Mapping[str, int]  # of the weights, by --format, if this engine runs the model; lossy
    expert_bytes: int
    expert_bytes_per_layer: tuple[int, ...]
    kv_bytes_per_token: int  # while a token is inside every window
    kv_bytes_per_token_unbounded: int  # of layers that keep every token
    kv_windows: tuple[tuple[int, int], ...]  # (tokens, bytes per token)
    state_bytes_per_sequence: int
    flops_per_token: int
    context_len: int
    machines: tuple[MachineView, ...]
    step: StepTraffic | None
    checkpoint: CheckpointView | None
    bytes_by_tensor_type: Mapping[str, int]  # of a GGUF file; empty for all else
    notes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        return dataclasses.asdict(self)


def inspect(
    name_or_path: str,
    *,
    hub: Path | None = None,
    batch: int | None = None,
    machines: Sequence[str] = ("h100",),
) -> Inspection:
    """Look at a folder, a config file, a GGUF file, a repository in the Hugging Face cache, or a preset.

    Raises: ConfigError for a name, a config or a machine that is wrong; CheckpointError for damaged weight
    files, and
            for experts in the weights of a model whose config is dense.
    """
    views = [machine(name) for name in machines]
    path = Path(name_or_path).expanduser() if name_or_path else Path()
    if is_gguf(path):
        return _inspect_gguf(read_gguf(path), batch, views)
    located = locate(name_or_path, hub=hub)
    spec = read_config(located.config, name=_file_name(located))
    checkpoint, notes = _look_at_files(located, spec)
    fault = _weights_fault(located, spec)
    if fault is not None:
        spec = dataclasses.replace(spec, runnable_reasons=(fault,))
    if spec.is_runnable and kv_footprint(spec).state_bytes:
        notes = (*notes, STATE_NOTE)
    return _collect(located.name, located.kind, spec, batch, views, checkpoint, notes)


def _inspect_gguf(file: Gguf, batch: int | None, views: Sequence[Machine]) -> Inspection:
    """Counts from the metadata, bytes from the tensors themselves."""
    spec = read_spec(file)
    view = CheckpointView(
        num_files=len(file.files),
        file_bytes=file.file_bytes,
        num_tensors=len(file.tensors),
        num_items=sum(tensor.num_items for tensor in file.tensors),
        missing_files=file.missing,
    )
    notes = [f"{len(file.missing)} parts are missing: {', '.join(file.missing[:3])}"] if file.missing else []
    notes += file.cut
    expected = count_params(spec).num_total
    if not file.missing and view.num_items < expected:
        notes.append(f"the tensors hold {view.num_items} numbers, the metadata describes {expected}")
    found = _collect(str(file.path), "gguf", spec, batch, views, view, tuple(notes))
    sizes = component_bytes(file.tensors)
    return dataclasses.replace(
        found,
        weight_bytes=sum(sizes.values()),
        weight_bytes_by_component={str(name): size for name, size in sizes.items()},
        bytes_by_tensor_type=dict(type_bytes(file.tensors)),
        rounded_bytes={},
    )


def _collect(
    name: str,
    kind: Literal["folder", "config_file", "preset", "gguf"],
    spec: ModelSpec,
    batch: int | None,
    views: Sequence[Machine],
    checkpoint: CheckpointView | None,
    notes: tuple[str, ...],
) -> Inspection:
    params, sizes, kv = count_params(spec), weight_bytes(spec), kv_footprint(spec)
    moes = [moe for _, moe in spec.moe_layers]
    blobs = tuple(expert_bytes(spec, moe) for moe in moes)
    total = sum(sizes.values())
    return Inspection(
        name=name,
        kind=kind,
        model_type=spec.model_type,
        family=spec.family,
        reader=spec.reader,
        runnable=spec.is_runnable,
        reasons=spec.runnable_reasons,
        total_params=params.num_total,
        active_params=params.num_active,
        params_by_component={str(name): count for name, count in params.total.items()},
        mtp_params=mtp_params(spec),
        other_parts=tuple(name for name, _ in spec.other_params),
        hidden=spec.hidden,
        vocab=spec.vocab,
        max_position=spec.max_position,
        num_layers=len(spec.layers),
        num_moe_layers=len(moes),
        moe_layers=tuple(layer_idx for layer_idx, _ in spec.moe_layers),
        num_experts=max((moe.num_experts for moe in moes), default=0),
        num_experts_per_layer=tuple(moe.num_experts for moe in moes),
        experts_per_token=max((moe.experts_per_token for moe in moes), default=0),
        experts_per_token_per_layer=tuple(moe.experts_per_token for moe in moes),
        sparsity=max((sparsity(moe) for moe in moes), default=0.0),
        dtype=spec.dtype,
        weight_format=spec.weight_format,
        weight_bytes=total,
        weight_bytes_by_component={str(name): size for name, size in sizes.items()},
        rounded_bytes={one: rounded_bytes(spec, one) for one in QUANTISED} if spec.is_runnable else {},
        expert_bytes=max(blobs, default=0),
        expert_bytes_per_layer=blobs,
        kv_bytes_per_token=kv.bytes_per_token_inside,
        kv_bytes_per_token_unbounded=kv.bytes_per_token,
        kv_windows=kv.windows,
        state_bytes_per_sequence=kv.state_bytes,
        flops_per_token=token_flops(spec, CONTEXT_LEN).total,
        context_len=CONTEXT_LEN,
        machines=tuple(
            MachineView(
                machine=view.name,
                memory_bytes=view.memory_bytes,
                devices_for_weights=devices_for_weights(total, view.memory_bytes),
                balance=balance_point(spec, view),
            )
            for view in views
        ),
        step=None if batch is None else step_traffic(spec, batch, CONTEXT_LEN),
        checkpoint=checkpoint,
        bytes_by_tensor_type={},
        notes=notes,
    )


def _file_name(located: Located) -> str:
    """What error messages call the config."""
    if located.kind == "folder" and located.path is not None:
        return str(located.path / "config.json")
    return located.name if located.kind == "config_file" else f"preset {located.name}"


def _look_at_files(located: Located, spec: ModelSpec) -> tuple[CheckpointView | None, tuple[str, ...]]:
    if located.kind != "folder" or located.path is None:
        return None, ()
    paths = sorted(located.path.glob("*.safetensors"))
    missing = missing_files(located.path)
    notes = []
    if missing and not spec.is_runnable:  # else it is why the folder does not run
        notes.append(f"{INDEX_FILE} names {len(missing)} files that are not there: {', '.join(missing[:3])}")
    if not paths:
        return None, (*notes, "the folder holds no *.safetensors file")
    tensors = [tensor for path in paths for tensor in read_header(path)]
    experts = [tensor.name for tensor in tensors if _EXPERT_NAME.search(tensor.name)]
    if experts and not spec.moe_layers:
        raise CheckpointError(
            f"{located.path}: the weights hold {len(experts)} expert tensors ({experts[0]}, ...), but "
            "config.json "
            "describes a dense model; the config is not this checkpoint's, or it hides num_experts where "
            "this reader "
            f"does not look"
        )
    view = CheckpointView(
        num_files=len(paths),
        file_bytes=sum(path.stat().st_size for path in paths),
        num_tensors=len(tensors),
        num_items=sum(tensor.num_items for tensor in tensors),
        missing_files=missing,
    )
    if all(stored.format == "float16" for stored in spec.stored):
        notes += _dtype_notes(tensors, spec)
        if (
            not spec.is_runnable and not missing and not spec.other_params
        ):  # else each tensor is accounted for
            notes += _number_notes(view.num_items, spec)
    return view, tuple(notes)


def _dtype_notes(tensors: Sequence[StoredTensor], spec: ModelSpec) -> list[str]:
    """Where most bytes of the weights have another dtype than config.json says."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.dtype] += tensor.num_bytes
    most = max(sizes, key=sizes.__getitem__, default="")
    found, expected = _FLOATS.get(most, most), spec.stored_format("attention").format
    if not found or found == expected:
        return []
    return [
        f"most weights are stored as {found}; config.json implies {expected}, which the bytes above follow"
    ]


def _number_notes(num_items: int, spec: ModelSpec) -> list[str]:
    """Where the weights are more or fewer numbers than config.json describes."""
    least = count_params(spec).num_total
    most = least + mtp_params(spec) + (spec.vocab * spec.hidden if spec.has_tied_head else 0)
    if least <= num_items <= most:
        return []
    return [f"the weight files hold {num_items} numbers, the config describes {least}"]


def _weights_fault(located: Located, spec: ModelSpec) -> str | None:
    """Why this folder does not run though its config does; None too where there are no weights to look at."""
    folder = located.path
    if not spec.is_runnable or located.kind != "folder" or folder is None:
        return None
    if not any(folder.glob("*.safetensors")) and not pickle_names(folder) and not missing_files(folder):
        return None
    try:
        account(Headers.open(located.weights_folder()), spec, FAMILIES[spec.family])
    except (CheckpointError, UnsupportedModelError) as error:
        return str(error)
    return None


def dump_json(inspection: Inspection) -> str:
    """The inspection as indented JSON text."""
    return json.dumps(inspection.to_json(), indent=2, allow_nan=False)
