"""Micro-batches between attention and expert ranks: the timeline, and what each further one brings.

Times of the stages come from `cost`; here they only meet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.cost.host import profile_on
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Formats, Work
from moesaic.cost.pingpong import (
    Stage,
    fewest_micro_batches,
    paper_micro_batches,
    paper_seconds,
    pipeline_seconds,
)
from moesaic.cost.two_sided import Sides, TwoSides, stage
from moesaic.errors import ConfigError
from moesaic.planner.sim.line import Timeline, run_line
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

STATIONS = ("attention", "to experts", "experts", "back")
MAX_VISITS = 400_000  # of a simulation of seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class PingPongRow:
    """A step with so many micro-batches.

    Units:  seconds; busy is the part of the step that the busier side works; gain is micro-batches per second
            by those of the row before.
    """

    num_micro_batches: int
    simulated_s: float
    closed_form_s: float
    paper_s: float | None  # formula (5), where its conditions hold
    paper_refusal: str | None  # which condition does not
    busy: Mapping[str, float]
    gain: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PingPongStudy:
    """What `moesaic simulate pingpong` answers."""

    attention_s: float
    expert_s: float
    transfer_s: float
    num_layers: int
    fewest: int  # micro-batches with which the slowest station never waits
    paper_fewest: int  # the paper's rule: 2 (1 + Tc / Tf), rounded up
    rows: tuple[PingPongRow, ...]
    chosen: Timeline


def timeline(one: Stage, num_micro_batches: int, num_layers: int) -> Timeline:
    """Every visit of every micro-batch at the four stations.

    Raises: ConfigError for times that are not numbers above 0 (transfers may take none), for counts below 1,
            and for more visits than are simulated in seconds.
    """
    attention_s, expert_s, transfer_s = _times(one)
    for name, count in (("micro-batches", num_micro_batches), ("layers", num_layers)):
        if count < 1:
            raise ConfigError(f"{name} must be at least 1, got {count}")
    if num_micro_batches * num_layers * 4 > MAX_VISITS:
        raise ConfigError(
            f"{num_micro_batches} micro-batches x {num_layers} layers x 4 stations are more than the "
            f"{MAX_VISITS:,} visits that are simulated; give fewer"
        )
    layer = list(zip(STATIONS, (attention_s, transfer_s, expert_s, transfer_s), strict=True))
    return run_line(STATIONS, [layer * num_layers] * num_micro_batches)


def study_ping_pong(one: Stage, *, num_layers: int, shown: int, most: int) -> PingPongStudy:
    """Steps of 1 to `most` micro-batches, simulated and by formula; the timeline of `shown` of them.

    Raises: ConfigError as `timeline` does.
    """
    attention_s, expert_s, transfer_s = _times(one)
    rows: list[PingPongRow] = []
    for count in range(1, max(most, shown) + 1):
        found = timeline(one, count, num_layers)
        paper_s, refusal = None, None
        try:
            paper_s = paper_seconds(one, count, num_layers)
        except ConfigError as error:
            refusal = str(error)
        rows.append(
            PingPongRow(
                num_micro_batches=count, simulated_s=found.total_s,
                closed_form_s=float(pipeline_seconds(one, count, num_layers)),
                paper_s=paper_s, paper_refusal=refusal, busy=found.busy,
                gain=count / found.total_s / (rows[-1].num_micro_batches / rows[-1].simulated_s)
                if rows
                else None,
            )
        )  # fmt: skip
    return PingPongStudy(
        attention_s=attention_s, expert_s=expert_s, transfer_s=transfer_s, num_layers=num_layers,
        fewest=fewest_micro_batches(one), paper_fewest=paper_micro_batches(one),
        rows=tuple(rows), chosen=timeline(one, shown, num_layers),
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoSidedCase:
    """Attention nodes beside one expert per `expert_tp` devices, and a micro-batch.

    Raises: ConfigError for counts below 1.
    """

    attention: Cluster
    experts: Cluster
    nodes: int
    tp: int
    expert_tp: int
    batch: int  # sequences of a micro-batch on each attention node
    context: int
    profile: str

    def __post_init__(self) -> None:
        for name in ("nodes", "tp", "expert_tp", "batch", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")

    def stage(self, model: ModelSpec) -> Stage:
        """The times of the micro-batch in the first sparse layer, experts being equally busy.

        Raises: ConfigError for a dense model.
        """
        num_experts = max((moe.num_experts for _, moe in model.moe_layers), default=1)
        profiles = (
            profile_on(self.profile, self.attention),
            profile_on(self.profile, self.experts),
        )
        return stage(
            model, Sides(attention=self.attention, experts=self.experts, profiles=profiles),
            TwoSides(
                num_attention=self.nodes, tp=self.tp, ep=num_experts, expert_tp=self.expert_tp,
                num_redundant=0, num_micro_batches=1,
            ),
            Work(num_seqs=self.batch, new_tokens=1, past=self.context), formats=Formats(), shares=EVEN,
        )  # fmt: skip


def _times(one: Stage) -> tuple[float, float, float]:
    times = float(one.attention_s), float(one.expert_s), float(one.transfer_s)
    for name, seconds, is_good in zip(
        ("attention", "experts", "transfer"), times, (times[0] > 0, times[1] > 0, times[2] >= 0), strict=True
    ):
        if not (is_good and math.isfinite(seconds)):
            rule = "at least 0" if name == "transfer" else "above 0"
            raise ConfigError(f"the time of {name} must be a finite number {rule}, got {seconds:g}")
    return times
