"""No tensor of a checkpoint is loaded and then left out: another value of any of them changes the logits."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from checkpoints import CONFIGS, cheap_cases, random_tensors, write_checkpoint
from parity import MUTATION_SHOWS, logits_of

from moesaic.models.build import load

CHANGES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "olmoe": {"attention_bias": True},
    "deepseek_v3": {"attention_bias": True},
    "gemma4": {"rms_norm_eps": 0.3},  # the norm after the last layer cancels its scalar, but for epsilon
    "deepseek_v2": {"attention_bias": True, "mlp_bias": True},
    "glm4_moe_lite": {"attention_bias": True},
    "dots1": {"attention_bias": True},
    "granitemoe": {"attention_bias": True},
}


@pytest.mark.parametrize("family", cheap_cases("phimoe"))
def test_every_tensor_matters(tmp_path: Path, family: str) -> None:
    config = CONFIGS[family](**CHANGES.get(family, {}))
    tensors, others = random_tensors(config), random_tensors(config, seed=1)
    base = logits_of(load(write_checkpoint(tmp_path, config, tensors=tensors), num_threads=1))
    # One of each kind: the last layer's, the last expert's; and the selection bias of some layer.
    kinds = {re.sub(r"\.\d+\.", ".N.", name): name for name in tensors}
    if family == "qwen3_5_moe":  # what Qwen3-Next does not have
        kinds = {kind: name for kind, name in kinds.items() if ".in_proj_" in kind}
    assert len(kinds) >= (4 if family == "qwen3_5_moe" else 12)
    for name in kinds.values():
        write_checkpoint(tmp_path, config, tensors=tensors | {name: others[name]})
        difference = (logits_of(load(tmp_path, num_threads=1)) - base).abs().max()
        assert difference > MUTATION_SHOWS, name


@pytest.mark.parametrize("family", cheap_cases("phimoe"))
def test_the_same_folder_gives_the_same_bits_and_digest(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path, CONFIGS[family]())
    first, second = load(folder, num_threads=1), load(folder, num_threads=1)
    assert first.model_digest == second.model_digest
    assert torch.equal(logits_of(first), logits_of(second))
    other = load(write_checkpoint(tmp_path, CONFIGS[family](), seed=1), num_threads=1)
    assert other.model_digest != first.model_digest
    changed = load(write_checkpoint(tmp_path, CONFIGS[family](rms_norm_eps=2e-2)), num_threads=1)
    assert changed.model_digest != first.model_digest
