"""Which layouts this engine runs, and how they are said in a line."""

from __future__ import annotations

import json
from pathlib import Path

from moesaic.errors import ConfigError
from moesaic.kernels import native
from moesaic.spec.codec import from_plain
from moesaic.spec.deployment import Grid, Layout, check_plan
from moesaic.spec.experts import ExpertPlan
from moesaic.spec.layout_rules import FUSED, Dispatcher
from moesaic.spec.model import ModelSpec

MAX_PLAN_BYTES = 64 * 2**20  # guess: 100 layers of 1,000 slots are 8 MB


def data_parallel(num_ranks: int, dispatcher: Dispatcher | None = None, *, is_native: bool = False) -> Layout:
    """Attention on every rank for its own requests, experts spread over all ranks.

    `dispatcher` None is the fastest between ranks of one machine: over shared memory, for which native
    kernels must have been built, else exchange. Layers are fused where it can and the backend is native.
    """
    ranks = tuple(range(num_ranks))
    if dispatcher is None:
        fastest: Dispatcher = "exchange" if native.module() is None else "shared_memory"
        dispatcher = "local" if num_ranks == 1 else fastest
    return Layout(
        attention=Grid(axes={"dp": num_ranks}, ranks=ranks),
        experts=Grid(axes={"ep": num_ranks}, ranks=ranks),
        dispatcher=dispatcher,
        is_fused=is_native and dispatcher in FUSED,
    )


def check_layout(layout: Layout, spec: ModelSpec) -> None:
    """Whether the model can be laid out so.

    Raises: ConfigError with the numbers and the nearest layouts that can.
    """
    fewest = min((moe.num_experts for _, moe in spec.moe_layers), default=1)
    if layout.num_ranks > fewest:
        raise ConfigError(
            f"{layout.num_ranks} ranks for {fewest} experts a layer: some would hold none; use at most "
            f"{fewest} ranks"
        )


def read_plan(path: str, num_ranks: int, spec: ModelSpec) -> ExpertPlan:
    """The placement that `moesaic balance -o` wrote, for this model and these ranks.

    Raises: ConfigError for a file that is none, and for a plan of other layers, experts or ranks.
    """
    file, where = Path(path), f"placement {path}"
    try:
        if file.stat().st_size > MAX_PLAN_BYTES:
            raise ConfigError(f"{where}: {file.stat().st_size} bytes, a plan has at most {MAX_PLAN_BYTES}")
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{where}: cannot be read ({error.strerror}); give a file of moesaic balance -o"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); write it by moesaic balance -o") from error
    plan = from_plain(ExpertPlan, data, where=where)
    counts = [moe.num_experts for _, moe in spec.moe_layers]
    if len(plan.slot_expert) != len(counts):
        raise ConfigError(
            f"{where}: it has {len(plan.slot_expert)} layers, the model has {len(counts)} with experts; give "
            "balance a load of this model"
        )
    if plan.num_ranks != num_ranks:
        raise ConfigError(
            f"{where}: it is for {plan.num_ranks} ranks, this engine has {num_ranks}; ask for --ranks "
            f"{plan.num_ranks}, or balance for --gpus {num_ranks}"
        )
    check_plan(plan, num_ranks=num_ranks)
    for layer, (ids, count) in enumerate(zip(plan.slot_expert, counts, strict=True)):
        if sorted(set(ids.tolist())) != list(range(count)):
            raise ConfigError(
                f"{where}: sparse layer {layer} must place experts 0 to {count - 1}, each once or more"
            )
    return plan


def describe_layout(layout: Layout) -> str:
    """`attention dp 4, experts ep 4, exchange`."""
    parts = []
    for name, grid in (("attention", layout.attention), ("experts", layout.experts)):
        axes = " ".join(f"{axis} {size}" for axis, size in grid.axes.items() if size > 1) or "on one rank"
        parts.append(f"{name} {axes}")
    return ", ".join([*parts, layout.dispatcher + (" fused" if layout.is_fused else "")])
