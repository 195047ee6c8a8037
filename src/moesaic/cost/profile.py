"""How much of the datasheet is reached: efficiencies, latencies, overheads. A profile is one set of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from moesaic.cost.term import Source

ProfileName = Literal["paper", "calibrated"]
PROFILES: tuple[ProfileName, ...] = get_args(ProfileName)

Kind = Literal["matrices", "attention", "experts"]
"""Operators that reach different shares of the peak: dense products, attention, routed experts."""
KINDS: tuple[Kind, ...] = get_args(Kind)

Launch = Literal[
    "gqa", "mla", "index", "linear", "mamba", "experts", "shared_experts", "dense_ffn", "head", "quantise",
]  # fmt: skip
"""What a layer launches, each with an overhead of its own: an MLA mixer is more kernels than a GQA one, and
`quantise` is what brings the rows to the format of the weights before a product."""
LAUNCHES: tuple[Launch, ...] = get_args(Launch)


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Corrections of a machine's datasheet numbers.

    Units:  shares of the peak without a unit, seconds otherwise.
    """

    name: str
    source: Source
    compute_share: Mapping[Kind, float]  # of the dense peak rate
    memory_share: Mapping[Kind, float]
    link_share: float  # of a link's bandwidth, one direction
    network_share: float
    usable_memory: float  # of a device's memory that weights and KV may fill
    launch_s: Mapping[Launch, float]  # launches and tails
    launch_power: float = 1.0  # 1: launches add to the work; above: they hide behind long operators
    hop_factor: float = 1.0  # on the latency of each hop of a ring
    exchange_factor: float = 1.0  # on the latency of an all-to-all or a message
    collective_s: float = 0.0  # of a reduction, beside its hops
    step_s: float = 0.0  # host work of a step: scheduling, sampling, launching
    skew: float = 0.0  # exponent of the popularity of experts that is assumed where no load is given
    full_rate_rows: float = (
        0.0  # rows per expert that reach compute_share; fewer reach the root of their part
    )
    counts_all: bool = True  # logits, rows in and out, router weights; the paper model: only matrices and KV
    joins_mixer: bool = False  # projections and attention are one operator, whose products and reads overlap
    has_two_levels: bool = True  # bytes to one's own node take the link; else all take the network
    sends_once: bool = True  # a token goes once to a rank with several of its experts; else once a choice
    low: float = 1.0  # bounds of the interval as factors of the value
    high: float = 1.0


PAPER = Profile(
    name="paper",
    source="modelled",
    compute_share=dict.fromkeys(KINDS, 0.7),
    memory_share=dict.fromkeys(KINDS, 0.8),
    link_share=0.8,
    network_share=0.8,
    usable_memory=0.9,
    launch_s={**dict.fromkeys(LAUNCHES, 5e-6), "index": 0.0, "head": 0.0, "quantise": 0.0},
    counts_all=False,
    joins_mixer=True,
    has_two_levels=False,
    sends_once=False,
)
"""The model of the lecture notes that the project's paper figures come from.

Source: 0.7 and 0.8 give 258 rows per expert on an H100 (0.7 * 989e12 / (0.8 * 3.35e12)); 0.9 gives 19 and 10
devices for DeepSeek-V3 in bfloat16 and fp8; the rest reproduces the step times of
tests/unit/cost/test_paper.py.
"""
