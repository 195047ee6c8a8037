"""Mixtral against transformers: its own key names, a window in every layer, weights always renormalised."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import Config, mixtral_config, write_checkpoint
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
    "window": {},
    "no_window": {"sliding_window": None},
    "window_of_one_block": {"sliding_window": 16},
    "tied": {"tie_word_embeddings": True},
    "six_experts_of_three": {"num_local_experts": 6, "num_experts_per_tok": 3},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, mixtral_config(**VARIANTS[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_equal_logits_stacked_in_two_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, mixtral_config(), layout="stacked", num_files=2)
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_what_transformers_saves_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ours", mixtral_config())
    Oracle(folder).model.save_pretrained(tmp_path / "theirs")
    assert max_difference(tmp_path / "theirs") < FLOAT32_TOLERANCE


def test_equal_greedy_tokens(tmp_path: Path) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, mixtral_config()))


MUTATIONS = {
    "no window": Mutation(change=mixers(window=None)),
    "a window one shorter": Mutation(change=mixers(window=23)),
    "a window one longer": Mutation(change=mixers(window=25)),
    "softmax scale": Mutation(change=softmax_scaled(1.1)),
    "another rope theta": Mutation(change=ropes(theta=1100.0)),
    "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
    "one expert more": Mutation(change=experts(experts_per_token=3)),
    "not renormalised": Mutation(change=gates(is_renormalised=False)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_feature_shows(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, mixtral_config())
    difference = (prompt_logits(folder) - prompt_logits(folder, MUTATIONS[name])).abs().max()
    assert difference > MUTATION_SHOWS
