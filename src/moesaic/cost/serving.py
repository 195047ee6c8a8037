"""What a request sees of an engine in steady state: time to first token and time per output token.

Prompts and decoding share the ranks (continuous batching). One walk prices an array of cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import numpy as np

from moesaic.cost.layouts import Split, largest_batch, step_cost
from moesaic.cost.load import ExpertShares
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import Profile
from moesaic.cost.term import Cost, CostTerm, Number, Par, Repeat, leaves, step_seconds
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Requests of one length, a constant number of them at a time.

    Shapes:  numbers, or arrays over candidates. Units: tokens; batch is sequences per attention replica.
    """

    prompt: Number
    output: Number
    batch: Number


@dataclass(frozen=True, kw_only=True, slots=True)
class Interference:
    """How prompts and decoding get into each other's way.

    Units:  seconds, or shares without a unit.
    """

    prefill_in_decode: float = 1.0  # of what the others' prompts add to the steps that they share
    queue_share: float = 0.0  # prompts before one's own: queue_share * (batch ** queue_power - 1)
    queue_power: float = 1.0
    backlog: float = 0.0  # and this often the batch times the share of time that prompts take, beside it
    first_s: float = 0.0  # fixed part of the first token
    eager: float = 0.0  # a prompt's kernels are launched one by one: this often a step's launches
    first_steps: float = 0.0  # decode steps waited for
    slot_share: float = 0.0  # of the time that others keep the KV slots which a request waits for


@dataclass(frozen=True, kw_only=True, slots=True)
class Phases:
    """Physical times of the cases.

    Shapes:  arrays over cases; seconds.
    """

    decode: Cost
    prefill: Cost
    decode_s: Number
    prefill_s: Number
    tpot_s: Number
    ttft_s: Number


def phases(
    model: ModelSpec, cluster: Cluster, split: Split, traffic: Traffic, *, profile: Profile,
    interference: Interference, formats: Formats | None = None, shares: ExpertShares | None = None,
) -> Phases:  # fmt: skip
    """A decode step halfway through the output, the prefill of one prompt, what a request sees of both.

    Sequences beyond those whose KV fits wait for a slot.
    """
    batch, prompt, output = (
        np.asarray(one, np.float64) for one in (traffic.batch, traffic.prompt, traffic.output)
    )
    ones = np.ones(np.broadcast(batch, prompt, output).shape)
    active = active_seqs(model, cluster, split, traffic, profile, formats)
    steps = []
    for work in (
        Work(num_seqs=active * ones, new_tokens=ones, past=prompt + output / 2),
        Work(num_seqs=ones, new_tokens=prompt * ones, past=0.0 * ones),
    ):
        steps.append(step_cost(model, cluster, split, work, profile=profile, formats=formats, shares=shares))
    decode_s, prefill_s = (step_seconds(cost).value for cost in steps)
    prefill_s = prefill_s - profile.step_s  # its host work is in `Interference.first_s`
    own = interference
    added_s = prefill_beside_decode(steps[1], active, own)
    tpot_s = decode_s + (active - 1) / output * added_s
    # The share of time that prompts take, each as long as beside decoding alone.
    alone_s = _beside(steps[1], active, slice(None))
    busy = np.minimum(active * alone_s / (output * tpot_s), 1.0)
    ttft_s = prefill_s * (1 + own.queue_share * (active**own.queue_power - 1)) + own.first_steps * decode_s
    ttft_s = ttft_s + own.backlog * active * busy * alone_s
    ttft_s = ttft_s + own.first_s + own.eager * launched_s(steps[1])
    ttft_s = ttft_s + own.slot_share * (batch / active - 1) * output * tpot_s
    return Phases(
        decode=steps[0],
        prefill=steps[1],
        decode_s=decode_s,
        prefill_s=prefill_s,
        tpot_s=tpot_s,
        ttft_s=ttft_s,
    )


KV_ROOM = 2.0  # guess: sequences in flight by those whose 16-bit KV fits at mean length; many caches are fp8


def active_seqs(
    model: ModelSpec, cluster: Cluster, split: Split, traffic: Traffic, profile: Profile,
    formats: Formats | None,
) -> Number:  # fmt: skip
    """Sequences of a replica that decode at a time: those whose KV fits; all where not even the weights do,
    for then the account of the memory is not the engine's."""
    context = np.asarray(traffic.prompt, np.float64) + np.asarray(traffic.output, np.float64) / 2
    fits = KV_ROOM * largest_batch(model, cluster, split, context=context, profile=profile, formats=formats)
    return np.where(fits > 0, np.minimum(traffic.batch, fits), np.asarray(traffic.batch, np.float64))


def launched_s(cost: Cost) -> Number:
    """Seconds of the launches in a step."""
    total: Number = 0.0
    for times, term in leaves(cost):
        if term.resource in ("compute", "memory"):
            total = total + times * term.overhead_s
    return total


def prefill_beside_decode(
    prefill: Cost, batch: Number, own: Interference, rows: np.ndarray | None = None
) -> Number:
    """Seconds that a prompt adds to the steps it shares with `batch` sequences.

    Its products and transfers count; weights are read for the batch anyway, so only its share of them does;
    it launches nothing of its own. The engine, the planner and the simulator charge this and nothing else.

    Shapes:  of a tree over arrays only `rows`, where they are given; batch goes along with them.
    """
    return own.prefill_in_decode * _beside(prefill, batch, slice(None) if rows is None else rows)


def _beside(cost: Cost, batch: Number, rows: np.ndarray | slice) -> Number:
    def of(number: Number) -> Number:
        return number[rows] if np.ndim(number) else number  # type: ignore[index]

    if isinstance(cost, CostTerm):
        if cost.resource == "overhead":
            return 0.0
        if cost.resource in ("compute", "memory"):
            return np.maximum(of(cost.compute_s), of(cost.memory_s) / batch)
        return of(cost.seconds.value) - of(cost.overhead_s)
    if isinstance(cost, Repeat):
        return of(cost.times) * _beside(cost.part, batch, rows)
    parts = [_beside(part, batch, rows) for part in cost.parts]
    return reduce(np.maximum if isinstance(cost, Par) else np.add, parts, np.zeros(()))
