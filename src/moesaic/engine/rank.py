"""One rank: a process that holds its share of a model and does what plans say, until its controller is gone.

    controller                                rank, main thread
       |  RankSetup                               |
       | -------------------------------------->  | joins the mesh, loads its share
       |  <--- RankReady, or what went wrong ---  |
       |  RankPool -->                            | makes its KV pool
       |  StepPlan --> <-- StepResult             | again and again

A second thread reads the pipe: when its end is gone, so is the process, whatever the main thread waits for.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from torch import distributed as dist

from moesaic import __version__
from moesaic.engine.config import EngineConfig, ResolvedConfig
from moesaic.engine.grammar import Grammars
from moesaic.engine.runner import Runner
from moesaic.engine.worker import Worker
from moesaic.errors import MoesaicError, PeerLost
from moesaic.kernels.invariance import InvarianceProof
from moesaic.kernels.ops import default_backend
from moesaic.kv.pool import KvPool
from moesaic.models.build import Dispatcher, LoadedModel, Share, build, read_spec
from moesaic.models.checkpoint import Checkpoint
from moesaic.parallel.dispatch.build import connect, make_dispatcher
from moesaic.parallel.mesh import Identity, Mesh
from moesaic.sched.step import StepPlan, StepResult
from moesaic.spec.deployment import Layout
from moesaic.spec.experts import ExpertPlan, contiguous_plan
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import Numerics


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankSetup:
    """What a rank is told first."""

    config: EngineConfig
    layout: Layout
    plan: ExpertPlan | None  # None: contiguous
    numerics: Numerics | None  # None: those of the config's preset
    num_threads: int
    available_bytes: int  # of memory, for this rank alone
    grammars: Grammars | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankReady:
    """What a rank says when its weights are in memory."""

    numerics: Numerics
    weight_bytes: int
    tensor_digests: Mapping[str, str]
    proof: InvarianceProof
    notes: tuple[str, ...]
    unused: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPool:
    """The decided settings: the rank makes its pool and waits for plans."""

    config: ResolvedConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Forget:
    """Requests that are over, when no plan follows that would say so."""

    request_ids: tuple[str, ...]


def plan_of(setup: RankSetup, spec: ModelSpec) -> ExpertPlan:
    """The plan that was given, or experts in equal runs over the layout's ranks."""
    if setup.plan is not None:
        return setup.plan
    return contiguous_plan(tuple(moe.num_experts for _, moe in spec.moe_layers), setup.layout.num_ranks)


def load_share(mesh: Mesh, setup: RankSetup) -> LoadedModel:
    """This rank's part of the model, wired to the other ranks; the wires are made first.

    Raises: what `models.build.build` raises; ConfigError when ranks differ in what they would compute;
            CapacityError when memory that ranks share does not hold their messages.
    """
    config, layout = setup.config, setup.layout
    checkpoint, spec = Checkpoint.open(config.model), read_spec(config.model)
    numerics = config.numerics_for(spec, backend=default_backend(), stated=setup.numerics)
    mesh.agree(
        Identity(
            version=__version__,
            checkpoint=checkpoint.header_digest(),
            numerics=numerics.digest(),
            backend=numerics.backend,
        )
    )
    wires = connect(layout, mesh, spec.moe_layers, numerics, config.max_tokens_per_step)
    plan = plan_of(setup, spec)

    def dispatcher(spec: ModelSpec, numerics: Numerics) -> Dispatcher:
        return make_dispatcher(
            layout, spec.moe_layers, numerics, plan, wires, replica_choice=config.replica_choice
        )

    return build(
        checkpoint,
        spec,
        numerics,
        num_threads=setup.num_threads,
        available_bytes=setup.available_bytes,
        share=Share(rank=mesh.rank, plan=plan, dispatcher=dispatcher),
    )


def ready_of(model: LoadedModel) -> RankReady:
    """What the controller has to know of a loaded share."""
    return RankReady(
        numerics=model.numerics,
        weight_bytes=model.weight_bytes,
        tensor_digests=model.tensor_digests,
        proof=model.proof,
        notes=model.notes,
        unused=model.unused_tensors,
    )


def serve(pipe: Connection, store: dist.Store, rank: int) -> None:
    """The life of a rank, in this process's main thread."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_read, args=(pipe, inbox), daemon=True).start()
    setup = inbox.get()
    try:
        mesh = Mesh.join(rank=rank, num_ranks=setup.layout.num_ranks, store=store)
        model = load_share(mesh, setup)
        pipe.send(ready_of(model))
        resolved = inbox.get().config
        worker = Worker(
            Runner(model.decoder, KvPool(model.spec, model.numerics, resolved.num_blocks)),
            model.spec,
            grammars=setup.grammars,
            traces_routes=resolved.trace_routes,
            replica_idx=rank,
        )
    except MoesaicError as error:
        pipe.send(error)
        return
    while True:
        message = inbox.get()
        if isinstance(message, Forget):
            worker.forget(message.request_ids)
            continue
        pipe.send(_run(worker, message))


def _run(worker: Worker, plan: StepPlan) -> StepResult | MoesaicError:
    try:
        return worker.run(plan)
    except PeerLost as lost:
        return StepResult(
            step_id=plan.step_id, tokens={}, logprobs={}, prompt_logprobs={}, loads=(), spread={}, lost=lost
        )


def _read(pipe: Connection, inbox: SimpleQueue[Any]) -> None:
    """Pass messages on; when the controller is gone, end the process, whatever it is doing."""
    try:
        while True:
            inbox.put(pipe.recv())
    except (EOFError, OSError, pickle.UnpicklingError):
        os._exit(1)


def main() -> None:
    """With the arguments RANK FD HOST PORT; the pipe's other end is the controller's."""
    rank, descriptor, host, port = sys.argv[1:]
    pipe = Connection(socket.socket(fileno=int(descriptor)).detach())
    serve(pipe, dist.TCPStore(host, int(port), is_master=False), int(rank))
