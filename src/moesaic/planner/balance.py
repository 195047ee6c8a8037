"""Which placement balances a measured load: every policy beside the others, and what the best one costs.

The algorithms are `placement`'s. Here loads are matched with a model, policies are timed and judged on other
loads, and copies are priced in memory and moves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from moesaic.account.memory import expert_bytes, kv_footprint
from moesaic.errors import ConfigError, nearest
from moesaic.interop.dump import Dump
from moesaic.placement.balance import DEFAULT_FLOOR, POLICIES, Task, place
from moesaic.placement.coactivation import Pairs, crossing_share, pairs_of_routes
from moesaic.placement.contiguous import contiguous
from moesaic.placement.grid import SlotGrid, round_slots
from moesaic.placement.load import stacked
from moesaic.placement.plan import local_share, plan_of
from moesaic.placement.shares import even_shares, shared_load, solve_shares
from moesaic.placement.slots import Placement, balancedness, num_moves, received
from moesaic.planner.balance_check import Difference, difference
from moesaic.spec.experts import ExpertPlan, FloatArray, IntArray
from moesaic.spec.model import ModelSpec

SOLVED = ("search", "robust")  # policies whose shares are solved too: a second or so a load
Shares = Literal["even", "solved"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Case:
    """What is asked. None: not given, or to be taken from what is. Dumps are matched with the model already.

    Shapes:  current_LGC [sparse layers, GPUs, slots].
    """

    dumps: tuple[Dump, ...]
    holdouts: tuple[Dump, ...] = ()
    model: ModelSpec | None = None
    num_gpus: int
    num_slots: int | None = None
    num_nodes: int = 1
    num_groups: int | None = None
    is_rounded: bool = False  # slots up to the next number that goes
    policies: tuple[str, ...] | None = None
    current: Placement | None = None
    max_moves: int | None = None
    floor: float = DEFAULT_FLOOR
    num_slices: int = 2
    pairs: Pairs = field(default_factory=dict)
    context: int = 4096  # positions of a sequence whose KV a copy takes the room of

    def __post_init__(self) -> None:
        for name in ("num_gpus", "num_slots", "num_nodes", "num_groups"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name.removeprefix('num_')} must be at least 1, got {value}")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Outcome:
    """One policy's placement and how even it is: mean over layers of mean / max GPU load, 1 is even.

    Units:  move_bytes over all GPUs, from the current plan, else from the contiguous one; None without a
             model.
    """

    name: str
    placement: Placement
    seconds: float
    on_load: float  # mean over the loads planned for
    on_load_min: float
    holdout_mean: float | None
    holdout_min: float | None
    on_load_solved: float | None  # with the shares of copies solved for each load
    holdout_mean_solved: float | None
    holdout_min_solved: float | None
    num_moves: int
    move_bytes: int | None
    same_rank_replicas: int
    receive_skew: float | None  # max / mean of the tokens that a GPU receives, each once
    local_share: float | None  # choices that find a copy on their own node
    crossing_share: float | None  # pairs of experts on different nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Formulas:
    """Balance of one placement under one load, as the engines print it.

    Source:  vLLM: sum over layers of mean / sum of max; SGLang: mean over layers of (mean + 1e-5) / (max +
             1e-5); TensorRT-LLM: mean over layers of (max - mean) / mean.
    """

    vllm: float
    sglang: float
    trtllm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What copies cost on one GPU.

    Units:  bytes.
    """

    slot_bytes: int  # one redundant slot in every sparse layer
    redundant_bytes: int  # all of them, on one GPU
    sequence_bytes: int  # KV of one sequence of `context` positions
    context: int

    @property
    def sequences_lost(self) -> int:
        """Sequences whose KV would fit in their place."""
        return self.redundant_bytes // max(self.sequence_bytes, 1)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Balance:
    """The answer.

    Shapes:  loads_SLE [loads, L, E]; before and after the GPU loads [L, G] of all loads together, over the
             mean.
    """

    case: Case
    num_slots: int
    layer_idxs: tuple[int, ...]
    loads_SLE: FloatArray
    outcomes: tuple[Outcome, ...]
    unfit: Mapping[str, str]
    chosen: str
    before: FloatArray
    after: FloatArray
    copies_LE: IntArray  # of the chosen placement
    formulas_before: Formulas
    formulas_after: Formulas
    memory: Memory | None

    def outcome(self, name: str) -> Outcome:
        """What a policy made."""
        return next(one for one in self.outcomes if one.name == name)

    def plan(self, shares: Shares = "even") -> ExpertPlan:
        """The chosen placement as a plan, copies sharing evenly or as solved for all loads together."""
        placement = self.outcome(self.chosen).placement
        load = together(self.loads_SLE)
        share = solve_shares(placement, load) if shares == "solved" else even_shares(placement, load.shape[1])
        return plan_of(placement, share)


