"""How a model is laid out over ranks: from wishes or a deployment file to one layout that this engine runs.

Knows files and rules; what a rank does with a layout is not known here.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import get_args

import numpy as np

from moesaic.errors import ConfigError, nearest
from moesaic.hashing import digest
from moesaic.kernels import native
from moesaic.spec.codec import from_plain
from moesaic.spec.deployment import Axis, Deployment, Grid, Layout, check_plan, from_json
from moesaic.spec.experts import MAX_VERSION, ExpertPlan, contiguous_plan, name_parts
from moesaic.spec.layout_rules import (
    DISPATCHERS,
    FUSED,
    GATHERED_RULE,
    NOT_BUILT,
    Dispatcher,
    Returns,
    TpWires,
    refusals,
)
from moesaic.spec.model import ModelSpec
from moesaic.spec.numerics import Numerics
from moesaic.spec.tensor_split import check_leaves, check_slices, check_tensor_parallel

RETURNS: tuple[Returns, ...] = get_args(Returns)

MAX_FILE_BYTES = 2**28  # guess: a placement of 100 layers of 1,000 slots has 8 MB
_COUNTS = ("num_ranks", "tp", "expert_tp", "num_micro_batches", "num_chunks", "ranks_per_node")
FLAGS = {
    "num_ranks": "--ranks",
    "tp": "--tp",
    "expert_tp": "--expert-tp",
    "placement": "--placement",
    "deployment": "--deployment",
    "dispatcher": "--dispatcher",
    "returns": "--returns",
    "num_micro_batches": "--micro-batches",
    "num_chunks": "--chunks",
    "ranks_per_node": "--ranks-per-node",
}
"""What the command line calls the fields of `LayoutWish`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayoutWish:
    """How the user wants a model spread over processes. None: derived, by the rule beside the field."""

    num_ranks: int | None = None  # None: as many as were started, else as a placement is for, else one
    tp: int | None = None  # ranks that share a replica's attention and dense matrices; None: one
    expert_tp: int | None = None  # ranks over which each expert is cut along its inner width; None: one
    placement: str | None = None  # file that says which rank holds which experts; None: equal runs
    deployment: str | None = None  # file with layout, placement and numerics; no other field is stated then
    dispatcher: Dispatcher | None = None  # None: local, gathered, shared_memory or exchange: the fastest
    returns: Returns | None = None  # None: choices
    num_micro_batches: int | None = None  # of a step; None: one
    num_chunks: int | None = None  # parts in which rows are sent to experts; None: one
    ranks_per_node: int | None = None  # that follow each other; None: as they were started, if that is known

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name, known in (("dispatcher", DISPATCHERS), ("returns", RETURNS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise ConfigError(f"{name} {value!r} is unknown; {nearest(value, known)}")
        others = [FLAGS[name] for name in self.stated() if name != "deployment"]
        if self.deployment is not None and others:
            raise ConfigError(
                f"--deployment {self.deployment} says the whole layout, and {', '.join(others)} "
                f"{'says' if len(others) == 1 else 'say'} it again: leave one of them out"
            )
        if self.placement is not None and self.expert_tp is not None:
            raise ConfigError(
                f"--placement {self.placement} says which slices of experts there are, and --expert-tp "
                f"{self.expert_tp} says it again: leave one of them out"
            )

    def stated(self) -> list[str]:
        """Fields that are not None."""
        return [field.name for field in fields(self) if getattr(self, field.name) is not None]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrangement:
    """A layout that this engine runs, and what was said beside it."""

    layout: Layout
    plan: ExpertPlan | None = None  # None: experts in equal runs
    numerics: Numerics | None = None  # None: those of the preset

    @property
    def num_slices(self) -> int:
        """Parts that every expert is cut into."""
        return 1 if self.plan is None else self.plan.num_slices


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Ranks that something else started, such as torchrun."""

    num_ranks: int
    ranks_per_node: int | None  # None: not alike on all nodes, or not said


def arrange(
    wish: LayoutWish, spec: ModelSpec, started: Started | None = None, *, is_native: bool = False
) -> Arrangement:
    """What the wishes come to for a model, on native kernels or others.

    Raises: ConfigError for a file that is none, for wishes that contradict each other, the model or the ranks
            that were started, and for layouts that this engine does not run; with the nearest that it does.
    """
    found = (
        _by_flags(wish, spec, started, is_native)
        if wish.deployment is None
        else _by_file(wish.deployment, spec, is_native=is_native)
    )
    if started is not None and found.layout.num_ranks != started.num_ranks:
        asked = "--ranks" if wish.deployment is None else f"deployment {wish.deployment}"
        raise ConfigError(
            f"{asked} is for {_ranks(found.layout.num_ranks)}, but WORLD_SIZE says {started.num_ranks}: "
            f"start {found.layout.num_ranks}"
            + (", or leave --ranks out" if wish.deployment is None else ", or plan anew")
        )
    check_layout(found.layout, spec, found.num_slices)
    return found


def _by_flags(wish: LayoutWish, spec: ModelSpec, started: Started | None, is_native: bool) -> Arrangement:
    plan, stated = None, wish.num_ranks or (None if started is None else started.num_ranks)
    if wish.placement is not None and stated != 1:
        plan = read_plan(wish.placement, stated, spec)
    num_ranks = stated or (1 if plan is None else max(1, plan.num_ranks))
    if wish.dispatcher is not None and wish.dispatcher in NOT_BUILT:
        raise ConfigError(
            f"dispatcher {wish.dispatcher} does not run yet ({NOT_BUILT[wish.dispatcher]}): "
            f"{_runnable(num_ranks)}"
        )
    if num_ranks == 1:
        for name in ("expert_tp", "placement", "dispatcher", "returns", "num_chunks", "ranks_per_node"):
            value = getattr(wish, name)
            if value not in (None, "local") and (name, value) != ("expert_tp", 1):
                raise ConfigError(
                    f"{FLAGS[name]} {value} is for several ranks, and there is one: ask for several with "
                    f"--ranks, or leave {FLAGS[name]} out"
                )
    elif wish.dispatcher == "local":
        raise ConfigError(
            f"dispatcher local sends nothing, so it has one rank, and there are {num_ranks}: "
            f"{_runnable(num_ranks)}, or leave --ranks out"
        )
    per_node = wish.ranks_per_node or (None if started is None else started.ranks_per_node)
    if wish.dispatcher == "two_level" and (per_node is None or per_node >= num_ranks):
        raise ConfigError(
            f"dispatcher two_level is for ranks on several nodes, got {num_ranks} ranks and "
            + ("no --ranks-per-node" if per_node is None else f"{per_node} per node")
            + (f": ask for --ranks-per-node {_up_to(num_ranks - 1)}" if num_ranks > 1 else "")
            + ", or use exchange"
        )
    expert_tp = wish.expert_tp or 1
    # Before any rank is counted: a slip of the finger may ask for a thousand million.
    _check_count(num_ranks, spec, expert_tp if plan is None else plan.num_slices)
    if expert_tp > 1:
        plan = _cut_plan(num_ranks, expert_tp, spec)
    found = Arrangement(
        layout=data_parallel(
            num_ranks,
            tp=wish.tp or 1,
            expert_tp=expert_tp,
            has_slices=plan is not None and plan.num_slices > 1,
            dispatcher=wish.dispatcher,
            returns=wish.returns or "choices",
            num_micro_batches=wish.num_micro_batches or 1,
            num_chunks=wish.num_chunks or 1,
            ranks_per_node=per_node,
            is_native=is_native,
        ),
        plan=plan,
    )
    for refusal in refusals(found.layout.cell(has_slices=True)) if found.num_slices > 1 else ():
        value = getattr(found.layout, refusal.field)
        raise ConfigError(
            f"{refusal.field} {value} does not run with {count_slices(found.num_slices)}: {refusal.reason}; "
            f"leave {FLAGS[refusal.field]} out"
        )
    return found


def _cut_plan(num_ranks: int, expert_tp: int, spec: ModelSpec) -> ExpertPlan:
    """Groups of `expert_tp` ranks, each with every expert of its group cut over its ranks.

    Raises: ConfigError when ranks do not go into such groups.
    """
    if num_ranks % expert_tp:
        raise ConfigError(
            f"expert_tp {expert_tp} does not divide {_ranks(num_ranks)}: {num_ranks} mod {expert_tp} = "
            f"{num_ranks % expert_tp}; ask for --expert-tp {_divisors(num_ranks)}, or for --ranks "
            f"{-(-num_ranks // expert_tp) * expert_tp}"
        )
    return contiguous_plan(tuple(moe.num_experts for _, moe in spec.moe_layers), num_ranks, expert_tp)


def _by_file(path: str, spec: ModelSpec, *, is_native: bool) -> Arrangement:
    deployment, where = read_deployment(path), f"deployment {path}"
    if deployment.model_digest != digest(spec):
        raise ConfigError(
            f"{where}: it was made for another model (digest {deployment.model_digest}, this one has "
            f"{digest(spec)}); plan for this one with moesaic plan"
        )
    if reasons := deployment.not_runnable(is_native=is_native):
        raise ConfigError(
            f"{where}: this engine does not run all of it:\n  "
            + "\n  ".join(str(reason) for reason in reasons)
            + "\nplan with other --layout and formats, or print the lines of another engine with moesaic emit"
        )
    (instance,) = deployment.instances
    check_placement(instance.plan, instance.layout.num_ranks, spec, where=where)
    return Arrangement(layout=instance.layout, plan=instance.plan, numerics=deployment.numerics)


def data_parallel(  # noqa: PLR0913 - each is a wish of its own
    num_ranks: int,
    *,
    tp: int = 1,
    expert_tp: int = 1,
    has_slices: bool = False,
    dispatcher: Dispatcher | None = None,
    returns: Returns = "choices",
    num_micro_batches: int = 1,
    num_chunks: int = 1,
    ranks_per_node: int | None = None,
    is_native: bool = False,
) -> Layout:
    """Attention by replicas of `tp` ranks for requests of their own, experts spread over all ranks.

    `dispatcher` None is the fastest between ranks of one machine: gathered in one replica, else over shared
    memory, for which native kernels must have been built, else exchange. Layers are fused where it can, the
    backend is native, experts are whole, and neither subtrees nor chunks are asked for. Slices of experts are
    over groups of `expert_tp` ranks, or as a plan has them.

    Raises: ConfigError when `tp` does not divide the ranks.
    """
    if num_ranks % tp:
        raise ConfigError(
            f"tp {tp} does not divide {_ranks(num_ranks)}: {num_ranks} mod {tp} = {num_ranks % tp}; ask for "
            f"--tp {_divisors(num_ranks)}, or for --ranks {max(1, num_ranks // tp) * tp}"
        )
    ranks = tuple(range(num_ranks))
    experts: dict[Axis, int] = {"ep": num_ranks // expert_tp}
    if expert_tp > 1:
        experts["tp"] = expert_tp
    if dispatcher is None:
        fastest: Dispatcher = "exchange" if native.module() is None else "shared_memory"
        dispatcher = "local" if num_ranks == 1 else "gathered" if num_ranks == tp else fastest
    return Layout(
        attention=Grid(axes={"dp": num_ranks // tp, "tp": tp}, ranks=ranks),
        experts=Grid(axes=experts, ranks=ranks),
        dispatcher=dispatcher,
        returns=returns,
        num_micro_batches=num_micro_batches,
        num_chunks=num_chunks,
        ranks_per_node=ranks_per_node,
        is_fused=is_native
        and dispatcher in FUSED
        and returns == "choices"
        and num_chunks == 1
        and not has_slices,
    )


def check_layout(layout: Layout, spec: ModelSpec, num_slices: int = 1) -> None:
    """Whether the model can be laid out so, its experts in so many slices.

    Raises: ConfigError with the numbers and the nearest layouts that can.
    """
    if layout.dispatcher == "gathered" and layout.attention.size("tp") != layout.num_ranks:
        raise ConfigError(
            f"dispatcher gathered: {GATHERED_RULE}; this layout has tp {layout.attention.size('tp')} and "
            f"{_ranks(layout.num_ranks)}: ask for --tp {layout.num_ranks} "
            "and as many --matmul-shards or more, or use exchange"
        )
    _check_count(layout.num_ranks, spec, num_slices)


def _check_count(num_ranks: int, spec: ModelSpec, num_slices: int) -> None:
    """Whether every rank gets an expert, or a slice of one, in every layer.

    Raises: ConfigError with the most ranks, or slices, that there can be.
    """
    fewest = min((moe.num_experts for _, moe in spec.moe_layers), default=1)
    width = min((moe.expert_width for _, moe in spec.moe_layers), default=num_slices)
    if num_slices > width:
        raise ConfigError(
            f"{num_slices} slices of an expert that is {width} wide: some would be empty; ask for fewer "
            "(--expert-tp)"
        )
    if num_ranks > fewest * num_slices:
        of_slices = f" in {num_slices} slices" if num_slices > 1 else ""
        raise ConfigError(
            f"{num_ranks} ranks for {fewest} experts a layer{of_slices}: some would hold none; use at "
            f"most {fewest * num_slices} ranks, or cut experts (--expert-tp)"
        )


def check_parts(layout: Layout, max_tokens: int) -> None:
    """Whether steps of up to so many tokens can be cut as a layout does.

    Raises: ConfigError: each part has wires of its own, and there is nothing to send over more of them.
    """
    for name in ("num_micro_batches", "num_chunks"):
        count = getattr(layout, name)
        if count > max_tokens:
            raise ConfigError(
                f"{name} {count}: a step has up to {max_tokens} tokens (max_tokens_per_step), so most parts "
                f"would always be empty; ask for fewer ({FLAGS[name]})"
            )


def check_split(layout: Layout, spec: ModelSpec, numerics: Numerics, num_slices: int = 1) -> None:
    """Whether these numerics have the leaves, and the model the heads, that a layout and slices split.

    Raises: ConfigError with the arithmetic, and what would do.
    """
    tp = layout.attention.size("tp")
    if tp > numerics.matmul_shards and layout.num_ranks > 1:
        needed = 1 << (tp - 1).bit_length()
        raise ConfigError(
            f"tp {tp} splits each sum further than its {numerics.matmul_shards} leaves: numerics with "
            f"matmul_shards {needed} allow it; ask for --matmul-shards {needed}, also where its bits are "
            "compared with one rank's"
        )
    check_slices(numerics.matmul_shards, num_slices)
    check_leaves(spec, numerics)
    check_tensor_parallel(spec, tp, numerics.matmul_shards)


def settle(arranged: Arrangement, wish: LayoutWish, hosts: Sequence[str]) -> Arrangement:
    """The arrangement of ranks that are on these hosts, by rank: a dispatcher that was not stated follows.

    Raises: ConfigError naming two ranks that cannot reach each other as was stated.
    """
    layout = arranged.layout
    if layout.dispatcher != "shared_memory" or len(set(hosts)) == 1:
        return arranged
    if wish.dispatcher is None and wish.deployment is None:
        return replace(arranged, layout=replace(layout, dispatcher="exchange", is_fused=False))
    far = next(rank for rank, host in enumerate(hosts) if host != hosts[0])
    raise ConfigError(
        f"dispatcher shared_memory is for ranks of one host, and ranks 0 and {far} share none: use "
        "exchange or two_level"
    )


def check_tp_wires(layout: Layout, wish: TpWires | None) -> None:
    """Refuse wires between the ranks of a replica where each replica is one rank.

    Raises: ConfigError.
    """
    if wish is not None and layout.attention.size("tp") == 1:
        raise ConfigError(
            f"--tp-wires {wish} is for ranks that share attention, and none do: ask for --tp, or leave "
            "--tp-wires out"
        )


def tp_wires_of(layout: Layout, wish: TpWires | None, hosts: Sequence[str]) -> TpWires | None:
    """What the ranks of a replica sum and gather over, on these hosts by rank; None: a replica is one rank.

    Not stated it is memory where each replica has one host, and kernels that can share it are built.

    Raises: ConfigError as `check_tp_wires`, and naming two ranks that cannot share memory as was stated.
    """
    check_tp_wires(layout, wish)
    tp = layout.attention.size("tp")
    if tp == 1:
        return None
    far = [rank for rank, host in enumerate(hosts) if host != hosts[rank // tp * tp]]
    if wish == "shared_memory" and far:
        raise ConfigError(
            f"--tp-wires shared_memory is for replicas of one host, and ranks {far[0] // tp * tp} and "
            f"{far[0]} of one share none: use gloo"
        )
    return wish or ("gloo" if far or native.module() is None else "shared_memory")


def read_plan(path: str, num_ranks: int | None, spec: ModelSpec) -> ExpertPlan:
    """The placement that `moesaic balance -o` wrote, for this model and these ranks, or as many as it is for.

    Raises: ConfigError for a file that is none, and for a plan of other layers, experts or ranks.
    """
    where = f"placement {path}"
    text = _read(path, where, "moesaic balance -o")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); write it by moesaic balance -o") from error
    if isinstance(data, dict) and "counts" in data:
        raise ConfigError(f"{where}: this is a load; moesaic balance {path} -o plan.json makes a plan of it")
    plan = from_plain(ExpertPlan, data, where=where)
    check_placement(plan, plan.num_ranks if num_ranks is None else num_ranks, spec, where=where)
    return plan


def read_deployment(path: str) -> Deployment:
    """The deployment that `moesaic plan -o` wrote.

    Raises: ConfigError for a file that is none.
    """
    where = f"deployment {path}"
    text = _read(path, where, "moesaic plan -o")
    if b'"slot_expert"' in text and b'"instances"' not in text:
        raise ConfigError(f"{where}: this is a placement; give it with --placement")
    return from_json(text, name=where)


def _read(path: str, where: str, writer: str) -> bytes:
    file = Path(path)
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{where}: {file.stat().st_size} bytes, it may have {MAX_FILE_BYTES}")
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read ({error.strerror}); give a file of {writer}") from error


def check_placement(plan: ExpertPlan, num_ranks: int, spec: ModelSpec, *, where: str) -> None:
    """Whether a plan is for this model and these ranks.

    Raises: ConfigError for a plan of other layers, experts or ranks, or with experts, or slices of such, that
            no slot takes tokens for.
    """
    counts, num_slices = [moe.num_experts for _, moe in spec.moe_layers], plan.num_slices
    if len(plan.slot_expert) != len(counts):
        raise ConfigError(
            f"{where}: it has {len(plan.slot_expert)} layers, the model has {len(counts)} with experts; give "
            "balance a load of this model"
        )
    if plan.num_ranks > num_ranks or (plan.num_ranks < num_ranks and plan.slot_rank):
        raise ConfigError(
            f"{where}: it is for {plan.num_ranks} ranks, this engine has {num_ranks}; ask for --ranks "
            f"{plan.num_ranks}, or balance for --gpus {num_ranks}"
        )
    check_plan(plan, num_ranks=num_ranks)
    for layer, (ids, count) in enumerate(zip(plan.part_ids, counts, strict=True)):
        if len(ids) < count * num_slices and num_slices > 1:
            raise ConfigError(
                f"{where}: sparse layer {layer} has {len(ids)} slots, and {count} experts in {num_slices} "
                f"slices need {count * num_slices} or more"
            )
        wanted = set(range(count * num_slices))
        lost = sorted(wanted - {*ids.tolist()})
        unknown = sorted({*plan.slot_expert[layer].tolist()} - set(range(count)))
        if lost or unknown:
            what = f"has no slot for {name_parts(lost, num_slices)}" if lost else f"names experts {unknown}"
            raise ConfigError(
                f"{where}: sparse layer {layer} {what}; it must place experts 0 to {count - 1}, "
                + ("each" if num_slices == 1 else f"each of their {num_slices} slices")
                + " once or more"
            )
        share_P = plan.slot_share[layer]
        if not np.isfinite(share_P).all() or (share_P < 0).any():
            raise ConfigError(f"{where}: a share in sparse layer {layer} is below 0 or not a number")
        if idle := sorted(wanted - set(ids[share_P > 0].tolist())):
            raise ConfigError(
                f"{where}: no slot of {name_parts(idle, num_slices)} of sparse layer {layer} has a share of "
                "their tokens; the shares of an expert's slots sum to 1"
            )
    if not 0 <= plan.version <= MAX_VERSION:
        raise ConfigError(f"{where}: version must be 0 to {MAX_VERSION}, got {plan.version}")


def describe_layout(layout: Layout, tp_wires: TpWires | None = None) -> str:
    """`attention dp 4, experts ep 4, exchange`, and what is not as usual."""
    parts = []
    for name, grid in (("attention", layout.attention), ("experts", layout.experts)):
        axes = " ".join(f"{axis} {size}" for axis, size in grid.axes.items() if size > 1) or "on one rank"
        parts.append(f"{name} {axes}")
    parts.append(layout.dispatcher + (" fused" if layout.is_fused else ""))
    if tp_wires is not None:
        parts.append(f"tp over {tp_wires}")
    if layout.returns != "choices":
        parts.append(f"returns {layout.returns}")
    if layout.num_micro_batches > 1:
        parts.append(f"{layout.num_micro_batches} micro-batches")
    if layout.num_chunks > 1:
        parts.append(f"{layout.num_chunks} chunks")
    if layout.ranks_per_node is not None:
        parts.append(f"{_ranks(layout.ranks_per_node)} per node")
    return ", ".join(parts)


def _runnable(num_ranks: int) -> str:
    """The nearest dispatchers that run."""
    if num_ranks == 1:
        return "local runs on one rank"
    return f"for {num_ranks} ranks there are " + " and ".join(
        one for one in DISPATCHERS if one not in NOT_BUILT and one not in ("local", "gathered")
    )


def count_slices(num_slices: int) -> str:
    """`whole experts`, `experts in 2 slices`."""
    return "whole experts" if num_slices == 1 else f"experts in {num_slices} slices"


def _divisors(count: int) -> str:
    return ", ".join(str(size) for size in range(1, count + 1) if count % size == 0)


def _up_to(most: int) -> str:
    return "1" if most == 1 else f"1 to {most}"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
