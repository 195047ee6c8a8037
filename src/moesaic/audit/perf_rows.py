"""Rows of measured serving times from a CSV file: which are usable, and why the others are not.

Cleaning looks at what was run, never at how long it took.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from moesaic.account.memory import SCALE_BLOCK
from moesaic.errors import ConfigError
from moesaic.spec.families import read_config
from moesaic.spec.hardware import MACHINES, Machine, machine
from moesaic.spec.locate import preset, preset_names
from moesaic.spec.model import GqaSpec, MlaSpec, ModelSpec, MoeSpec

COLUMNS = (
    "id", "backend", "model_path", "system", "mode", "isl", "osl", "gemm_quant_mode", "moe_quant_mode",
    "batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size", "silicon_ttft_ms",
    "silicon_tpot_ms",
)  # fmt: skip
BACKENDS = ("sglang", "trtllm", "vllm")
MIN_EXPERT_SLICE = SCALE_BLOCK["fp8"]
"""Columns of an expert that a rank has at least."""
MAX_STRETCH = 10  # guess: times the model's positions up to which lengths are no slip
MAX_BATCH = 2**16  # guess: sequences of a replica, far above what engines schedule
_FORMATS: Mapping[str, str | None] = {
    "": None, "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "nvfp4", "int4_wo": "int4", "int8_wo": "int8",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "float16": "bfloat16", "w4a16_mxfp4": "mxfp4",
    "mxfp4": "mxfp4",
}  # fmt: skip
_SUFFIXES = re.compile(r"(-instruct|-fp8|-nvfp4|-fp4|-bf16|-int4|-awq|-w4a16|-hf)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class PerfRow:
    """One measured configuration.

    Units:  seconds; batch is sequences per attention replica.
    """

    row_id: str
    model: str  # preset
    machine: str
    backend: str
    prompt: int
    output: int
    batch: int
    tp: int
    dp: int
    ep: int
    expert_tp: int
    dense_format: str | None  # None: as the checkpoint stores it
    expert_format: str | None
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PerfTable:
    """Usable rows, and how many others there were by reason."""

    rows: tuple[PerfRow, ...]
    decoders: tuple[PerfRow, ...]  # pools that only decode, beside others that prefill
    num_aggregated: int  # rows of one engine for both phases, usable or not
    dropped: Mapping[str, int]


def read_perf_rows(path: Path) -> PerfTable:
    """The rows of a CSV file, plain or gzip.

    Raises: ConfigError when the file is unreadable, lacks a column, or has no usable row.
    """
    lines = read_csv(path, COLUMNS)
    dropped: Counter[str] = Counter()
    rows: list[PerfRow] = []
    decoders: list[PerfRow] = []
    num_aggregated = 0
    for line in lines:
        is_aggregated = line["mode"] in ("agg", "")
        num_aggregated += is_aggregated
        found = _read_row(line if is_aggregated else _decoder(line))
        if isinstance(found, str):
            dropped[found if is_aggregated else f"disaggregated: {found}"] += 1
        elif is_aggregated:
            rows.append(found)
        elif spec_of(found.model).moe_layers:
            decoders.append(found)
        else:
            dropped["disaggregated: dense model"] += 1
    if not rows:
        reasons = (
            "; ".join(f"{reason}: {count}" for reason, count in dropped.most_common()) or "it has no rows"
        )
        raise ConfigError(f"{path}: no usable row ({reasons})")
    return PerfTable(
        rows=tuple(rows), decoders=tuple(decoders), num_aggregated=num_aggregated,
        dropped=dict(dropped.most_common()),
    )  # fmt: skip


def _decoder(line: Mapping[str, str]) -> dict[str, str]:
    """A row of separate pools as one of the pool that decodes; empty where the row does not say."""
    names = ("batch_size", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    return {**line, **{name: line.get(f"decode_{name}", "") for name in names}}


def read_csv(path: Path, columns: Iterable[str]) -> list[dict[str, str]]:
    """The rows of a CSV file as texts by column, plain or gzip.

    Raises: ConfigError naming the file and the columns that it lacks.
    """
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig")))
        lines = [{key: value or "" for key, value in line.items() if key} for line in reader]
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path}: not a readable CSV file: {error}") from error
    missing = [name for name in columns if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{path}: lacks the columns {', '.join(missing)}")
    return lines


@cache
def spec_of(name: str) -> ModelSpec:
    """The model of a preset."""
    return read_config(preset(name).config, name=f"preset {name}")


@cache
def preset_of(model_path: str) -> str | None:
    """The preset behind a model's id, formats and tuning in its name aside; None when there is none."""
    names = preset_names()
    short = model_path.strip().lower().rsplit("/", 1)[-1]
    while True:
        if short in names:
            return names[short]
        shorter = _SUFFIXES.sub("", short)
        if shorter == short:
            return None
        short = shorter


