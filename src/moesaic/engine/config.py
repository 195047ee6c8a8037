"""What the user wishes of an engine, and the complete settings that follow from model and machine.

`EngineConfig.resolve` decides everything once; nothing is written into a config later. The environment
variables of the whole project are read here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

from moesaic.engine.layout import LayoutWish, Started
from moesaic.engine.machine import Machine
from moesaic.errors import CapacityError, ConfigError, nearest
from moesaic.placement.choice import REPLICA_CHOICES, ReplicaChoice
from moesaic.sched.capacity import pool_sizes, useful_bytes
from moesaic.sched.ledger import CacheGroup, cache_groups
from moesaic.sched.scheduler import Limits
from moesaic.spec.hub import hub_cache
from moesaic.spec.layout_rules import TP_WIRES, TpWires
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import (
    AUTO_BACKEND,
    DTYPE_BYTES,
    FORMATS,
    KV_FORMATS,
    PRESETS,
    WIRE_FORMATS,
    DType,
    Format,
    KvFormat,
    Numerics,
    Preset,
    WireFormat,
)
from moesaic.spec.numerics import preset as numerics_of
from moesaic.units import format_bytes, parse_bytes

KV_FRACTION = 0.7  # guess: the rest is for activations, the page cache and other processes
Numa = Literal["spread", "off"]
_COUNTS = (
    "max_num_seqs",
    "max_model_len",
    "max_tokens_per_step",
    "max_waiting",
    "kv_bytes",
    "num_threads",
    "matmul_shards",
)


LauncherName = Literal["local", "torchrun", "ray"]
LAUNCHERS: tuple[LauncherName, ...] = get_args(LauncherName)
_KNOWN: Mapping[str, Collection[str]] = MappingProxyType(
    {
        "preset": PRESETS,
        "dtype": DTYPE_BYTES,
        "format": FORMATS,
        "kv_format": KV_FORMATS,
        "dispatch_format": WIRE_FORMATS,
        "replica_choice": REPLICA_CHOICES,
        "tp_wires": TP_WIRES,
        "launcher": LAUNCHERS,
        "numa": get_args(Numa),
    }
)
"""Values of the fields that are a name; their default is one, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The user's wishes. None means: derived, by the rule beside the field."""

    model: str  # folder of the checkpoint
    preset: Preset = "portable"
    dtype: DType | None = None  # None: the checkpoint's own
    format: Format | None = None  # weights are rounded to it while they load; None: the dtype
    kv_format: KvFormat | None = None  # of keys and values in the pool; None: the dtype
    dispatch_format: WireFormat | None = None  # of rows on their way to experts; None: the dtype
    matmul_shards: int | None = None  # leaves of a row-parallel matmul; None: the preset's
    max_num_seqs: int = 32  # requests computed in one step
    max_model_len: int | None = None  # prompt and output; None: the model's, or what the KV pool holds
    max_tokens_per_step: int = 512  # longer prompts are computed in chunks
    max_waiting: int = 1024
    kv_bytes: int | None = None  # None: all that is useful, at most KV_FRACTION of what is free after loading
    num_threads: int | None = None  # None: as many as this process may use
    backend: str | None = None  # of the kernels, as `kernels.ops.backends`; None: the fastest here
    has_prefix_cache: bool = True
    trace_routes: bool = False  # report which experts every token chose
    layout: LayoutWish = field(default_factory=LayoutWish)  # over how many processes, and how
    replica_choice: ReplicaChoice = "turns"  # which copy of an expert a row goes to; never what it comes to
    tp_wires: TpWires | None = None  # that a replica's ranks sum over; None: memory where they can share it
    launcher: LauncherName | None = (
        None  # of these processes; None: torchrun when it started this, else local
    )
    rank_address: str | None = None  # HOST:PORT where ranks come in; None: by the launcher
    share_weights: bool = False  # with other processes of this machine that load the same ones alike
    numa: Numa = "spread"  # over all nodes that this process may use; off: where the loading thread runs

    def __post_init__(self) -> None:
        for one in fields(self):
            known, value = _KNOWN.get(one.name), getattr(self, one.name)
            if known is not None and value not in (*known, one.default):
                raise ConfigError(f"{one.name} {value!r} is unknown; {nearest(value, known)}")
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.max_tokens_per_step < self.max_num_seqs:
            raise ConfigError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request takes a token of every step"
            )

    @classmethod
    def parse(cls, model: str, options: Mapping[str, Any]) -> EngineConfig:
        """From keyword options, as `LLM(path, **options)` takes them; those of `LayoutWish` by their names.

        Raises: ConfigError naming the nearest known option.
        """
        own = [one.name for one in fields(cls) if one.name != "model"]
        of_layout = [one.name for one in fields(LayoutWish)]
        for name in options:
            if name not in own and name not in of_layout:
                raise ConfigError(f"unknown engine option {name!r}; {nearest(name, own + of_layout)}")
        wishes = {name: value for name, value in options.items() if name in of_layout}
        if wishes:
            stated = options.get("layout", LayoutWish())
            options = {name: value for name, value in options.items() if name not in of_layout}
            options |= {"layout": replace(stated, **wishes)}
        return cls(model=model, **options)

    def numerics(self, *, dtype: DType, backend: str) -> Numerics:
        """What is computed under these wishes in `dtype`."""
        return numerics_of(
            self.preset,
            dtype=dtype,
            backend=backend,
            format=self.format,
            kv_format=self.kv_format,
            wire_format=self.dispatch_format,
            matmul_shards=self.matmul_shards,
        )

    def with_environment(self, environment: Environment) -> EngineConfig:
        """Wishes that were not stated, taken from the environment."""
        return replace(
            self,
            kv_bytes=self.kv_bytes or environment.kv_bytes,
            num_threads=self.num_threads or environment.num_threads,
            backend=self.backend or environment.backend,
        )

    def threads(self, machine: Machine) -> int:
        """How many threads to compute with; needed before the weights are loaded.

        Raises: ConfigError when more are asked for than this process may use.
        """
        if self.num_threads is not None and self.num_threads > machine.num_cpus:
            raise ConfigError(
                f"{self.num_threads} threads are asked for, but this process may use {machine.num_cpus} "
                f"processors ({machine.cpu_source}): ask for at most {machine.num_cpus}"
            )
        return self.num_threads or machine.num_cpus

    def numerics_for(self, spec: ModelSpec, *, backend: str, stated: Numerics | None = None) -> Numerics:
        """What is computed: as a deployment states, else by the preset, on `backend` when none is asked for.

        Raises: ConfigError naming an option that contradicts what is stated.
        """
        if stated is None:
            return self.numerics(dtype=self.dtype or spec.dtype, backend=self.backend or backend)
        if stated.backend == AUTO_BACKEND:
            stated = replace(stated, backend=self.backend or backend)
        for name, asked, found in (
            ("numerics", None if self.preset == PRESETS[0] else self.preset, "its own"),
            ("dtype", self.dtype, stated.seam_dtype),
            ("format", self.format, stated.formats.default.weight),
            ("kv_format", self.kv_format, stated.kv_format),
            ("dispatch_format", self.dispatch_format, stated.wire_format),
            ("matmul_shards", self.matmul_shards, stated.matmul_shards),
            ("backend", self.backend, stated.backend),
        ):
            if asked not in (None, found):
                raise ConfigError(
                    f"{name} {asked} is asked for, but the deployment {self.layout.deployment} has {found}: "
                    f"leave it out ({_where_asked(name)}), or plan for it"
                )
        return stated

    def resolve(self, spec: ModelSpec, numerics: Numerics, machine: Machine) -> ResolvedConfig:
        """Everything decided. `machine` is read after the weights were loaded.

        Raises: ConfigError for a context beyond the model's; CapacityError, with the arithmetic, when memory
                does not hold the KV pool, or the pool not one request of `max_model_len`.
        """
        if self.max_model_len is not None and self.max_model_len > spec.max_position:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}, but the model knows {spec.max_position} positions: "
                "lower it"
            )
        kv_block = numerics.kv_block
        groups = cache_groups(spec, numerics.kv_format, kv_block)
        limits = Limits(
            max_num_seqs=self.max_num_seqs,
            max_tokens_per_step=self.max_tokens_per_step,
            max_model_len=self.max_model_len or spec.max_position,
            max_waiting=self.max_waiting,
        )
        budget_bytes, source = self._kv_budget(useful_bytes(groups, limits, kv_block), machine)
        notes = _rope_notes(spec)
        if self.max_model_len is None:
            # Not asked for: the context is what the pool holds, if that is less than the model's.
            sizes = pool_sizes(groups, budget_bytes, replace(limits, max_model_len=1), kv_block)
            counts = [size for group, size in zip(groups, sizes, strict=True) if group.kind == "tokens"]
            max_model_len = min([spec.max_position, *(count * kv_block for count in counts)])
            if max_model_len < spec.max_position:
                notes += (
                    f"max_model_len is {max_model_len}, not the model's {spec.max_position}: a KV pool of "
                    f"{format_bytes(budget_bytes)} holds no more; give it more memory",
                )
                limits = replace(limits, max_model_len=max_model_len)
        num_blocks = pool_sizes(groups, budget_bytes, limits, kv_block)
        return ResolvedConfig(
            model=self.model,
            preset=self.preset,
            num_threads=self.threads(machine),
            limits=limits,
            groups=groups,
            num_blocks=num_blocks,
            kv_block=kv_block,
            kv_bytes=sum(g.unit_bytes * count for g, count in zip(groups, num_blocks, strict=True)),
            kv_source=source,
            has_prefix_cache=self.has_prefix_cache,
            trace_routes=self.trace_routes,
            notes=notes,
        )

    def _kv_budget(self, most_bytes: int, machine: Machine) -> tuple[int, str]:
        """(bytes, why so many); `most_bytes` is all that the limits can use."""
        free_text = f"{format_bytes(machine.available_bytes)} free after loading, {machine.memory_source}"
        if self.kv_bytes is not None:
            if self.kv_bytes > machine.available_bytes:
                raise CapacityError(
                    f"a KV pool of {format_bytes(self.kv_bytes)} is asked for, memory has {free_text}: "
                    "ask for less"
                )
            return self.kv_bytes, "as asked"
        allowed_bytes = int(KV_FRACTION * machine.available_bytes)
        if most_bytes <= allowed_bytes:
            return most_bytes, "all that the limits can use"
        return allowed_bytes, f"{KV_FRACTION:.0%} of {free_text}"


