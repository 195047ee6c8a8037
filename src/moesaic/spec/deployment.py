"""WHERE it is computed: the file that the planner writes, the engine runs and the rebalancer replaces.

Values and their JSON only. What costs how much, who talks to whom and which layout is best is not known here.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moesaic.errors import ConfigError
from moesaic.hashing import digest_bytes
from moesaic.spec.codec import from_plain, to_plain
from moesaic.spec.codec import json_schema as schema_of
from moesaic.spec.experts import ExpertPlan, Phase
from moesaic.spec.layout_rules import GATHERED_RULE, Dispatcher, LayoutCell, Refusal, refusals
from moesaic.spec.numerics import AUTO_BACKEND, Numerics

SCHEMA_VERSION = 1

Role = Literal["attention", "expert"]
Axis = Literal["dp", "kvp", "tp", "ep"]
ATTENTION_AXES: tuple[Axis, ...] = ("dp", "kvp", "tp")
EXPERT_AXES: tuple[Axis, ...] = ("ep", "tp")

_NUMBERS = re.compile(r"\[\n([-+.\deE,\s]+)\]")
"""An indented array of numbers; a JSON string holds no line break, so nothing else looks like one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """One factorisation of some ranks. The last axis runs fastest, in the order dp, kvp, tp or ep, tp."""

    axes: Mapping[Axis, int]  # an axis that is not named has size 1
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        for name, size in self.axes.items():
            if size < 1:
                raise ConfigError(f"axis {name} must be at least 1, got {size}")
        product = math.prod(self.axes.values())
        if product != len(self.ranks):
            shown = " x ".join(f"{name} {size}" for name, size in self.axes.items()) or "no axes"
            raise ConfigError(
                f"axes and ranks disagree: {shown} = {product}, but there are {len(self.ranks)} ranks"
            )
        if len(set(self.ranks)) != len(self.ranks) or any(rank < 0 for rank in self.ranks):
            raise ConfigError(f"ranks must be different and at least 0, got {list(self.ranks)}")

    def size(self, axis: Axis) -> int:
        """Ranks along an axis."""
        return self.axes.get(axis, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which ranks do what, and how rows travel between attention and experts."""

    attention: Grid  # dp x kvp x tp
    experts: Grid  # ep x tp over the same ranks (colocated) or over other ones (split)
    dispatcher: Dispatcher
    returns: Literal["choices", "subtrees"] = "choices"  # what goes back over the wire; both exact
    pipeline: int = 1
    num_micro_batches: int = 1
    num_chunks: int = 1  # parts in which a micro-batch's rows are sent; one is computed while others travel
    is_fused: bool = False
    ranks_per_node: int | None = None  # that share a node and follow each other; None: not said

    def __post_init__(self) -> None:
        for name, grid, allowed in (
            ("attention", self.attention, ATTENTION_AXES),
            ("experts", self.experts, EXPERT_AXES),
        ):
            unknown = sorted(set(grid.axes) - set(allowed))
            if unknown:
                raise ConfigError(
                    f"{name} has no axis {', '.join(unknown)}; its axes are {', '.join(allowed)}"
                )
        for name in ("pipeline", "num_micro_batches", "num_chunks"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        mine, theirs = set(self.attention.ranks), set(self.experts.ranks)
        if mine != theirs and mine & theirs:
            raise ConfigError(
                "attention and experts must have the same ranks or none in common; attention has "
                f"{sorted(mine)}, "
                f"experts have {sorted(theirs)}"
            )
        if self.dispatcher == "local" and self.num_ranks > 1:
            raise ConfigError(
                f"dispatcher local sends nothing, so it has one rank; this layout has {self.num_ranks}"
            )
        if self.dispatcher == "shared_memory" and self.num_ranks < 2:
            raise ConfigError("dispatcher shared_memory is between ranks, and this layout has one: use local")
        if self.dispatcher == "remote" and mine == theirs:
            raise ConfigError("dispatcher remote needs experts on ranks of their own")
        self._check_nodes()
        for refusal in refusals(self.cell()):
            if refusal.is_contradiction:
                raise ConfigError(refusal.reason)

    @property
    def num_ranks(self) -> int:
        """All ranks."""
        return len(set(self.attention.ranks) | set(self.experts.ranks))

    @property
    def is_split(self) -> bool:
        """Whether experts have ranks of their own."""
        return not set(self.attention.ranks) & set(self.experts.ranks)

    def cell(
        self, *, has_expert_tiers: bool = False, has_slices: bool = False, is_native: bool = True
    ) -> LayoutCell:
        """The cell of the table of combinations that this layout is in; the plan has slices or none."""
        return LayoutCell(
            dispatcher=self.dispatcher,
            is_fused=self.is_fused,
            num_micro_batches=self.num_micro_batches,
            num_chunks=self.num_chunks,
            has_expert_tiers=has_expert_tiers,
            has_slices=has_slices,
            returns=self.returns,
            is_native=is_native,
        )

    def _check_nodes(self) -> None:
        size = self.ranks_per_node
        if size is not None and size < 1:
            raise ConfigError(f"ranks_per_node must be at least 1, got {size}")
        if self.dispatcher == "two_level" and (size is None or size >= self.num_ranks):
            raise ConfigError(
                f"dispatcher two_level is for ranks on several nodes, got ranks_per_node = {size} and "
                f"num_ranks = {self.num_ranks}; set how many ranks share a node, or use exchange"
            )

    def check_numerics(self, numerics: Numerics) -> None:
        """Whether every sum that this layout splits has enough leaves.

        Raises: ConfigError with the arithmetic and the leaves that would do.
        """
        for name, grid in (("attention", self.attention), ("experts", self.experts)):
            size = grid.size("tp")
            if size > numerics.matmul_shards:
                raise ConfigError(
                    f"{name} tp {size} splits a matmul further than its {numerics.matmul_shards} leaves; "
                    "numerics with "
                    f"matmul_shards = {_power_of_two(size)} allow it"
                )
        lanes = self.attention.size("kvp")
        if numerics.kv_lanes % lanes:
            raise ConfigError(
                f"kvp {lanes} must divide kv_lanes ({numerics.kv_lanes}); {numerics.kv_lanes} mod {lanes} = "
                f"{numerics.kv_lanes % lanes}"
                + ("" if lanes & (lanes - 1) else f"; numerics with kv_lanes = {lanes} allow it")
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertTier:
    """Memory that experts live in when the device's is not enough."""

    place: Literal["host", "disk"]
    budget_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class KvTier:
    """Memory that KV blocks move to when the device's is not enough."""

    place: Literal["host", "disk", "shared", "peer"]
    budget_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TierPlan:
    """Tiers below the device, nearest first. None: everything is resident."""

    experts: tuple[ExpertTier, ...] = ()
    kv: tuple[KvTier, ...] = ()

    def __post_init__(self) -> None:
        for name, tiers in (("experts", self.experts), ("kv", self.kv)):
            if any(tier.budget_bytes <= 0 for tier in tiers):
                raise ConfigError(f"every tier of {name} needs a budget_bytes above 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One kind of server, `count` times: what it does, where, and which experts are where in it."""

    name: str
    phases: frozenset[Phase]
    count: int
    machines: Mapping[Role, str]  # a node of each: `h200x8`, or `h200` with as many devices as its file says
    layout: Layout
    plan: ExpertPlan
    tiers: TierPlan = field(default_factory=TierPlan)

    def __post_init__(self) -> None:
        if not self.name or not self.phases:
            raise ConfigError("an instance needs a name and at least one of the phases prefill and decode")
        if self.count < 1:
            raise ConfigError(f"count must be at least 1, got {self.count}")
        missing = {"attention", "expert"} - set(self.machines)
        if missing:
            raise ConfigError(f"machines must name one for each role; {', '.join(sorted(missing))} has none")
        check_plan(self.plan, num_ranks=len(self.layout.experts.ranks))


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundRobin:
    """Instances in turn."""

    kind: Literal["round_robin"] = "round_robin"


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixAffinity:
    """The instance that the hash of the prompt's first blocks points to."""

    kind: Literal["prefix_affinity"] = "prefix_affinity"
    num_blocks: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class KvAffinity:
    """The instance that holds most of the prompt; where that is below `least_hit` of it, the least loaded."""

    kind: Literal["kv_affinity"] = "kv_affinity"
    least_hit: float = 0.25


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadAffinity:
    """The highest hit_weight x (share of the prompt cached there) - load_weight x (its load).

    Load is the prompt tokens that wait there, by those of this prompt.
    """

    kind: Literal["load_affinity"] = "load_affinity"
    hit_weight: float = 2.0  # a miss is computed, and its copy displaces others: `simulate fleet`
    load_weight: float = 1.0


RoutePolicy = RoundRobin | PrefixAffinity | KvAffinity | LoadAffinity


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A number and how sure it is."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ConfigError(f"an interval goes up, got {self.low} to {self.high}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the planner expects of the whole deployment. Units: tokens per second, seconds."""

    tokens_per_s: Interval
    ttft_s: Interval
    tpot_s: Interval | None  # None: a request has one token
    source: Literal["measured", "modelled", "guessed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """Why a deployment cannot be run by this engine: the field, its value, and what is missing."""

    path: str
    value: str
    message: str

    def __str__(self) -> str:
        return f"{self.path} = {self.value}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deployment:
    """A whole deployment of one model. One `numerics` for all, else prefill's KV would not be decode's."""

    schema_version: int = SCHEMA_VERSION
    model_digest: str
    numerics: Numerics
    instances: tuple[Instance, ...]
    route: RoutePolicy = field(default_factory=RoundRobin)
    predicted: Prediction | None = None

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ConfigError(
                f"schema_version is {self.schema_version}, this build reads {SCHEMA_VERSION}; write the "
                "file anew with "
                f"the build that runs it"
            )
        if not self.model_digest or not self.instances:
            raise ConfigError("a deployment needs a model_digest and at least one instance")
        twice = [name for name, times in Counter(one.name for one in self.instances).items() if times > 1]
        if twice:
            raise ConfigError(f"instances need different names; {', '.join(twice)} is there twice")
        for instance in self.instances:
            instance.layout.check_numerics(self.numerics)

    def to_json(self) -> str:
        """The deployment file: one JSON object, indented but for arrays of numbers, keys in the order of the
        fields."""
        text = json.dumps(to_plain(self), indent=2, allow_nan=False)
        return _NUMBERS.sub(lambda array: f"[{' '.join(array[1].split())}]", text) + "\n"

    def digest(self) -> str:
        """Identity of this value; equal files that differ in blanks or key order have the same."""
        text = json.dumps(to_plain(self), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return digest_bytes(text.encode()).hex()

    def not_runnable(self, *, is_native: bool = True) -> tuple[Reason, ...]:
        """Every field value that this engine does not run yet; empty when it runs the whole.

        `is_native` is a backend that is left to the machine.
        """
        reasons = list(_numerics_reasons(self.numerics))
        if self.numerics.backend != AUTO_BACKEND:
            is_native = self.numerics.backend.startswith("native/")
        if len(self.instances) > 1:
            reasons.append(
                _reason("instances", len(self.instances), "several instances need the router in front")
            )
        for i, instance in enumerate(self.instances):
            reasons += _instance_reasons(f"instances[{i}]", instance, is_native=is_native)
        return tuple(reasons)


def from_json(text: str | bytes, *, name: str = "deployment") -> Deployment:
    """The deployment that a file holds. `name` is what messages call the file.

    Raises: ConfigError for damaged JSON, an unknown or missing key, a wrong type or a contradiction, with the
    path.
    """
    try:
        data = json.loads(text)
    except RecursionError as error:
        raise ConfigError(f"{name}: nested too deep to be a deployment") from error
    except ValueError as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from error
    return from_plain(Deployment, data, where=name)


def json_schema() -> dict[str, Any]:
    """JSON Schema of the deployment file."""
    return schema_of(Deployment)


def single_process(model_digest: str, numerics: Numerics, plan: ExpertPlan) -> Deployment:
    """One instance of one rank on this machine, both phases: what the engine runs when no file is given."""
    grid = Grid(axes={}, ranks=(0,))
    return Deployment(
        model_digest=model_digest,
        numerics=numerics,
        instances=(
            Instance(
                name="all",
                phases=frozenset({"prefill", "decode"}),
                count=1,
                machines={"attention": "here", "expert": "here"},
                layout=Layout(attention=grid, experts=grid, dispatcher="local"),
                plan=plan,
            ),
        ),
    )


def check_plan(plan: ExpertPlan, *, num_ranks: int) -> None:
    """Whether a plan's arrays fit together and name ranks that exist.

    Raises: ConfigError naming the layer (in ascending order of sparse layers) and the array.
    """
    arrays = {name: getattr(plan, name) for name in ("slot_rank", "slot_expert", "slot_slice", "slot_share")}
    if len({len(layers) for layers in arrays.values()}) > 1:
        counts = ", ".join(f"{name} {len(layers)}" for name, layers in arrays.items())
        raise ConfigError(f"a plan's arrays must have the same number of layers: {counts}")
    for layer, ranks in enumerate(plan.slot_rank):
        sizes = {name: len(layers[layer]) for name, layers in arrays.items()}
        if len(set(sizes.values())) > 1:
            counts = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ConfigError(
                f"layer {layer} of a plan must have the same number of slots in every array: {counts}"
            )
        if any(
            int(array.min(initial=0)) < 0
            for array in (ranks, plan.slot_expert[layer], plan.slot_slice[layer])
        ):
            raise ConfigError(f"layer {layer} of a plan has a negative rank, expert or slice")
        if int(ranks.max(initial=0)) >= num_ranks:
            raise ConfigError(
                f"layer {layer} of a plan names rank {int(ranks.max())}, but there are {num_ranks}"
            )


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _reason(path: str, value: object, message: str) -> Reason:
    return Reason(path=path, value=str(value), message=message)


def _numerics_reasons(numerics: Numerics) -> list[Reason]:
    reasons = []
    if numerics.backend not in (AUTO_BACKEND, "reference") and not numerics.backend.startswith("native/"):
        reasons.append(_reason("numerics.backend", numerics.backend, "only reference and native/* are built"))
    if numerics.combine != "tree":
        reasons.append(_reason("numerics.combine", numerics.combine, "only the tree is built"))
    return reasons


def _instance_reasons(path: str, instance: Instance, *, is_native: bool) -> list[Reason]:
    layout, tiers = instance.layout, instance.tiers
    num_slices = instance.plan.num_slices
    cell = layout.cell(has_expert_tiers=bool(tiers.experts), has_slices=num_slices > 1, is_native=is_native)
    phases = ", ".join(sorted(instance.phases))
    checks: tuple[tuple[bool, str, object, str], ...] = (
        (instance.count > 1, "count", instance.count, "several instances need the router in front"),
        (len(instance.phases) < 2, "phases", phases, "an instance of one phase needs KV transfer"),
        *_grid_checks(layout, num_slices),
        (layout.pipeline > 1, "layout.pipeline", layout.pipeline, "pipelines are planned, not run"),
        (bool(tiers.kv), "tiers.kv", len(tiers.kv), "all KV blocks are resident"),
        (
            layout.num_ranks == 1 and _has_copies(instance.plan),
            "plan.slot_expert",
            "copies",
            "one rank keeps one copy of an expert",
        ),
    )
    return [
        *(_refused(path, instance, refusal) for refusal in refusals(cell)),
        *(_reason(f"{path}.{name}", value, message) for is_wrong, name, value, message in checks if is_wrong),
    ]


def _grid_checks(layout: Layout, num_slices: int) -> Iterator[tuple[bool, str, object, str]]:
    """(is wrong, path, value, why) of the ranks, 0 to n - 1: attention dp x tp and experts ep x tp run."""
    own, theirs, count = layout.attention, layout.experts, layout.num_ranks
    has_other_rows = layout.dispatcher == "gathered" and own.size("tp") != count
    yield has_other_rows, "layout.dispatcher", "gathered", GATHERED_RULE
    yield own.size("kvp") > 1, "layout.attention.kvp", own.size("kvp"), "KV is not split over ranks"
    cut = theirs.size("tp")
    why = f"the plan has {num_slices} slices of an expert"
    yield cut not in (1, num_slices), "layout.experts.tp", cut, why
    if not layout.is_split:  # which the dispatcher's refusal names
        for name, grid in (("attention", own), ("experts", theirs)):
            is_other = grid.ranks != tuple(range(count))
            yield is_other, f"layout.{name}.ranks", list(grid.ranks), f"they are 0 to {count - 1}, in order"
    is_idle = count == 1 and (layout.dispatcher != "local" or layout.returns != "choices")
    value = f"{layout.dispatcher}, {layout.returns}"
    yield is_idle, "layout.dispatcher", value, "one rank sends nothing: local, choices"


def _refused(path: str, instance: Instance, refusal: Refusal) -> Reason:
    """A refusal of the table of combinations, at its place in the file."""
    if refusal.field == "has_expert_tiers":
        return _reason(f"{path}.tiers.experts", len(instance.tiers.experts), refusal.reason)
    if refusal.field == "has_slices":
        return _reason(f"{path}.plan.slot_slice", instance.plan.num_slices, refusal.reason)
    value = getattr(instance.layout, refusal.field)
    return _reason(f"{path}.layout.{refusal.field}", value, refusal.reason)


def _has_copies(plan: ExpertPlan) -> bool:
    pairs = zip(plan.slot_expert, plan.slot_slice, strict=True)
    return any(len(set(zip(ids.tolist(), parts.tolist(), strict=True))) < len(ids) for ids, parts in pairs)
