from __future__ import annotations

from typing import Any

import pytest
from config_cases import CONFIGS, read

from moesaic.errors import ConfigError
from moesaic.spec.model import GqaSpec, ModelSpec, MoeSpec

QWEN3 = CONFIGS["qwen3_moe"]
V3 = CONFIGS["deepseek_v3"]


def rope_of(spec: ModelSpec) -> Any:
    mixer = spec.layers[0].mixer
    assert isinstance(mixer, GqaSpec)
    return mixer.rope


def test_old_and_new_spelling_of_rope_agree() -> None:
    old = read(QWEN3, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})
    new = read(QWEN3, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5})
    assert old == new
    assert rope_of(old).theta == 5e5
    with pytest.raises(ConfigError, match="remove one"):
        read(
            QWEN3,
            rope_scaling={"type": "linear", "factor": 2.0},
            rope_parameters={"rope_type": "yarn", "factor": 2.0},
        )


def test_rope_nested_by_layer_type() -> None:
    gemma = read(CONFIGS["gemma4"])
    sliding, full = gemma.layers[0].mixer, gemma.layers[5].mixer
    assert isinstance(sliding, GqaSpec)
    assert isinstance(full, GqaSpec)
    assert sliding.rope is not None
    assert full.rope is not None
    assert sliding.rope.scaling is None
    assert full.rope.scaling is not None
    assert (full.rope.scaling.kind, full.rope.scaling.proportion) == ("proportional", 0.25)


def test_what_gemma_lacks_is_named() -> None:
    assert read(CONFIGS["gemma4 experts"]).is_runnable
    embeddings, shared = read(CONFIGS["gemma4"]).runnable_reasons
    assert "per-layer embeddings" in embeddings
    assert "of another layer, in 5 layers" in shared
    [no_decoder] = read(CONFIGS["gemma4 experts"], use_bidirectional_attention="all").runnable_reasons
    assert "sees later tokens" in no_decoder


def test_gemma_heads_by_layer_are_those_by_kind() -> None:
    """transformers 5 writes `per_layer_config` for what was `global_head_dim`."""
    old = CONFIGS["gemma4 experts"]
    full = {"head_dim": 32, "num_key_value_heads": 1}
    new = {k: v for k, v in old.items() if not k.startswith(("global_", "num_global_"))}
    by_layer = {str(i): full for i, layer in enumerate(read(old).layers) if layer.mixer.window is None}  # type: ignore[union-attr]
    assert read(new, per_layer_config=by_layer) == read(old)
    with pytest.raises(ConfigError, match="made of head_dim and num_key_value_heads"):
        read(new, per_layer_config={"0": {"sliding_window": 3}})


def test_yarn_takes_what_it_is_not_told_from_the_config() -> None:
    rope = rope_of(read(QWEN3, rope_scaling={"rope_type": "yarn", "factor": 4.0}))
    assert (rope.scaling.original_max_position, rope.scaling.beta_fast, rope.scaling.mscale) == (
        256,
        32.0,
        None,
    )
    rope = rope_of(read(QWEN3, rope_scaling={"rope_type": "yarn", "original_max_position_embeddings": 64}))
    assert rope.scaling.factor == 4.0
    gpt = rope_of(read(CONFIGS["gpt_oss"]))
    assert (gpt.scaling.kind, gpt.scaling.truncate, gpt.theta) == ("yarn", False, 150_000.0)


def test_part_of_a_head_is_rotated() -> None:
    assert rope_of(read(CONFIGS["glm4_moe"])).dim == 8
    assert rope_of(read(CONFIGS["glm4_moe"], partial_rotary_factor=1.0)).dim == 16
    assert rope_of(read(CONFIGS["minimax_m2"], rotary_dim=4)).dim == 4


LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


@pytest.mark.parametrize(("original", "scale"), [(64, 1.3), (256, 1.1)])
def test_phimoe_scales_its_rope_by_the_factor_that_goes_with_the_positions(
    original: int, scale: float
) -> None:
    block = {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.3}
    spec = read(CONFIGS["phimoe"], rope_scaling={**block, "original_max_position_embeddings": original})
    assert rope_of(spec).scaling.attention_factor == scale
    assert spec.is_runnable
    with pytest.raises(ConfigError, match="short_mscale is missing"):
        read(CONFIGS["phimoe"], rope_scaling=LONGROPE)


def test_what_phimoe_does_not_run_is_named() -> None:
    linear = {"rope_type": "linear", "factor": 2.0, "short_mscale": 1.0, "long_mscale": 1.0}
    spec = read(CONFIGS["phimoe"], rope_scaling=linear, num_experts_per_tok=3)
    assert spec.runnable_reasons == (
        "rope scaling linear under model_type phimoe is not run; longrope is",
        "sparsemixer chooses two experts; num_experts_per_tok 3 is not run",
    )
    moe = read(CONFIGS["phimoe"]).layers[0].ffn
    assert isinstance(moe, MoeSpec)
    assert moe.gate.jitter == 0.01


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "yarm", "factor": 2.0}, "unknown rope type; did you mean yarn"),
        ({"rope_type": "linear"}, "factor is missing; rope type linear needs it"),
        ({"rope_type": "linear", "factor": -1.0}, "factor must be above 0"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor is missing"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0},
            r"above low_freq_factor \(4\)",
        ),
        ({"rope_type": "longrope", "short_factor": [1.0]}, "long_factor is missing"),
        ({"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "a list of 16 numbers"),
        ({"rope_type": 3}, "rope_type must be a string"),
        ([1], "must be a JSON object"),
    ],
)
def test_impossible_rope_is_refused(scaling: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(QWEN3, rope_scaling=scaling)


def test_dynamic_rope_is_read_and_not_run() -> None:
    spec = read(QWEN3, rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert spec.runnable_reasons == ("rope scaling dynamic is not run yet",)
    assert read(QWEN3, rope_scaling={"rope_type": "yarn", "factor": 2.0}).is_runnable
