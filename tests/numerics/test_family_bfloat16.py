"""In bfloat16 we are no further from the float32 model than transformers is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, write_checkpoint
from paged import PagedModel, random_tokens
from parity import Oracle

from moesaic.models.build import load


@pytest.mark.parametrize("family", CONFIGS)
def test_error_is_no_larger_than_that_of_transformers(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[family](), dtype=torch.bfloat16)
    prompts = [random_tokens(90, 256, seed=seed) for seed in (4, 5, 6)]
    exact, rounded = Oracle(folder), Oracle(folder, torch.bfloat16)
    paged = PagedModel(load(folder, num_threads=1))
    exact_TV = torch.cat([exact.logits(prompt) for prompt in prompts])
    theirs_TV = torch.cat([rounded.logits(prompt) for prompt in prompts])
    ours_TV = torch.cat([paged.run(f"r{i}", prompt) for i, prompt in enumerate(prompts)])
    # Medians over tokens: a token whose experts change by a rounding is far off in either.
    ours, theirs = ((x - exact_TV).abs().mean(-1).median() for x in (ours_TV, theirs_TV))
    assert ours < 1.25 * theirs
    assert ours < 0.1