def together(loads_SLE: FloatArray) -> FloatArray:
    """All loads added up, each weighing as much as another; a layer's sum is 1."""
    found: FloatArray = (loads_SLE / loads_SLE.sum(axis=2, keepdims=True)).mean(axis=0)
    return found


def balance(case: Case, progress: Callable[[str], None] = lambda line: None) -> Balance:
    """Every policy that fits, on every load.

    Raises: ConfigError when loads disagree, when nothing fits, and for a policy asked for that does not.
    """
    layer_idxs = _same_layers((*case.dumps, *case.holdouts))
    loads = stacked([dump.load() for dump in (*case.dumps, *case.holdouts)])
    planned, held_out = loads[: len(case.dumps)], loads[len(case.dumps) :]
    num_slots = _num_slots(case, loads.shape[2])
    task = Task(
        loads_SLE=planned, num_gpus=case.num_gpus, num_slots=num_slots, num_nodes=case.num_nodes,
        num_groups=_num_groups(case), floor=case.floor, num_slices=case.num_slices, pairs=_pairs(case),
        current_LGC=_current(case, loads),
        max_moves=case.max_moves,
        progress=lambda done, total: progress(f"robust: {done} of {total} layers"),
    )  # fmt: skip
    names, unfit = _fitting(case, task)
    start = _start(case, task)
    outcomes = []
    for name in names:
        progress(f"{name} ...")
        before = time.perf_counter()
        placement = place(task, name)
        seconds = time.perf_counter() - before
        outcomes.append(_judge(case, task, name, placement, seconds, held_out, start, layer_idxs))
    best = max(outcomes, key=lambda one: one.on_load).name
    chosen = next((name for name in ("robust", "search") if name in names), best)
    after = next(one for one in outcomes if one.name == chosen).placement
    load = together(planned)
    old, new = (one.gpu_load(load) for one in (start, after))
    experts = after.ids_LGC.reshape(len(load), -1) // after.num_slices
    return Balance(
        case=case, num_slots=num_slots, layer_idxs=layer_idxs, loads_SLE=planned, outcomes=tuple(outcomes),
        unfit=unfit, chosen=chosen, before=old * case.num_gpus, after=new * case.num_gpus,
        copies_LE=np.stack([np.bincount(row, minlength=load.shape[1]) for row in experts])
        // after.num_slices,
        formulas_before=formulas(old), formulas_after=formulas(new),
        memory=_memory(case, num_slots, layer_idxs),
    )  # fmt: skip


def compare(case: Case) -> Difference:
    """What changed from the first load to the second, and what that does to the current plan or one for the
    first.

    Raises: ConfigError as `balance`.
    """
    layer_idxs = _same_layers(case.dumps)
    loads = stacked([dump.load() for dump in case.dumps])
    tasks = [
        Task(loads_SLE=loads[i : i + 1], num_gpus=case.num_gpus, num_slots=_num_slots(case, loads.shape[2]))
        for i in range(2)
    ]
    _current(case, loads)
    old = case.current or place(tasks[0], "search")
    return difference(loads, layer_idxs, old, place(tasks[1], "search"))


