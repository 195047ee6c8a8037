"""gpt-oss against transformers: sinks, alternate windows, clamped biased experts, yarn, MXFP4 experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Config, gpt_oss_config, write_checkpoint
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

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

VARIANTS: dict[str, Config] = {
    "as_released": {},
    "no_attention_bias": {"attention_bias": False},
    "another_clamp": {"swiglu_limit": 0.7, "swiglu_alpha": 1.1},
    "all_windows": {"layer_types": ["sliding_attention"] * 3},
    "truncated_yarn": {"rope_scaling": gpt_oss_config()["rope_scaling"] | {"truncate": True}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equal_logits(tmp_path: Path, variant: str) -> None:
    folder = write_checkpoint(tmp_path, gpt_oss_config(**VARIANTS[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_equal_logits_from_mxfp4_experts(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path, gpt_oss_config(quantization_config=MXFP4), layout="mxfp4", num_files=3
    )
    assert max_difference(folder) < FLOAT32_TOLERANCE


def test_what_transformers_saves_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "ours", gpt_oss_config())
    Oracle(folder).model.save_pretrained(tmp_path / "theirs")
    assert max_difference(tmp_path / "theirs") < FLOAT32_TOLERANCE


def test_equal_greedy_tokens(tmp_path: Path) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, gpt_oss_config()))


MUTATIONS: dict[str, Any] = {
    "no sinks": Mutation(change=mixers(has_sinks=False), drops=r"sinks"),
    "no windows": Mutation(change=mixers(window=None)),
    "windows everywhere": Mutation(change=mixers(window=24)),
    "windows one longer": Mutation(change=mixers(window=25)),
    "no q, k and v bias": Mutation(change=mixers(has_qkv_bias=False), drops=r"[qkv]_proj\.bias"),
    "no o bias": Mutation(change=mixers(has_out_bias=False), drops=r"o_proj\.bias"),
    "softmax scale": Mutation(change=softmax_scaled(1.1)),
    "no yarn": Mutation(change=ropes(scaling=None)),
    "truncated yarn": Mutation(change=scalings(truncate=True)),
    "yarn attention factor": Mutation(change=scalings(attention_factor=1.0)),
    "interleaved rope": Mutation(change=ropes(is_interleaved=True)),
    "no expert biases": Mutation(change=experts(has_bias=False), drops=r"experts\..*_bias"),
    "no clamp": Mutation(change=experts(activation_limit=None)),
    "another slope": Mutation(change=experts(activation_alpha=1.5)),
    "plain silu": Mutation(change=experts(activation="silu")),
    "no router bias": Mutation(change=gates(has_logit_bias=False), drops=r"router\.bias"),
    "softmax before the choice": Mutation(change=gates(order="score_then_topk")),
    "one expert more": Mutation(change=experts(experts_per_token=4)),
    "norm epsilon": Mutation(change=field(norm_eps=1e-5)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpt_oss"), gpt_oss_config())


@pytest.fixture(scope="module")
def logits_TV(folder: Path) -> torch.Tensor:
    return prompt_logits(folder)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_feature_shows(folder: Path, logits_TV: torch.Tensor, name: str) -> None:
    assert (logits_TV - prompt_logits(folder, MUTATIONS[name])).abs().max() > MUTATION_SHOWS
