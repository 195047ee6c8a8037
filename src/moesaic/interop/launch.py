"""A deployment as another engine would be started: launch lines, files, and what the engine cannot carry.

Values and what all engines share. Which flag says what is in the module of each engine; every flag is looked
up in the inventory of the release, so one that is not in it is never written.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from moesaic.errors import ConfigError, nearest
from moesaic.interop.inventory import Inventory
from moesaic.placement.pack import placed_slots
from moesaic.spec.deployment import Deployment, Instance, Layout
from moesaic.spec.experts import ExpertPlan, Phase
from moesaic.spec.hardware import node_devices
from moesaic.spec.model import ModelSpec

HEAD = "${HEAD:?address of the first node}"
DEFAULT_DEVICES_PER_NODE = 8  # guess: of a machine that no file describes

PlacementWriter = Callable[[ExpertPlan, ModelSpec | None], str]
"""The text of an engine's expert placement file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lack:
    """Something of the deployment that the engine cannot carry, and the nearest that it can do."""

    path: str
    value: str
    reason: str
    nearest: str

    def __str__(self) -> str:
        return f"{self.path} = {self.value}: {self.reason}; nearest: {self.nearest}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One instance as the numbers that launch lines are made of.

    `dp` replicas of attention of `tp` x `kvp` ranks; experts over `ep` ranks, each cut into `expert_tp`.
    """

    name: str
    path: str  # in the deployment file
    phases: frozenset[Phase]
    count: int
    tp: int
    dp: int
    kvp: int
    ep: int
    expert_tp: int
    pp: int
    num_micro_batches: int
    dispatcher: str
    num_experts: int  # logical; 0 for a dense model
    num_redundant: int
    weights: str | None  # None: as the checkpoint stores them
    stored: str | None  # how it stores them, as far as is known: of an unknown model as planned
    kv: str
    dispatch: str
    dtype: str
    devices_per_node: int
    instance: Instance

    @property
    def ranks(self) -> int:
        """Devices of a stage."""
        return self.tp * self.dp * self.kvp

    @property
    def num_devices(self) -> int:
        """Devices of the instance."""
        return self.ranks * self.pp

    @property
    def num_nodes(self) -> int:
        """Nodes of the instance."""
        return -(-self.num_devices // self.devices_per_node)

    @property
    def phase(self) -> Phase | None:
        """The one phase it does; None for both."""
        return next(iter(self.phases)) if len(self.phases) == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a line runs: how it names the first node, and its own position, as text that a shell expands."""

    head: str
    rank: str
    is_head: bool

    def times(self, number: int) -> str:
        """The rank times a number."""
        return (
            str(int(self.rank) * number) if self.rank.isdigit() else f"$(({self.rank.strip('$')} * {number}))"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One process to start on one node of one instance."""

    instance: str
    node: int
    num_nodes: int
    count: int  # instances that are started like this
    env: Mapping[str, str]
    words: tuple[str, ...]

    @property
    def text(self) -> str:
        """The line for a shell."""
        return " ".join([*(f"{k}={quoted(v)}" for k, v in self.env.items()), *map(quoted, self.words)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Emission:
    """All that starts a deployment. `lacks` is what it leaves out; empty: the whole is carried."""

    engine: str
    version: str
    basis: str
    model: str
    launches: tuple[Launch, ...]
    files: Mapping[str, str]
    lacks: tuple[Lack, ...]
    notes: tuple[str, ...]


class Words:
    """The words of a line; every flag is checked against the inventory when it is added."""

    def __init__(self, inventory: Inventory, *start: str, program: str | None = None) -> None:
        self.inventory, self.program = inventory, program
        self.words = list(start)

    def has(self, name: str) -> bool:
        """Whether the release knows a flag."""
        return self.inventory.find(name, self.program) is not None

    def add(self, name: str, value: object = None) -> None:
        """A flag, with its value where it takes one.

        Raises: ConfigError for a flag or a choice that the release does not have, which is our bug.
        """
        flag = self.inventory.check(name, self.program)
        if flag.takes_value != (value is not None):
            raise ConfigError(
                f"{name} of {self.inventory.title} takes {'a' if flag.takes_value else 'no'} value"
            )
        if value is not None and flag.choices and str(value) not in flag.choices:
            raise ConfigError(
                f"{name} {value}: {self.inventory.title} has {nearest(str(value), flag.choices)}"
            )
        self.words += [name] if value is None else [name, str(value)]

    def allows(self, name: str, value: str) -> bool:
        """Whether the release takes a value, as far as its choices are known."""
        flag = self.inventory.find(name, self.program)
        return flag is not None and (not flag.choices or value in flag.choices)


def shapes_of(
    deployment: Deployment, spec: ModelSpec | None, devices_per_node: int | None
) -> tuple[Shape, ...]:
    """Every instance as numbers. Attention and experts on ranks of their own are joined on the same ranks.

    Raises: ConfigError for nodes that an instance does not fill.
    """
    return tuple(
        _shape(f"instances[{idx}]", instance, deployment, spec, devices_per_node)
        for idx, instance in enumerate(deployment.instances)
    )


def _shape(
    path: str, instance: Instance, deployment: Deployment, spec: ModelSpec | None, per_node: int | None
) -> Shape:
    layout = instance.layout
    formats = dict(re.findall(r"(\w+)=(\S+)", deployment.numerics.backend))
    stored = None if spec is None else spec.weight_format
    weights = formats.get("weights")
    experts = max((int(ids.max(initial=-1)) + 1 for ids in instance.plan.slot_expert), default=0)
    tp, dp, kvp = (layout.attention.size(axis) for axis in ("tp", "dp", "kvp"))
    ep, expert_tp = layout.experts.size("ep"), layout.experts.size("tp")
    slots = max((len(ids) for ids in instance.plan.slot_expert), default=0) // expert_tp
    redundant = max(slots - experts, 0)
    node = per_node or node_devices(instance.machines["attention"]) or DEFAULT_DEVICES_PER_NODE
    if layout.is_split:
        ep, expert_tp = _joined_ranks(layout, tp * kvp, node), 1
        dp, redundant = ep // (tp * kvp), -experts % ep
    shape = Shape(
        name=instance.name, path=path, phases=instance.phases, count=instance.count, tp=tp, dp=dp, kvp=kvp,
        ep=ep, expert_tp=expert_tp, pp=layout.pipeline, num_micro_batches=layout.num_micro_batches,
        dispatcher=layout.dispatcher, num_experts=experts, num_redundant=redundant,
        weights=None if stored is None or weights in (None, stored) else weights, stored=stored or weights,
        kv=formats.get("kv", "bfloat16"), dispatch=formats.get("dispatch", "bfloat16"),
        dtype=deployment.numerics.seam_dtype,
        devices_per_node=node, instance=instance,
    )  # fmt: skip
    devices = shape.num_devices
    if devices > node and devices % node:
        raise ConfigError(
            f"{path} has {devices} devices, which fill no whole nodes of {node}; say how many a node "
            "has with "
            "--gpus-per-node"
        )
    return replace(shape, devices_per_node=min(node, devices))


def _joined_ranks(layout: Layout, replica: int, node: int) -> int:
    """Ranks of attention and experts together: of all, else of the larger side where all fill no whole nodes.

    Whole replicas of attention, so that every rank has work.
    """
    larger = max(len(layout.attention.ranks), len(layout.experts.ranks))
    ranks = layout.num_ranks if layout.num_ranks <= node or layout.num_ranks % node == 0 else larger
    return max(ranks // replica, 1) * replica


def common_lacks(shape: Shape, title: str) -> list[Lack]:
    """What no engine but ours carries."""
    layout, path = shape.instance.layout, shape.path
    found = []
    if layout.is_split:
        found.append(
            Lack(
                path=f"{path}.layout", value=f"attention on {shape.instance.machines['attention']}, "
                f"experts on {shape.instance.machines['expert']}",
                reason=f"{title} computes attention and experts on the same devices",
                nearest=f"both on the same {shape.num_devices} devices",
            )
        )  # fmt: skip
    if layout.returns != "choices":
        found.append(
            Lack(
                path=f"{path}.layout.returns", value=layout.returns,
                reason=f"{title} has one form of its exchange", nearest="its own",
            )
        )  # fmt: skip
    if layout.is_fused:
        found.append(
            Lack(
                path=f"{path}.layout.is_fused", value="true", reason=f"{title} chooses its kernels itself",
                nearest="its own choice",
            )
        )  # fmt: skip
    return found + _plan_lacks(shape, title)


def can_be_placed(shape: Shape) -> bool:
    """Whether a file of whole experts by slot says where they are: equal ranks, equal shares, no slices."""
    is_whole = shape.instance.layout.experts.size("tp") == 1 and not shape.instance.layout.is_split
    return is_whole and not _plan_lacks(shape, "")


def _plan_lacks(shape: Shape, title: str) -> list[Lack]:
    plan, path = shape.instance.plan, shape.path
    found = []
    if any(
        _has_uneven_shares(ids, parts) for ids, parts in zip(plan.slot_expert, plan.slot_share, strict=True)
    ):
        found.append(
            Lack(
                path=f"{path}.plan.slot_share", value="uneven",
                reason=f"{title} gives every copy of an expert the same share of its tokens",
                nearest="the same copies with equal shares",
            )
        )  # fmt: skip
    # Without copies engines split experts as evenly as they can, one more here and there.
    per_rank = {size for ranks in plan.slot_rank for size in np.bincount(ranks).tolist()}
    if len(per_rank) > 1 and (shape.num_redundant or max(per_rank) - min(per_rank) > 1):
        found.append(
            Lack(
                path=f"{path}.plan.slot_rank", value=f"{min(per_rank)} to {max(per_rank)} slots a rank",
                reason=f"{title} holds the same number of experts on every rank",
                nearest=f"{-shape.num_experts % shape.ep} redundant experts, or as many more as there "
                "are ranks",
            )
        )  # fmt: skip
    return found


def _has_uneven_shares(ids: np.ndarray, shares: np.ndarray) -> bool:
    copies, total = np.bincount(ids), np.bincount(ids, weights=shares)
    return bool((np.abs(shares * copies[ids] - total[ids]) > 1e-6 * total[ids]).any())


def is_default_plan(shape: Shape) -> bool:
    """Whether experts are where they are put when no load is known: in order, copies spread evenly."""
    plan, layout = shape.instance.plan, shape.instance.layout
    ep, expert_tp = layout.experts.size("ep"), layout.experts.size("tp")
    even = cache(
        lambda redundant: placed_slots(np.full(shape.num_experts, 1.0 / shape.num_experts), ep, redundant)
    )
    for ranks, ids in zip(plan.slot_rank, plan.slot_expert, strict=True):
        slots = even(len(ids) // expert_tp - shape.num_experts)
        own_ranks, own_ids = ranks[::expert_tp] // expert_tp, ids[::expert_tp]
        if not (np.array_equal(own_ids, slots.expert) and np.array_equal(own_ranks, slots.rank)):
            return False
    return True


def places_lack(shape: Shape, title: str, nearest_thing: str) -> list[Lack]:
    """That an engine reads no plan, where the plan says more than the usual order."""
    if not shape.num_experts or is_default_plan(shape):
        return []
    return [
        Lack(
            path=f"{shape.path}.plan.slot_expert", value="places of its own",
            reason=f"{title} is not told where experts are", nearest=nearest_thing,
        )
    ]  # fmt: skip


def tier_lacks(shape: Shape, title: str, carried: frozenset[tuple[str, str]]) -> list[Lack]:
    """Tiers below the device that an engine does not have; `carried` holds (experts or kv, place)."""
    tiers = shape.instance.tiers
    return [
        Lack(
            path=f"{shape.path}.tiers.{what}", value=tier.place,
            reason=f"{title} keeps no {'experts' if what == 'experts' else 'KV blocks'} there",
            nearest="without that tier, on more devices",
        )
        for what, kinds in (("experts", tiers.experts), ("kv", tiers.kv))
        for tier in kinds
        if (what, tier.place) not in carried
    ]  # fmt: skip


def overlap_lack(shape: Shape, title: str, reason: str = "overlaps no batches") -> list[Lack]:
    """That an engine computes one batch at a time, where the deployment has two."""
    if shape.num_micro_batches == 1:
        return []
    return [
        Lack(
            path=f"{shape.path}.layout.num_micro_batches", value=str(shape.num_micro_batches),
            reason=f"{title} {reason}", nearest="one batch at a time",
        )
    ]  # fmt: skip


def one_host_lacks(shape: Shape, title: str) -> list[Lack]:
    """What an engine of one process on one host has none of: nodes, phases of their own, copies, overlap."""
    found = overlap_lack(shape, title)
    facts = (
        (shape.num_nodes > 1, "layout", f"{shape.num_nodes} nodes", "runs on one node", "one node"),
        (
            shape.phase is not None, "phases", str(shape.phase), "does both phases in one server",
            "an instance of both phases",
        ),
        (
            shape.num_redundant > 0, "plan", f"{shape.num_redundant} copies of experts",
            "holds every expert once", "no copies",
        ),
    )  # fmt: skip
    for is_lacking, name, value, reason, instead in facts:
        if is_lacking:
            found.append(
                Lack(path=f"{shape.path}.{name}", value=value, reason=f"{title} {reason}", nearest=instead)
            )
    return found


def format_lack(shape: Shape, what: str, value: str, title: str, nearest_thing: str) -> Lack:
    """That an engine does not store or send in a format."""
    return Lack(
        path="numerics.backend", value=f"{what}={value}",
        reason=f"{title} has no such format for {shape.path}", nearest=nearest_thing,
    )  # fmt: skip


def places(shape: Shape) -> list[Place]:
    """Every node of an instance."""
    return [Place(head=HEAD, rank=str(node), is_head=node == 0) for node in range(shape.num_nodes)]


def quoted(word: str) -> str:
    """A word for a shell; variables in it are still expanded."""
    if "$" not in word:
        return shlex.quote(word)
    return f'"{word}"'