def machine_of(system: str) -> str | None:
    """The machine behind a system's id: `h200_sxm` is h200."""
    name = re.sub(r"_(sxm|pcie|nvl\d*)$", "", system.strip().lower()).replace("_", "-")
    return name if name in MACHINES else None


def _read_row(line: Mapping[str, str]) -> PerfRow | str:
    """The row, or why it cannot be used."""
    model, system = preset_of(line["model_path"]), machine_of(line["system"])
    if model is None:
        return "model without a preset"
    if system is None:
        return "machine without a file"
    if line["backend"] not in BACKENDS:
        return "unknown backend"
    formats = [line["gemm_quant_mode"], line["moe_quant_mode"]]
    if any(one not in _FORMATS for one in formats):
        return "unknown weight format"
    counts = {name: _count(line[name]) for name in ("isl", "osl", "batch_size", "tp_size")}
    if None in counts.values():
        return "lengths, batch or tensor parallelism missing"
    optional = {
        name: _count(line[name] or "1")
        for name in ("pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
    }
    if (counts["isl"] or 0) + (counts["osl"] or 0) > MAX_STRETCH * spec_of(model).max_position:
        return f"lengths over {MAX_STRETCH} times the model's positions"
    if (counts["batch_size"] or 0) > MAX_BATCH:
        return f"batch over {MAX_BATCH} sequences a replica"
    times = [_seconds(line[name]) for name in ("silicon_ttft_ms", "silicon_tpot_ms")]
    if None in times:
        return "no measured time"
    found = _topology(line, counts, optional, spec_of(model), machine(system))
    if isinstance(found, str):
        return found
    tp, dp, ep, expert_tp = found
    return PerfRow(
        row_id=line["id"], model=model, machine=system, backend=line["backend"], prompt=counts["isl"] or 0,
        output=counts["osl"] or 0, batch=counts["batch_size"] or 0, tp=tp, dp=dp, ep=ep, expert_tp=expert_tp,
        dense_format=_FORMATS[formats[0]], expert_format=_FORMATS[formats[1]], ttft_s=times[0] or 0.0,
        tpot_s=times[1] or 0.0,
    )  # fmt: skip


def _topology(
    line: Mapping[str, str], counts: Mapping[str, int | None], optional: Mapping[str, int | None],
    model: ModelSpec, device: Machine,
) -> tuple[int, int, int, int] | str:  # fmt: skip
    """(tp, dp, ep, expert_tp), or what is impossible about it."""
    tp, dp = counts["tp_size"] or 1, optional["attention_dp_size"] or 1
    ep, expert_tp = optional["moe_ep_size"] or 1, optional["moe_tp_size"] or 1
    if (optional["pp_size"] or 1) > 1:
        return "pipeline parallelism"
    if not model.moe_layers:
        ep, expert_tp = 1, tp * dp
    elif not line["attention_dp_size"] and (ep * expert_tp) % tp == 0:
        dp = ep * expert_tp // tp  # left out: what the experts' ranks imply
    if tp * dp != ep * expert_tp:
        return "attention and experts have different numbers of ranks"
    domain = max(device.num_devices_per_node, int(device.number("num_devices_per_link_domain", 1)))
    if tp * dp > domain:
        return "more devices than one node or rack has"
    heads = [layer.mixer.num_heads for layer in model.layers if isinstance(layer.mixer, GqaSpec | MlaSpec)]
    if any(count % tp for count in heads):
        return "heads not divisible by tensor parallelism"
    sparse = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoeSpec)]
    if any(moe.num_experts % ep for moe in sparse):
        return "experts not divisible by expert parallelism"
    if any(moe.expert_width / expert_tp < MIN_EXPERT_SLICE for moe in sparse):
        return "experts sliced thinner than a block of their scales"
    return tp, dp, ep, expert_tp


def _count(text: str) -> int | None:
    """A whole number of at least 1; 0 counts as left out."""
    try:
        value = float(text)
    except ValueError:
        return None
    if value == 0:
        return 1
    return int(value) if value >= 1 and value.is_integer() else None


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value / 1e3 if 0 < value < float("inf") else None
