"""What sparse models cost beside dense ones: memory by all parameters, time by active ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moesaic.account.flops import token_flops
from moesaic.account.memory import kv_footprint, weight_bytes
from moesaic.account.params import count_params
from moesaic.cost.layouts import Split, step_cost
from moesaic.cost.load import EVEN
from moesaic.cost.ops import Work
from moesaic.cost.profile import Profile
from moesaic.cost.term import FloatArray, step_seconds
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

SYSTEM_BYTES = 8_000_000_000
"""Of each device for the runtime and activations. Source: the lecture notes' capacity formula."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Economy:
    """One model. Units: bytes of the stored weights; flops of one token; step_s at the batch asked for."""

    num_params: int
    active_params: int
    weight_bytes: int
    flops_per_token: int
    kv_bytes_per_token: int
    step_s: float


def economy(model: ModelSpec, cluster: Cluster, *, batch: int, context: int, profile: Profile) -> Economy:
    """A row of the table dense against sparse, under tensor parallelism over all devices."""
    params = count_params(model)
    return Economy(
        num_params=params.num_total, active_params=params.num_active,
        weight_bytes=sum(weight_bytes(model).values()), flops_per_token=token_flops(model, context).total,
        kv_bytes_per_token=kv_footprint(model).bytes_per_token,
        step_s=float(decode_curve(model, cluster, [batch], context=context, profile=profile)[0]),
    )  # fmt: skip


def decode_curve(
    model: ModelSpec, cluster: Cluster, batches: Sequence[int], *, context: int, profile: Profile
) -> FloatArray:
    """Seconds of a decode step at each batch, under tensor parallelism over all devices.

    Shapes:  [batches].
    """
    devices = cluster.num_devices
    work = Work(num_seqs=np.array(batches, np.float64), new_tokens=1.0, past=float(context - 1))
    split = Split(tp=devices, expert_tp=devices)
    cost = step_cost(model, cluster, split, work, profile=profile, shares=EVEN)
    return np.asarray(step_seconds(cost).value, np.float64)


def crossovers(batches: Sequence[int], first_s: FloatArray, second_s: FloatArray) -> list[int]:
    """Batches from which the other of two models is the faster one; the first batch is not one of them."""
    is_faster = np.asarray(first_s) < np.asarray(second_s)
    return [batches[idx] for idx in range(1, len(batches)) if is_faster[idx] != is_faster[idx - 1]]


def concurrency(
    memory_bytes: float, weights: float, kv_bytes: float, *, num_devices: int = 1,
    system_bytes: float = SYSTEM_BYTES,
) -> int:  # fmt: skip
    """Requests whose KV fits beside all weights: floor((memory - weights - system) / KV of one), from 0 on.

    Source: the lecture notes' formula, with all weights instead of the experts of one layer, and the KV of
    all layers and tokens.
    """
    free = num_devices * (memory_bytes - system_bytes) - weights
    return max(math.floor(free / kv_bytes), 0)
