"""From wishes to a running engine: read the machine, load, resolve, wire the parts, say what came out."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moesaic.engine.config import (
    EngineConfig,
    ResolvedConfig,
    World,
    read_environment,
    read_ray_address,
    read_world,
)
from moesaic.engine.grammar import Grammars
from moesaic.engine.launchers.launcher import Address, Launcher
from moesaic.engine.launchers.local import Local
from moesaic.engine.launchers.ray import Ray
from moesaic.engine.launchers.torchrun import Torchrun
from moesaic.engine.layout import (
    Arrangement,
    check_split,
    check_tp_wires,
    data_parallel,
    describe_layout,
    settle,
    tp_wires_of,
)
from moesaic.engine.link import Link, LocalLink
from moesaic.engine.loop import Engine, Facts
from moesaic.engine.machine import Machine, read_machine
from moesaic.engine.rank import Hello, RankPool, RankSetup, arrange_for, home_of, split_of
from moesaic.engine.ranks import Ranks
from moesaic.engine.rebalance import Rebalance
from moesaic.engine.runner import Runner
from moesaic.engine.worker import Worker
from moesaic.errors import ConfigError
from moesaic.experts.blob import BlobLayout
from moesaic.hashing import digest
from moesaic.kernels import huge_pages, native
from moesaic.kernels.invariance import InvarianceProof
from moesaic.kernels.ops import default_backend
from moesaic.kv.pool import KvPool
from moesaic.log import get_logger
from moesaic.models.build import LoadedModel, build, model_digest, read_spec
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.home import abandoned_weights
from moesaic.placement.choice import ReplicaChoice
from moesaic.sched.key import KvKeyScope
from moesaic.sched.ledger import KvLedger, cache_groups
from moesaic.sched.scheduler import Scheduler
from moesaic.spec.deployment import ATTENTION_AXES, EXPERT_AXES, Layout
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.layout_rules import TpWires
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import Numerics
from moesaic.units import format_bytes

_log = get_logger("engine")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ModelFacts:
    """What an engine says of its model, whether that lies in one process or in many."""

    spec: ModelSpec
    numerics: Numerics
    weight_bytes: int  # of all ranks together
    model_digest: str
    proof: InvarianceProof
    notes: tuple[str, ...]  # what loading did
    lacks: tuple[str, ...]  # what it was to do and did not
    unused: tuple[Mapping[str, Any], ...]
    layout: Layout
    plan: ExpertPlan | None = None  # that it starts with; None: equal runs
    replica_choice: ReplicaChoice = "turns"
    tp_wires: TpWires | None = None  # that a replica's ranks sum over; None: each is one rank
    pids: tuple[int, ...]  # of the ranks

    @property
    def num_slices(self) -> int:
        """Parts that every expert is cut into."""
        return 1 if self.plan is None else self.plan.num_slices

    @classmethod
    def of(cls, model: LoadedModel, layout: Layout) -> ModelFacts:
        """Of a model in this process."""
        return cls(
            spec=model.spec,
            numerics=model.numerics,
            weight_bytes=model.weight_bytes,
            model_digest=model.model_digest,
            proof=model.proof,
            notes=model.notes,
            lacks=model.lacks,
            unused=model.unused_tensors,
            layout=layout,
            pids=(os.getpid(),),
        )


def start_engine(
    config: EngineConfig,
    *,
    tokenizer_digest: str = "",
    grammars: Grammars | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """An engine that takes requests. Text stays outside: `tokenizer_digest` only keeps caches apart.

    Owns:    the engine must be closed; it also ends with the main thread.
    Raises:  ConfigError, CheckpointError, HostMemoryShort, CapacityError, KernelUnavailable, PeerLost: all of
             them before a request is taken.
    """
    if not config.share_weights:
        for path, num_bytes in abandoned_weights():
            _log.warning(
                "%s takes %s of memory and no process uses it: remove it, or start with --share-weights",
                path,
                format_bytes(num_bytes),
            )
    spec, world = read_spec(config.model), read_world(config)
    arranged = arrange_for(config, spec, None if world is None else world.started())
    if arranged.layout.num_ranks > 1:
        launcher = _launcher(config, arranged.layout, world)
        return _start_on_ranks(config, spec, arranged, launcher, tokenizer_digest, grammars).start()
    _check_alone(config)
    for name, value in (("--launcher", config.launcher), ("--rank-address", config.rank_address)):
        if value not in (None, "local"):
            raise ConfigError(f"{name} {value} is for several ranks, and there is one: ask for --ranks, too")
    config = config.with_environment(read_environment())
    machine = read_machine()
    model = build(
        Checkpoint.open(config.model),
        spec,
        config.numerics_for(spec, backend=default_backend(), stated=arranged.numerics),
        num_threads=config.threads(machine),
        available_bytes=machine.available_bytes,
        home=home_of(config),
        progress=progress,
    )
    resolved = config.resolve(model.spec, model.numerics, read_machine())
    engine = assemble(
        model, resolved, tokenizer_digest=tokenizer_digest, grammars=grammars, layout=arranged.layout
    )
    # What was loaded lives until `close`: the collector need not walk it again and again.
    gc.collect()
    gc.freeze()
    return engine.start()


def assemble(
    model: LoadedModel,
    config: ResolvedConfig,
    *,
    tokenizer_digest: str = "",
    grammars: Grammars | None = None,
    layout: Layout | None = None,
) -> Engine:
    """The parts of an engine around a loaded model, not yet started; `layout` None is one rank's usual."""
    pool = KvPool(model.local_spec, model.numerics, config.num_blocks)
    worker = Worker(
        Runner(model.decoder, pool),
        model.spec,
        grammars=grammars,
        traces_routes=config.trace_routes,
        meter=model.meter,
    )
    return _engine(
        ModelFacts.of(model, layout or data_parallel(1)),
        config,
        LocalLink(worker, model.placed),
        tokenizer_digest,
        grammars,
    )


