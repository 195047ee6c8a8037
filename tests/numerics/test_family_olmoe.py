"""OLMoE against transformers: norms over all heads at once, clipped projections, weights not renormalised."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import Config, olmoe_config, write_checkpoint
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
    softmax_scaled,
)

VARIANTS: dict[str, Config] = {
    "not_renormalised": {},
    "renormalised": {"norm_topk_prob": True},
    "no_clip": {"clip_qkv": None},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True},
    "multi_head": {"num_key_value_heads": 4},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, olmoe_config(**VARIANTS[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_equal_logits_stacked_in_two_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, olmoe_config(), layout="stacked", num_files=2)
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_what_transformers_saves_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ours", olmoe_config())
    Oracle(folder).model.save_pretrained(tmp_path / "theirs")
    assert max_difference(tmp_path / "theirs") < FLOAT32_TOLERANCE


def test_equal_greedy_tokens(tmp_path: Path) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, olmoe_config()))


MUTATIONS = {
    "no q and k norms": Mutation(change=mixers(qk_norm="none"), drops=r"self_attn\.[qk]_norm"),
    "no clip": Mutation(change=mixers(qkv_clip=None)),
    "another clip": Mutation(change=mixers(qkv_clip=1.6)),
    "softmax scale": Mutation(change=softmax_scaled(1.1)),
    "another rope theta": Mutation(change=ropes(theta=1100.0)),
    "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
    "one expert less": Mutation(change=experts(experts_per_token=2)),
    "renormalised": Mutation(change=gates(is_renormalised=True)),
    "softmax after the choice": Mutation(change=gates(order="topk_then_score")),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_feature_shows(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, olmoe_config())
    difference = (prompt_logits(folder) - prompt_logits(folder, MUTATIONS[name])).abs().max()
    assert difference > MUTATION_SHOWS
