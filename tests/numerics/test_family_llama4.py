"""Llama 4 as released, inside a model that sees; `test_family_table` compares its text."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import llama4_config, random_tensors, write_checkpoint
from parity import logits_of

from moesaic.models.build import load


def test_inside_the_model_that_sees_it_is_the_same(tmp_path: Path) -> None:
    """As released: text_config, keys below language_model, and a tower that is known and left alone."""
    text = llama4_config()
    alone = load(write_checkpoint(tmp_path / "alone", text), num_threads=1)
    outer = {"model_type": "llama4", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    tensors = {f"language_model.{name}": value for name, value in random_tensors(text).items()}
    tower = {
        "vision_model.class_embedding": torch.ones(8),
        "multi_modal_projector.linear_1.weight": torch.ones(8, 8),
    }
    folder = write_checkpoint(tmp_path / "wrapped", outer, tensors=tensors | tower)
    wrapped = load(folder, num_threads=1)
    assert torch.equal(logits_of(alone), logits_of(wrapped))
    assert {tensor.key for tensor in wrapped.accounting.unused} == set(tower)
    assert all("vision tower" in tensor.reason for tensor in wrapped.accounting.unused)
