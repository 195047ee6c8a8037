"""How uneven the experts are: a recorded load from a file, or a skew model. What that costs, `cost` knows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moesaic.cost.load import CHANCE, ExpertShares, shares_of, zipf_shares
from moesaic.errors import ConfigError
from moesaic.interop.dump import match_model
from moesaic.interop.load_file import read_dump
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
MAX_SKEW = 4.0  # guess: there one expert in 64 takes 92 % of the choices
COARSE = 16  # guess: experts up to which a model's are few and large


NUM_GROUPS = 4  # guess: kinds of layers that a recorded load is priced as


def default_skew(model: ModelSpec) -> float:
    """What is assumed where neither a load nor a skew is given."""
    most = max((moe.num_experts for _, moe in model.moe_layers), default=0)
    return SKEW_FINE if most > COARSE else SKEW_COARSE


def skewed(model: ModelSpec, exponent: float | None = None) -> ExpertShares:
    """The skew model for a model's experts; exponent 0 leaves chance alone, None takes `default_skew`.

    Raises: ConfigError for an exponent outside 0 to `MAX_SKEW`.
    """
    exponent = default_skew(model) if exponent is None else exponent
    layers = model.moe_layers
    if not 0.0 <= exponent <= MAX_SKEW:  # not a number is neither
        raise ConfigError(
            f"a skew is an exponent of at least 0 and at most {MAX_SKEW:g} (0 is even, 0.6 is strong), got "
            f"{exponent!r}"
        )
    if exponent == 0 or not layers:
        return CHANCE
    if len({moe.num_experts for _, moe in layers}) > 1:
        raise ConfigError("the model's layers have different numbers of experts; give a --load, or --skew 0")
    return zipf_shares(layers[0][1].num_experts, exponent)


def read_load(path: Path, model: ModelSpec) -> ExpertShares:
    """The shares of a recorded load, in any layout that `interop.load_file` reads.

    Raises: ConfigError naming the file and what is wrong: layers, experts, negative or not finite counts.
    """
    dump = match_model(read_dump(str(path)), model)
    silent = sorted(set(dict(model.moe_layers)) - set(dump.sparse_layers))
    if silent:
        raise ConfigError(f"the load {path} counted nothing in layer {silent[0]} of the model")
    return shares_of(dump.load(), model)


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
