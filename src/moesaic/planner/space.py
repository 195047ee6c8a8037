"""The layouts worth pricing: every legal way to split a model over some of a cluster's devices.

Layouts are columns of numbers, so thousands are priced in one walk. What they cost is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import numpy as np

from moesaic.account.memory import scale_block
from moesaic.cost.layouts import Split
from moesaic.cost.ops import Formats
from moesaic.cost.term import FloatArray
from moesaic.errors import ConfigError, nearest
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import GqaSpec, LinearSpec, MambaSpec, MlaSpec, ModelSpec

Knob = Literal[
    "tp", "dp", "ep", "pp", "kvp", "expert_tp", "num_micro_batches", "num_redundant", "num_offloaded"
]
KNOBS: tuple[Knob, ...] = get_args(Knob)
COLUMNS = ("tp", "dp", "kvp", "ep", "expert_tp", "pp", "num_redundant")

MAX_COUNTS = 48  # guess: numbers of instances or attention replicas tried are at most so many
MAX_STAGES = 16  # guess: more stages than this, or no power of two, are priced only when asked for
MAX_SLICES = 16  # guess: heads, KV and experts are sliced over more ranks only inside one link domain


@dataclass(frozen=True, kw_only=True, slots=True)
class NearMiss:
    """How many candidates one reason ruled out, and which came nearest to being allowed."""

    count: int
    nearest: str
    distance: float = 0.0  # how far the nearest is from being allowed, as a factor; 1 is allowed

    def joined(self, other: NearMiss) -> NearMiss:
        """Both counts, the nearer of the two."""
        near = self if self.distance <= other.distance else other
        return replace(near, count=self.count + other.count)


@dataclass(frozen=True, kw_only=True, slots=True)
class FormatChoice:
    """How weights, KV and dispatched rows are stored. A name of None: as the checkpoint stores them."""

    weights: str | None
    kv: str
    dispatch: str
    formats: Formats


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """Layouts that share what is one number for a walk: formats and the number of micro-batches.

    Shapes:  every column of `columns` is [n] float64, one row a layout of one instance.
    """

    columns: Mapping[str, FloatArray]
    num_micro_batches: int
    choice: FormatChoice
    split: Split = field(init=False)

    def __post_init__(self) -> None:
        columns: dict[str, Any] = dict(self.columns)
        object.__setattr__(self, "split", Split(**columns, num_micro_batches=self.num_micro_batches))

    def __len__(self) -> int:
        return len(self.columns["tp"])

    @property
    def devices(self) -> FloatArray:
        """Devices of one instance."""
        return np.asarray(self.split.ranks) * self.columns["pp"]

    @property
    def unit(self) -> FloatArray:
        """Sequences of a replica come in multiples of this: one a stage and micro-batch."""
        return self.columns["pp"] * self.num_micro_batches

    def take(self, rows: np.ndarray) -> Block:
        """Some of the layouts."""
        return replace(self, columns={name: column[rows] for name, column in self.columns.items()})

    def row(self, idx: int) -> dict[Knob, int]:
        """One layout as plain numbers."""
        found: dict[Knob, int] = {
            knob: int(self.columns[knob][idx]) if knob in self.columns else 0 for knob in KNOBS
        }
        found["num_micro_batches"] = self.num_micro_batches
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a model lets be divided by what."""

    heads: tuple[int, ...]  # of every mixer: tp divides each
    kv_heads: int | None  # kvp > 1 needs tp at most this; None: a latent, on every rank whatever tp is
    num_layers: int
    num_experts: int | None  # None: dense
    expert_width: int
    scale_block: int = 1  # columns of an expert that share a scale

    @staticmethod
    def of(model: ModelSpec, choices: Sequence[FormatChoice]) -> Limits:
        """The limits of a model in any of some formats: the finest blocks of scales count."""
        heads: set[int] = set()
        kv_heads: list[int] = []
        for layer in model.layers:
            mixer = layer.mixer
            if isinstance(mixer, GqaSpec):
                heads.add(mixer.num_heads)
                kv_heads.append(mixer.num_kv_heads)
            elif isinstance(mixer, MlaSpec | MambaSpec):
                heads.add(mixer.num_heads)
            elif isinstance(mixer, LinearSpec):
                heads.add(mixer.num_key_heads)
        moes = [moe for _, moe in model.moe_layers]
        return Limits(
            heads=tuple(sorted(heads)), kv_heads=min(kv_heads, default=None), num_layers=len(model.layers),
            num_experts=max((moe.num_experts for moe in moes), default=None),
            expert_width=min((moe.expert_width for moe in moes), default=0),
            scale_block=min(scale_block(model, choice.weights) for choice in choices),
        )  # fmt: skip

    def refusal(self, knob: Knob, value: int) -> str | None:
        """Why one number is not legal, with the arithmetic and the nearest legal ones; None when it is."""
        parts: dict[Knob, tuple[str, Sequence[int]]] = {
            "tp": ("attention heads", self.heads),
            "expert_tp": ("columns of an expert", (self.expert_width,)),
        }  # fmt: skip
        if knob in parts and (knob == "tp" or self.num_experts is not None):
            what, totals = parts[knob]
            for total in totals:
                if total % value:
                    return f"{total} {what} / {knob} {value} = {total / value:.2f}; {_legal(total, value)}"
        if knob == "expert_tp" and self.num_experts is not None and value > 1:
            width, block = self.expert_width, self.scale_block
            if width // value % block:
                fits = [d for d in divisors(width, width) if d == 1 or width // d % block == 0]
                return (
                    f"{width} columns of an expert / expert_tp {value} = {width // value}, no multiple of "
                    f"the {block} that share a scale; {_near(fits, value)}"
                )
        if knob == "pp" and value > self.num_layers:
            most = self.num_layers
            return f"pp {value} is more stages than the {most} layers; pp is at most {most}"
        if knob == "num_offloaded" and self.num_experts is not None and value > self.num_experts:
            return f"num_offloaded {value} is more than the {self.num_experts} experts of a layer"
        if (
            knob in ("ep", "num_redundant", "num_offloaded")
            and not self.num_experts
            and value > (knob == "ep")
        ):
            return f"{knob} {value} needs routed experts, and this model is dense; leave it out"
        if knob == "ep" and self.num_experts is not None and value > 2 * self.num_experts:
            return (
                f"ep {value} has more ranks than two copies of the {self.num_experts} experts fill; ep is at "
                f"most "
                f"{2 * self.num_experts}"
            )
        return None


def _legal(total: int, value: int) -> str:
    return _near(divisors(total, total), value)


def _near(legal: Sequence[int], value: int) -> str:
    below = max((d for d in legal if d <= value), default=legal[0])
    above = min((d for d in legal if d >= value), default=below)
    return f"the nearest legal numbers are {below} and {above}" if below != above else f"{below} is legal"


def instance_sizes(cluster: Cluster, needed: int | None = None) -> list[int]:
    """Devices that one instance may have: powers of two in a node, then whole nodes.

    Beyond 40 nodes only counts of nodes without a prime factor above 5. A machine whose file has no network
    or no link has no instance that would use it.
    """
    node, num_nodes = cluster.devices_per_node, cluster.num_nodes
    facts = cluster.machine.facts
    if "link_bytes_per_s" not in facts and "host_link_bytes_per_s" not in facts:
        return [1]
    if "network_bytes_per_s" not in facts:
        num_nodes = cluster.link_domain // node
    sizes = {size for size in (1 << bit for bit in range(node.bit_length())) if size <= node} | {node}
    for count in range(1, num_nodes + 1):
        if num_nodes <= 40 or _is_smooth(count) or count == num_nodes:
            sizes.add(count * node)
    if needed is not None and needed <= cluster.num_devices:
        sizes.add(needed)
    return sorted(sizes)


def _is_smooth(number: int) -> bool:
    for prime in (2, 3, 5):
        while number % prime == 0:
            number //= prime
    return number == 1


def redundancies(num_experts: int, ep: int) -> list[int]:
    """Further expert slots worth trying: the fewest that fill all ranks alike, then one, two, a quarter
    more."""
    slots = -(-num_experts // ep)
    return sorted({many * ep - num_experts for many in (slots, slots + 1, slots + 2, -(-5 * slots // 4))})


def blocks(
    model: ModelSpec,
    cluster: Cluster,
    choices: Sequence[FormatChoice],
    pins: Mapping[Knob, int],
) -> tuple[list[Block], dict[str, NearMiss]]:
    """Every layout of one instance on a cluster, and what divisibility ruled out.

    `pins` holds numbers that are given instead of searched.
    """
    limits = Limits.of(model, choices)
    tally = _Tally()
    rows = np.array(
        [
            row
            for size in instance_sizes(cluster, _pinned_size(pins))
            for row in _splits(size, cluster, limits, pins, tally)
        ],
        dtype=np.float64,
    ).reshape(-1, len(COLUMNS))
    columns = {name: rows[:, idx] for idx, name in enumerate(COLUMNS)}
    can_overlap = (columns["dp"] > 1) & (columns["ep"] > 1)
    found = []
    for choice in choices:
        for micro_batches in (1, 2) if not pins.get("num_offloaded") else ():
            if pins.get("num_micro_batches", micro_batches) != micro_batches:
                continue
            chosen = np.full(len(rows), True) if micro_batches == 1 else can_overlap
            if len(choices) > 1:
                chosen = chosen & _whole_blocks(columns["expert_tp"], Limits.of(model, [choice]), tally)
            if chosen.any():
                part = {name: column[chosen] for name, column in columns.items()}
                found.append(Block(columns=part, num_micro_batches=micro_batches, choice=choice))
    return found, tally.misses()


def _whole_blocks(expert_tp: FloatArray, limits: Limits, tally: _Tally) -> np.ndarray:
    allowed = {value for value in set(expert_tp) if tally.allows(limits, "expert_tp", int(value))}
    return np.isin(expert_tp, list(allowed))


def _pinned_size(pins: Mapping[Knob, int]) -> int | None:
    attention = [pins.get(knob) for knob in ("tp", "dp", "kvp")]
    if None not in attention:
        return int(np.prod([size for size in attention if size is not None])) * pins.get("pp", 1)
    if "ep" in pins:
        return pins["ep"] * pins.get("expert_tp", 1) * pins.get("pp", 1)
    return None


class _Tally:
    """Divisors that a model does not have, counted, with the first of each kind as the nearest."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.first: dict[str, str] = {}

    def allows(self, limits: Limits, knob: Knob, value: int) -> bool:
        reason = limits.refusal(knob, value)
        if reason is None:
            return True
        self.counts["divisibility"] = self.counts.get("divisibility", 0) + 1
        self.first.setdefault("divisibility", reason)
        return False

    def misses(self) -> dict[str, NearMiss]:
        return {name: NearMiss(count=count, nearest=self.first[name]) for name, count in self.counts.items()}


def _splits(
    size: int, cluster: Cluster, limits: Limits, pins: Mapping[Knob, int], tally: _Tally
) -> Iterator[tuple[int, ...]]:
    """Rows of COLUMNS for instances of `size` devices."""
    widest = max(cluster.link_domain, MAX_SLICES)
    for pp in divisors(size, min(MAX_STAGES, limits.num_layers)):
        ranks = size // pp
        if pins.get("pp", pp) != pp or (pp & (pp - 1) and "pp" not in pins):
            continue
        attention = [
            (tp, ranks // (tp * kvp), kvp)
            for tp in divisors(ranks, widest)
            if pins.get("tp", tp) == tp and tally.allows(limits, "tp", tp)
            for kvp in _kv_splits(ranks // tp, tp, pp, limits, pins)
            if pins.get("dp", ranks // (tp * kvp)) == ranks // (tp * kvp)
        ]
        experts = list(_expert_splits(ranks, widest, limits, pins, tally)) if attention else []
        for tp, dp, kvp in attention:
            if limits.num_experts is None and dp > 1:
                continue  # replicas of a dense model share nothing: they are instances of their own
            for ep, expert_tp, redundant in experts:
                # Engines that send rows to experts one by one keep those whole; slices go with gathered rows.
                if dp > 1 and ep > 1 and expert_tp > 1 and "expert_tp" not in pins:
                    continue
                yield tp, dp, kvp, ep, expert_tp, pp, redundant


def _kv_splits(replicas: int, tp: int, pp: int, limits: Limits, pins: Mapping[Knob, int]) -> list[int]:
    """KV parallelism: none, or all ranks of the stage are one replica (Helix); a power of two, as lanes
    are."""
    if "kvp" in pins:
        return [pins["kvp"]] if replicas % pins["kvp"] == 0 else []
    if (
        replicas == 1
        or replicas & (replicas - 1)
        or pp > 1
        or (limits.kv_heads is not None and tp > limits.kv_heads)
    ):
        return [1]
    return [1, replicas]


def _expert_splits(
    ranks: int, widest: int, limits: Limits, pins: Mapping[Knob, int], tally: _Tally
) -> Iterator[tuple[int, int, int]]:
    if limits.num_experts is None:
        yield 1, ranks, 0
        return
    for expert_tp in divisors(ranks, widest):
        ep = ranks // expert_tp
        if pins.get("expert_tp", expert_tp) != expert_tp or pins.get("ep", ep) != ep:
            continue
        if not tally.allows(limits, "expert_tp", expert_tp) or not tally.allows(limits, "ep", ep):
            continue
        wanted = redundancies(limits.num_experts, ep) if ep > 1 else [0]
        if "num_redundant" in pins:
            wanted = [pins["num_redundant"]]
        for redundant in wanted:
            yield ep, expert_tp, redundant


def divisors(number: int, most: int) -> list[int]:
    """Divisors of a number up to `most`."""
    return [d for d in range(1, min(number, most) + 1) if number % d == 0]


def spaced(most: int) -> list[int]:
    """Numbers from 1 to `most`: all of them up to `MAX_COUNTS`, spread evenly in the logarithm beyond."""
    if most <= MAX_COUNTS:
        return list(range(1, most + 1))
    counts: list[int] = np.unique(np.geomspace(1, most, MAX_COUNTS).round().astype(int)).tolist()
    return counts


def check_pins(
    model: ModelSpec, cluster: Cluster, choices: Sequence[FormatChoice], pins: Mapping[Knob, int]
) -> None:
    """Whether the numbers that the caller fixed can hold together on a cluster.

    Raises: ConfigError with the arithmetic and the nearest legal numbers.
    """
    limits = Limits.of(model, choices)
    for knob, value in pins.items():
        least = int(knob not in ("num_redundant", "num_offloaded"))
        if value < least:
            raise ConfigError(f"{knob} must be at least {least}, got {value}")
        reason = limits.refusal(knob, value)
        if reason is not None:
            raise ConfigError(reason)
    if pins.get("num_micro_batches", 1) > 2:
        raise ConfigError(f"one or two micro-batches share the ranks, not {pins['num_micro_batches']}")
    _check_slots(limits, pins)
    size = _pinned_size(pins)
    if size is not None and size > cluster.num_devices:
        shown = " x ".join(f"{knob} {value}" for knob, value in pins.items())
        raise ConfigError(f"{shown} needs at least {size} devices, {cluster} has {cluster.num_devices}")
    if all(knob in pins for knob in ("tp", "dp", "kvp", "ep", "expert_tp")):
        attention = pins["tp"] * pins["dp"] * pins["kvp"]
        experts = pins["ep"] * pins["expert_tp"]
        if attention != experts:
            raise ConfigError(
                f"attention has dp {pins['dp']} x kvp {pins['kvp']} x tp {pins['tp']} = {attention} ranks, "
                f"experts have "
                f"ep {pins['ep']} x expert_tp {pins['expert_tp']} = {experts}; both must be the same ranks"
            )


def _check_slots(limits: Limits, pins: Mapping[Knob, int]) -> None:
    if limits.num_experts is None or "ep" not in pins:
        return
    ep, extra = pins["ep"], pins.get("num_redundant")
    if extra is not None and (limits.num_experts + extra) % ep:
        slots = limits.num_experts + extra
        below = max((slots // ep) * ep - limits.num_experts, 0)
        above = -(-slots // ep) * ep - limits.num_experts
        near = (
            f"{below} and {above}"
            if below != above and (limits.num_experts + below) % ep == 0
            else f"{above}"
        )
        raise ConfigError(
            f"{limits.num_experts} experts + {extra} redundant = {slots} slots / ep {ep} = {slots / ep:.2f}; "
            f"the "
            f"nearest legal numbers of redundant slots are {near}"
        )


def parse_pins(text: str) -> dict[Knob, int]:
    """Numbers of a layout from `tp=8,ep=32`.

    Raises: ConfigError naming the part that is wrong.
    """
    pins: dict[Knob, int] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        name, _, value = part.partition("=")
        knob = next((one for one in KNOBS if one == name.strip()), None)
        if knob is None:
            raise ConfigError(f"{name.strip()!r} is no part of a layout; {nearest(name.strip(), KNOBS)}")
        try:
            pins[knob] = int(value)
        except ValueError:
            raise ConfigError(f"{part!r} is no number of a layout; write it as in tp=8,ep=32") from None
    return pins
