"""Expert counts as other engines and ours write them, read into one value with all that was done to them.

Layouts: SGLang's recorder (stat, per_pass, per_token), its logical_count JSON, TensorRT-LLM's statistics,
our own JSON, the JSON of our server, CSV, and routes in .npz. What a file holds decides, not what it is
called.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.errors import ConfigError
from moesaic.spec.experts import ExpertLoad, FloatArray, IntArray, Phase
from moesaic.spec.model import ModelSpec
from moesaic.units import format_bytes

MAX_COUNT = 2**53  # every whole number up to it is a float64
MAX_JSON_BYTES = 256 * 2**20  # guess: read whole, at about ten times its size in memory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dump:
    """The counts of one file, folder or address.

    Shapes:  counts_LE [layers of the file, E] float64, dense layers all 0; routes_LTK [layers, T, K], logical
             ids, -1 for none.
    """

    source: str
    layout: str  # "SGLang stat", ...
    counts_LE: FloatArray
    num_steps: int  # that counted something
    num_zero_steps: int = 0  # dropped
    layer_idxs: tuple[int, ...] | None = None  # of the rows, where the file names them
    ranks: tuple[int, ...] = ()  # that wrote a part
    short_ranks: tuple[int, ...] = ()  # that lack counts which another one wrote
    num_padded: int = 0  # entries that are no choice
    top_k: int | None = None
    columns: int | None = None  # of routes: choices beyond are not in the file
    routes_LTK: IntArray | None = None
    phase: Phase = "decode"
    num_tokens: int = 0
    notes: tuple[str, ...] = ()

    @property
    def sparse_rows(self) -> tuple[int, ...]:
        """Rows that count something; the others are dense layers."""
        return tuple(np.flatnonzero(self.counts_LE.sum(axis=1) > 0).tolist())

    @property
    def sparse_layers(self) -> tuple[int, ...]:
        """Layer indices of the model of the sparse rows, as far as the file says."""
        names = self.layer_idxs or range(len(self.counts_LE))
        return tuple(names[row] for row in self.sparse_rows)

    @property
    def num_experts(self) -> int:
        """Logical experts."""
        return int(self.counts_LE.shape[1])

    def load(self) -> ExpertLoad:
        """The record that placement reads: sparse layers only.

        Raises: ConfigError when no layer counted anything.
        """
        rows = self.sparse_rows
        if not rows:
            raise ConfigError(
                f"{self.source}: all {self.counts_LE.size} counts are 0; record while requests are served"
            )
        counts = tuple(_whole(self.counts_LE[row]) for row in rows)
        return ExpertLoad(
            counts=counts, phase=self.phase, num_tokens=self.num_tokens, num_steps=self.num_steps,
            since_s=0.0, until_s=0.0, plan_version=0, source=self.source,
        )  # fmt: skip


def _whole(counts: FloatArray) -> IntArray:
    """Counts as integers where they are; a mean over steps stays as it is."""
    rounded = np.rint(counts)
    return rounded.astype(np.int64) if np.array_equal(rounded, counts) else counts  # type: ignore[return-value]


def checked(dump: Dump) -> Dump:
    """The dump, if its counts can be counts.

    Raises: ConfigError for a shape, and for a count below 0, above 2^53 or not finite, naming the layer, or
            the row of the file (from 0) where that names no layers.
    """
    counts = dump.counts_LE
    if counts.ndim != 2 or 0 in counts.shape:
        raise ConfigError(
            f"{dump.source}: counts must be [layers][experts], got the shape {list(counts.shape)}"
        )
    wrong = np.argwhere(~((counts >= 0) & (counts <= MAX_COUNT)))  # not a number is neither
    if len(wrong):
        row, expert = wrong[0].tolist()
        layer = f"layer {dump.layer_idxs[row]}" if dump.layer_idxs else f"row {row}"
        raise ConfigError(
            f"{dump.source}: expert {expert} of {layer} has the count {counts[row, expert]:g}; "
            "counts are from 0 to 2^53"
        )
    return dump


def match_model(dump: Dump, model: ModelSpec) -> Dump:
    """The dump with its rows named by the model's layers.

    Raises: ConfigError when experts or layers are not the model's.
    """
    moe_layers = dict(model.moe_layers)
    if not moe_layers:
        raise ConfigError(f"{dump.source}: expert counts, but the model has no experts")
    known = sorted({moe.num_experts for moe in moe_layers.values()})
    if dump.num_experts not in known:
        raise ConfigError(
            f"{dump.source}: {dump.num_experts} experts, the model has {' or '.join(map(str, known))}; "
            "give the load "
            "and the model that belong together"
        )
    if dump.layer_idxs is None:
        if len(dump.counts_LE) == len(model.layers):
            dump = replace(dump, layer_idxs=tuple(range(len(model.layers))))
        elif len(dump.counts_LE) == len(moe_layers):
            dump = replace(dump, layer_idxs=tuple(moe_layers))
        else:
            raise ConfigError(
                f"{dump.source}: {len(dump.counts_LE)} layers; the model has {len(model.layers)}, of which "
                f"{len(moe_layers)} have experts"
            )
    for layer in dump.sparse_layers:
        if layer not in moe_layers:
            raise ConfigError(f"{dump.source}: layer {layer} has counts, and in the model it has no experts")
        if moe_layers[layer].num_experts != dump.num_experts:
            raise ConfigError(
                f"{dump.source}: {dump.num_experts} experts, the model has "
                f"{moe_layers[layer].num_experts} in layer "
                f"{layer}; give the load and the model that belong together"
            )
    return dump


def sum_steps(source: str, layout: str, counts: Any, *, step_of: str = "step") -> Dump:
    """A dump of counts by layer, or by step and layer; steps that counted nothing are dropped and counted.

    Shapes:  counts [L, E] or [steps, L, E], numbers.
    Raises:  ConfigError for another shape, and for what `checked` refuses.
    """
    array = counts if isinstance(counts, np.ndarray) else _table(source, counts)
    if array.ndim not in (2, 3) or 0 in array.shape:
        raise ConfigError(
            f"{source}: counts must be [layers][experts] or [{step_of}s][layers][experts], got the shape "
            f"{list(array.shape)}"
        )
    if array.ndim == 2:
        return checked(Dump(source=source, layout=layout, counts_LE=array.astype(np.float64), num_steps=1))
    total = np.zeros(array.shape[1:])
    zero = 0
    for step in array:  # one at a time: the array may be a mapped file larger than memory
        values = np.asarray(step, dtype=np.float64)
        checked(Dump(source=source, layout=layout, counts_LE=values, num_steps=1))
        zero += not values.any()
        total += values
    return checked(Dump(
        source=source, layout=layout, counts_LE=total, num_steps=len(array) - zero, num_zero_steps=zero
    ))  # fmt: skip


def _table(source: str, counts: Any) -> FloatArray:
    """Nested lists of numbers as an array: text is no number here, even if it could be read as one."""
    try:
        found = np.asarray(counts)
        if found.dtype.kind in "iuf" or (found.dtype.kind == "O" and not _no_table(counts)):  # O: above 2^64
            return found.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        pass  # what is wrong is said below, by its place
    raise ConfigError(f"{source}: {_no_table(counts) or 'counts are from 0 to 2^53'}")


def _no_table(rows: Any, step: str = "") -> str:
    """What makes nested lists no table of numbers: the first row or entry (from 0) that is unlike."""
    if not isinstance(rows, list):
        return f"{step or 'counts '}must be a list of rows, got a {type(rows).__name__}"
    if not step and rows and isinstance(rows[0], list) and rows[0] and isinstance(rows[0][0], list):
        for idx, one in enumerate(rows):
            reason = _no_table(one, f"step {idx} ")
            if reason:
                return reason
            if len(one) != len(rows[0]):
                return f"step {idx} has {len(one)} rows, step 0 has {len(rows[0])}; they must be alike"
            if one and len(one[0]) != len(rows[0][0]):
                return f"step {idx} has {len(one[0])} experts, step 0 has {len(rows[0][0])}"
        return ""
    for idx, row in enumerate(rows):
        if not isinstance(row, list):
            return f"{step}row {idx} must be a list of counts, got a {type(row).__name__}"
        if len(row) != len(rows[0]):
            return f"{step}row {idx} has {len(row)} entries, row 0 has {len(rows[0])}; they must be alike"
        for expert, cell in enumerate(row):
            if isinstance(cell, bool) or not isinstance(cell, int | float):
                return f"{step}row {idx} must hold numbers, entry {expert} is {json.dumps(cell)[:40]}"
    return ""


def read_json(path: Path) -> Any:
    """The value of a JSON file.

    Raises: ConfigError when it cannot be read, is too large (before it is read), or is no JSON.
    """
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise ConfigError(
                f"{path}: {format_bytes(size)} of JSON; it is read whole, up to "
                f"{format_bytes(MAX_JSON_BYTES)}. Sum "
                "its steps first, or give the engine's .pt or a CSV, which are read piece by piece"
            )
        return parse_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def parse_json(text: bytes, name: str) -> Any:
    """The value of a JSON text.

    Raises: ConfigError when it is none.
    """
    try:
        return json.loads(text.decode("utf-8-sig"))
    except RecursionError as error:
        raise ConfigError(f"{name}: nested too deep to be a load") from error
    except ValueError as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from error


def merged(dumps: list[Dump], source: str) -> Dump:
    """The parts that several ranks or runs wrote, added up.

    Shapes:  all alike.
    Raises:  ConfigError when they differ in layout, layers or experts.
    """
    first = dumps[0]
    for other in dumps[1:]:
        if other.layout != first.layout or other.counts_LE.shape != first.counts_LE.shape:
            raise ConfigError(
                f"{source}: {Path(first.source).name} is {first.layout} {list(first.counts_LE.shape)}, "
                f"{Path(other.source).name} is {other.layout} {list(other.counts_LE.shape)}; files of one "
                "run are "
                "needed"
            )
    notes = list(dict.fromkeys(note for dump in dumps for note in dump.notes))
    if len(dumps) > 1 and first.ranks and all(_same_counts(first, other) for other in dumps[1:]):
        notes.append(f"all {len(dumps)} ranks recorded the same tokens (attention under TP): counted once")
        return replace(first, source=source, ranks=_ranks(dumps), notes=tuple(notes))
    total = np.sum([dump.counts_LE for dump in dumps], axis=0)
    routes = [dump.routes_LTK for dump in dumps if dump.routes_LTK is not None]
    width = max((part.shape[2] for part in routes), default=0)
    wide = [np.pad(part, ((0, 0), (0, 0), (0, width - part.shape[2])), constant_values=-1) for part in routes]
    return replace(
        first, source=source, counts_LE=total, ranks=_ranks(dumps), notes=tuple(notes),
        num_steps=max(dump.num_steps for dump in dumps) if first.ranks else sum(d.num_steps for d in dumps),
        num_zero_steps=sum(dump.num_zero_steps for dump in dumps),
        num_padded=sum(dump.num_padded for dump in dumps), num_tokens=sum(dump.num_tokens for dump in dumps),
        routes_LTK=np.concatenate(wide, axis=1) if wide else None,
    )  # fmt: skip


def _same_counts(first: Dump, other: Dump) -> bool:
    if first.routes_LTK is not None and other.routes_LTK is not None:
        return np.array_equal(first.routes_LTK, other.routes_LTK)
    return np.array_equal(first.counts_LE, other.counts_LE)


def _ranks(dumps: list[Dump]) -> tuple[int, ...]:
    return tuple(sorted({rank for dump in dumps for rank in dump.ranks}))
