"""From wishes to a running engine: read the machine, load, resolve, wire the parts, say what came out."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from moesaic.engine.config import EngineConfig, ResolvedConfig, read_environment
from moesaic.engine.grammar import Grammars
from moesaic.engine.link import LocalLink
from moesaic.engine.loop import Engine, Facts
from moesaic.engine.machine import read_machine
from moesaic.engine.runner import Runner
from moesaic.engine.worker import Worker
from moesaic.hashing import digest
from moesaic.kernels import huge_pages, native
from moesaic.kv.pool import KvPool
from moesaic.log import get_logger
from moesaic.models.build import LoadedModel, load
from moesaic.sched.key import KvKeyScope
from moesaic.sched.ledger import KvLedger
from moesaic.sched.scheduler import Scheduler
from moesaic.units import format_bytes

_log = get_logger("engine")


def start_engine(
    config: EngineConfig,
    *,
    tokenizer_digest: str = "",
    grammars: Grammars | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Engine:
    """An engine that takes requests. Text stays outside: `tokenizer_digest` only keeps caches apart.

    Owns:    the engine must be closed; it also ends with the main thread.
    Raises:  ConfigError, CheckpointError, HostMemoryShort, CapacityError, KernelUnavailable: all of them
             before a request is taken.
    """
    config = config.with_environment(read_environment())
    machine = read_machine()
    model = load(
        config.model,
        preset=config.preset,
        dtype=config.dtype,
        format=config.format,
        num_threads=config.threads(machine),
        backend=config.backend,
        available_bytes=machine.available_bytes,
        progress=progress,
    )
    resolved = config.resolve(model.spec, model.numerics, read_machine())
    engine = assemble(model, resolved, tokenizer_digest=tokenizer_digest, grammars=grammars)
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
) -> Engine:
    """The parts of an engine around a loaded model, not yet started."""
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
    pool = KvPool(model.spec, model.numerics, config.num_blocks)
    worker = Worker(
        Runner(model.decoder, pool), model.spec, grammars=grammars, traces_routes=config.trace_routes
    )
    notes = _notes(model, config, has_prefix_cache=ledger.has_prefix_cache)
    for line in (
        f"weights {format_bytes(model.weight_bytes)} ({model.numerics.formats.default.weight}), "
        f"backend {model.numerics.backend}",
        config.describe_kv(),
        model.proof.summary(),
        *notes,
    ):
        _log.info(line)
    return Engine(
        spec=model.spec,
        config=config,
        scheduler=Scheduler(ledger, config.limits),
        link=LocalLink(worker),
        facts=Facts(weight_bytes=model.weight_bytes, active=describe(model, config, notes)),
        grammars=grammars,
    )


def _notes(model: LoadedModel, config: ResolvedConfig, *, has_prefix_cache: bool) -> list[str]:
    """What was asked for, or could be expected, and is not active, and what loading changed."""
    notes = [*model.notes, *config.notes]
    if config.has_prefix_cache and not has_prefix_cache:
        notes.append(
            "prefix cache: off, because this model keeps a running state that cannot be cut at a block"
        )
    if not native.levels():
        notes.append("native kernels: not built in this installation, so matmuls are torch's own")
    if (reason := huge_pages.why_none()) is not None:
        notes.append(f"huge pages: none for the weights, which are read more slowly: {reason}")
    notes += [f"{name}: {effect}" for name, effect in model.numerics.effects()]
    return notes


def describe(model: LoadedModel, config: ResolvedConfig, notes: list[str]) -> dict[str, Any]:
    """What runs, as plain values: the content of `/v1/internal/active`."""
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
            "attention": {"dp": 1, "kvp": 1, "tp": 1},
            "experts": {"ep": 1, "tp": 1},
            "dispatcher": "local",
            "num_ranks": 1,
        },
        "num_threads": config.num_threads,
        "kv": {
            "bytes": config.kv_bytes,
            "source": config.kv_source,
            "num_blocks": list(config.num_blocks),
            "block_tokens": config.kv_block,
        },
        "limits": {
            "max_num_seqs": limits.max_num_seqs,
            "max_tokens_per_step": limits.max_tokens_per_step,
            "max_model_len": limits.max_model_len,
            "max_waiting": limits.max_waiting,
        },
        "not_active": notes,
        "unused_tensors": [
            {"name": tensor.key, "bytes": tensor.num_bytes, "reason": tensor.reason}
            for tensor in model.accounting.unused
        ],
    }
