"""Families beside transformers, one table: variants that must agree, and changes that must show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import CONFIGS, Config, write_checkpoint
from family_configs import LONGROPE, YARN
from parity import (
    FLOAT32_TOLERANCE,
    MUTATION_SHOWS,
    Family,
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
    scalings,
    shared,
    softmax_scaled,
)
from stacked_cases import STACKED_FAMILIES
from torch import Tensor

from moesaic.models.build import load

TIED: Config = {"tie_word_embeddings": True}
PLAIN_YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}}


WEIGHTINGS: dict[str, Config] = {
    f"renormalised {is_renormalised}, scale {scale}": {
        "norm_topk_prob": is_renormalised,
        "routed_scaling_factor": scale,
    }
    for is_renormalised in (True, False)
    for scale in (1.0, 1.7)
}
ROUTING: dict[str, Mutation] = {
    "one expert less": Mutation(change=experts(experts_per_token=2)),
    "one expert more": Mutation(change=experts(experts_per_token=4)),
    "another activation in the experts": Mutation(change=experts(activation="gelu")),
}
DEEPSEEK_GATE: dict[str, Mutation] = {
    **ROUTING,
    "no selection bias": Mutation(change=gates(has_selection_bias=False), drops="e_score_correction_bias"),
    "no group limit": Mutation(change=gates(num_groups=1, groups_per_token=1)),
    "groups by their best expert": Mutation(change=gates(group_score="max")),
    "scale 1": Mutation(change=gates(scale=1.0)),
    "not renormalised": Mutation(change=gates(is_renormalised=False)),
    "softmax scores": Mutation(change=gates(score="softmax")),
    "no shared experts": Mutation(change=experts(shared=None), drops="shared_experts"),
}
ROPE: dict[str, Mutation] = {
    "another rope theta": Mutation(change=ropes(theta=1100.0)),
    "norm epsilon": Mutation(change=field(norm_eps=1e-6)),
    "softmax scale": Mutation(change=softmax_scaled(1.1)),
}
YARN_PARTS: dict[str, Mutation] = {
    "no yarn": Mutation(change=ropes(scaling=None)),
    "yarn factor": Mutation(change=scalings(factor=8.0)),
    "yarn original length": Mutation(change=scalings(original_max_position=64)),
    "yarn mscale": Mutation(change=scalings(mscale=0.4)),
    "softmax scale without mscale": Mutation(change=softmax_scaled(1 / 1.3327**2)),
}

PER_EXPERT_FAMILIES: dict[str, Family] = {
    "qwen2_moe": Family(
        variants={
            "base": {},
            "renormalised": {"norm_topk_prob": True},
            "every second sparse": {"mlp_only_layers": [], "decoder_sparse_step": 2},
            "a dense layer where the step has a sparse one": {
                "num_hidden_layers": 4,
                "mlp_only_layers": [3],
                "decoder_sparse_step": 2,
            },
            "no windows": {"use_sliding_window": False},
            "windows by layer_types": {
                "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]
            },
        },
        more={
            "no biases": {"qkv_bias": False},
            "tied": TIED,
            "yarn": PLAIN_YARN,
        },
        mutations={
            **ROUTING,
            **ROPE,
            "renormalised": Mutation(change=gates(is_renormalised=True)),
            "sigmoid scores": Mutation(change=gates(score="sigmoid")),
            "no shared expert": Mutation(change=experts(shared=None), drops="shared_expert"),
            "shared expert without its gate": Mutation(
                change=shared(has_output_gate=False), drops="shared_expert_gate"
            ),
            "no biases": Mutation(change=mixers(has_qkv_bias=False), drops=r"_proj\.bias"),
            "no windows": Mutation(change=mixers(window=None)),
            "windows everywhere": Mutation(change=mixers(window=24)),
        },
    ),
    "deepseek_v2": Family(
        variants={
            "base": {},
            "greedy": {"topk_method": "greedy"},
            "scale 1": {"routed_scaling_factor": 1.0},
            "full-rank queries": {"q_lora_rank": None},
            "no yarn": {"rope_scaling": None},
            "yarn without mscales": {"rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k}},
            "biases": {"attention_bias": True, "mlp_bias": True},
        },
        more={
            "greedy though groups are named": {"topk_method": "greedy", "n_group": 2, "topk_group": 1},
            "two groups of two": {"n_group": 2, "topk_group": 2},
            "yarn with equal mscales": {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
            "all sparse": {"first_k_dense_replace": 0},
            "tied": TIED,
            "value wider than key": {"v_head_dim": 32},
        },
        mutated={"attention_bias": True, "mlp_bias": True},
        mutations={
            **ROUTING,
            **ROPE,
            **YARN_PARTS,
            "no group limit": Mutation(change=gates(num_groups=1, groups_per_token=1)),
            "groups by their two best": Mutation(change=gates(group_score="top2_sum")),
            "one group more": Mutation(change=gates(groups_per_token=3)),
            "scale 1": Mutation(change=gates(scale=1.0)),
            "renormalised": Mutation(change=gates(is_renormalised=True)),
            "no shared experts": Mutation(change=experts(shared=None), drops="shared_experts"),
            "no biases in shared experts": Mutation(
                change=shared(has_bias=False), drops=r"shared_experts.*\.bias"
            ),
            "no interleave": Mutation(change=ropes(is_interleaved=False)),
            "no biases": Mutation(change=mixers(has_bias=False), drops=r"self_attn\..*\.bias"),
        },
    ),
    "glm4_moe": Family(
        variants={
            **WEIGHTINGS,
            "no biases": {"attention_bias": False},
            "no head norms": {"use_qk_norm": False},
            "whole heads rotated": {"partial_rotary_factor": 1.0},
        },
        more={
            "one group": {"n_group": 1, "topk_group": 1},
            "one shared expert": {"n_shared_experts": 1},
            "all sparse": {"first_k_dense_replace": 0},
            "tied": TIED,
            "yarn": PLAIN_YARN,
        },
        mutations={
            **DEEPSEEK_GATE,
            **ROPE,
            "no head norms": Mutation(change=mixers(qk_norm="none"), drops=r"self_attn\.[qk]_norm"),
            "whole heads rotated": Mutation(change=ropes(dim=32)),
            "interleaved rope": Mutation(change=ropes(is_interleaved=True)),
            "no biases": Mutation(change=mixers(has_qkv_bias=False), drops=r"_proj\.bias"),
        },
    ),
    "glm4_moe_lite": Family(
        variants={
            "base": {},
            "full-rank queries": {"q_lora_rank": None},
            "half rotation": {"rope_interleave": False},
            "yarn": {"rope_scaling": YARN},
        },
        more={
            **WEIGHTINGS,
            "biases": {"attention_bias": True},
            "one group": {"n_group": 1, "topk_group": 1},
            "tied": TIED,
            "value wider than key": {"v_head_dim": 32},
        },
        mutated={"attention_bias": True, "rope_scaling": YARN},
        same={**DEEPSEEK_GATE, **ROPE},
        mutations={
            **YARN_PARTS,
            "no interleave": Mutation(change=ropes(is_interleaved=False)),
            "no biases": Mutation(change=mixers(has_bias=False), drops=r"self_attn\..*\.bias"),
        },
    ),
    "dots1": Family(
        variants={
            "base": {},
            "biases": {"attention_bias": True},
            "windows by layer_types": {
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]
            },
        },
        more={
            **WEIGHTINGS,
            "no windows": {"sliding_window": None},
            "one group": {"n_group": 1, "topk_group": 1},
            "all sparse": {"first_k_dense_replace": 0},
            "tied": TIED,
        },
        mutated={"attention_bias": True},
        same={**DEEPSEEK_GATE, **ROPE},
        mutations={
            "no head norms": Mutation(change=mixers(qk_norm="none"), drops=r"self_attn\.[qk]_norm"),
            "no windows": Mutation(change=mixers(window=None)),
            "windows everywhere": Mutation(change=mixers(window=24)),
            "no biases": Mutation(
                change=mixers(has_qkv_bias=False, has_out_bias=False), drops=r"_proj\.bias"
            ),
        },
    ),
    "minimax_m2": Family(
        variants={
            "base": {},
            "whole heads rotated": {"rotary_dim": 32},
        },
        more={
            "one expert": {"num_experts_per_tok": 1},
            "tied": TIED,
            "yarn": PLAIN_YARN,
        },
        same={**ROUTING, **ROPE},
        mutations={
            "no selection bias": Mutation(
                change=gates(has_selection_bias=False), drops="e_score_correction_bias"
            ),
            "not renormalised": Mutation(change=gates(is_renormalised=False)),
            "softmax scores": Mutation(change=gates(score="softmax")),
            "no norms of queries and keys": Mutation(
                change=mixers(qk_norm="none"), drops=r"self_attn\.[qk]_norm"
            ),
            "whole heads rotated": Mutation(change=ropes(dim=32)),
        },
    ),
    "ernie4_5_moe": Family(
        variants={
            "base": {},
            "no biases": {"use_bias": False},
            "every second sparse": {"moe_layer_start_index": 0, "moe_layer_interval": 2},
            "no shared experts": {"moe_num_shared_experts": 0},
            "a floor under the sum of weights": {"moe_norm_min": 0.9},
            "tied": TIED,
        },
        more={
            "the last dense": {"moe_layer_end_index": 1},
            "tied without biases": {**TIED, "use_bias": False},
            "yarn": PLAIN_YARN,
        },
        mutated={"moe_norm_min": 0.7},
        mutations={
            **ROUTING,
            **ROPE,
            "no selection bias": Mutation(
                change=gates(has_selection_bias=False), drops="e_score_correction_bias"
            ),
            "not renormalised": Mutation(change=gates(is_renormalised=False)),
            "no floor under the sum of weights": Mutation(change=gates(renormalise_floor=0.0)),
            "sigmoid scores": Mutation(change=gates(score="sigmoid")),
            "no shared experts": Mutation(change=experts(shared=None), drops="shared_experts"),
            "no biases in shared experts": Mutation(
                change=shared(has_bias=False), drops=r"shared_experts.*\.bias"
            ),
            "no interleave": Mutation(change=ropes(is_interleaved=False)),
            "no biases in attention": Mutation(
                change=mixers(has_qkv_bias=False, has_out_bias=False), drops=r"self_attn\..*_proj\.bias"
            ),
            "no bias on the head": Mutation(change=field(has_head_bias=False), drops=r"lm_head\.bias"),
        },
    ),
    "granitemoe": Family(
        variants={
            "base": {},
            "biases": {"attention_bias": True},
            "tied": TIED,
        },
        more={
            "multipliers of 1": {
                "embedding_multiplier": 1.0,
                "residual_multiplier": 1.0,
                "logits_scaling": 1.0,
                "attention_multiplier": 0.25,
            },
            "yarn": PLAIN_YARN,
        },
        mutated={"attention_bias": True},
        mutations={
            **ROUTING,
            **ROPE,
            "no embedding multiplier": Mutation(change=field(embedding_scale=1.0)),
            "no residual multiplier": Mutation(change=field(residual_scale=1.0)),
            "no logits scaling": Mutation(change=field(logit_scale=1.0)),
            "attention scaled by the width of a head": Mutation(change=mixers(softmax_scale=0.25)),
            "softmax before the choice": Mutation(
                change=gates(order="score_then_topk", is_renormalised=False)
            ),
            "no biases": Mutation(
                change=mixers(has_qkv_bias=False, has_out_bias=False), drops=r"_proj\.bias"
            ),
        },
    ),
    "phimoe": Family(
        variants={
            "base": {},
            "no biases": {"attention_bias": False, "lm_head_bias": False},
            "no longrope": {"rope_scaling": None},
            "tied": TIED,
        },
        more={
            "little jitter": {"router_jitter_noise": 0.01},
            "no window": {"sliding_window": None},
            "long factors for short ones": {
                "rope_scaling": {**LONGROPE, "short_factor": LONGROPE["long_factor"]}
            },
        },
        mutations={
            **ROPE,
            "another activation in the experts": ROUTING["another activation in the experts"],
            "no jitter": Mutation(change=gates(jitter=0.0)),
            "more jitter": Mutation(change=gates(jitter=0.4)),
            "softmax scores": Mutation(change=gates(score="softmax")),
            "softmax of the chosen": Mutation(change=gates(score="softmax", order="topk_then_score")),
            "root-mean-square norms": Mutation(
                change=field(norm="rms", has_norm_bias=False), drops=r"norm\.bias"
            ),
            "no biases in norms": Mutation(change=field(has_norm_bias=False), drops=r"norm\.bias"),
            "no bias on the head": Mutation(change=field(has_head_bias=False), drops=r"lm_head\.bias"),
            "no biases in attention": Mutation(
                change=mixers(has_qkv_bias=False, has_out_bias=False), drops=r"_proj\.bias"
            ),
            "no window": Mutation(change=mixers(window=None)),
            "no longrope": Mutation(change=ropes(scaling=None)),
            "the short factors": Mutation(change=scalings(long_factor=tuple(LONGROPE["short_factor"]))),
            "the short mscale": Mutation(change=scalings(attention_factor=LONGROPE["short_mscale"])),
            "mscale by the formula": Mutation(change=scalings(attention_factor=None)),
        },
    ),
}


FAMILIES = PER_EXPERT_FAMILIES | STACKED_FAMILIES


def pairs(usual: str, long: str) -> list[Any]:
    """(family, name) of the entries of two fields, the second one's marked long."""
    return [(family, name) for family, case in FAMILIES.items() for name in getattr(case, usual)] + [
        pytest.param(family, name, marks=pytest.mark.long)
        for family, case in FAMILIES.items()
        for name in getattr(case, long)
    ]


