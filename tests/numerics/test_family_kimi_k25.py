"""Kimi K2.5, the text of it: DeepSeek-V3 under other keys, beside a vision tower that is known and unused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import deepseek_v3_config, random_tensors, write_checkpoint
from paged import PagedModel, random_tokens
from parity import FLOAT32_TOLERANCE, PROMPT_TOKENS, logits_of
from safetensors.torch import load_file
from torch import Tensor

from moesaic.errors import CheckpointError
from moesaic.models.build import load

VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
TEXT = deepseek_v3_config(attention_bias=True)
CONFIG = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "text_config": TEXT,
    "vision_config": VISION,
    "projection_hidden_size": 32,
    "tie_word_embeddings": False,
}
IMAGE_KEYS = ("vision_tower.encoder.blocks.0.wo.weight", "mm_projector.proj.0.weight")


def wrapped(images: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of `TEXT` as Kimi's files call them, and those for images."""
    return {f"language_model.{name}": value for name, value in random_tensors(TEXT).items()} | images


def test_gives_the_bits_of_the_text_model_alone(tmp_path: Path) -> None:
    plain = load(write_checkpoint(tmp_path / "plain", TEXT), num_threads=1)
    images = {name: torch.ones(3) for name in IMAGE_KEYS}
    folder = write_checkpoint(tmp_path / "wrapped", CONFIG, tensors=wrapped(images))
    model = load(folder, num_threads=1)
    assert torch.equal(logits_of(model), logits_of(plain))
    assert {tensor.key for tensor in model.accounting.unused} == set(images)
    assert {tensor.reason for tensor in model.accounting.unused} == {"images are not read, only text"}


def test_an_unknown_tensor_beside_the_text_model_is_an_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, CONFIG, tensors=wrapped({"audio_tower.weight": torch.ones(3)}))
    with pytest.raises(CheckpointError, match=r"1 tensors fill no parameter: audio_tower\.weight"):
        load(folder, num_threads=1)


def test_equals_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    folder = write_checkpoint(tmp_path / "text", CONFIG, tensors=wrapped({}))
    empty = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    empty.save_pretrained(tmp_path / "empty")
    images = {
        name.removeprefix("model."): value
        for name, value in load_file(tmp_path / "empty" / "model.safetensors").items()
        if not name.startswith("language_model.")
    }
    folder = write_checkpoint(tmp_path / "whole", CONFIG, tensors=wrapped(images))
    oracle, info = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    prompt = random_tokens(PROMPT_TOKENS, TEXT["vocab_size"], seed=6)
    with torch.inference_mode():
        expected = oracle(torch.tensor([prompt])).logits[0]
    found = PagedModel(load(folder, num_threads=1)).run("r", prompt, chunk=33)
    assert (found - expected).abs().max() < FLOAT32_TOLERANCE
