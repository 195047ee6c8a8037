"""Whole models on native kernels: one call a MoE layer and step, the bits of the staged experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, write_checkpoint
from family_configs import FAMILY_CONFIGS
from marks import needs_native
from paged import PagedModel, random_tokens

from moesaic.experts.blob import BlobLayout
from moesaic.experts.contract import Routing
from moesaic.experts.ffn import LoopFfn
from moesaic.kernels import native
from moesaic.kernels.native.ops import NativeOps
from moesaic.models import build
from moesaic.models.build import LoadedModel, load
from moesaic.models.decoder import FfnHalf
from moesaic.models.moe_block import MoeBlock
from moesaic.parallel.dispatch.fused import Fused
from moesaic.parallel.dispatch.local import Local
from moesaic.parallel.dispatch.staged import Staged

pytestmark = needs_native
PROMPT = random_tokens(40, 256, seed=5)


def in_parts(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> LoadedModel:
    """A model whose sparse layers go part by part, and expert by expert."""
    with monkeypatch.context() as patch:
        patch.setattr(build._Parts, "fused_ffn", lambda parts, half: half)
        model = load(folder, num_threads=1, **options)
    assert model.store is not None
    local = Local(model.spec.moe_layers, model.numerics)
    halves = [layer.ffn for layer in model.decoder.layers if isinstance(layer.ffn, FfnHalf)]
    blocks = [half.ffn for half in halves if isinstance(half.ffn, MoeBlock)]
    for block, (_, spec) in zip(blocks, model.spec.moe_layers, strict=True):
        assert isinstance(block.routed, Fused)
        block.routed = Staged(tokens=local, experts=local, ffn=LoopFfn(spec, model.store, model.ops))
    return model


# One family of each way that experts differ: SwiGLU, clamped with biases, weight on the input, shared, gelu.
@pytest.mark.parametrize(
    ("family", "dtype", "format"),
    [
        ("olmoe", "float32", None),
        ("deepseek_v3", "bfloat16", "int8-g32"),
        ("gpt_oss", "bfloat16", None),
        ("llama4", "float32", None),
        ("gemma4", "float32", None),
    ],
)
def test_a_fused_model_has_the_logits_of_a_staged_one(
    family: str, dtype: str, format: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[family](), dtype=getattr(torch, dtype))
    options: Any = {"backend": f"native/{native.levels()[-1]}", "format": format}
    model = load(folder, num_threads=1, **options)
    assert isinstance(model.ops, NativeOps)
    paged, seen = PagedModel(model), []

    def observe(moe_idx: int, routing: Routing) -> None:
        seen.append(routing.experts_TK.unique().numel())

    fused = [paged.step(("r", tokens), observe=observe)[0] for tokens in (PROMPT, [3], [4])]
    num_layers, counts = len(model.spec.moe_layers), model.ops.moe_counts
    assert counts.launches == 3 * num_layers
    assert counts.jobs == sum(42 * spec.experts_per_token for _, spec in model.spec.moe_layers)
    layout = BlobLayout.of(model.spec.moe_layers[0][1], format or dtype)
    expert_bytes = layout.num_bytes - sum(stop - start for start, stop in layout.gaps)
    assert counts.weight_bytes == sum(seen) * expert_bytes

    other = in_parts(folder, monkeypatch, **options)
    paged = PagedModel(other, seed=1)
    staged = [paged.step(("r", tokens))[0] for tokens in (PROMPT, [3], [4])]
    assert isinstance(other.ops, NativeOps)
    assert other.ops.moe_counts.launches == 0, "the staged experts use no fused call"
    for found, expected in zip(fused, staged, strict=True):
        assert torch.equal(found, expected)


def test_every_family_has_its_experts_fused_and_most_have_their_half(tmp_path: Path) -> None:
    in_one_call = set()
    for family in sorted({*CONFIGS} - {"llama"} - set(FAMILY_CONFIGS)):
        folder = write_checkpoint(tmp_path / family, CONFIGS[family]())
        model = load(folder, num_threads=1, backend=f"native/{native.levels()[0]}")
        layers = [model.decoder.layers[layer_idx].ffn for layer_idx, _ in model.spec.moe_layers]
        for half in layers:
            if isinstance(half, FfnHalf):
                assert isinstance(half.ffn, MoeBlock)
                assert isinstance(half.ffn.routed, Fused)
            else:
                in_one_call.add(family)
    assert in_one_call == {*CONFIGS} - {"llama"} - set(FAMILY_CONFIGS) - {"gemma4"}, (
        "with norms around branches"
    )