def _check_alone(config: EngineConfig) -> None:
    """Refuse what is for several ranks where there is one.

    Raises: ConfigError naming the option.
    """
    for name, asked, usual in (
        ("launcher", config.launcher, ("local", "torchrun")),  # torchrun may start one
        ("rank-address", config.rank_address, ()),
        ("replica-choice", config.replica_choice, ("turns",)),
        ("tp-wires", config.tp_wires, ()),
    ):
        if asked is not None and asked not in usual:
            raise ConfigError(
                f"--{name} {asked} is for several ranks, and there is one: ask for several with --ranks, or "
                f"leave --{name} out"
            )


def _launcher(config: EngineConfig, layout: Layout, world: World | None) -> Launcher:
    """What starts the ranks, or meets those that were started."""
    address = None if config.rank_address is None else Address.parse(config.rank_address, "--rank-address")
    if world is not None:
        return Torchrun(world, address)
    if config.launcher == "ray":
        return Ray(
            address,
            cluster=read_ray_address(),
            ranks_per_node=layout.ranks_per_node,
            num_threads=config.num_threads,
        )
    return Local(address)


def _start_on_ranks(
    config: EngineConfig,
    spec: ModelSpec,
    arranged: Arrangement,
    launcher: Launcher,
    tokenizer_digest: str,
    grammars: Grammars | None,
) -> Engine:
    """An engine whose model lies in several processes, each with requests of its own."""
    numerics = config.with_environment(read_environment()).numerics_for(
        spec, backend=default_backend(), stated=arranged.numerics
    )
    check_split(arranged.layout, spec, numerics, arranged.num_slices)
    check_tp_wires(arranged.layout, config.tp_wires)
    ranks = Ranks(launcher, arranged.layout.num_ranks)
    try:
        hellos = ranks.await_hello()
        arranged = settle(arranged, config.layout, [one.host for one in hellos])
        setups = _setups(config, arranged, hellos, grammars)
        ranks.set_up(setups)
        ready = ranks.await_ready()
        digests = {name: digest for one in ready for name, digest in one.tensor_digests.items()}
        facts = ModelFacts(
            spec=spec,
            numerics=ready[0].numerics,
            weight_bytes=sum(one.weight_bytes for one in ready),
            model_digest=model_digest(spec, digests),
            proof=ready[0].proof,
            notes=_by_rank([one.notes for one in ready]),
            lacks=_by_rank([one.lacks for one in ready]),
            unused=ready[0].unused,
            layout=arranged.layout,
            plan=arranged.plan,
            replica_choice=config.replica_choice,
            tp_wires=tp_wires_of(arranged.layout, config.tp_wires, setups[0].hosts),
            pids=tuple(one.pid for one in hellos),
        )
        machine = _smallest(setups[0].hosts, [one.machine for one in ready])
        # The first rank of a replica has the most heads, so no pool is larger than its.
        first = split_of(arranged.layout, facts.numerics, 0)
        pooled = spec if first is None else first.model(spec)
        resolved = config.with_environment(read_environment()).resolve(pooled, facts.numerics, machine)
        ranks.start_pools(RankPool(config=resolved))
    except BaseException:
        ranks.close()
        raise
    return _engine(facts, resolved, ranks, tokenizer_digest, grammars)


