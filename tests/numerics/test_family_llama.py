"""Llama against transformers: biases, tied head, llama3 rope; each feature removed must show."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import llama_config, write_checkpoint
from parity import (
    FLOAT32_TOLERANCE,
    MUTATION_SHOWS,
    Mutation,
    assert_same_greedy,
    each_layer,
    field,
    max_difference,
    mixers,
    prompt_logits,
    ropes,
    scalings,
    softmax_scaled,
)

from moesaic.spec.model import DenseSpec, LayerSpec

VARIANTS = {
    "llama3_rope": {},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "plain_rope": {"rope_scaling": None, "rope_theta": 10000.0},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "multi_head": {"num_key_value_heads": 4},
    "one_kv_head": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 24},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, llama_config(**VARIANTS[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_equal_logits_from_several_files(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, llama_config(), num_files=3)
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_equal_greedy_tokens(tmp_path: Path) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, llama_config(attention_bias=True)))


def dense(**changes: object) -> Mutation:
    def change(layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.ffn, DenseSpec)
        return LayerSpec(mixer=layer.mixer, ffn=DenseSpec(width=layer.ffn.width, **changes))  # type: ignore[arg-type]

    return Mutation(change=each_layer(change))


MUTATIONS = {
    "no q, k and v bias": Mutation(change=mixers(has_qkv_bias=False), drops=r"[qkv]_proj\.bias"),
    "no o bias": Mutation(change=mixers(has_out_bias=False), drops=r"o_proj\.bias"),
    "no biases in the dense half": Mutation(change=dense().change, drops=r"mlp\..*\.bias"),
    "another activation": dense(has_bias=True, activation="gelu"),
    "softmax scale": Mutation(change=softmax_scaled(1.1)),
    "no rope scaling": Mutation(change=ropes(scaling=None)),
    "another rope theta": Mutation(change=ropes(theta=1100.0)),
    "interleaved rope": Mutation(change=ropes(is_interleaved=True)),
    "rope scaling factor": Mutation(change=scalings(factor=8.0)),
    "rope low frequency": Mutation(change=scalings(low_freq_factor=2.0)),
    "rope high frequency": Mutation(change=scalings(high_freq_factor=8.0)),
    "rope original length": Mutation(change=scalings(original_max_position=128)),
    "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
    "tied head": Mutation(change=field(has_tied_head=True), drops="lm_head"),
    "a window": Mutation(change=mixers(window=48)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_feature_shows(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, llama_config(attention_bias=True, mlp_bias=True))
    difference = (prompt_logits(folder) - prompt_logits(folder, MUTATIONS[name])).abs().max()
    assert difference > MUTATION_SHOWS
