"""From words to a simulation: an engine from a model, devices and a layout, or from a deployment file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from moesaic.cost.host import interference_on, profile_on
from moesaic.cost.layouts import Split, split_of, step_cost
from moesaic.cost.load import ExpertShares
from moesaic.cost.ops import Formats, Work
from moesaic.cost.serving import Interference, launched_s
from moesaic.cost.term import pick, step_seconds
from moesaic.errors import ConfigError
from moesaic.hashing import digest
from moesaic.planner.fit import legal_splits
from moesaic.planner.question import format_choices
from moesaic.planner.sim.engine import EngineCase
from moesaic.planner.sim.step_time import StepCase
from moesaic.planner.space import Knob
from moesaic.sched.scheduler import Limits
from moesaic.spec.deployment import Deployment, Instance
from moesaic.spec.hardware import Cluster, cluster, node_devices
from moesaic.spec.model import ModelSpec

TYPICAL_SEQS, TYPICAL_CONTEXT = 32.0, 4096.0  # guess: what layouts are compared at where none is given
MAX_MODEL_LEN = 131_072  # of a simulation, where the model takes more and none is given
UNBOUNDED = 10**9  # requests that may wait where no bound is given

WORDS = ("weights", "kv", "dispatch")  # of a backend `external weights=fp8 kv=bfloat16 dispatch=fp8`


def split_for(
    model: ModelSpec, machines: Cluster, pins: Mapping[Knob, int], case_of: EngineParts, *, one_replica: bool
) -> Split:
    """The layout over all devices that agrees with `pins`; of several the one that decodes fastest.

    Raises: ConfigError when none agrees, with what there is.
    """
    if pins.get("pp", 1) != 1:
        raise ConfigError("pp is not simulated: a pipeline's stages work on different steps; leave it out")
    kvp = pins.get("kvp", 1)
    every = legal_splits(model, machines.num_devices)
    columns = {name: np.asarray(getattr(every, name), np.float64) for name in ("tp", "ep", "expert_tp")}
    dp = machines.num_devices / (columns["tp"] * kvp)
    keep = (dp == np.floor(dp)) & (dp >= 1) & ((dp == 1) | (not one_replica))
    for name, column in (*columns.items(), ("dp", dp)):
        if name in pins:
            keep &= column == pins[name]  # type: ignore[index]
    if not keep.any():
        asked = ", ".join(f"{name}={value}" for name, value in pins.items()) or "one attention replica"
        legal = sorted({int(tp) for tp in columns["tp"]})
        raise ConfigError(
            f"no layout over {machines.num_devices} devices has {asked}"
            + (" and dp=1, which a fleet's engine needs" if one_replica else "")
            + f"; tp may be {', '.join(map(str, legal))}, and dp x kvp x tp = ep x expert_tp = "
            f"{machines.num_devices}"
        )
    found = Split(
        tp=columns["tp"][keep], dp=dp[keep], kvp=float(kvp), ep=columns["ep"][keep],
        expert_tp=columns["expert_tp"][keep], num_redundant=float(pins.get("num_redundant", 0)),
        num_micro_batches=pins.get("num_micro_batches", 1),
    )  # fmt: skip
    work = Work(num_seqs=np.ceil(TYPICAL_SEQS / np.asarray(found.dp)), new_tokens=1.0, past=TYPICAL_CONTEXT)
    cost = step_cost(
        model, machines, found, work, profile=case_of.profile, formats=case_of.formats, shares=case_of.shares
    )
    best = int(np.argmin(step_seconds(cost).value))
    tp, dp_best, ep, expert_tp = (pick(one, best) for one in (found.tp, found.dp, found.ep, found.expert_tp))
    return replace(found, tp=tp, dp=dp_best, ep=ep, expert_tp=expert_tp)


class EngineParts:
    """Profile, formats and load, which layouts are compared under and the engine is priced under."""

    def __init__(
        self, model: ModelSpec, machines: Cluster, profile: str, formats: Formats, shares: ExpertShares
    ):
        self.model, self.machines = model, machines
        self.formats, self.shares = formats, shares
        self.profile = profile_on(profile, machines)
        self.waits = interference_on(machines) if profile == "calibrated" else Interference()

    def engine(
        self, split: Split, limits: Limits, *, has_prefix_cache: bool = True, kv_bytes: int | None = None
    ) -> EngineCase:
        """The engine of a layout."""
        step = StepCase(
            model=self.model, cluster=self.machines, split=split, profile=self.profile,
            formats=self.formats, shares=self.shares, interference=self.waits,
        )  # fmt: skip
        prompt = Work(num_seqs=1.0, new_tokens=float(limits.max_tokens_per_step), past=0.0)
        launched = float(np.asarray(launched_s(step.cost(prompt))))
        return EngineCase(
            step=step, limits=limits, first_s=self.waits.first_s + self.waits.eager * launched,
            has_prefix_cache=has_prefix_cache, kv_pool_bytes=kv_bytes,
        )  # fmt: skip


def limits_for(
    model: ModelSpec, *, max_num_seqs: int, max_tokens_per_step: int, max_model_len: int | None,
    max_waiting: int | None,
) -> Limits:  # fmt: skip
    """The limits of an engine; without a context length the model's, up to `MAX_MODEL_LEN`.

    Raises: ConfigError for a context beyond the model's, and as `Limits` does.
    """
    if max_model_len is not None and max_model_len > model.max_position:
        raise ConfigError(
            f"a context of {max_model_len} is beyond the model's {model.max_position} positions"
        )
    return Limits(
        max_num_seqs=max_num_seqs, max_tokens_per_step=max_tokens_per_step,
        max_model_len=max_model_len or min(model.max_position, MAX_MODEL_LEN),
        max_waiting=UNBOUNDED if max_waiting is None else max_waiting,
    )  # fmt: skip


def deployed(
    deployment: Deployment, model: ModelSpec, instance_name: str | None = None
) -> tuple[Instance, Cluster, Split, Formats]:
    """An instance of a deployment file that serves both phases: its devices, layout and formats.

    Raises: ConfigError when the file is another model's, or the instance is not one that `serve` simulates.
    """
    if deployment.model_digest != digest(model):
        raise ConfigError(
            "the deployment is of another model: its model_digest is "
            f"{deployment.model_digest}, this model's is {digest(model)}"
        )
    names = [one.name for one in deployment.instances]
    both = [one for one in deployment.instances if len(one.phases) == 2]
    named = both[0].name if instance_name is None and both else instance_name
    instance = next((one for one in both if one.name == named), None)
    if instance is None:
        raise ConfigError(
            f"no instance{'' if named is None else f' {named!r}'} of the deployment serves both prefill and "
            f"decode (there are {', '.join(names)}): prompts and decoding on different devices are planned, "
            "not simulated"
        )
    counts = [len(ids) for ids in instance.plan.slot_expert]
    moes = [moe for _, moe in model.moe_layers]
    slices = instance.layout.experts.size("tp")
    redundant = counts[0] // slices - moes[0].num_experts if counts and moes else 0
    split = split_of(instance.layout, redundant)
    node, ranks = instance.machines["attention"], instance.layout.num_ranks
    found = cluster(node).machine
    per_node = min(ranks, node_devices(node) or ranks)
    machines = Cluster(machine=found, devices_per_node=per_node, num_nodes=-(-ranks // per_node))
    return instance, machines, split, _formats(deployment, model)


def _formats(deployment: Deployment, model: ModelSpec) -> Formats:
    """The formats that a backend for another engine names; of ours, those of the numerics."""
    found = dict(re.findall(r"(weights|kv|dispatch)=(\S+)", deployment.numerics.backend))
    stored = model.weight_format
    weights = found.get("weights", "stored")
    choice = format_choices(
        model, "stored" if weights == stored else weights, found.get("kv", "bfloat16"), found.get("dispatch")
    )
    return choice[0].formats
