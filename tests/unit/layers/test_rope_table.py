from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from kv_cases import reference_ops

from moesaic.errors import UnsupportedModelError
from moesaic.kernels.matmul import noise
from moesaic.layers.rope import FIRST_ROWS, RopeTable, frequencies
from moesaic.spec.model import RopeScaling, RopeSpec

OPS = reference_ops()


def rotation(positions_T: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """cos + i sin in float64."""
    inverse = spec.theta ** -(torch.arange(0, spec.dim, 2).double() / spec.dim)
    return torch.polar(torch.ones(1).double(), positions_T[:, None] * inverse)


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rotates_pairs_as_complex_numbers(is_interleaved: bool) -> None:
    spec = RopeSpec(theta=1e4, dim=8, is_interleaved=is_interleaved)
    positions_T, x_THC = torch.tensor([0, 3, 700]), noise((3, 2, 12))
    turned = RopeTable(spec, 1000).rotate(x_THC, positions_T, OPS)
    order = (slice(0, 8, 2), slice(1, 8, 2)) if is_interleaved else (slice(0, 4), slice(4, 8))
    pairs = torch.complex(x_THC[..., order[0]].double(), x_THC[..., order[1]].double())
    expected = pairs * rotation(positions_T, spec)[:, None]
    torch.testing.assert_close(turned[..., order[0]].double(), expected.real, rtol=0, atol=1e-6)
    torch.testing.assert_close(turned[..., order[1]].double(), expected.imag, rtol=0, atol=1e-6)
    assert torch.equal(turned[..., 8:], x_THC[..., 8:])
    assert torch.equal(turned[0], x_THC[0])


def test_rows_do_not_follow_the_growth_of_the_table() -> None:
    spec = RopeSpec(theta=1e4, dim=16)
    small, large = RopeTable(spec, 3 * FIRST_ROWS), RopeTable(spec, 3 * FIRST_ROWS)
    positions_T = torch.tensor([1, 5, 90])
    before = small.at(positions_T)
    large.at(torch.tensor([3 * FIRST_ROWS - 1]))
    small.at(torch.tensor([FIRST_ROWS + 1]))
    for table in (small, large):
        assert all(torch.equal(a, b) for a, b in zip(table.at(positions_T.clone()), before, strict=True))
    assert small.at(torch.empty(0, dtype=torch.int64))[0].shape == (0, 8)


def test_layers_of_a_step_share_rows() -> None:
    table = RopeTable(RopeSpec(theta=1e4, dim=16), 100)
    positions_T = torch.tensor([1, 2])
    assert table.at(positions_T)[0] is table.at(positions_T)[0]
    assert not torch.equal(table.at(torch.tensor([3, 4]))[0], table.at(positions_T)[0])


def hf_config(rope: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 1e4, **rope},
    )


SCALINGS: list[tuple[RopeScaling, dict[str, Any]]] = [
    (RopeScaling(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    (
        RopeScaling(
            kind="llama3", factor=8.0, original_max_position=1024, low_freq_factor=1.0, high_freq_factor=4.0
        ),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "original_max_position_embeddings": 1024,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    (
        RopeScaling(kind="yarn", factor=4.0, original_max_position=1024),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    ),
    (
        RopeScaling(kind="yarn", factor=4.0, original_max_position=1024, truncate=False, beta_fast=24.0),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "truncate": False,
            "beta_fast": 24.0,
        },
    ),
    (
        RopeScaling(kind="yarn", factor=40.0, original_max_position=128, mscale=0.707, mscale_all_dim=0.9),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 128,
            "mscale": 0.707,
            "mscale_all_dim": 0.9,
        },
    ),
    (
        RopeScaling(kind="yarn", factor=4.0, original_max_position=1024, attention_factor=1.5),
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "attention_factor": 1.5,
        },
    ),
    (
        RopeScaling(
            kind="longrope",
            factor=4.0,
            original_max_position=1024,
            short_factor=(1.0,) * 16,
            long_factor=tuple(1.0 + i for i in range(16)),
        ),
        {
            "rope_type": "longrope",
            "factor": 4.0,
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 16,
            "long_factor": [1.0 + i for i in range(16)],
        },
    ),
    (
        RopeScaling(kind="proportional", factor=2.0, proportion=0.3),
        {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.3},
    ),
]


@pytest.mark.parametrize(("scaling", "parameters"), SCALINGS, ids=lambda value: getattr(value, "kind", ""))
@pytest.mark.parametrize("served", [512, 4096])
def test_frequencies_are_those_of_transformers(
    scaling: RopeScaling, parameters: dict[str, Any], served: int
) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    expected, factor = ROPE_INIT_FUNCTIONS[scaling.kind](hf_config(parameters), seq_len=served)
    found, found_factor = frequencies(RopeSpec(theta=1e4, dim=32, scaling=scaling), served)
    torch.testing.assert_close(found, expected.double(), rtol=1e-6, atol=1e-12)
    assert math.isclose(found_factor, factor, rel_tol=1e-12)


def test_frequencies_that_follow_the_sequence_are_refused() -> None:
    spec = RopeSpec(theta=1e4, dim=32, scaling=RopeScaling(kind="dynamic", factor=2.0))
    with pytest.raises(
        UnsupportedModelError, match="'dynamic' is not run: its frequencies follow the length"
    ):
        RopeTable(spec, 100)


def test_a_missing_original_length_is_named() -> None:
    spec = RopeSpec(theta=1e4, dim=32, scaling=RopeScaling(kind="yarn", factor=2.0))
    with pytest.raises(UnsupportedModelError, match="needs original_max_position_embeddings"):
        RopeTable(spec, 100)


def test_position_beyond_what_is_served_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="position 100 of at most 100"):
        RopeTable(RopeSpec(theta=1e4, dim=32), 100).at(torch.tensor([100]))
