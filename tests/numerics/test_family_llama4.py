"""Llama 4 against transformers: chunks, layers without rope, norms after rope, weights on the input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Config, llama4_config, random_tensors, write_checkpoint
from parity import (
    FLOAT32_TOLERANCE,
    MUTATION_SHOWS,
    Mutation,
    Oracle,
    assert_same_greedy,
    each_layer,
    experts,
    field,
    gates,
    logits_of,
    max_difference,
    prompt_logits,
    softmax_scaled,
)

from moesaic.models.build import load
from moesaic.spec.model import GqaSpec, LayerSpec, RopeSpec, TemperatureSpec

VARIANTS: dict[str, Config] = {
    "as_scout": {},
    "as_maverick": {"use_qk_norm": False, "moe_layers": None, "interleave_moe_layer_step": 2},
    "one_expert": {"num_experts_per_tok": 1},
    "no_temperature": {"attn_temperature_tuning": False},
    "no_chunks": {"attention_chunk_size": None},
    "chunk_of_one_block": {"attention_chunk_size": 16, "attention_bias": True},
    "llama3_rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, llama4_config(**VARIANTS[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_what_transformers_saves_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ours", llama4_config())
    Oracle(folder).model.save_pretrained(tmp_path / "theirs")
    assert max_difference(tmp_path / "theirs") < FLOAT32_TOLERANCE


def test_equal_greedy_tokens(tmp_path: Path) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, llama4_config()))


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


def rotated(**changes: Any) -> Mutation:
    """The layers with rope, changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, GqaSpec)
        return layer if layer.mixer.rope is None else replace(layer, mixer=replace(layer.mixer, **changes))

    return Mutation(change=each_layer(change))


def unrotated(**changes: Any) -> Mutation:
    """The layers without rope, changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mixer, GqaSpec)
        return replace(layer, mixer=replace(layer.mixer, **changes)) if layer.mixer.rope is None else layer

    return Mutation(change=each_layer(change))


ROPE = RopeSpec(theta=1000.0, dim=16, is_interleaved=True)
MUTATIONS: dict[str, Any] = {
    "a window that trails": rotated(is_chunked=False),
    "no chunks": rotated(is_chunked=False, window=None),
    "chunks one longer": rotated(window=25),
    "no q and k norms": rotated(qk_norm="none"),
    "no rope": rotated(rope=None),
    "rope by halves": rotated(rope=replace(ROPE, is_interleaved=False)),
    "another rope theta": rotated(rope=replace(ROPE, theta=1100.0)),
    "rope in every layer": unrotated(rope=ROPE),
    "chunks in every layer": unrotated(window=24, is_chunked=True),
    "norms in every layer": unrotated(qk_norm="l2"),
    "no temperature": unrotated(temperature=None),
    "a weaker temperature": unrotated(temperature=TemperatureSpec(scale=0.4, interval=16)),
    "a slower temperature": unrotated(temperature=TemperatureSpec(scale=0.5, interval=17)),
    "temperature in every layer": rotated(temperature=TemperatureSpec(scale=0.5, interval=16)),
    "softmax scale": Mutation(change=softmax_scaled(1.1)),
    "weights on the output": Mutation(change=experts(weight_on="output")),
    "no shared expert": Mutation(change=experts(shared=None), drops="shared_expert"),
    "one expert more": Mutation(change=experts(experts_per_token=3)),
    "softmax scores": Mutation(change=gates(score="softmax")),
    "renormalised": Mutation(change=gates(is_renormalised=True)),
    "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama4"), llama4_config())


@pytest.fixture(scope="module")
def logits_TV(folder: Path) -> torch.Tensor:
    return prompt_logits(folder)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_feature_shows(folder: Path, logits_TV: torch.Tensor, name: str) -> None:
    assert (logits_TV - prompt_logits(folder, MUTATIONS[name])).abs().max() > MUTATION_SHOWS
