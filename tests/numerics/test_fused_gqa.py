"""The attention half of a layer in one native call has the bits of its parts; a control shows it can fail."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import BLOCK
from marks import needs_native
from torch import Tensor

from moesaic.kernels import native
from moesaic.kernels.kv_format import pool_zeros
from moesaic.kernels.kv_view import KvPlaces, KvRow, KvView
from moesaic.kernels.matmul import noise
from moesaic.kernels.native.ops import NativeOps
from moesaic.kernels.ops import choose
from moesaic.kernels.panel import PanelWeight, Weight, pack_panels
from moesaic.layers.attention import FusedGqa, GqaAttention, PagedAttend
from moesaic.layers.norm import RmsNorm
from moesaic.layers.rope import RopeTable
from moesaic.models.decoder import MixerHalf
from moesaic.spec.model import GqaSpec, RopeSpec
from moesaic.spec.numerics import KV_FORMATS, KvFormat, preset
from moesaic.spec.quantised import QUANTISED
from moesaic.steps import drive

pytestmark = needs_native
LEVELS = native.levels()
HIDDEN, EPS = 64, 1e-5
SPEC = GqaSpec(
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rope=RopeSpec(theta=1e4, dim=16),
    softmax_scale=0.25,
    qk_norm="full",
)


def make_ops(level: str, dtype: Any, *, num_threads: int, shards: int, kv_format: KvFormat) -> NativeOps:
    numerics = preset("portable", dtype=dtype, backend=f"native/{level}", kv_format=kv_format)
    ops = choose(numerics.with_leaves(matmul_shards=shards), num_threads=num_threads)
    assert isinstance(ops, NativeOps)
    return ops


def make_halves(
    spec: GqaSpec, ops: NativeOps, formats: str | dict[str, str] | None
) -> tuple[MixerHalf, FusedGqa | None]:
    """One layer part by part and in one call, over the same weights: of one format, or each of its own."""
    dtype = getattr(torch, ops.numerics.seam_dtype)
    query, key = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes = {"q": (query, HIDDEN), "k": (key, HIDDEN), "v": (key, HIDDEN), "o": (HIDDEN, query)}
    weights: dict[str, Weight] = {}
    for i, (name, shape) in enumerate(shapes.items()):
        weight = noise(shape, dtype, seed=i)
        format = formats.get(name) if isinstance(formats, dict) else formats
        weights[name] = weight if format is None else pack_panels(weight, format)
    if spec.qk_norm in ("full", "head"):
        widths = (query, key) if spec.qk_norm == "full" else (spec.head_dim, spec.head_dim)
        for name, width in zip(("q_norm", "k_norm"), widths, strict=True):
            weights[name] = 1 + noise((1, width), dtype, seed=9)[0]
    if spec.has_sinks:
        weights["sinks"] = noise((1, spec.num_heads), dtype, seed=10)[0]
    sinks = weights.get("sinks")
    assert not isinstance(sinks, PanelWeight)
    rope = None if spec.rope is None else RopeTable(spec.rope, 1000)
    attend = PagedAttend.of(spec, ops, sinks)
    mixer = GqaAttention(spec, weights, ops, rope, attend, norm_eps=EPS)
    norm = RmsNorm(1 + noise((1, HIDDEN), dtype, seed=11)[0], 2 * EPS, ops)
    return MixerHalf(norm=norm, mixer=mixer), mixer.fused(0, norm)


def run(half: Any, spec: GqaSpec, kv_format: KvFormat, x_TD: Tensor, sizes: list[int]) -> list[Tensor]:
    """Two sequences in one batch, step by step; outputs, then what the pools hold."""
    shape = (21, spec.num_kv_heads, BLOCK, spec.head_dim)
    pools = pool_zeros(shape, kv_format), pool_zeros(shape, kv_format)
    found, at = [], 0
    for size in sizes:
        rows = [
            KvRow(first_row=i * size, num_tokens=size, start_idx=at, blocks=tuple(range(10 * i, 10 * i + 10)))
            for i in range(2)
        ]
        places = KvPlaces.of(tuple(rows), BLOCK)
        view = KvView(key_pool=pools[0], value_pool=pools[1], places=places)
        positions_T = torch.arange(at, at + size).repeat(2)
        x = torch.cat([x_TD[at : at + size], -x_TD[at : at + size]])
        found += drive([half.forward(x, positions_T, view, 0)], 1.0)
        at += size
    return [*found, *pools]


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_bits_are_those_of_the_parts(data: st.DataObject) -> None:
    draw = data.draw
    level, dtype = draw(st.sampled_from(LEVELS)), draw(st.sampled_from(["float32", "bfloat16"]))
    kv_format = draw(st.sampled_from(KV_FORMATS))
    ropes = [None, RopeSpec(theta=1e4, dim=16), RopeSpec(theta=1e4, dim=8, is_interleaved=True)]
    window = draw(st.sampled_from([None, 20]))
    spec = replace(
        SPEC,
        num_kv_heads=draw(st.sampled_from([1, 2, 4])),
        rope=draw(st.sampled_from(ropes)),
        qk_norm=draw(st.sampled_from(["none", "head", "full"])),
        window=window,
        is_chunked=window is not None and draw(st.booleans()),
        has_sinks=draw(st.booleans()),
    )
    format = draw(st.sampled_from([None, *QUANTISED]))
    is_wide = format is not None and (QUANTISED[format].group or 32) > 32  # a leaf is whole groups
    ops = make_ops(
        level,
        dtype,
        num_threads=draw(st.integers(1, 2)),
        shards=1 if is_wide else draw(st.sampled_from([1, 2])),
        kv_format=kv_format,
    )
    staged, fused = make_halves(spec, ops, format)
    assert fused is not None
    sizes = draw(st.lists(st.sampled_from([1, 1, 3, 30]), min_size=1, max_size=3))
    x_TD = noise((100, HIDDEN), getattr(torch, dtype), seed=3)
    expected = run(staged, spec, kv_format, x_TD, sizes)
    for found, of_parts in zip(run(fused, spec, kv_format, x_TD, sizes), expected, strict=True):
        assert found.dtype == of_parts.dtype
        assert torch.equal(found.view(torch.uint8), of_parts.view(torch.uint8))


@pytest.mark.parametrize("level", LEVELS)
def test_matrices_of_several_formats_share_rows_of_x_where_their_form_is_one(level: str) -> None:
    ops = make_ops(level, "bfloat16", num_threads=1, shards=1, kv_format="bfloat16")
    staged, fused = make_halves(SPEC, ops, {"q": "int8-g32", "k": "int4-g32", "v": "int8"})
    assert fused is not None
    x_TD = noise((100, HIDDEN), torch.bfloat16, seed=3)
    expected = run(staged, SPEC, "bfloat16", x_TD, [3, 1])
    for found, of_parts in zip(run(fused, SPEC, "bfloat16", x_TD, [3, 1]), expected, strict=True):
        assert torch.equal(found.view(torch.uint8), of_parts.view(torch.uint8))


def test_another_rotation_gives_other_bits() -> None:
    """The negative control."""
    ops = make_ops(LEVELS[-1], "float32", num_threads=1, shards=1, kv_format="float32")
    staged, _ = make_halves(SPEC, ops, None)
    _, fused = make_halves(replace(SPEC, rope=RopeSpec(theta=2e4, dim=16)), ops, None)
    x_TD = noise((100, HIDDEN), seed=3)
    found, expected = (run(half, SPEC, "float32", x_TD, [5])[0] for half in (fused, staged))
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("changes", [{"qk_norm": "l2"}, {"qkv_clip": 1.0}, {"has_value_norm": True}])
def test_what_the_call_does_not_do_stays_in_parts(changes: dict[str, Any]) -> None:
    ops = make_ops(LEVELS[-1], "float32", num_threads=1, shards=1, kv_format="float32")
    assert make_halves(replace(SPEC, **changes), ops, None)[1] is None


def test_no_rows_are_no_rows() -> None:
    ops = make_ops(LEVELS[-1], "bfloat16", num_threads=1, shards=1, kv_format="int8")
    _, fused = make_halves(SPEC, ops, "int4-g32")
    assert fused is not None
    pool = pool_zeros((3, 2, BLOCK, 16), "int8")
    view = KvView(key_pool=pool, value_pool=pool.clone(), places=KvPlaces.of((), BLOCK))
    empty = torch.empty((0, HIDDEN), dtype=torch.bfloat16)
    (found,) = drive([fused.forward(empty, torch.empty(0, dtype=torch.int64), view, 0)], 1.0)
    assert found.shape == (0, HIDDEN)


class Spy:
    """Kernels whose call is kept, so that it can be told again with one argument changed."""

    def __init__(self, kernels: Any) -> None:
        self.kernels, self.told = kernels, ()

    def gqa(self, *told: Any) -> None:
        self.told = told
        self.kernels.gqa(*told)


def test_the_boundary_checks_the_call() -> None:
    """Addresses are trusted, all else is not: a wrong number is an error that names the layer or the pool."""
    ops = make_ops(LEVELS[-1], "float32", num_threads=1, shards=1, kv_format="float32")
    _, fused = make_halves(SPEC, ops, None)
    assert fused is not None
    layer = fused.layer
    spy = layer._kernels = Spy(layer._kernels)
    run(fused, SPEC, "float32", noise((100, HIDDEN), seed=3), [2])
    x_numbers, angles, key_bytes, value_bytes, kind, tokens, num_fresh, num_rows, num_ids = (
        2, 6, 8, 10, 11, 13, 15, 17, 19,
    )  # fmt: skip
    for place, wrong in {
        x_numbers: 3, angles: 3, key_bytes: 100, value_bytes: 100, kind: 4, tokens: -1, num_fresh: 9,
        num_rows: 1, num_ids: 1, 1: 0, 3: 0, 7: 0,
    }.items():  # fmt: skip
        told = [*spy.told]
        told[place] = wrong
        with pytest.raises(ValueError, match="attention"):
            spy.kernels.gqa(*told)


def test_parameters_that_do_not_fit_are_refused() -> None:
    ops = make_ops(LEVELS[-1], "float32", num_threads=1, shards=1, kv_format="float32")
    _, fused = make_halves(SPEC, ops, None)
    assert fused is not None
    native_layer = fused.layer.native
    with pytest.raises(ValueError, match="weight z: weights are q, k, v and o"):
        native_layer.set_matrix("z", 1, 1, 1, 0, 0, False)
    with pytest.raises(ValueError, match="weight q: the weight has 12 bytes, its shape needs 16384"):
        native_layer.set_matrix("q", 64, 12, 1, 0, 0, False)
    with pytest.raises(ValueError, match="norm q has 3 numbers, not 64"):
        native_layer.set_norm("q", 64, 3, False)