def _setups(
    config: EngineConfig, arranged: Arrangement, hellos: Sequence[Hello], grammars: Grammars | None
) -> list[RankSetup]:
    """What each rank is told. Ranks of one host share its processors and memory."""
    hosts = tuple(one.host for one in hellos)
    for host, machine in {one.host: one.machine for one in hellos}.items():
        if hosts.count(host) > machine.num_cpus:
            _log.warning(
                "%d ranks share %d processors (%s) and wait for each other: fewer are faster",
                hosts.count(host),
                machine.num_cpus,
                machine.cpu_source,
            )
    wishes = config.with_environment(read_environment())
    each = _shares(hosts, [one.machine for one in hellos])
    return [
        RankSetup(
            config=config,
            layout=arranged.layout,
            plan=arranged.plan,
            numerics=arranged.numerics,
            num_threads=max(1, wishes.threads(one.machine) // hosts.count(one.host)),
            available_bytes=available_bytes,
            hosts=hosts,
            grammars=grammars,
        )
        for one, available_bytes in zip(hellos, each, strict=True)
    ]


def _shares(hosts: Sequence[str], machines: Sequence[Machine]) -> list[int]:
    """Bytes for each rank: those of a host share alike what the one that looked last found there."""
    free: dict[str, int] = {}
    for host, machine in zip(hosts, machines, strict=True):
        free[host] = min(machine.available_bytes, free.get(host, machine.available_bytes))
    return [free[host] // hosts.count(host) for host in hosts]


def _by_rank(said: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """What ranks say: once where all say it, else with the number of who does."""
    ranks: dict[str, list[int]] = {}
    for rank, notes in enumerate(said):
        for note in notes:
            ranks.setdefault(note, []).append(rank)
    return tuple(
        note if len(some) == len(said) else f"rank {', '.join(map(str, some))}: {note}"
        for note, some in ranks.items()
    )


def _smallest(hosts: Sequence[str], machines: Sequence[Machine]) -> Machine:
    """The machine of rank 0 with as much memory as every rank has: all KV pools have one size."""
    source = f"{machines[0].memory_source}, for each rank"
    return replace(machines[0], available_bytes=min(_shares(hosts, machines)), memory_source=source)


def _engine(
    model: ModelFacts, config: ResolvedConfig, link: Link, tokenizer_digest: str, grammars: Grammars | None
) -> Engine:
    scope = KvKeyScope(
        model_digest=model.model_digest,
        numerics_digest=model.numerics.digest(),
        tokenizer_digest=tokenizer_digest,
        positions=digest([layer.mixer for layer in model.spec.layers]),
    )
    ledger = KvLedger(
        config.groups,
        config.num_blocks,
        kv_block=config.kv_block,
        scope=scope,
        has_prefix_cache=config.has_prefix_cache,
    )
    notes = _notes(model, config, has_prefix_cache=ledger.has_prefix_cache)
    ranks, kv_bytes = model.layout.num_ranks, _kv_bytes(model, config)
    pools = f"{ranks} KV pools, {format_bytes(sum(kv_bytes))} together; of rank 0: " if ranks > 1 else ""
    for line in (
        f"weights {format_bytes(model.weight_bytes)} ({model.numerics.formats.default.weight}), "
        f"backend {model.numerics.backend}",
        *([f"{ranks} ranks: {describe_layout(model.layout, model.tp_wires)}"] if ranks > 1 else []),
        pools + config.describe_kv(),
        model.proof.summary(),
        *model.notes,
        *notes,
    ):
        _log.info(line)
    return Engine(
        spec=model.spec,
        config=config,
        scheduler=Scheduler(
            ledger,
            config.limits,
            num_replicas=model.layout.attention.size("dp"),
            num_micro_batches=model.layout.num_micro_batches,
        ),
        link=link,
        facts=Facts(
            weight_bytes=model.weight_bytes,
            kv_bytes=kv_bytes,
            active=describe(model, config, kv_bytes, notes),
            pids=model.pids,
        ),
        rebalance=_rebalance(model) if model.spec.moe_layers else None,
        grammars=grammars,
    )


def _kv_bytes(model: ModelFacts, config: ResolvedConfig) -> tuple[int, ...]:
    """Of each rank's pool: all have as many blocks, each of its own heads."""
    numerics, tp, found = model.numerics, model.layout.attention.size("tp"), []
    for rank in range(tp):
        split = split_of(model.layout, numerics, rank)
        spec = model.spec if split is None else split.model(model.spec)
        groups = cache_groups(spec, numerics.kv_format, numerics.kv_block)
        found.append(sum(g.unit_bytes * count for g, count in zip(groups, config.num_blocks, strict=True)))
    return tuple(found) * (model.layout.num_ranks // tp)


def _rebalance(model: ModelFacts) -> Rebalance:
    layers, formats = model.spec.moe_layers, model.numerics.formats
    num_experts = tuple(moe.num_experts for _, moe in layers)
    plan = model.plan or contiguous_plan(num_experts, model.layout.num_ranks)
    return Rebalance(
        plan,
        model.spec,
        num_ranks=model.layout.num_ranks,
        expert_bytes=[
            max(
                BlobLayout.of(moe, format, plan.num_slices).num_bytes
                for format in {formats.of_expert(layer_idx, i).weight for i in range(moe.num_experts)}
            )
            for layer_idx, moe in layers
        ],
        available_bytes=lambda: read_machine().available_bytes,
        replica_choice=model.replica_choice,
    )


def _notes(model: ModelFacts, config: ResolvedConfig, *, has_prefix_cache: bool) -> list[str]:
    """What was asked for, or could be expected, and is not active, and effects that are not exact."""
    notes = [*model.lacks, *config.notes]
    if config.has_prefix_cache and not has_prefix_cache:
        notes.append(
            "prefix cache: off, because this model keeps a running state that cannot be cut at a block"
        )
    if not native.levels():
        notes.append("native kernels: not built in this installation, so matmuls are torch's own")
    if model.num_slices > 1:
        notes.append(
            f"experts are cut into {model.num_slices} slices, whose results are joined one by one: layers "
            "are not fused"
        )
    if (reason := huge_pages.why_none()) is not None:
        notes.append(f"huge pages: none for the weights, which are read more slowly: {reason}")
    notes += [f"{name}: {effect}" for name, effect in model.numerics.effects()]
    return notes


def describe(
    model: ModelFacts, config: ResolvedConfig, kv_bytes: Sequence[int], notes: list[str]
) -> dict[str, Any]:
    """What runs, as plain values: the content of `/v1/internal/active`; `kv_bytes` are of each rank."""
    numerics, limits = model.numerics, config.limits
    return {
        "model": config.model,
        "model_digest": model.model_digest,
        "model_type": model.spec.model_type,
        "vocab": model.spec.vocab,
        "weight_bytes": model.weight_bytes,
        "numerics": {
            "preset": config.preset,
            "digest": numerics.digest(),
            "seam_dtype": numerics.seam_dtype,
            "weight_format": numerics.formats.default.weight,
            "activation_format": numerics.formats.default.activation,
            "partial_dtype": numerics.partial_dtype,
            "kv_format": numerics.kv_format,
            "wire_format": numerics.wire_format,
            "matmul_shards": numerics.matmul_shards,
            "kv_lanes": numerics.kv_lanes,
            "combine": numerics.combine,
        },
        "numerics_digest": numerics.digest(),
        "backend": numerics.backend,
        "effects": {name: str(effect) for name, effect in numerics.effects()},
        "invariance": {
            "num_shapes": len(model.proof.shapes),
            "row_quantum": model.proof.quantum,
            "num_threads": model.proof.num_threads,
            "seconds": model.proof.seconds,
        },
        "layout": {
            "attention": {axis: model.layout.attention.size(axis) for axis in ATTENTION_AXES},
            "experts": {axis: model.layout.experts.size(axis) for axis in EXPERT_AXES},
            "dispatcher": model.layout.dispatcher,
            "is_fused": model.layout.is_fused,
            "returns": model.layout.returns,
            "num_ranks": model.layout.num_ranks,
            "num_slices": model.num_slices,
            "num_micro_batches": model.layout.num_micro_batches,
            "num_chunks": model.layout.num_chunks,
            "ranks_per_node": model.layout.ranks_per_node,
            "tp_wires": model.tp_wires,
        },
        "num_threads": config.num_threads,
        "kv": {
            "bytes": sum(kv_bytes),  # of all ranks
            "source": config.kv_source,
            "num_replicas": model.layout.attention.size("dp"),
            "num_blocks": list(config.num_blocks),  # of each replica
            "block_tokens": config.kv_block,
        },
        "limits": {
            "max_num_seqs": limits.max_num_seqs,
            "max_tokens_per_step": limits.max_tokens_per_step,
            "max_model_len": limits.max_model_len,
            "max_waiting": limits.max_waiting,
        },
        "notes": list(model.notes),
        "not_active": notes,
        "unused_tensors": list(model.unused),
    }
