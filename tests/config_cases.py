"""Small configs of every family that is read exactly, in the words of a config.json. Sizes are made up."""

from __future__ import annotations

from typing import Any

from moesaic.spec.families import read_config
from moesaic.spec.model import ModelSpec

DROP = object()


def read(config: dict[str, Any], **changes: Any) -> ModelSpec:
    """The spec of a config with some keys changed; a change to DROP removes the key."""
    merged = {key: value for key, value in {**config, **changes}.items() if value is not DROP}
    return read_config(merged, name="config.json")


_BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
_MLA: dict[str, Any] = {
    **_BASE,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
_QWEN: dict[str, Any] = {**_BASE, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_DELTA: dict[str, Any] = {
    **_QWEN,
    "head_dim": 16,
    "shared_expert_intermediate_size": 40,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_GEMMA: dict[str, Any] = {
    **_BASE,
    "num_hidden_layers": 12,
    "head_dim": 16,
    "global_head_dim": 32,
    "vocab_size_per_layer_input": 100,
    "hidden_size_per_layer_input": 8,
}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_BASE, "attention_bias": True, "mlp_bias": True},
    "mixtral": {"model_type": "mixtral", **_BASE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"model_type": "olmoe", **_BASE, "num_experts": 8, "num_experts_per_tok": 3, "clip_qkv": 8.0},
    "qwen2_moe": {"model_type": "qwen2_moe", **_QWEN, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"model_type": "qwen3_moe", **_QWEN, "head_dim": 32, "attention_bias": True},
    "qwen3_moe dense layers": {
        "model_type": "qwen3_moe",
        **_QWEN,
        "num_hidden_layers": 6,
        "mlp_only_layers": [1],
        "decoder_sparse_step": 2,
    },
    "qwen3_next": {"model_type": "qwen3_next", **_DELTA},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **_DELTA},
    "deepseek_v2": {"model_type": "deepseek_v2", **_MLA},
    "deepseek_v3": {"model_type": "deepseek_v3", **_MLA, "n_group": 2, "topk_group": 1},
    "deepseek_v3 no query rank": {
        "model_type": "deepseek_v3",
        **_MLA,
        "q_lora_rank": None,
        "n_group": 2,
        "topk_group": 1,
        "attention_bias": True,
    },
    "deepseek_v32": {
        "model_type": "deepseek_v32",
        **_MLA,
        "n_group": 2,
        "topk_group": 1,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "glm_moe_dsa": {
        "model_type": "glm_moe_dsa",
        **_MLA,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
        "indexer_types": ["full", "shared", "full", "shared"],
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **_MLA},
    "glm4_moe": {
        "model_type": "glm4_moe",
        **_BASE,
        "head_dim": 16,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "dots1": {
        "model_type": "dots1",
        **_BASE,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "ernie4_5_moe": {
        "model_type": "ernie4_5_moe",
        **_BASE,
        "use_bias": True,
        "moe_intermediate_size": 32,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_layer_interval": 2,
    },
    "granitemoe": {"model_type": "granitemoe", **_BASE, "num_local_experts": 4, "tie_word_embeddings": True},
    "phimoe": {
        "model_type": "phimoe",
        **_BASE,
        "num_local_experts": 4,
        "attention_bias": True,
        "lm_head_bias": True,
    },
    "minimax_m2": {
        "model_type": "minimax_m2",
        **_BASE,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_BASE,
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
    },
    "llama4": {
        "model_type": "llama4_text",
        **_BASE,
        "head_dim": 16,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 32,
    },
    "dbrx": {
        "model_type": "dbrx",
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 3,
        "max_seq_len": 256,
        "vocab_size": 100,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "nemotron_h": {
        "model_type": "nemotron_h",
        **_BASE,
        "head_dim": 16,
        "hybrid_override_pattern": "ME*-",
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 16,
        "use_bias": True,
        "moe_latent_size": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
    },
    "gemma4": {"model_type": "gemma4_text", **_GEMMA, "num_kv_shared_layers": 5, "use_double_wide_mlp": True},
    "gemma4 experts": {
        "model_type": "gemma4_text",
        **_GEMMA,
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
