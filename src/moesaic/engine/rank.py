"""One rank: a process that holds its share of a model and does what plans say, until its controller is gone.

    controller                                rank, main thread
       |  <--- Hello: where, how much memory ---  |
       |  RankSetup ----------------------------> |  joins the mesh, loads its share
       |  <--- RankReady, or what went wrong ---  |
       |  RankPool -->                            |  makes its KV pool
       |  StepPlan --> <-- StepResult             |  again and again
       |  Adopt --> <-- Adopted                   |  between steps: another expert plan
       |  Leave -->                               |  ends

A second thread reads the pipe: when its end is gone, so is the process, whatever the main thread waits for.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from torch import Tensor
from torch import distributed as dist

from moesaic import __version__
from moesaic.engine.config import EngineConfig, ResolvedConfig, read_environment
from moesaic.engine.grammar import Grammars
from moesaic.engine.layout import (
    Arrangement,
    Started,
    arrange,
    check_parts,
    describe_layout,
    settle,
    tp_wires_of,
)
from moesaic.engine.link import MOVE_TIMEOUT_S
from moesaic.engine.machine import Machine, host_key, read_machine
from moesaic.engine.runner import Runner
from moesaic.engine.worker import Worker
from moesaic.errors import MoesaicError, PeerLost
from moesaic.hashing import digest
from moesaic.kernels.invariance import InvarianceProof
from moesaic.kernels.nodes import read_nodes
from moesaic.kernels.ops import default_backend
from moesaic.kernels.shared_bytes import leave_all
from moesaic.kv.pool import KvPool
from moesaic.models.build import Dispatcher, LoadedModel, Share, TensorShare, build, read_spec
from moesaic.models.checkpoint import Checkpoint
from moesaic.models.home import SHARED_FOLDER, Home
from moesaic.parallel.dispatch.build import connect, connect_replica, make_dispatcher
from moesaic.parallel.dispatch.fused_ranks import FusedRanks
from moesaic.parallel.gloo import GlooTransport
from moesaic.parallel.mesh import Identity, Mesh
from moesaic.parallel.moves import Placed
from moesaic.parallel.tensor import TensorRanks
from moesaic.sched.step import StepPlan, StepResult
from moesaic.spec.codec import to_plain
from moesaic.spec.deployment import Layout
from moesaic.spec.experts import ExpertPlan, IntArray, contiguous_plan
from moesaic.spec.layout_rules import TpWires
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import Numerics
from moesaic.spec.tensor_split import TensorSplit
from moesaic.steps import drive

LEAVE_S = 2.0  # guess: what a rank may still compute when it is told to leave


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """What a rank says first. Ranks of one `host` share memory, and the numbers of its machine."""

    host: str
    machine: Machine
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankSetup:
    """What a rank is told first."""

    config: EngineConfig
    layout: Layout
    plan: ExpertPlan | None  # None: contiguous
    numerics: Numerics | None  # None: those of the config's preset
    num_threads: int
    available_bytes: int  # of memory, for this rank alone
    hosts: tuple[str, ...]  # of all ranks, as they said hello
    grammars: Grammars | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankReady:
    """What a rank says when its weights are in memory."""

    numerics: Numerics
    weight_bytes: int
    tensor_digests: Mapping[str, str]
    proof: InvarianceProof
    notes: tuple[str, ...]
    lacks: tuple[str, ...]
    unused: tuple[Mapping[str, Any], ...]
    machine: Machine  # after loading


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPool:
    """The decided settings: the rank makes its pool and waits for plans."""

    config: ResolvedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """Requests that are over, when no plan follows that would say so."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Adopt:
    """Another expert plan, from the next step on."""

    plan: ExpertPlan


