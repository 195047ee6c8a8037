"""From words to a study of expert parallelism: sizes, routing by skew or recorded load, priced chunks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moesaic.cost.host import profile_on
from moesaic.errors import ConfigError
from moesaic.planner.load_file import read_load
from moesaic.planner.question import format_choices
from moesaic.planner.sim.chunking import (
    ChunkReport,
    Exchange,
    MessageRow,
    study_chunks,
    study_messages,
)
from moesaic.planner.sim.ep import EpCase, EpReport, study_ep
from moesaic.planner.sim.traffic import TopicTraffic, max_mean
from moesaic.spec.hardware import Cluster
from moesaic.spec.model import ModelSpec

DEFAULT_EXPERTS, DEFAULT_TOP_K = 256, 8  # of DeepSeek-V3
MAX_COUNTED = 128  # tokens of a GPU whose messages are counted


@dataclass(frozen=True, kw_only=True, slots=True)
class EpAnswer:
    """What `moesaic simulate ep` prints."""

    routing: EpReport
    chunks: ChunkReport | None  # with a model and a machine, for the largest batch
    messages: tuple[MessageRow, ...] = ()  # likewise


def sizes_of(model: ModelSpec | None, experts: int | None, top_k: int | None) -> tuple[int, int]:
    """Experts of a layer and of a token.

    Raises: ConfigError for a dense model, and for numbers that are not the model's.
    """
    if model is None:
        return (DEFAULT_EXPERTS if experts is None else experts), (DEFAULT_TOP_K if top_k is None else top_k)
    if not model.moe_layers:
        raise ConfigError("this model is dense: it has no experts to place")
    moe = model.moe_layers[0][1]
    for name, given, own in (("experts", experts, moe.num_experts), ("top-k", top_k, moe.experts_per_token)):
        if given not in (None, own):
            raise ConfigError(f"--{name} {given} is not the model's {own}; leave it out")
    return moe.num_experts, moe.experts_per_token


def routing(
    model: ModelSpec | None, case: EpCase, *, load: Path | None, layer: int | None, skew: float, topics: int
) -> tuple[TopicTraffic, str]:
    """The traffic, and what it is in words.

    Raises: ConfigError for a load without a model, and a layer that it has not.
    """
    if load is None:
        if layer is not None:
            raise ConfigError("--layer is one of a recorded load: give --load FILE too")
        words = "even" if skew == 0 else f"Zipf {skew:g}" + (f" in each of {topics} topics" * (topics > 1))
        return TopicTraffic.zipf(case.num_experts, skew, num_topics=topics, seed=case.seed), words
    if model is None:
        raise ConfigError(
            "--load needs the MODEL that it was recorded with: its layers and experts are checked"
        )
    popularity_LE = TopicTraffic.recorded(read_load(load, model)).popularity_ZE
    ratios = [max_mean(one) for one in popularity_LE]
    idx = int(np.argsort(ratios)[len(ratios) // 2]) if layer is None else layer
    if not 0 <= idx < len(ratios):
        raise ConfigError(f"--layer {idx}: the load has the sparse layers 0 to {len(ratios) - 1}")
    words = (
        f"{load.name}, sparse layer {idx} of {len(ratios)} (hottest expert {min(ratios):.1f} to "
        f"{max(ratios):.1f} x the mean over layers)"
    )
    return TopicTraffic(popularity_ZE=popularity_LE[idx : idx + 1]), words


def priced_exchange(
    model: ModelSpec | None, machines: Cluster | None, case: EpCase, profile: str
) -> Exchange | None:
    """The exchange of the largest batch; None without a machine.

    Raises: ConfigError for a machine without a model, and for other GPUs than the machine's.
    """
    if machines is None:
        return None
    if model is None:
        raise ConfigError("--machine prices the exchange of a MODEL's layer: give one")
    if machines.num_devices != case.num_gpus:
        raise ConfigError(
            f"--gpus {case.num_gpus} are not the {machines.num_devices} of --machine {machines}"
        )
    return Exchange(
        model=model, cluster=machines, tokens=max(case.tokens_per_gpu),
        profile=profile_on(profile, machines),
        formats=format_choices(model, "stored", "bfloat16", None)[0].formats,
    )  # fmt: skip


def study(case: EpCase, traffic: TopicTraffic, source: str, exchange: Exchange | None) -> EpAnswer:
    """Imbalance and copies, and with a priced exchange its chunks and messages."""
    report = study_ep(case, traffic, source)
    if exchange is None:
        return EpAnswer(routing=report, chunks=None)
    return EpAnswer(
        routing=report, chunks=study_chunks(exchange),
        messages=study_messages(exchange, traffic, min(exchange.tokens, MAX_COUNTED), case.seed),
    )  # fmt: skip
