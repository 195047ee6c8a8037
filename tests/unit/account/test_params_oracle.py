"""Parameter counts and class defaults against the reference modules, built on torch's meta device."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
from config_cases import CONFIGS

from moesaic.account.params import count_params
from moesaic.spec.families import read_config
from moesaic.spec.families.defaults import DEFAULTS

pytestmark = pytest.mark.long

IGNORED = {"tie_word_embeddings", "rope_theta", "partial_rotary_factor"}
OURS = {
    "qwen3_next": {"full_attention_interval"},
    "qwen3_5_moe": {"full_attention_interval"},
    "glm_moe_dsa": {"index_topk_freq", "index_skip_topk_offset"},
    "deepseek_v32": {"rope_interleave", "num_nextn_predict_layers"},
    "glm4_moe_lite": {"first_k_dense_replace"},
    "dbrx": {"attn_config", "ffn_config", "layer_norm_eps"},
    "gemma4": {"global_head_dim", "rope_parameters"},
    "gpt_oss": {"rope_parameters"},
}
"""Keys that the class takes from elsewhere than a field of its own."""
TEXT_TYPES = {"qwen3_vl_moe": "qwen3_vl_moe_text", "qwen3_5_moe": "qwen3_5_moe_text", "llama4": "llama4_text"}
TEXT_TYPES |= {"gemma4": "gemma4_text", "kimi_k2": "deepseek_v3", "kimi_k25": "deepseek_v3"}


def reference_count(config: dict[str, Any]) -> int:
    """Numbers in the reference model's state, a tied head not counted twice."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    keys = copy.deepcopy(config)
    reference = CONFIG_MAPPING[keys.pop("model_type")](**keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(reference)
    is_tied = reference.tie_word_embeddings
    return sum(
        tensor.numel()
        for name, tensor in model.state_dict().items()
        if not (is_tied and name == "lm_head.weight")
    )


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "llama4"])
def test_count_equals_the_reference_modules(name: str) -> None:
    config = CONFIGS[name]
    spec = read_config(config, name=name)
    assert count_params(spec).num_total == reference_count(config)


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_the_class(model_type: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    reference = CONFIG_MAPPING[TEXT_TYPES.get(model_type, model_type)]
    fields = {field.name: field.default for field in dataclasses.fields(reference)}
    names = reference.attribute_map | {old: new for new, old in reference.attribute_map.items()}
    for key, value in DEFAULTS[model_type].items():
        if key not in IGNORED | OURS.get(model_type, set()):
            assert fields[key if key in fields else names[key]] == value, key
    assert reference.default_theta == DEFAULTS[model_type].get("rope_theta", 10_000.0)
