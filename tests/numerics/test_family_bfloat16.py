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
    prompt = random_tokens(90, 256, seed=4)
    exact_TV = Oracle(folder).logits(prompt)
    theirs_TV = Oracle(folder, torch.bfloat16).logits(prompt)
    ours_TV = PagedModel(load(folder, num_threads=1)).run("r", prompt)
    # Medians over tokens: a token whose experts change by a rounding is far off in either.
    ours, theirs = ((x - exact_TV).abs().mean(-1).median() for x in (ours_TV, theirs_TV))
    assert ours < 1.25 * theirs
    assert ours < 0.1
