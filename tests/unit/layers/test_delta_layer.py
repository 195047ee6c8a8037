"""The linear-attention layer alone: both cuts of its projections, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_cases import reference_ops
from torch import Tensor

from moesaic.errors import ConfigError, UnsupportedModelError
from moesaic.kernels.ops import choose
from moesaic.kernels.state_view import StatePlaces, StateRow, StateView
from moesaic.layers.delta import GatedDelta
from moesaic.models.parameter import mixer_parameters
from moesaic.spec.model import LinearSpec
from moesaic.spec.numerics import FormMap, preset
from moesaic.steps import drive

SPEC = LinearSpec(num_key_heads=2, num_value_heads=6, key_dim=4, value_dim=3, conv_width=3)
HIDDEN = 16


def weights(spec: LinearSpec = SPEC) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = mixer_parameters(spec, HIDDEN)
    return {name: torch.randn(shape, generator=generator) * 0.5 for name, shape in shapes.items()}


def run(spec: LinearSpec, given: dict[str, Tensor], num_tokens: int = 5) -> Tensor:
    view = StateView(
        states=torch.zeros(2, 6, 4, 3),
        tails=torch.zeros(2, 2, spec.conv_channels),
        places=StatePlaces.of(
            [StateRow(first_row=0, num_tokens=num_tokens, slot_from=None, slot_to=1)] if num_tokens else []
        ),
    )
    x_TD = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
    layer = GatedDelta(spec, given, reference_ops(), norm_eps=1e-6)
    return drive([layer.forward(x_TD, torch.arange(num_tokens), view)], 1.0)[0]


def fuse(split: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same rows, by key head."""
    q, k, v = split["qkv"].split((8, 8, 18))
    parts = [part.view(2, -1, HIDDEN) for part in (q, k, v, split["z"])]
    pairs = [part.view(2, -1, HIDDEN) for part in (split["b"], split["a"])]
    kept = {name: value for name, value in split.items() if name not in ("qkv", "z", "b", "a")}
    return kept | {"qkvz": torch.cat(parts, dim=1).flatten(0, 1), "ba": torch.cat(pairs, dim=1).flatten(0, 1)}


def test_fused_projections_are_the_split_ones_by_key_head() -> None:
    split = weights()
    fused = run(replace(SPEC, is_fused=True), fuse(split))
    assert torch.allclose(fused, run(SPEC, split), atol=1e-5)
    assert run(SPEC, split, num_tokens=0).shape == (0, HIDDEN)


def test_another_form_is_refused() -> None:
    numerics = replace(preset("portable", dtype="float32"), forms=FormMap(state="chunked"))
    with pytest.raises(UnsupportedModelError, match=r"runs recurrent; numerics\.forms\.state is 'chunked'"):
        GatedDelta(SPEC, weights(), choose(numerics, num_threads=1), norm_eps=1e-6)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"z": None}, "linear attention needs the weight 'z'"),
        ({"conv": torch.zeros(34, 1, 4)}, r"'conv' has shape \[34, 1, 4\], its spec says \[34, 1, 3\]"),
        ({"k": torch.zeros(1)}, "linear attention has no use for the weights k"),
    ],
)
def test_weights_must_be_those_of_the_spec(change: dict[str, Any], rule: str) -> None:
    given = {name: value for name, value in (weights() | change).items() if value is not None}
    with pytest.raises(ConfigError, match=rule):
        GatedDelta(SPEC, given, reference_ops(), norm_eps=1e-6)
