"""Gemma 4 against transformers: norms around everything, a router's own input, keys as values, a soft cap."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Config, gemma4_config, random_tensors, write_checkpoint
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
    mixers,
    prompt_logits,
    softmax_scaled,
)

from moesaic.models.build import load
from moesaic.spec.model import GqaSpec, LayerSpec

VARIANTS: dict[str, Config] = {
    "as_released": {},
    "values_of_their_own": {"attention_k_eq_v": False},
    "no_experts": {"enable_moe_block": False},
    "no_soft_cap": {"final_logit_softcapping": None, "attention_bias": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, gemma4_config(**VARIANTS[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_what_transformers_saves_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ours", gemma4_config())
    Oracle(folder).model.save_pretrained(tmp_path / "theirs")
    assert max_difference(tmp_path / "theirs") < FLOAT32_TOLERANCE


def test_equal_greedy_tokens(tmp_path: Path) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, gemma4_config()))


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


def layers(is_full: bool, **changes: Any) -> Mutation:
    """The mixers of the full layers, or of those with a window, changed."""

    def change(layer: LayerSpec) -> LayerSpec:
        mixer = layer.mixer
        assert isinstance(mixer, GqaSpec)
        return replace(layer, mixer=replace(mixer, **changes)) if (mixer.window is None) == is_full else layer

    return Mutation(change=each_layer(change))


def rope_of(layer_idx: int, **changes: Any) -> Any:
    """The rope of a layer of the config, its scaling changed."""
    from moesaic.spec.families import read_config

    mixer = read_config(gemma4_config(), name="gemma4").layers[layer_idx].mixer
    assert isinstance(mixer, GqaSpec)
    assert mixer.rope is not None
    return replace(mixer.rope, **changes)


SCALING = rope_of(1).scaling
MUTATIONS: dict[str, Any] = {
    "no window": layers(False, window=None),
    "a window one longer": layers(False, window=25),
    "another rope theta in windows": layers(False, rope=rope_of(0, theta=1100.0)),
    "another rope theta in full layers": layers(True, rope=rope_of(1, theta=5500.0)),
    "every pair turns": layers(True, rope=rope_of(1, scaling=None)),
    "more pairs turn": layers(True, rope=rope_of(1, scaling=replace(SCALING, proportion=0.5))),
    "a rope factor": layers(True, rope=rope_of(1, scaling=replace(SCALING, factor=2.0))),
    "no q and k norms": Mutation(change=mixers(qk_norm="none"), drops=r"self_attn\.[qk]_norm"),
    "no value norm": Mutation(change=mixers(has_value_norm=False)),
    "softmax scale": Mutation(change=softmax_scaled(1.1)),
    "no norms after the halves": Mutation(
        change=each_layer(lambda layer: replace(layer, has_out_norms=False)),
        drops=r"post_(attention|feedforward)_layernorm\.",
    ),
    "no layer scalars": Mutation(
        change=each_layer(lambda layer: replace(layer, has_scale=False)), drops="layer_scalar"
    ),
    "no norms of the branches": Mutation(
        change=experts(has_branch_norms=False), drops=r"feedforward_layernorm_\d"
    ),
    "no norm before the router": Mutation(change=gates(has_input_norm=False), drops=r"router\.scale"),
    "no scales of experts": Mutation(change=gates(has_expert_scale=False), drops="per_expert_scale"),
    "not renormalised": Mutation(change=gates(is_renormalised=False)),
    "one expert more": Mutation(change=experts(experts_per_token=4)),
    "another activation": Mutation(change=experts(activation="silu")),
    "no embedding scale": Mutation(change=field(embedding_scale=1.0)),
    "no soft cap": Mutation(change=field(logit_softcap=None)),
    "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gemma4"), gemma4_config())


@pytest.fixture(scope="module")
def logits_TV(folder: Path) -> torch.Tensor:
    return prompt_logits(folder)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_feature_shows(folder: Path, logits_TV: torch.Tensor, name: str) -> None:
    assert (logits_TV - prompt_logits(folder, MUTATIONS[name])).abs().max() > MUTATION_SHOWS
