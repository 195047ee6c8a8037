"""How uneven the experts are: a recorded load from a file, or a skew model. What that costs, `cost` knows."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from moesaic.cost.load import CHANCE, ExpertShares, shares_of, zipf_shares
from moesaic.errors import ConfigError
from moesaic.spec.codec import from_plain
from moesaic.spec.experts import ExpertLoad
from moesaic.spec.locate import read_json_object
from moesaic.spec.model import ModelSpec

SKEW_FINE = 0.48
"""Exponent of the popularity of many small experts where no load is given.

Source: the second moment of DeepSeek-V3's decode counts that SGLang published with its 96-GPU deployment:
1.54 to 1.60 times that of even shares, median over the sparse layers. OLMoE (64 experts, six corpora
together): 0.43.
"""
SKEW_COARSE = 0.17
"""The same of few large experts.

Source: Mixtral-8x7B over seven subjects of MMLU, Fiddler's published counts: 0.16 and 0.17; single subjects
0.2 to 0.37.
"""
COARSE = 16  # guess: experts up to which a model's are few and large


NUM_GROUPS = 4  # guess: kinds of layers that a recorded load is priced as


def default_skew(model: ModelSpec) -> float:
    """What is assumed where neither a load nor a skew is given."""
    most = max((moe.num_experts for _, moe in model.moe_layers), default=0)
    return SKEW_FINE if most > COARSE else SKEW_COARSE


def skewed(model: ModelSpec, exponent: float | None = None) -> ExpertShares:
    """The skew model for a model's experts; exponent 0 leaves chance alone, None takes `default_skew`.

    Raises: ConfigError for an exponent below 0 or not finite.
    """
    exponent = default_skew(model) if exponent is None else exponent
    layers = model.moe_layers
    if not math.isfinite(exponent) or exponent < 0:
        raise ConfigError(f"a skew is an exponent of at least 0 (0 is even, 0.6 is strong), got {exponent!r}")
    if exponent == 0 or not layers:
        return CHANCE
    if len({moe.num_experts for _, moe in layers}) > 1:
        raise ConfigError("the model's layers have different numbers of experts; give a --load, or --skew 0")
    return zipf_shares(layers[0][1].num_experts, exponent)


def read_load(path: Path, model: ModelSpec) -> ExpertShares:
    """The shares of a recorded load: moesaic's own JSON, or `{"logical_count": [layers][experts]}`.

    A `logical_count` may have a row for every layer, dense ones being 0, or for the sparse layers alone;
    with one more dimension in front it is summed over it.

    Raises: ConfigError naming the file and what is wrong: layers, experts, negative or not finite counts.
    """
    data = read_json_object(path)
    if "logical_count" in data:
        load = _from_counts(data["logical_count"], path, model)
    elif "counts" in data:
        load = from_plain(ExpertLoad, data, where=str(path))
    else:
        keys = ", ".join(sorted(data)[:5]) or "none"
        raise ConfigError(
            f"{path}: no expert load: it needs counts or logical_count, and its keys are {keys}"
        )
    return shares_of(load, model)


def grouped(shares: ExpertShares, num_groups: int = NUM_GROUPS) -> ExpertShares:
    """The layers in groups of like unevenness, each of which has the shares of its middle layer.

    Pricing takes as long as there are different layers, and they differ little beside the rest of a plan.
    """
    layers = shares.shares or ()
    if len(layers) <= num_groups:
        return shares
    order = np.argsort([len(layer) * float(np.square(layer).sum()) for layer in layers])
    found = list(layers)
    for group in np.array_split(order, num_groups):
        for idx in group:
            found[idx] = layers[group[len(group) // 2]]
    return ExpertShares(shares=tuple(found), has_chance=shares.has_chance)


def _from_counts(rows: Any, path: Path, model: ModelSpec) -> ExpertLoad:
    try:
        counts = np.asarray(rows, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: logical_count must be numbers by layer and expert, all rows equally long: {error}"
        ) from error
    if counts.ndim == 3:
        counts = counts.sum(axis=0)
    if counts.ndim != 2:
        raise ConfigError(f"{path}: logical_count must be [layers][experts], got {counts.ndim} dimensions")
    sparse = [idx for idx, _ in model.moe_layers]
    if len(counts) == len(model.layers) and len(sparse) < len(counts):
        counts = counts[sparse]
    return ExpertLoad(
        counts=tuple(counts), phase="decode", num_tokens=0, num_steps=0, since_s=0.0, until_s=0.0,
        plan_version=0,
        source=str(path),
    )  # fmt: skip
