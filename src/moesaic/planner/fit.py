"""Whether a model fits a machine: on the devices, with experts in host memory or on disk, or not at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from moesaic.account.memory import WEIGHT_BITS, scale_block
from moesaic.account.params import count_params
from moesaic.cost.host import profile_on
from moesaic.cost.layouts import Split, memory_per_rank, step_cost
from moesaic.cost.offload import TIERS, Tier, layers_bytes, room, tiers
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import Profile
from moesaic.cost.term import Cost, Interval, pick, step_seconds
from moesaic.errors import ConfigError, nearest
from moesaic.planner.demand import stretched
from moesaic.planner.load_file import skewed
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import GqaSpec, MlaSpec, ModelSpec

Verdict = Literal["fits", "fits_offloaded", "does_not_fit"]
CONTEXT = 4096
_COLUMNS = ("tp", "dp", "ep", "expert_tp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """The answer.

    Units:  bytes over the whole cluster by tier; tokens per second of the whole batch, None where it does not
    fit.
    """

    model: str
    machine: str
    verdict: Verdict
    need_bytes: Mapping[Tier, int]
    have_bytes: Mapping[Tier, int]
    missing_bytes: int
    tokens_per_s: Interval | None
    batch: int
    context: int
    num_params: int
    active_params: int
    layout: Mapping[str, int]  # tp, dp, ep, expert_tp of the layout that the numbers are for
    rank_bytes: Mapping[str, int]  # one rank, by component
    rank_have_bytes: int
    expert_share: Mapping[Tier, float]  # of the routed experts, by tier
    notes: tuple[str, ...] = ()  # why this engine does not run the model, and what its counts may miss

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`."""
        speed = self.tokens_per_s
        return {
            "model": self.model, "machine": self.machine, "verdict": self.verdict,
            "need_bytes": dict(self.need_bytes), "have_bytes": dict(self.have_bytes),
            "missing_bytes": self.missing_bytes,
            "tokens_per_s": None if speed is None else {
                "value": float(speed.value), "low": float(speed.low), "high": float(speed.high)
            },
            "batch": self.batch, "context": self.context, "num_params": self.num_params,
            "active_params": self.active_params, "layout": dict(self.layout),
            "rank_bytes": dict(self.rank_bytes),
            "rank_have_bytes": self.rank_have_bytes, "expert_share": dict(self.expert_share),
            "notes": list(self.notes),
        }  # fmt: skip


def fit(
    model: ModelSpec, name: str, cluster: Cluster, *, batch: int = 1, context: int | None = None,
    weight_format: str | None = None, kv_bits: float = 16.0, profile_name: str = "calibrated",
) -> Fit:  # fmt: skip
    """Whether `batch` sequences of `context` tokens fit, and how fast a decode step is then.

    Without `context` it is CONTEXT, or all positions of a model that has fewer.

    Raises: ConfigError for a batch or context below 1, a context far beyond the model's, an unknown format,
            KV bits outside 1 to 64, and for more devices than the model can be split over.
    """
    context = min(CONTEXT, model.max_position) if context is None else context
    _check(batch, context, weight_format, kv_bits)
    notes = (*filter(None, [stretched(context, model.max_position)]), *model.runnable_reasons)
    profile = profile_on(profile_name, cluster)
    formats = Formats(dense=weight_format, experts=weight_format, kv_bits=kv_bits)
    splits = _fewest_offloaded(
        model,
        cluster,
        legal_splits(model, cluster.num_devices, weight_format),
        batch,
        context,
        profile,
        formats,
    )
    seqs = np.ceil(batch / splits.dp)
    parts = memory_per_rank(
        model, splits, num_seqs=seqs, context=float(context), max_rows=seqs, formats=formats, profile=profile
    )
    rank = np.broadcast_to(sum(parts.values()), np.shape(splits.tp))
    have = profile.usable_memory * cluster.machine.memory_bytes
    held = tiers(model, cluster, splits.num_offloaded, cluster.num_devices, formats.experts)
    missing = np.maximum(rank - have, 0.0) * cluster.num_devices + held.missing
    work = Work(num_seqs=seqs, new_tokens=1.0, past=float(context - 1))
    cost = step_cost(model, cluster, splits, work, profile=profile, formats=formats, shares=skewed(model))
    speed = tokens_per_second(cost, float(batch))
    good = np.where(missing <= 0, speed.value, -1.0)
    is_whole = np.asarray(splits.num_offloaded) <= 0
    if (good[is_whole] > 0).any():
        good = np.where(is_whole, good, -1.0)
    best = int(np.argmax(good)) if good.max() > 0 else int(np.argmin(missing))
    verdict: Verdict = "does_not_fit" if good.max() <= 0 else "fits" if is_whole[best] else "fits_offloaded"
    places = {tier: pick(getattr(held, tier), best) for tier in TIERS}
    each = layers_bytes(model, formats.experts)
    have_bytes = {"device": have * cluster.num_devices, **room(cluster, cluster.num_devices)}
    need = {"device": pick(rank, best) * cluster.num_devices, **{t: places[t] * each for t in TIERS[1:]}}
    total, params = max(sum(places.values()), 1.0), count_params(model)
    return Fit(
        model=name, machine=str(cluster), verdict=verdict, need_bytes={t: int(need[t]) for t in TIERS},
        have_bytes={t: int(have_bytes[t]) for t in TIERS}, missing_bytes=math.ceil(missing[best]),
        tokens_per_s=None if verdict == "does_not_fit" else speed.at(best), batch=batch, context=context,
        num_params=params.num_total, active_params=params.num_active,
        layout={key: int(pick(getattr(splits, key), best)) for key in ("tp", "dp", "ep", "expert_tp")},
        rank_bytes={key: int(pick(size, best)) for key, size in parts.items()}, rank_have_bytes=int(have),
        expert_share={tier: number / total for tier, number in places.items()}, notes=notes,
    )  # fmt: skip