@pytest.mark.parametrize(("family", "variant"), pairs("variants", "more"))
def test_equal_logits(tmp_path: Path, family: str, variant: str) -> None:
    case = FAMILIES[family]
    folder = write_checkpoint(tmp_path, CONFIGS[family](**{**case.variants, **case.more}[variant]))
    assert max_difference(folder) < FLOAT32_TOLERANCE


@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_both_layouts_give_the_same_bits_also_in_two_files(tmp_path: Path, family: str) -> None:
    one = write_checkpoint(tmp_path / "one", CONFIGS[family]())
    two = write_checkpoint(tmp_path / "two", CONFIGS[family](), layout="stacked", num_files=2)
    assert torch.equal(*(logits_of(load(folder, num_threads=1)) for folder in (one, two)))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_transformers_saves_gives_the_same_bits(tmp_path: Path, family: str) -> None:
    ours = write_checkpoint(tmp_path / "ours", CONFIGS[family](), layout="stacked")
    Oracle(ours).model.save_pretrained(tmp_path / "theirs")
    assert torch.equal(*(logits_of(load(folder, num_threads=1)) for folder in (ours, tmp_path / "theirs")))


@pytest.mark.parametrize(
    "family",
    ["deepseek_v2", "ernie4_5_moe", "phimoe", *STACKED_FAMILIES]
    + [
        pytest.param(family, marks=pytest.mark.long)
        for family in ("qwen2_moe", "glm4_moe", "glm4_moe_lite", "dots1", "minimax_m2", "granitemoe")
    ],
)
def test_equal_greedy_tokens(tmp_path: Path, family: str) -> None:
    assert_same_greedy(write_checkpoint(tmp_path, CONFIGS[family]()))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Tensor]]:
    """The folder that a family's mutations start from and its logits, filled as they are asked for."""

    class Bases(dict[str, tuple[Path, Tensor]]):
        def __missing__(self, family: str) -> tuple[Path, Tensor]:
            config = CONFIGS[family](**FAMILIES[family].mutated)
            folder = write_checkpoint(tmp_path_factory.mktemp(family), config)
            self[family] = folder, prompt_logits(folder)
            return self[family]

    return Bases()


@pytest.mark.parametrize(("family", "name"), pairs("mutations", "same"))
def test_a_changed_feature_shows(bases: Any, family: str, name: str) -> None:
    folder, base = bases[family]
    mutation = {**FAMILIES[family].mutations, **FAMILIES[family].same}[name]
    difference = (prompt_logits(folder, mutation) - base).abs().max()
    assert difference > MUTATION_SHOWS
