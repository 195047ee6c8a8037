"""WHAT is computed: everything that decides the bits of a logit, and nothing that does not.

`Numerics` says what, `Layout` where, `StepPlan` when; changing where or when never changes a bit. The digest
of this value is part of every KV key, of `/v1/internal/active` and of every benchmark result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, get_args

from moesaic.errors import ConfigError, nearest
from moesaic.hashing import digest
from moesaic.spec.quantised import ACTIVATION_FORMAT, QUANTISED

DType = Literal["float32", "bfloat16"]
Format = Literal[
    "float32",
    "bfloat16",
    "int8",
    "int8-g32",
    "int4-g32",
    "int4-g64",
    "int4-g128",
    "int4-g32-zp",
    "int4-g64-zp",
    "int4-g128-zp",
]
KvFormat = Literal["float32", "bfloat16", "int8", "fp8"]
WireFormat = Literal["float32", "bfloat16", "fp8"]
Preset = Literal["portable", "fast"]

DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"float32": 4, "bfloat16": 2})
FORMATS: tuple[Format, ...] = get_args(Format)
KV_FORMATS: tuple[KvFormat, ...] = get_args(KvFormat)
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
KV_SCALE_BYTES = 4
"""Of each token and head in a KV pool of integers or fp8: a float32."""
WIRE_GROUP = 128
"""Numbers of a row under one scale, a float32, where rows travel in fp8.
Source: DeepSeek-V3 report, arXiv 2412.19437, 3.3.2: activations are scaled by tiles of 1 x 128."""
PRESETS: tuple[Preset, ...] = ("portable", "fast")
AUTO_BACKEND = "auto"
"""The backend of numerics in a file that leaves it to the machine that runs them; nothing computes by it."""


def kv_row_bytes(format: KvFormat, width: int) -> int:
    """Bytes of `width` numbers of one token and head in a KV pool."""
    return width * DTYPE_BYTES[format] if format in DTYPE_BYTES else width + KV_SCALE_BYTES


def wire_row_bytes(format: WireFormat, width: int) -> int:
    """Bytes of a row of `width` numbers on its way to an expert."""
    if format in DTYPE_BYTES:
        return width * DTYPE_BYTES[format]
    return width + 4 * -(-width // WIRE_GROUP)


def is_kv_lossy(format: KvFormat, dtype: str) -> bool:
    """Whether a pool of `format` rounds keys and values of `dtype`."""
    return DTYPE_BYTES.get(format, 0) < DTYPE_BYTES[dtype]


def tail_bytes(format: KvFormat) -> int:
    """Of a number in a convolution's tail beside such a pool: beside one of bytes it is a float32."""
    return DTYPE_BYTES.get(format, DTYPE_BYTES["float32"])


