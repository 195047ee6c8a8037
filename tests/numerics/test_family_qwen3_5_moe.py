"""Qwen3.5-MoE's text model against transformers: split projections, alone and in a wrapper with a tower."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checkpoints import (
    Config,
    Layout,
    qwen3_5_moe_config,
    random_tensors,
    stack_experts,
    write_checkpoint,
    write_tensors,
)
from parity import FLOAT32_TOLERANCE, assert_same_greedy, logits_of, max_difference
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.layers.delta import GatedDelta
from moesaic.models.build import load, read_spec

WIDE = ("decay_log", "decay_bias", "out_norm")


def wrapped() -> tuple[Config, dict[str, Tensor]]:
    """The same model as published ones are written: text_config, a vision tower, prediction layers."""
    text = qwen3_5_moe_config()
    del text["architectures"]
    config = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "qwen3_5_moe_vision", "depth": 1, "hidden_size": 16, "num_heads": 2},
    }
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in stack_experts(random_tensors(qwen3_5_moe_config())).items()
    }
    tensors |= {
        "model.visual.blocks.0.norm1.weight": torch.ones(16),
        "mtp.layers.0.input_layernorm.weight": torch.ones(64),
    }
    return config, tensors


@pytest.mark.parametrize("layout", ["per_expert", "stacked"])
def test_equal_logits(tmp_path: Path, layout: Layout) -> None:
    folder = write_checkpoint(tmp_path, qwen3_5_moe_config(), layout=layout)
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_equal_greedy_tokens(tmp_path: Path) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, qwen3_5_moe_config()))


def test_the_wrapped_model_is_the_text_model(tmp_path: Path) -> None:
    config, tensors = wrapped()
    folder = write_checkpoint(tmp_path / "wrapped", config, tensors=tensors)
    assert max_difference(folder) < FLOAT32_TOLERANCE
    model = load(folder, num_threads=1)
    plain = load(write_checkpoint(tmp_path / "plain", qwen3_5_moe_config()), num_threads=1)
    assert torch.equal(logits_of(model), logits_of(plain))
    assert {unused.key: unused.reason.split()[0] for unused in model.accounting.unused} == {
        "model.visual.blocks.0.norm1.weight": "vision",
        "mtp.layers.0.input_layernorm.weight": "multi-token",
    }
    assert read_spec(folder).other_params == (("vision tower", None),)


def test_a_stray_tensor_in_the_wrapper_is_named(tmp_path: Path) -> None:
    config, tensors = wrapped()
    folder = write_checkpoint(tmp_path, config, tensors=tensors | {"model.audio.weight": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"1 tensors fill no parameter: model\.audio\.weight"):
        load(folder, num_threads=1)


def test_tensors_of_both_spellings_do_not_mix(tmp_path: Path) -> None:
    config, tensors = wrapped()
    name = "model.language_model.layers.0.linear_attn.dt_bias"
    tensors["model.layers.0.linear_attn.dt_bias"] = tensors.pop(name)
    folder = write_checkpoint(tmp_path, config, tensors=tensors)
    with pytest.raises(CheckpointError, match=r"1 parameters are filled by no tensor: .*1 tensors fill no"):
        load(folder, num_threads=1)


def test_vectors_stored_in_float32_beside_bfloat16_matrices_keep_their_bits(tmp_path: Path) -> None:
    config, tensors = qwen3_5_moe_config(), random_tensors(qwen3_5_moe_config())
    write_checkpoint(tmp_path, config, dtype=torch.bfloat16)
    wide = re.compile(r"A_log|dt_bias|linear_attn\.norm|input_layernorm")
    stored = {name: value if wide.search(name) else value.bfloat16() for name, value in tensors.items()}
    write_tensors(tmp_path, stored)
    model = load(tmp_path, num_threads=1)
    assert model.numerics.seam_dtype == "bfloat16"
    half = model.decoder.layers[2].mixer
    assert half is not None
    assert isinstance(half.mixer, GatedDelta)
    layer = "model.layers.2"
    assert torch.equal(half.norm.weight_D, 1.0 + tensors[f"{layer}.input_layernorm.weight"])
    assert torch.equal(half.mixer._norm.weight_D, tensors[f"{layer}.linear_attn.norm.weight"])
    assert torch.equal(half.mixer._decay_bias_H, tensors[f"{layer}.linear_attn.dt_bias"])
    assert torch.allclose(half.mixer._rate_H.log(), tensors[f"{layer}.linear_attn.A_log"], atol=1e-6)
    kept = sum(f.num_elements * (4 if f.offset or f.name in WIDE else 2) for f in model.accounting.fillings)
    routers = sum(2 * f.num_elements for f in model.accounting.fillings if f.half == "router")
    assert model.weight_bytes == kept + routers
