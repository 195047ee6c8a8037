"""Qwen3-MoE against transformers: head norms, dense layers among sparse ones, both key layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Config, Layout, qwen3_moe_config, write_checkpoint
from parity import (
    FLOAT32_TOLERANCE,
    MUTATION_SHOWS,
    Mutation,
    Oracle,
    assert_same_greedy,
    experts,
    field,
    gates,
    logits_of,
    max_difference,
    mixers,
    prompt_logits,
    ropes,
    softmax_scaled,
)

from moesaic.models.build import load

VARIANTS: dict[str, Config] = {
    "renormalised": {},
    "not_renormalised": {"norm_topk_prob": False},
    "all_sparse": {"mlp_only_layers": []},
    "every_second_sparse": {"mlp_only_layers": [], "decoder_sparse_step": 2},
    "tied": {"tie_word_embeddings": True},
    "one_expert": {"num_experts_per_tok": 1},
    "all_experts": {"num_experts_per_tok": 8},
    "yarn": {
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, qwen3_moe_config(**VARIANTS[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


@pytest.mark.parametrize(("layout", "num_files"), [("stacked", 1), ("stacked", 2), ("per_expert", 4)])
def test_equal_logits_in_each_layout(tmp_path: Path, layout: Layout, num_files: int) -> None:
    folder = write_checkpoint(tmp_path, qwen3_moe_config(), layout=layout, num_files=num_files)
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_both_layouts_give_the_same_bits(tmp_path: Path) -> None:
    logits = [
        logits_of(load(write_checkpoint(tmp_path / layout, qwen3_moe_config(), layout=layout), num_threads=1))
        for layout in ("per_expert", "stacked")
    ]
    assert torch.equal(*logits)


def test_what_transformers_saves_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ours", qwen3_moe_config(), layout="stacked")
    Oracle(folder).model.save_pretrained(tmp_path / "theirs")
    assert max_difference(tmp_path / "theirs") < FLOAT32_TOLERANCE
    ours, theirs = (load(tmp_path / name, num_threads=1) for name in ("ours", "theirs"))
    assert torch.equal(logits_of(ours), logits_of(theirs))


def test_equal_greedy_tokens(tmp_path: Path) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, qwen3_moe_config()))


MUTATIONS: dict[str, Any] = {
    "no q and k norms": Mutation(change=mixers(qk_norm="none"), drops=r"self_attn\.[qk]_norm"),
    "softmax scale": Mutation(change=softmax_scaled(1.1)),
    "another rope theta": Mutation(change=ropes(theta=1100.0)),
    "interleaved rope": Mutation(change=ropes(is_interleaved=True)),
    "half of each head rotated": Mutation(change=ropes(dim=16)),
    "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
    "one expert less": Mutation(change=experts(experts_per_token=3)),
    "one expert more": Mutation(change=experts(experts_per_token=5)),
    "another activation in the experts": Mutation(change=experts(activation="gelu")),
    "not renormalised": Mutation(change=gates(is_renormalised=False)),
    "sigmoid scores": Mutation(change=gates(score="sigmoid")),
    "a scale": Mutation(change=gates(scale=1.1)),
    "groups": Mutation(change=gates(num_groups=4, groups_per_token=2)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_feature_shows(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, qwen3_moe_config())
    difference = (prompt_logits(folder) - prompt_logits(folder, MUTATIONS[name])).abs().max()
    assert difference > MUTATION_SHOWS