@dataclass(frozen=True, kw_only=True, slots=True)
class Adopted:
    """What a rank says when it follows another plan, or whom it lost on the way."""

    sent_bytes: int
    lost: PeerLost | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Observe:
    """How often experts were chosen of late, per MoE layer [E]."""

    loads: tuple[IntArray, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """The run is over."""


def arrange_for(config: EngineConfig, spec: ModelSpec, started: Started | None) -> Arrangement:
    """What the wishes of a process come to, on the kernels that it would use.

    Raises: ConfigError, as `arrange`.
    """
    backend = config.with_environment(read_environment()).backend or default_backend()
    arranged = arrange(config.layout, spec, started, is_native=backend.startswith("native/"))
    check_parts(arranged.layout, config.max_tokens_per_step)
    return arranged


def plan_of(setup: RankSetup, spec: ModelSpec) -> ExpertPlan:
    """The plan that was given, or experts in equal runs over the layout's ranks."""
    if setup.plan is not None:
        return setup.plan
    return contiguous_plan(tuple(moe.num_experts for _, moe in spec.moe_layers), setup.layout.num_ranks)


def home_of(config: EngineConfig, num_ranks: int = 1) -> Home:
    """Where the weights of a rank go, one of so many on this machine, who share what a node has free."""
    nodes = read_nodes() if config.numa == "spread" else ()
    return Home(
        nodes=tuple(replace(node, available_bytes=node.available_bytes // num_ranks) for node in nodes),
        shared_in=SHARED_FOLDER if config.share_weights else None,
        num_ranks=num_ranks,
    )


def split_of(layout: Layout, numerics: Numerics, rank: int) -> TensorSplit | None:
    """What part of its replica's matrices a rank has; None: the whole."""
    size = layout.attention.size("tp")
    if size == 1:
        return None
    return TensorSplit(rank=rank % size, size=size, num_leaves=numerics.matmul_shards)


def tensor_share(
    mesh: Mesh, setup: RankSetup, spec: ModelSpec, numerics: Numerics, wires: TpWires | None
) -> TensorShare | None:
    """This rank's part of its replica, and the wires to the others of it; None: it is the replica."""
    layout = setup.layout
    split = split_of(layout, numerics, mesh.rank)
    if split is None or wires is None:
        return None
    max_tokens = setup.config.max_tokens_per_step
    ends = connect_replica(layout, mesh, spec, numerics, max_tokens, split=split, wires=wires)
    return TensorShare(
        split=split, ranks=TensorRanks(ends, split), has_own_rows=layout.dispatcher != "gathered"
    )


def load_share(mesh: Mesh, setup: RankSetup) -> LoadedModel:
    """This rank's part of the model, wired to the other ranks; the wires are made first.

    Raises: what `models.build.build` raises; ConfigError when ranks differ in what they would compute;
            CapacityError when memory that ranks share does not hold their messages.
    """
    config, layout = setup.config, setup.layout
    checkpoint, spec = Checkpoint.open(config.model), read_spec(config.model)
    numerics = config.numerics_for(spec, backend=default_backend(), stated=setup.numerics)
    plan = plan_of(setup, spec)
    tp_wires = tp_wires_of(layout, config.tp_wires, setup.hosts)
    mesh.agree(
        Identity(
            version=__version__,
            checkpoint=checkpoint.header_digest(),
            numerics=numerics.digest(),
            backend=numerics.backend,
            layout=f"{describe_layout(layout, tp_wires)}, placement {digest(to_plain(plan))}, steps of up to "
            f"{config.max_tokens_per_step} tokens",
        )
    )
    wires = connect(
        layout,
        mesh,
        spec.moe_layers,
        numerics,
        config.max_tokens_per_step,
        tp_wires=tp_wires,
        num_slices=plan.num_slices,
    )

    def dispatcher(
        spec: ModelSpec, numerics: Numerics, down_biases: Mapping[int, Tensor]
    ) -> Dispatcher | FusedRanks:
        return make_dispatcher(
            layout,
            spec.moe_layers,
            numerics,
            plan,
            wires,
            replica_choice=config.replica_choice,
            down_biases=down_biases,
        )

    return build(
        checkpoint,
        spec,
        numerics,
        num_threads=setup.num_threads,
        available_bytes=setup.available_bytes,
        home=home_of(config, setup.hosts.count(setup.hosts[mesh.rank])),
        share=Share(
            rank=mesh.rank,
            plan=plan,
            dispatcher=dispatcher,
            moves=GlooTransport(mesh, num_lanes=1, name="moves"),
            traffic=wires.traffic,
            tensor=tensor_share(mesh, setup, spec, numerics, tp_wires),
        ),
    )


def ready_of(model: LoadedModel) -> RankReady:
    """What the controller has to know of a loaded share."""
    return RankReady(
        numerics=model.numerics,
        weight_bytes=model.weight_bytes,
        tensor_digests=model.tensor_digests,
        proof=model.proof,
        notes=model.notes,
        lacks=model.lacks,
        unused=model.unused_tensors,
        machine=read_machine(),
    )


def serve(
    pipe: Connection,
    store: dist.Store,
    rank: int,
    address: str,
    *,
    own: EngineConfig | None = None,
    started: Started | None = None,
) -> None:
    """The life of a rank, in this process's main thread. Others reach it at `address`.

    `own` is what this process was asked for, where it was asked: what comes of it has to be what comes of the
    controller's, or `load_share` refuses; then this raises, too.
    """
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    pipe.send(Hello(host=host_key(), machine=read_machine(), pid=os.getpid()))
    setup = inbox.get()
    if isinstance(setup, Leave):
        return
    try:
        if own is not None:
            wanted = arrange_for(own, read_spec(own.model), started)
            arranged = settle(wanted, own.layout, setup.hosts)
            setup = replace(
                setup, config=own, layout=arranged.layout, plan=arranged.plan, numerics=arranged.numerics
            )
        setup = replace(setup, config=setup.config.with_environment(read_environment()))
        mesh = Mesh.join(rank=rank, num_ranks=len(setup.hosts), store=store, address=address)
        model = load_share(mesh, setup)
        pipe.send(ready_of(model))
        pool = inbox.get()
        if not isinstance(pool, Leave):
            _work(pipe, inbox, _worker(model, setup, pool.config, rank), model.placed)
        mesh.close()
    except MoesaicError as error:
        pipe.send(error)
        inbox.get()  # the controller says what went wrong: none may end before it has
        if own is not None:
            raise  # so does whoever was asked here


def _worker(model: LoadedModel, setup: RankSetup, config: ResolvedConfig, rank: int) -> Worker:
    replica_idx, part = divmod(rank, setup.layout.attention.size("tp"))
    return Worker(
        Runner(model.decoder, KvPool(model.local_spec, model.numerics, config.num_blocks)),
        model.spec,
        grammars=setup.grammars,
        traces_routes=config.trace_routes,
        replica_idx=replica_idx,
        is_silent=part > 0,
        rank=rank,
        meter=model.meter,
        traffic=model.traffic,
    )


def _work(pipe: Connection, inbox: SimpleQueue[Any], worker: Worker, placed: Placed | None) -> None:
    """Plan by plan, until told to leave."""
    while not isinstance(message := inbox.get(), Leave):
        match message:
            case Forget():
                worker.forget(message.request_ids)
            case Observe() if placed is not None:
                placed.observe(message.loads)
            case Adopt() if placed is not None:
                pipe.send(_adopt(placed, message.plan))
            case StepPlan():
                pipe.send(_run(worker, message))


def _run(worker: Worker, plan: StepPlan) -> StepResult | MoesaicError:
    try:
        return worker.run(plan)
    except PeerLost as lost:
        return StepResult(
            step_id=plan.step_id, tokens={}, logprobs={}, prompt_logprobs={}, loads=(), spread={}, lost=lost
        )


def _adopt(placed: Placed, plan: ExpertPlan) -> Adopted | MoesaicError:
    try:
        return Adopted(sent_bytes=drive([placed.adopt(plan)], MOVE_TIMEOUT_S)[0])
    except PeerLost as lost:
        return Adopted(sent_bytes=0, lost=lost)
    except MoesaicError as error:
        return error


def _read(pipe: Connection, inbox: SimpleQueue[Any]) -> None:
    """Pass messages on; when the controller is gone, end the process, whatever it is doing."""
    try:
        while True:
            message = pipe.recv()
            inbox.put(message)
            if isinstance(message, Leave):
                time.sleep(LEAVE_S)
                leave_all()
                os._exit(0)
    except (EOFError, OSError, pickle.UnpicklingError):
        leave_all()  # nothing else runs any more
        os._exit(1)
