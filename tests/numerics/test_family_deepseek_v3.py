"""DeepSeek-V3 against transformers: absorbed latent attention, yarn, grouped sigmoid gate, shared experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import Config, deepseek_v3_config, write_checkpoint
from parity import (
    FLOAT32_TOLERANCE,
    MUTATION_SHOWS,
    Mutation,
    Oracle,
    assert_same_greedy,
    experts,
    field,
    gates,
    max_difference,
    mixers,
    prompt_logits,
    ropes,
    scalings,
    softmax_scaled,
)

YARN = deepseek_v3_config()["rope_scaling"]
VARIANTS: dict[str, Config] = {
    "full_rank_queries": {"q_lora_rank": None},
    "half_rotation": {"rope_interleave": False},
    "no_yarn": {"rope_scaling": None},
    "yarn_without_mscale_all_dim": {"rope_scaling": {**YARN, "mscale_all_dim": 0.0}},
    "yarn_without_mscales": {"rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k}},
    "yarn_equal_mscales": {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "biases": {"attention_bias": True},
    "biases_full_rank": {"attention_bias": True, "q_lora_rank": None},
    "one_group": {"n_group": 1, "topk_group": 1},
    "two_of_two_groups": {"n_group": 2, "topk_group": 2},
    "one_shared_expert": {"n_shared_experts": 1},
    "all_sparse": {"first_k_dense_replace": 0},
    "two_dense": {"first_k_dense_replace": 2},
    "tied": {"tie_word_embeddings": True},
    "value_wider_than_key": {"v_head_dim": 32},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, deepseek_v3_config(**VARIANTS[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("is_renormalised", [True, False])
@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_equal_logits_for_each_weighting(tmp_path: Path, is_renormalised: bool, scale: float) -> None:
    config = deepseek_v3_config(norm_topk_prob=is_renormalised, routed_scaling_factor=scale)
    assert max_difference(write_checkpoint(tmp_path, config)) < FLOAT32_TOLERANCE


def test_equal_logits_stacked_in_two_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, deepseek_v3_config(), layout="stacked", num_files=2)
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_what_transformers_saves_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ours", deepseek_v3_config())
    Oracle(folder).model.save_pretrained(tmp_path / "theirs")
    assert max_difference(tmp_path / "theirs") < FLOAT32_TOLERANCE


@pytest.mark.parametrize("rank", [24, None])
def test_equal_greedy_tokens(tmp_path: Path, rank: int | None) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, deepseek_v3_config(q_lora_rank=rank)))


MUTATIONS: dict[str, Any] = {
    "no selection bias": Mutation(change=gates(has_selection_bias=False), drops="e_score_correction_bias"),
    "no group limit": Mutation(change=gates(num_groups=1, groups_per_token=1)),
    "one group more": Mutation(change=gates(groups_per_token=3)),
    "groups by their best expert": Mutation(change=gates(group_score="max")),
    "scale 1": Mutation(change=gates(scale=1.0)),
    "not renormalised": Mutation(change=gates(is_renormalised=False)),
    "softmax scores": Mutation(change=gates(score="softmax")),
    "one expert more": Mutation(change=experts(experts_per_token=4)),
    "no shared experts": Mutation(change=experts(shared=None), drops="shared_experts"),
    "no yarn": Mutation(change=ropes(scaling=None)),
    "yarn factor": Mutation(change=scalings(factor=8.0)),
    "yarn original length": Mutation(change=scalings(original_max_position=64)),
    "yarn beta_fast": Mutation(change=scalings(beta_fast=1.0)),
    "yarn beta_slow": Mutation(change=scalings(beta_slow=1.0)),
    "yarn mscale": Mutation(change=scalings(mscale=0.4)),
    "yarn mscale_all_dim on cosines": Mutation(change=scalings(mscale_all_dim=0.6)),
    "softmax scale without mscale": Mutation(change=softmax_scaled(1 / 1.3327**2)),
    "another rope theta": Mutation(change=ropes(theta=1100.0)),
    "no interleave": Mutation(change=ropes(is_interleaved=False)),
    "norm epsilon": Mutation(change=field(norm_eps=1e-6)),
    "no biases": Mutation(change=mixers(has_bias=False), drops=r"self_attn\..*\.bias"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_feature_shows(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, deepseek_v3_config(attention_bias=True))
    difference = (prompt_logits(folder) - prompt_logits(folder, MUTATIONS[name])).abs().max()
    assert difference > MUTATION_SHOWS