def _where_asked(name: str) -> str:
    return "MOESAIC_CPU_LEVEL" if name == "backend" else "--" + name.replace("_", "-")


def long_factor_lengths(spec: ModelSpec) -> tuple[int, ...]:
    """Original lengths of the longropes that turn by their long factors here, at every length.

    The short ones, which the model's own code takes up to that length, would turn every cached key otherwise
    once its sequence grows beyond it.
    """
    ropes = {getattr(layer.mixer, "rope", None) for layer in spec.layers}
    scalings = {rope.scaling for rope in ropes if rope is not None and rope.scaling is not None}
    lengths = {s.original_max_position or 0 for s in scalings if s.kind == "longrope"}
    return tuple(length for length in sorted(lengths) if length < spec.max_position)


def _rope_notes(spec: ModelSpec) -> tuple[str, ...]:
    return tuple(
        f"longrope turns by its long factors at every length, also in sequences of up to {length} tokens, "
        "for which the model's own code takes the short ones"
        for length in long_factor_lengths(spec)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedConfig:
    """Complete settings of a running engine."""

    model: str
    preset: Preset
    num_threads: int
    limits: Limits
    groups: tuple[CacheGroup, ...]
    num_blocks: tuple[int, ...]  # per group: blocks, or state slots
    kv_block: int
    kv_bytes: int
    kv_source: str  # why so many
    has_prefix_cache: bool
    trace_routes: bool
    notes: tuple[str, ...]  # what was asked for, or could be expected, and is not so

    def describe_kv(self) -> str:
        """One line for the log: `KV pool 64.0 MB (as asked): 1024 blocks of 16 tokens, 62.5 kB each; ...`."""
        parts = []
        for group, count in zip(self.groups, self.num_blocks, strict=True):
            size = format_bytes(group.unit_bytes)
            if group.kind == "state":
                parts.append(f"{count} state slots of {size}")
            else:
                window = f" (window {group.window})" if group.window else ""
                parts.append(f"{count} blocks of {self.kv_block} tokens, {size} each{window}")
        limits = self.limits
        return (
            f"KV pool {format_bytes(self.kv_bytes)} ({self.kv_source}): {', '.join(parts)}; "
            f"up to {limits.max_num_seqs} requests at once, of up to {limits.max_model_len} tokens each"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """The environment variables of the project, read and checked."""

    num_threads: int | None = None
    kv_bytes: int | None = None
    log_level: str | None = None
    log_style: str | None = None
    api_key: str | None = None
    backend: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """One environment variable."""

    name: str
    field: str | None  # of `Environment`; None: read by the tests only
    parse: Callable[[str], Any]
    help: str


def _parse_count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _parse_choice(*known: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in known:
            raise ConfigError(f"{text!r} is unknown; {nearest(text, known)}")
        return text

    return parse


def _parse_level(text: str) -> str:
    levels = ("portable", "avx2", "avx512", "avx512-vnni", "avx512-bf16", "neon", "neon-dotprod")
    level = _parse_choice("reference", *levels)(text)
    return level if level == "reference" else f"native/{level}"


VARIABLES: tuple[Variable, ...] = (
    Variable(
        name="MOESAIC_NUM_THREADS",
        field="num_threads",
        parse=_parse_count,
        help="threads to compute with; default: all that this process may use",
    ),
    Variable(
        name="MOESAIC_CPU_LEVEL",
        field="backend",
        parse=_parse_level,
        help="level of the native kernels (portable, avx2, avx512, avx512-vnni, avx512-bf16, neon, "
        "neon-dotprod), or reference for torch's own matmuls; default: the best of an x86 processor from "
        "avx2 on, else reference",
    ),
    Variable(
        name="MOESAIC_KV_BYTES",
        field="kv_bytes",
        parse=parse_bytes,
        help="size of the KV pool, as in 512MiB; default: from the memory that is free",
    ),
    Variable(
        name="MOESAIC_LOG_LEVEL",
        field="log_level",
        parse=_parse_choice("DEBUG", "INFO", "WARNING", "ERROR"),
        help="DEBUG, INFO, WARNING or ERROR",
    ),
    Variable(
        name="MOESAIC_LOG_STYLE",
        field="log_style",
        parse=_parse_choice("text", "json"),
        help="text, or json for one object a line",
    ),
    Variable(
        name="MOESAIC_API_KEY",
        field="api_key",
        parse=str,
        help="key that the server asks for; unlike --api-key it does not show in the list of processes",
    ),
    Variable(
        name="MOESAIC_DATA", field=None, parse=str, help="folder of test data; read by the test suite only"
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What torchrun, or another that starts all ranks, tells each process."""

    rank: int
    num_ranks: int
    master_host: str
    master_port: int
    num_local: int | None  # ranks of this node, None: not told
    num_nodes: int | None
    has_store: bool  # at the master's port already
    attempt: str

    def started(self) -> Started:
        """What follows for the layout."""
        nodes, local = self.num_nodes, self.num_local
        is_even = nodes is not None and local is not None and nodes * local == self.num_ranks
        return Started(num_ranks=self.num_ranks, ranks_per_node=local if is_even else None)


WORLD_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "RANK": "number of this process, from 0",
        "WORLD_SIZE": "how many processes there are on all nodes",
        "MASTER_ADDR": "address of the node of rank 0",
        "MASTER_PORT": "port there at which the processes meet",
        "LOCAL_WORLD_SIZE": "how many of them are on this node",
        "GROUP_WORLD_SIZE": "how many nodes there are",
        "TORCHELASTIC_USE_AGENT_STORE": "True: torchrun itself listens at the port",
        "TORCHELASTIC_RESTART_COUNT": "how often torchrun has started them anew",
    }
)
"""torchrun's own variables. The first four are needed, and then this process is one of several ranks."""


def read_world(config: EngineConfig, environ: Mapping[str, str] | None = None) -> World | None:
    """What torchrun started; None when ranks are to be started from here.

    Raises: ConfigError for variables that are no numbers or do not fit together, and when torchrun is asked
            for and has started nothing.
    """
    source = os.environ if environ is None else environ
    needed = list(WORLD_VARIABLES)[:4]
    missing = [name for name in needed if not source.get(name)]
    if config.launcher in ("local", "ray") or (
        config.launcher is None and missing and source.get("WORLD_SIZE", "1") in ("", "0", "1")
    ):
        return None
    if missing:
        asked = "launcher torchrun" if config.launcher else f"WORLD_SIZE is {source['WORLD_SIZE']}"
        raise ConfigError(
            f"{asked}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; start "
            "the ranks by torchrun --nproc-per-node N -m moesaic ..., or use --launcher local"
        )
    counts = {}
    for name in WORLD_VARIABLES:
        text = source.get(name)
        if text is None or name in ("MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
            continue
        if not text.isdigit():
            raise ConfigError(f"environment variable {name}: {text!r} is not a whole number of at least 0")
        counts[name] = int(text)
    rank, num_ranks = counts["RANK"], counts["WORLD_SIZE"]
    if rank >= num_ranks:
        raise ConfigError(f"RANK {rank} must be below WORLD_SIZE {num_ranks}")
    if num_ranks == 1 and config.launcher is None:
        return None  # alone, as without it
    return World(
        rank=rank,
        num_ranks=num_ranks,
        master_host=source["MASTER_ADDR"],
        master_port=counts["MASTER_PORT"],
        num_local=counts.get("LOCAL_WORLD_SIZE"),
        num_nodes=counts.get("GROUP_WORLD_SIZE"),
        has_store=source.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=str(counts.get("TORCHELASTIC_RESTART_COUNT", 0)),
    )


HUB_VARIABLES: Mapping[str, str] = MappingProxyType(
    {
        "HF_HUB_CACHE": "the Hugging Face cache folder itself",
        "HUGGINGFACE_HUB_CACHE": "the same, by its older name",
        "HF_HOME": "the folder that holds hub/, the cache",
        "XDG_CACHE_HOME": "the folder that holds huggingface/hub/, the cache; default: ~/.cache",
    }
)
"""Hugging Face's own variables, the first one that is set counts: where downloaded models are looked for."""


def read_hub_cache(environ: Mapping[str, str] | None = None) -> Path:
    """The local Hugging Face cache."""
    source = os.environ if environ is None else environ
    return hub_cache({name: source[name] for name in HUB_VARIABLES if name in source})


def read_ray_address(environ: Mapping[str, str] | None = None) -> str | None:
    """Ray's own RAY_ADDRESS, the cluster to take; None: the one that runs on this machine."""
    source = os.environ if environ is None else environ
    address = source.get("RAY_ADDRESS", "")
    return None if address in ("", "auto", "local") else address


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """The `MOESAIC_*` variables.

    Raises: ConfigError naming the variable and its value, or the nearest known name for one that is unknown.
    """
    source = os.environ if environ is None else environ
    known = {variable.name: variable for variable in VARIABLES}
    values: dict[str, Any] = {}
    for name, text in source.items():
        if not name.startswith("MOESAIC_"):
            continue
        if name not in known:
            raise ConfigError(f"unknown environment variable {name}; {nearest(name, known)}")
        variable = known[name]
        try:
            value = variable.parse(text)
        except ConfigError as error:
            raise ConfigError(f"environment variable {name}: {error}") from error
        if variable.field is not None:
            values[variable.field] = value
    return Environment(**values)