class Effect(StrEnum):
    """What a choice does to the answer. All but `EXACT` are named wherever the choice is shown."""

    EXACT = "exact"
    """The same bits."""
    REASSOCIATED = "reassociated"
    """The same terms summed in another order; a tolerance is stated."""
    LOSSY = "lossy"
    """Another function, the same in every layout."""
    BATCH_DEPENDENT = "batch_dependent"
    """A token may depend on its neighbours or on history."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FormMap:
    """Which of two algebraically equal forms a layer uses; one for every position, never one per phase."""

    mla: Literal["absorbed", "plain"] = "absorbed"
    state: Literal["recurrent", "chunked"] = "recurrent"


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatPair:
    """How a weight is stored and how the activation that meets it is rounded."""

    weight: Format
    activation: Format

    @classmethod
    def of(cls, weight: Format) -> FormatPair:
        """The pair that kernels multiply: integer weights meet rows of int8, others their own kind."""
        return cls(weight=weight, activation=ACTIVATION_FORMAT if weight in QUANTISED else weight)


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatMap:
    """Formats by role, and by (layer, logical expert) where one differs; never by slot, tier or heat."""

    default: FormatPair
    by_expert: Mapping[tuple[int, int], FormatPair] = field(default_factory=dict)

    def of_expert(self, layer_idx: int, logical_id: int) -> FormatPair:
        """The pair of one logical expert."""
        return self.by_expert.get((layer_idx, logical_id), self.default)


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """What is computed. Two runs with equal numerics, checkpoint, request and seed give equal bits."""

    backend: str  # "reference": torch ops on the CPU; "native/avx2": one level, pinned over all ranks
    seam_dtype: DType  # a value that crosses a layer seam is rounded to it, wire or no wire
    partial_dtype: DType  # inner nodes of every reduction tree
    matmul_shards: int  # leaves of a row-parallel matmul; a power of two
    kv_lanes: int  # leaves of attention: lane of a KV block = block_idx % kv_lanes; a power of two
    kv_block: int  # tokens per KV block: the leaf that a lane folds
    forms: FormMap
    combine: Literal["tree", "per_rank"]  # "per_rank": one partial sum per rank, declared reassociated
    formats: FormatMap
    wire_format: WireFormat  # of rows sent to experts; Local rounds through it too
    kv_format: KvFormat  # int8 and fp8 have one scale for each token and head

    def __post_init__(self) -> None:
        for name in ("matmul_shards", "kv_lanes", "kv_block"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ConfigError(f"numerics.{name} must be a power of two, got {value}")
        for name, known in (("wire_format", WIRE_FORMATS), ("kv_format", KV_FORMATS)):
            value = getattr(self, name)
            if value not in known:
                raise ConfigError(f"numerics.{name} {value!r} is not built; {nearest(value, known)}")

    def digest(self) -> str:
        """Identity of this value."""
        return digest(self)

    def effects(self) -> tuple[tuple[str, Effect], ...]:
        """What of this value is not exact, as (name, effect)."""
        found: list[tuple[str, Effect]] = []
        if self.combine == "per_rank":
            found.append(("combine=per_rank", Effect.REASSOCIATED))
        weights = {pair.weight for pair in (self.formats.default, *self.formats.by_expert.values())}
        found += [(f"weights={weight}", Effect.LOSSY) for weight in sorted(weights & set(QUANTISED))]
        if is_kv_lossy(self.kv_format, self.seam_dtype):
            found.append((f"kv={self.kv_format}", Effect.LOSSY))
        if DTYPE_BYTES.get(self.wire_format, 1) < DTYPE_BYTES[self.seam_dtype]:
            found.append((f"wire={self.wire_format}", Effect.LOSSY))
        return tuple(found)

    def with_leaves(self, *, matmul_shards: int | None = None, kv_lanes: int | None = None) -> Numerics:
        """The same numerics with more leaves, as a layout that splits a sum further needs."""
        return replace(
            self, matmul_shards=matmul_shards or self.matmul_shards, kv_lanes=kv_lanes or self.kv_lanes
        )


def preset(
    name: str,
    *,
    dtype: DType,
    backend: str = "reference",
    format: Format | None = None,
    kv_format: KvFormat | None = None,
    wire_format: WireFormat | None = None,
    matmul_shards: int | None = None,
) -> Numerics:
    """The numerics of a preset for a model whose own dtype is `dtype`, its weights kept in `format`.

    `kv_format` is of keys and values, `wire_format` of rows on their way to experts; None: `dtype`.

    `portable` keeps prefix reuse and preemption by recompute exact. `fast` gives a layout no leaves to split.
    Every leaf of a row-parallel matmul is one more sum, so presets have one; `matmul_shards` asks for as many
    as a layout with tensor parallelism needs.

    Raises: ConfigError for an unknown name, and for a float format that is not `dtype`.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown numerics preset {name!r}; {nearest(name, PRESETS)}")
    if format is not None and format != dtype and format not in QUANTISED:
        raise ConfigError(
            f"weights in {format} cannot be kept by a model of dtype {dtype}: {nearest(format, QUANTISED)}, "
            f"or set the dtype to {format}"
        )
    return Numerics(
        backend=backend,
        seam_dtype=dtype,
        partial_dtype="float32",
        matmul_shards=matmul_shards or 1,
        kv_lanes=4 if name == "portable" else 1,
        kv_block=16,
        forms=FormMap(),
        combine="tree",
        formats=FormatMap(default=FormatPair.of(format or dtype)),
        wire_format=wire_format or dtype,
        kv_format=kv_format or dtype,
    )
