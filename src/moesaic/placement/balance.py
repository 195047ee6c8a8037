"""The policies by name: what each needs, and one way to call them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from moesaic.errors import ConfigError, nearest
from moesaic.placement.coactivation import Pairs, coactivation
from moesaic.placement.contiguous import contiguous
from moesaic.placement.eplb import eplb, eplb_hierarchical
from moesaic.placement.grid import SlotGrid
from moesaic.placement.local_search import local_search
from moesaic.placement.lpt import lpt
from moesaic.placement.megascale import megascale
from moesaic.placement.plan import relabel, spread_over_nodes
from moesaic.placement.robust import robust
from moesaic.placement.search import normalised
from moesaic.placement.slices import slices
from moesaic.placement.slots import Placement, balancedness, gpu_load, num_moves
from moesaic.spec.experts import FloatArray, IntArray

DEFAULT_FLOOR = 0.5  # guess: K of MegaScale's objective, in mean loads of an expert


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Task:
    """What is to be placed where, and what is known beside it.

    Shapes:  loads_SLE [S, L, E], no layer without load; current_LGC [L, GPUs, slots].
    """

    loads_SLE: FloatArray
    num_gpus: int
    num_slots: int
    num_nodes: int = 1
    num_groups: int = 1
    floor: float = DEFAULT_FLOOR
    num_slices: int = 2
    pairs: Pairs = field(default_factory=dict)
    current_LGC: IntArray | None = None  # whole experts
    max_moves: int | None = None  # experts that may be fetched from the current placement, over all layers
    progress: Callable[[int, int], None] = lambda done, total: None

    def __post_init__(self) -> None:
        if not 0 <= self.floor < np.inf:
            raise ConfigError(f"the floor of an expert's cost is at least 0 mean loads, got {self.floor}")
        if self.num_slices < 2:
            raise ConfigError(f"an expert is cut into at least 2 slices, got {self.num_slices}")
        if self.max_moves is not None and self.current_LGC is None:
            raise ConfigError("a limit on moves needs a current plan to move from")
        if self.max_moves is not None and self.max_moves < 0:
            raise ConfigError(f"a limit on moves is at least 0, got {self.max_moves}")

    @property
    def load_LE(self) -> FloatArray:
        """All loads together, each weighing as much as another."""
        shares = self.loads_SLE / self.loads_SLE.sum(axis=2, keepdims=True)
        found: FloatArray = shares.mean(axis=0)
        return found

    def grid(self, parts: int = 1) -> SlotGrid:
        """The slots, of whole experts or of parts of them.

        Raises: ConfigError when the numbers do not go together.
        """
        return SlotGrid(
            num_experts=self.loads_SLE.shape[2] * parts, num_gpus=self.num_gpus,
            num_slots=self.num_slots * parts, num_nodes=self.num_nodes, num_groups=self.num_groups,
        )  # fmt: skip

    def budget(self) -> IntArray | None:
        """Moves of each layer: an even part, the rest of the division to the layers least even now."""
        if self.max_moves is None or self.current_LGC is None:
            return None
        worst = self.loads_SLE / self.loads_SLE.sum(axis=2, keepdims=True)
        even = np.min([balancedness(gpu_load(load, self.current_LGC)) for load in worst], axis=0)
        budget = np.full(len(even), self.max_moves // len(even), dtype=np.int64)
        budget[np.argsort(even, kind="stable")[: self.max_moves % len(even)]] += 1
        return budget


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One way to place. `unfit` says why it cannot, or None."""

    place: Callable[[Task], Placement]
    unfit: Callable[[Task], str | None]
    summary: str


