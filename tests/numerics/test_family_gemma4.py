"""Gemma 4 as released, inside a model that sees; `test_family_table` compares its text."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoints import gemma4_config, random_tensors, write_checkpoint
from parity import logits_of

from moesaic.models.build import load


def test_inside_the_model_that_sees_it_is_the_same(tmp_path: Path) -> None:
    text = gemma4_config()
    alone = load(write_checkpoint(tmp_path / "alone", text), num_threads=1)
    outer = {"model_type": "gemma4", "text_config": text, "vision_config": {}, "tie_word_embeddings": True}
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in random_tensors(text).items()
    }
    tower = {"model.vision_tower.a.weight": torch.ones(8), "model.embed_vision.b.weight": torch.ones(8)}
    folder = write_checkpoint(tmp_path / "wrapped", outer, tensors=tensors | tower)
    wrapped = load(folder, num_threads=1)
    assert torch.equal(logits_of(alone), logits_of(wrapped))
    assert {tensor.key for tensor in wrapped.accounting.unused} == set(tower)