def formulas(load_LG: FloatArray) -> Formulas:
    """The three engines' figures.

    Shapes:  load_LG [L, G].
    """
    mean, most = load_LG.mean(axis=1), load_LG.max(axis=1)
    return Formulas(
        vllm=float(mean.sum() / most.sum()),
        sglang=float(((mean + 1e-5) / (most + 1e-5)).mean()),
        trtllm=float(((most - mean) / mean).mean()),
    )


def _judge(
    case: Case,
    task: Task,
    name: str,
    placement: Placement,
    seconds: float,
    held_out: FloatArray,
    start: Placement,
    layer_idxs: Sequence[int],
) -> Outcome:
    on, off = (_evenness(placement, loads) for loads in (task.loads_SLE, held_out))
    solved_on = _solved(placement, task.loads_SLE) if name in SOLVED else []
    solved_off = _solved(placement, held_out) if name in SOLVED else []
    fetched = _moves(start, placement)
    nodes = case.num_nodes
    top_k = _top_k(case)
    load = task.load_LE
    return Outcome(
        name=name, placement=placement, seconds=seconds, on_load=float(np.mean(on)), on_load_min=min(on),
        holdout_mean=_mean(off), holdout_min=min(off, default=None), on_load_solved=_mean(solved_on),
        holdout_mean_solved=_mean(solved_off),
        holdout_min_solved=min(solved_off, default=None),
        num_moves=int(fetched.sum()), move_bytes=_move_bytes(case, placement, fetched, layer_idxs),
        same_rank_replicas=placement.num_same_rank(),
        receive_skew=None if top_k is None else _receive_skew(placement, load, top_k),
        local_share=local_share(placement, load, nodes) if nodes > 1 else None,
        crossing_share=crossing_share(placement, task.pairs, nodes)
        if nodes > 1 and task.pairs and placement.num_slices == 1
        else None,
    )  # fmt: skip


def _evenness(placement: Placement, loads_SLE: FloatArray) -> list[float]:
    return [float(balancedness(placement.gpu_load(load)).mean()) for load in loads_SLE]


def _solved(placement: Placement, loads_SLE: FloatArray) -> list[float]:
    found = (shared_load(placement, load, solve_shares(placement, load)) for load in loads_SLE)
    return [float(balancedness(load).mean()) for load in found]


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _receive_skew(placement: Placement, load_LE: FloatArray, top_k: int) -> float:
    load_LG = received(placement.weights(load_LE), placement.ids_LGC, top_k)
    return float((load_LG.max(axis=1) / load_LG.mean(axis=1)).mean())


def _moves(start: Placement, placement: Placement) -> IntArray:
    """Experts, or slices of them, that each layer's GPUs fetch; a GPU that has the expert has its slices."""
    before = start.ids_LGC
    if placement.num_slices > 1 and start.num_slices == 1:
        parts = before[:, :, :, None] * placement.num_slices + np.arange(placement.num_slices)
        before = parts.reshape(*before.shape[:2], -1)
    return num_moves(before, placement.ids_LGC)


def _move_bytes(case: Case, placement: Placement, moves: IntArray, layer_idxs: Sequence[int]) -> int | None:
    if case.model is None:
        return None
    moe_layers = dict(case.model.moe_layers)
    sizes = [expert_bytes(case.model, moe_layers[idx]) for idx in layer_idxs]
    return round(float(np.dot(moves, sizes)) / placement.num_slices)


def _same_layers(dumps: Sequence[Dump]) -> tuple[int, ...]:
    first = dumps[0]
    for other in dumps[1:]:
        apart = sorted(set(first.sparse_layers) ^ set(other.sparse_layers))
        if apart:
            raise ConfigError(
                f"{first.source} and {other.source} count in different layers: {len(first.sparse_layers)} "
                "and "
                f"{len(other.sparse_layers)} of them, layer {apart[0]} in one only; loads of one model "
                "are needed"
            )
    return first.sparse_layers