def place(task: Task, name: str) -> Placement:
    """What a policy makes of a task.

    Raises: ConfigError for an unknown policy, or for one that does not fit, with the reason.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown policy {name!r}; {nearest(name, POLICIES)}")
    reason = POLICIES[name].unfit(task)
    if reason is not None:
        raise ConfigError(f"policy {name} does not fit: {reason}")
    return POLICIES[name].place(task)


def _whole(task: Task) -> str | None:
    return _reason(task, 1)


def _reason(task: Task, parts: int) -> str | None:
    try:
        task.grid(parts)
    except ConfigError as error:
        return str(error)
    return None


def _hierarchical(task: Task) -> str | None:
    if task.num_nodes == 1 or task.num_groups % task.num_nodes:
        return (
            f"{task.num_nodes} nodes do not divide {task.num_groups} groups of experts into more than one "
            "part; "
            "give --nodes, and --groups or a --model with groups"
        )
    if task.num_slots % task.num_nodes:
        return f"{task.num_slots} slots mod {task.num_nodes} nodes = {task.num_slots % task.num_nodes}"
    return _reason(task, 1)


def _paired(task: Task) -> str | None:
    if not task.pairs:
        return "no pairs of experts are known; give --pairs or a load with the routes of tokens"
    experts = task.loads_SLE.shape[2]
    if task.num_nodes == 1 or experts % task.num_nodes or task.num_slots % task.num_nodes:
        return (
            f"it needs several nodes that divide experts and slots: {experts} experts and "
            f"{task.num_slots} slots "
            f"on {task.num_nodes} nodes"
        )
    return _reason(task, 1)


def _several(task: Task) -> str | None:
    if len(task.loads_SLE) < 2:
        return "it needs two loads or more"
    return _reason(task, 1)


def _search(task: Task) -> Placement:
    if task.current_LGC is None:
        return _near(task, local_search(task.load_LE, task.grid()))
    if task.max_moves is not None:
        return local_search(task.load_LE, task.grid(), start=_start(task), budget_L=task.budget())
    return _fewer_moves(task, relabel(local_search(task.load_LE, task.grid()), task.current_LGC))


def _robust(task: Task) -> Placement:
    if task.max_moves is None:
        found = robust(task.loads_SLE, task.grid(), progress=task.progress)
        return _near(task, found) if task.current_LGC is None else relabel(found, task.current_LGC)
    return robust(
        task.loads_SLE, task.grid(), start=_start(task), budget_L=task.budget(), progress=task.progress
    )


def _near(task: Task, placement: Placement) -> Placement:
    if task.num_nodes == 1:
        return placement
    return spread_over_nodes(placement, task.load_LE, task.num_nodes)


def _start(task: Task) -> IntArray:
    current = task.current_LGC
    if current is None or current.shape[1:] != (task.num_gpus, task.num_slots // task.num_gpus):
        raise ConfigError(
            f"a limit on moves needs as many GPUs and slots as the current plan has; it has "
            f"{'none' if current is None else f'{current.shape[1]} GPUs of {current.shape[2]} slots'}"
        )
    if Placement(ids_LGC=current).num_same_rank():
        raise ConfigError(
            "the current plan has two copies of an expert on one GPU, which this search never makes; "
            "leave the "
            "limit on moves out"
        )
    return current


def _fewer_moves(task: Task, scratch: Placement) -> Placement:
    """Per layer the placement improved from the current one, where it is as even as the one from scratch."""
    current = task.current_LGC
    assert current is not None, "asked for with a current plan only"
    if current.shape[1:] != scratch.ids_LGC.shape[1:] or Placement(ids_LGC=current).num_same_rank():
        return scratch
    load = normalised(task.loads_SLE, task.num_gpus).mean(axis=0)
    moved = local_search(load, task.grid(), start=current)
    even = balancedness(moved.gpu_load(load)) >= balancedness(scratch.gpu_load(load)) - 1e-3
    fewer = num_moves(current, moved.ids_LGC) <= num_moves(current, scratch.ids_LGC)
    return Placement(ids_LGC=np.where((even & fewer)[:, None, None], moved.ids_LGC, scratch.ids_LGC))


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        "contiguous": Policy(
            place=lambda task: contiguous(task.grid(), task.loads_SLE.shape[1]),
            unfit=_whole, summary="experts in the order of their ids",
        ),
        "lpt": Policy(
            place=lambda task: lpt(task.load_LE, task.grid()), unfit=_whole,
            summary="greedy copies, largest first, copies on different GPUs",
        ),
        "eplb": Policy(
            place=lambda task: eplb(task.load_LE, task.grid()), unfit=_whole,
            summary="DeepSeek's balancer over all GPUs",
        ),
        "eplb-hierarchical": Policy(
            place=lambda task: eplb_hierarchical(task.load_LE, task.grid()), unfit=_hierarchical,
            summary="DeepSeek's balancer, groups of experts kept on nodes",
        ),
        "megascale": Policy(
            place=lambda task: megascale(task.load_LE, task.grid(), task.floor), unfit=_whole,
            summary="an expert costs at least the reading of its weights",
        ),
        "coactivation": Policy(
            place=lambda task: coactivation(task.load_LE, task.grid(), task.pairs), unfit=_paired,
            summary="experts that the same tokens use on one node",
        ),
        "slices": Policy(
            place=lambda task: slices(task.load_LE, task.grid(task.num_slices), task.num_slices),
            unfit=lambda task: _reason(task, task.num_slices), summary="each expert cut into parts",
        ),
        "search": Policy(
            place=_search, unfit=_whole, summary="copies and places searched together; moves bounded",
        ),
        "robust": Policy(
            place=_robust, unfit=_several, summary="the same for several loads and what lies beyond them",
        ),
    }
)  # fmt: skip
