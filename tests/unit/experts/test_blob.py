"""One expert, one run of bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.errors import CheckpointError
from moesaic.experts.blob import ALIGNMENT_BYTES, BlobLayout, ExpertBlob, Part, pack_expert
from moesaic.kernels.formats import pack as quantise
from moesaic.kernels.panel import PanelWeight
from moesaic.spec.experts import ExpertKey
from moesaic.spec.model import GateSpec, MoeSpec
from moesaic.spec.numerics import DTYPE_BYTES, Format
from moesaic.spec.quantised import QUANTISED


def moe_spec(inner: int = 24, width: int = 40, *, is_gated: bool = True, has_bias: bool = True) -> MoeSpec:
    return MoeSpec(
        num_experts=4,
        experts_per_token=2,
        expert_width=inner,
        gate=GateSpec(score="softmax"),
        shared=None,
        row_width=width,
        is_gated=is_gated,
        has_bias=has_bias,
    )


def random_parts(layout: BlobLayout, seed: int = 0) -> dict[Part, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {part: torch.randn(place.shape, generator=rng) for part, place in layout.places.items()}


@settings(max_examples=40)
@given(
    inner=st.integers(1, 40),
    width=st.integers(1, 40),
    is_gated=st.booleans(),
    has_bias=st.booleans(),
    format=st.sampled_from(["float32", "bfloat16"]),
)
def test_unpack_of_pack_is_the_identity(
    inner: int, width: int, is_gated: bool, has_bias: bool, format: Format
) -> None:
    spec = moe_spec(inner, width, is_gated=is_gated, has_bias=has_bias)
    layout = BlobLayout.of(spec, format)
    parts = random_parts(layout)
    data = pack_expert(layout, parts)
    assert data.shape == (layout.num_bytes,)
    unpacked = layout.unpack(data)
    assert set(unpacked) == set(parts)
    for part, tensor in parts.items():
        assert torch.equal(unpacked[part], tensor.to(unpacked[part].dtype))


@settings(max_examples=25, deadline=None)
@given(
    inner=st.integers(1, 40),
    width=st.integers(1, 140),
    is_gated=st.booleans(),
    has_bias=st.booleans(),
    format=st.sampled_from(list(QUANTISED)),
)
def test_integer_parts_are_packed_each_by_itself_and_biases_stay(
    inner: int, width: int, is_gated: bool, has_bias: bool, format: Format
) -> None:
    layout = BlobLayout.of(moe_spec(inner, width, is_gated=is_gated, has_bias=has_bias), format)
    parts = random_parts(layout)
    data = pack_expert(layout, parts)
    weights = layout.weights(data)
    inners = [quantise(parts[part], format).unpack(torch.float32) for part in ("gate", "up")[not is_gated :]]
    assert isinstance(weights.inner_FD, PanelWeight)
    assert weights.inner_FD.shape == (len(inners) * inner, width)
    assert torch.equal(weights.inner_FD.unpack().unpack(torch.float32), torch.cat(inners))
    assert isinstance(weights.down_DF, PanelWeight)
    down_DF = quantise(parts["down"], format).unpack(torch.float32)
    assert torch.equal(weights.down_DF.unpack().unpack(torch.float32), down_DF)
    if has_bias:
        names = ("gate_bias", "up_bias")[not is_gated :]
        assert torch.equal(weights.inner_bias_F, torch.cat([parts[name] for name in names]))
    assert torch.equal(pack_expert(layout, parts), data), "equal experts have equal bytes"


def test_what_an_integer_format_cannot_hold_is_refused_with_the_parts_name() -> None:
    layout = BlobLayout.of(moe_spec(), "int4-g32")
    parts = random_parts(layout)
    parts["up"][3, 5] = float("nan")
    with pytest.raises(CheckpointError, match="up holds numbers that are NaN or infinite"):
        pack_expert(layout, parts)


def test_parts_follow_each_other_and_matrices_start_at_cache_lines() -> None:
    layout = BlobLayout.of(moe_spec(), "bfloat16")
    assert list(layout.places) == ["gate", "up", "down", "gate_bias", "up_bias", "down_bias"]
    size = 24 * 40 * DTYPE_BYTES["bfloat16"]
    assert layout.places["gate"].start == 0
    assert layout.places["up"].start == size
    for part in ("down", "gate_bias", "down_bias"):
        assert layout.places[part].start % ALIGNMENT_BYTES == 0
    assert layout.num_bytes % ALIGNMENT_BYTES == 0
    assert layout.num_bytes >= 3 * size
    assert list(BlobLayout.of(moe_spec(is_gated=False, has_bias=False), "float32").places) == ["up", "down"]


def test_views_copy_nothing_and_gate_and_up_are_one_matrix() -> None:
    layout = BlobLayout.of(moe_spec(), "float32")
    parts = random_parts(layout)
    data = pack_expert(layout, parts)
    weights = layout.weights(data)
    assert torch.equal(weights.inner_FD, torch.cat((parts["gate"], parts["up"])))
    assert weights.inner_bias_F is not None
    assert torch.equal(weights.inner_bias_F, torch.cat((parts["gate_bias"], parts["up_bias"])))
    assert torch.equal(weights.down_DF, parts["down"])
    layout.view(data, "up")[3, 5] = 77.0
    assert weights.inner_FD[24 + 3, 5] == 77.0


def test_an_expert_without_gate_has_up_alone() -> None:
    layout = BlobLayout.of(moe_spec(is_gated=False), "float32")
    parts = random_parts(layout)
    weights = layout.weights(pack_expert(layout, parts))
    assert torch.equal(weights.inner_FD, parts["up"])
    assert weights.inner_bias_F is not None
    assert torch.equal(weights.inner_bias_F, parts["up_bias"])


def test_pack_names_what_is_wrong() -> None:
    layout = BlobLayout.of(moe_spec(has_bias=False), "float32")
    parts = random_parts(layout)
    with pytest.raises(CheckpointError, match="needs gate, up, down; missing: up, down"):
        pack_expert(layout, {"gate": parts["gate"]})
    with pytest.raises(CheckpointError, match=r"down: expected shape \[40, 24\], found \[24, 40\]"):
        pack_expert(layout, {**parts, "down": parts["down"].T})
    with pytest.raises(CheckpointError, match="no part 'up_bias'; known: down, gate, up"):
        pack_expert(layout, {**parts, "up_bias": torch.zeros(24)})
    with pytest.raises(CheckpointError, match=r"gate: expected float32, .* found torch\.int32"):
        pack_expert(layout, {**parts, "gate": parts["gate"].int()})


def test_digest_is_of_the_numbers_and_their_format() -> None:
    layout = BlobLayout.of(moe_spec(inner=5, width=7), "float32")
    assert layout.gaps  # or the next line proves nothing
    key = ExpertKey(3, 1)
    blobs = [ExpertBlob.of(key, "float32", pack_expert(layout, random_parts(layout))) for _ in range(2)]
    assert blobs[0].digest == blobs[1].digest
    other = ExpertBlob.of(key, "float32", pack_expert(layout, random_parts(layout, seed=1)))
    assert other.digest != blobs[0].digest
    assert ExpertBlob.of(key, "bfloat16", blobs[0].data).digest != blobs[0].digest


def test_a_damaged_blob_is_named() -> None:
    layout = BlobLayout.of(moe_spec(), "float32")
    blob = ExpertBlob.of(ExpertKey(3, 1), "float32", pack_expert(layout, random_parts(layout)))
    blob.verify()
    blob.data[17] ^= 1
    with pytest.raises(CheckpointError, match="expert 1 of layer 3: its bytes have digest"):
        blob.verify()