def _fewest_offloaded(
    model: ModelSpec, cluster: Cluster, splits: Split, batch: int, context: int, profile: Profile,
    formats: Formats,
) -> Split:  # fmt: skip
    """The splits, each with the fewest experts outside the devices with which it fits; or all of them."""
    most = max((moe.num_experts for _, moe in model.moe_layers), default=0)
    count = len(np.asarray(splits.tp))
    columns: dict[str, Any] = {
        name: np.repeat(np.asarray(getattr(splits, name)), most + 1) for name in _COLUMNS
    }
    every = Split(**columns, num_offloaded=np.tile(np.arange(most + 1.0), count))
    seqs = np.ceil(batch / every.dp)
    parts = memory_per_rank(
        model, every, num_seqs=seqs, context=float(context), max_rows=seqs, formats=formats, profile=profile
    )
    fits = sum(parts.values()) <= profile.usable_memory * cluster.machine.memory_bytes
    fits = np.broadcast_to(fits, (count * (most + 1),)).reshape(count, most + 1)
    return replace(splits, num_offloaded=np.where(fits.any(axis=1), np.argmax(fits, axis=1), most) * 1.0)


def tokens_per_second(cost: Cost, num_tokens: float) -> Interval:
    """Tokens of a step by its seconds."""
    seconds = step_seconds(cost)
    return Interval(
        value=num_tokens / seconds.value, low=num_tokens / seconds.high, high=num_tokens / seconds.low
    )


def legal_splits(model: ModelSpec, num_devices: int, weight_format: str | None = None) -> Split:
    """Every split of a model over `num_devices`: attention by heads, experts by expert or slice; no pipeline.

    Slices hold whole blocks of the weights that share a scale.

    Raises: ConfigError with the arithmetic when no split is legal.
    """
    heads = [layer.mixer.num_heads for layer in model.layers if isinstance(layer.mixer, GqaSpec | MlaSpec)]
    sizes = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    tps = [size for size in sizes if all(count % size == 0 for count in heads)]
    moes = [moe for _, moe in model.moe_layers]
    pairs = []
    for ep in sizes:
        slices = num_devices // ep
        whole = slices * (scale_block(model, weight_format) if slices > 1 else 1)
        is_legal = all(moe.num_experts >= ep and moe.expert_width % whole == 0 for moe in moes)
        if is_legal and (moes or ep == 1):
            pairs += [(tp, ep) for tp in tps]
    if not pairs:
        most = max((moe.num_experts for moe in moes), default=0)
        raise ConfigError(
            f"{num_devices} devices: neither {most} experts nor slices of them divide over so many; use fewer"
        )
    columns = np.array(pairs, dtype=np.float64)
    tps_N, eps_N = columns[:, 0], columns[:, 1]
    return Split(tp=tps_N, dp=num_devices / tps_N, ep=eps_N, expert_tp=num_devices / eps_N)


def _check(batch: int, context: int, weight_format: str | None, kv_bits: float) -> None:
    if batch < 1 or context < 1:
        raise ConfigError(f"batch and context must be at least 1, got {batch} and {context}")
    if weight_format is not None and weight_format not in WEIGHT_BITS:
        raise ConfigError(f"unknown weight format {weight_format!r}; {nearest(weight_format, WEIGHT_BITS)}")
    if not 1.0 <= kv_bits <= 64.0:  # not a number is neither
        raise ConfigError(
            f"the KV cache holds 1 to 64 bits a number, got {kv_bits:g}; 16 is bfloat16, 8 is fp8"
        )
