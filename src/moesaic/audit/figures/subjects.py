"""What figures are about: models by name, their sparse layers, and the paper's way to price a step."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from moesaic.account.params import expert_weights
from moesaic.cost.layouts import Split, largest_batch, step_cost
from moesaic.cost.load import EVEN, ExpertShares
from moesaic.cost.ops import Formats, Work
from moesaic.cost.profile import PAPER
from moesaic.cost.term import Cost, Number, step_seconds
from moesaic.errors import ConfigError
from moesaic.spec.families import read_config
from moesaic.spec.hardware import Cluster
from moesaic.spec.locate import preset
from moesaic.spec.model import ModelSpec, MoeSpec

SCALED_MOE = {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "hidden_size": 8192,
    "intermediate_size": 8192, "num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8,
    "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 32000, "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
"""Source: MegaScale-Infer, arXiv:2504.02263, table 2; the vocabulary is a guess that gives its 317B."""


@cache
def model(name: str) -> ModelSpec:
    """A preset, or the paper's Scaled-MoE."""
    return read_config(SCALED_MOE if name == "scaled-moe" else preset(name).config, name=name)


def experts_of(name: str) -> MoeSpec:
    """The routed experts of a model's sparse layers.

    Raises: ConfigError for a dense model.
    """
    layers = model(name).moe_layers
    if not layers:
        raise ConfigError(f"{name} is dense: this figure is about routed experts")
    return layers[-1][1]


def num_moe_layers(name: str) -> int:
    """How many layers have routed experts."""
    return len(model(name).moe_layers)


def one_expert_bytes(name: str, bits: float = 16.0) -> float:
    """Matrices of one routed expert in one layer, without scales."""
    return expert_weights(experts_of(name)) * bits / 8


def resized(name: str, **sizes: Any) -> MoeSpec:
    """The experts of a model with other sizes."""
    return replace(experts_of(name), **sizes)


def decode(
    name: str, cards: Cluster, split: Split, batch: Number, context: Number, *,
    formats: Formats | None = None, shares: ExpertShares = EVEN,
) -> Cost:  # fmt: skip
    """A decode step of `batch` sequences per replica by the paper's model; the last position is new."""
    work = Work(num_seqs=batch, new_tokens=1, past=context - 1)
    return step_cost(model(name), cards, split, work, profile=PAPER, formats=formats, shares=shares)


def decode_seconds(
    name: str, cards: Cluster, split: Split, batch: Number, context: Number, *,
    formats: Formats | None = None, shares: ExpertShares = EVEN,
) -> Number:  # fmt: skip
    """Seconds of that step."""
    return step_seconds(decode(name, cards, split, batch, context, formats=formats, shares=shares)).value


def fullest(
    name: str, cards: Cluster, split: Split, context: int, *, formats: Formats | None = None
) -> int:  # fmt: skip
    """Sequences per replica that fit."""
    found = largest_batch(model(name), cards, split, context=context, profile=PAPER, formats=formats)
    return int(found)
