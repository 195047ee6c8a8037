from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import reference_ops
from torch.nn import functional as F

from moesaic.errors import ConfigError, KernelUnavailable
from moesaic.kernels.matmul import noise
from moesaic.kernels.ops import choose
from moesaic.kernels.reference import ReferenceOps
from moesaic.spec.numerics import preset

FLOAT32 = reference_ops()
BFLOAT16 = reference_ops("bfloat16")


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(KernelUnavailable, match="'cuda' is not built; known: reference"):
        choose(preset("portable", dtype="float32", backend="cuda"), num_threads=1)


def test_numerics_that_are_not_computed_are_refused() -> None:
    numerics = replace(preset("portable", dtype="bfloat16"), partial_dtype="bfloat16")
    with pytest.raises(KernelUnavailable, match="partial_dtype is 'bfloat16'"):
        choose(numerics, num_threads=1)
    with pytest.raises(ConfigError, match="num_threads must be at least 1, got 0"):
        choose(preset("portable", dtype="float32"), num_threads=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_linear_inner_is_a_neighbour_tree_over_equal_leaves(dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    x_TF, weight_DF = noise((9, 64), torch_dtype), noise((24, 64), torch_dtype, seed=1)
    bias_D = noise((24,), torch_dtype, seed=2)
    numerics = preset("portable", dtype=dtype).with_leaves(matmul_shards=4)  # type: ignore[arg-type]
    ops = choose(numerics, num_threads=1)
    leaves = [
        ops.linear_float32(x_TF[:, low : low + 16].contiguous(), weight_DF[:, low : low + 16].contiguous())
        for low in (0, 16, 32, 48)
    ]
    expected = ((leaves[0] + leaves[1]) + (leaves[2] + leaves[3])).to(torch_dtype) + bias_D
    assert torch.equal(ops.linear_inner(x_TF, weight_DF, bias_D), expected)
    assert torch.equal(ops.linear_inner(x_TF[3:4], weight_DF, bias_D), expected[3:4])
    folded = (((leaves[0] + leaves[1]) + leaves[2]) + leaves[3] + bias_D).to(torch_dtype)
    if dtype == "float32":
        assert not torch.equal(folded, expected), "the negative control: a left fold is another sum"


def test_linear_inner_refuses_leaves_of_unequal_size() -> None:
    ops = choose(preset("portable", dtype="float32").with_leaves(matmul_shards=8), num_threads=1)
    with pytest.raises(ConfigError, match="matmul_shards = 8 does not divide an inner width of 12"):
        ops.linear_inner(noise((1, 12)), noise((4, 12)))


def test_results_have_the_seam_dtype_or_float32() -> None:
    for ops, dtype in ((FLOAT32, torch.float32), (BFLOAT16, torch.bfloat16)):
        x_TD, weight_FD = noise((3, 64), dtype), noise((8, 64), dtype, seed=1)
        assert ops.linear(x_TD, weight_FD, noise((8,), dtype)).dtype == dtype
        assert ops.linear_inner(x_TD, weight_FD).dtype == dtype
        assert ops.bmm(x_TD[None], weight_FD.t()[None]).dtype == dtype
        assert ops.activation(x_TD, None, "silu").dtype == dtype
        assert ops.rms_norm(x_TD, weight_FD[0], 1e-6).dtype == dtype
        assert ops.layer_norm(x_TD, weight_FD[0], weight_FD[1], 1e-6).dtype == dtype
        assert ops.logits(x_TD, weight_FD).dtype == torch.float32
        assert ops.logits(x_TD, weight_FD, noise((8,), dtype)).dtype == torch.float32
        assert ops.linear_float32(x_TD, weight_FD).dtype == torch.float32
        assert ops.sigmoid(x_TD).dtype == torch.float32
        assert ops.softmax_float32(x_TD).dtype == torch.float32


def test_bfloat16_is_rounded_once() -> None:
    gate_TF, up_TF = noise((5, 40), torch.bfloat16), noise((5, 40), torch.bfloat16, seed=1)
    expected = FLOAT32.activation(gate_TF.float(), up_TF.float(), "silu").bfloat16()
    assert torch.equal(BFLOAT16.activation(gate_TF, up_TF, "silu"), expected)
    x_THC, cos_TC, sin_TC = noise((5, 2, 8), torch.bfloat16), noise((5, 4)), noise((5, 4), seed=1)
    expected = FLOAT32.rope(x_THC.float(), cos_TC, sin_TC, False).bfloat16()
    assert torch.equal(BFLOAT16.rope(x_THC, cos_TC, sin_TC, False), expected)


def test_rms_norm_is_torchs() -> None:
    x_TD, weight_D = noise((7, 96)), noise((96,), seed=1)
    expected = F.rms_norm(x_TD, (96,), weight_D, 1e-5)
    torch.testing.assert_close(FLOAT32.rms_norm(x_TD, weight_D, 1e-5), expected)
    heads = FLOAT32.rms_norm(x_TD.view(7, 4, 24), weight_D[:24], 1e-5)
    torch.testing.assert_close(heads, F.rms_norm(x_TD.view(7, 4, 24), (24,), weight_D[:24], 1e-5))


def test_layer_norm_is_torchs_and_rounded_once() -> None:
    x_TD, weight_D, bias_D = noise((7, 96)) + 3.0, noise((96,), seed=1), noise((96,), seed=2)
    for bias in (bias_D, None):
        expected = F.layer_norm(x_TD.double(), (96,), weight_D.double(), _double(bias), 1e-3)
        torch.testing.assert_close(FLOAT32.layer_norm(x_TD, weight_D, bias, 1e-3), expected.float())
    narrow = [value.bfloat16() for value in (x_TD, weight_D, bias_D)]
    wide = FLOAT32.layer_norm(*(value.float() for value in narrow), 1e-3)  # type: ignore[arg-type]
    assert torch.equal(BFLOAT16.layer_norm(*narrow, 1e-3), wide.bfloat16())  # type: ignore[arg-type]


def _double(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.double()


def test_a_bias_of_the_head_is_added_in_float32() -> None:
    x_BD, weight_VD, bias_V = (
        noise(shape, torch.bfloat16, seed=i) for i, shape in enumerate([(3, 64), (40, 64), (40,)])
    )
    expected = BFLOAT16.logits(x_BD, weight_VD) + bias_V.float()
    assert torch.equal(BFLOAT16.logits(x_BD, weight_VD, bias_V), expected)


@settings(max_examples=30)
@given(
    num_rows=st.integers(1, 60),
    start=st.integers(0, 30),
    width=st.sampled_from([24, 64, 90, 2880]),
    is_wide=st.booleans(),
)
def test_rows_of_every_op_follow_their_own_row_alone(
    num_rows: int, start: int, width: int, is_wide: bool
) -> None:
    ops, dtype = (FLOAT32, torch.float32) if is_wide else (BFLOAT16, torch.bfloat16)
    x_TD, weight_D = noise((90, width), dtype), noise((width,), dtype, seed=1)
    router_ED = noise((8, width), seed=2)
    head_VD, bias_V = noise((40, width), dtype, seed=3), noise((40,), dtype, seed=4)
    cos_TC, sin_TC = noise((90, 4)), noise((90, 4), seed=1)

    def run(rows: slice) -> list[torch.Tensor]:
        normed = ops.rms_norm(x_TD[rows], weight_D, 1e-6)
        scores = ops.linear_float32(normed, router_ED)
        heads = normed.view(len(normed), 2, -1)
        return [
            normed,
            scores,
            ops.softmax_float32(scores),
            ops.sigmoid(scores),
            ops.rope(heads, cos_TC[rows], sin_TC[rows], True),
            ops.activation(normed, None, "gelu"),
            ops.layer_norm(x_TD[rows], weight_D, None, 1e-6),
            ops.layer_norm(x_TD[rows], weight_D, x_TD[0], 1e-6),
            ops.logits(normed, head_VD, bias_V),
        ]

    rows = slice(start, start + num_rows)
    whole = run(slice(None))
    assert all(torch.equal(part, full[rows]) for part, full in zip(run(rows), whole, strict=True))


def test_prove_covers_what_it_is_told_and_returns_it() -> None:
    ops = ReferenceOps(preset("portable", dtype="bfloat16").with_leaves(matmul_shards=2), num_threads=1)
    proof = ops.prove([(64, 32), (64, 32)], float32_weights=[(8, 32)], heads=[(16, 16)])
    names = sorted(shape.name for shape in proof.shapes)
    assert names == [
        "attention scores over 16",
        "attention values of 16",
        "linear 64 x 16 float32",
        "linear 64 x 32 bfloat16",
        "linear 8 x 32 float32",
    ]
    ops.linear(noise((3, 32), torch.bfloat16), noise((64, 32), torch.bfloat16))
    assert ops.prove().shapes == proof.shapes, "a proved shape is not proved again"
    assert proof.seconds > 0