def _num_slots(case: Case, num_experts: int) -> int:
    if case.num_slots is None:
        if case.current is not None and case.current.num_slices == 1:
            return int(case.current.ids_LGC[0].size)
        return round_slots(num_experts, num_experts, case.num_gpus)
    if case.is_rounded:
        return round_slots(case.num_slots, num_experts, case.num_gpus)
    return case.num_slots


def _num_groups(case: Case) -> int:
    if case.num_groups is not None:
        return case.num_groups
    if case.model is None:
        return 1
    return max((moe.gate.num_groups for _, moe in case.model.moe_layers), default=1)


def _top_k(case: Case) -> int | None:
    if case.model is not None and case.model.moe_layers:
        return case.model.moe_layers[0][1].experts_per_token
    return next((dump.top_k for dump in case.dumps if dump.top_k), None)


def _pairs(case: Case) -> Pairs:
    if case.pairs or case.num_nodes == 1:
        return case.pairs
    routed = next((dump for dump in case.dumps if dump.routes_LTK is not None), None)
    if routed is None or routed.routes_LTK is None:
        return {}
    return pairs_of_routes(routed.routes_LTK[list(routed.sparse_rows)], routed.num_experts)


def _current(case: Case, loads: FloatArray) -> IntArray | None:
    if case.current is None:
        return None
    ids = case.current.ids_LGC // case.current.num_slices
    if len(ids) != loads.shape[1] or ids.shape[1] != case.num_gpus:
        raise ConfigError(
            f"the current plan has {len(ids)} layers on {ids.shape[1]} GPUs, the load {loads.shape[1]} "
            "sparse layers "
            f"for {case.num_gpus} GPUs"
        )
    for layer, row in enumerate(ids):
        missing = np.setdiff1d(np.arange(loads.shape[2]), row)
        if len(missing) or row.max() >= loads.shape[2]:
            what = f"lacks expert {missing[0]}" if len(missing) else f"names expert {row.max()}"
            raise ConfigError(
                f"the current plan {what} in sparse layer {layer}; the load has {loads.shape[2]} experts"
            )
    if case.current.num_slices > 1:
        if case.max_moves is not None:
            raise ConfigError("a limit on moves needs a current plan of whole experts; this one has slices")
        return None
    return ids


def _start(case: Case, task: Task) -> Placement:
    """What runs now: the current plan, else experts in the order of their ids."""
    if case.current is not None:
        return case.current
    layers, experts = task.loads_SLE.shape[1:]
    slots = round_slots(task.num_slots, experts, case.num_gpus)
    return contiguous(SlotGrid(num_experts=experts, num_gpus=case.num_gpus, num_slots=slots), layers)


def _fitting(case: Case, task: Task) -> tuple[tuple[str, ...], dict[str, str]]:
    """The policies to run, and why each other does not.

    Raises: ConfigError when one was asked for that does not fit, or when none does.
    """
    for name in case.policies or ():
        if name not in POLICIES:
            raise ConfigError(f"unknown policy {name!r}; {nearest(name, POLICIES)}")
    asked = case.policies or tuple(POLICIES)
    unfit = {name: reason for name in asked if (reason := POLICIES[name].unfit(task)) is not None}
    names = tuple(name for name in asked if name not in unfit)
    if case.policies and unfit:
        name, reason = next(iter(unfit.items()))
        raise ConfigError(f"policy {name} does not fit: {reason}")
    if "contiguous" in unfit:  # the numbers themselves do not go, though slices would
        raise ConfigError(unfit["contiguous"])
    return names, unfit


def _memory(case: Case, num_slots: int, layer_idxs: Sequence[int]) -> Memory | None:
    if case.model is None:
        return None
    moe_layers = dict(case.model.moe_layers)
    slot = sum(expert_bytes(case.model, moe_layers[idx]) for idx in layer_idxs)
    redundant = max(num_slots - case.dumps[0].num_experts, 0)
    return Memory(
        slot_bytes=slot,
        redundant_bytes=round(slot * redundant / case.num_gpus),
        sequence_bytes=kv_footprint(case.model).sequence_bytes(case.context),
        context=case.context,
    )
