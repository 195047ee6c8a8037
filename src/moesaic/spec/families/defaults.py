"""Defaults of each config class, by model_type: what an absent key means. Only keys that a reader asks for.

Source: the configuration classes of transformers 5.24.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QWEN2_MOE: Mapping[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
    "num_experts": 60, "norm_topk_prob": False, "qkv_bias": True,
}  # fmt: skip

_QWEN3_MOE: Mapping[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
    "num_attention_heads": 32, "num_key_value_heads": 4, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096, "decoder_sparse_step": 1,
    "moe_intermediate_size": 768, "num_experts_per_tok": 8, "num_experts": 128, "norm_topk_prob": False,
}  # fmt: skip

_QWEN3_VL_MOE: Mapping[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_act": "silu",
    "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "attention_bias": False,
    "decoder_sparse_step": 1, "moe_intermediate_size": 1408, "num_experts_per_tok": 4, "num_experts": 60,
    "rope_theta": 500000.0,
}  # fmt: skip

_QWEN3_NEXT: Mapping[str, Any] = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 48,
    "num_attention_heads": 16, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "decoder_sparse_step": 1, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10, "num_experts": 512, "norm_topk_prob": True, "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
}  # fmt: skip

_QWEN3_5_MOE: Mapping[str, Any] = {
    "vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16,
    "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
    "attention_bias": False, "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts_per_tok": 8,
    "num_experts": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4,
}  # fmt: skip

_DEEPSEEK_V2: Mapping[str, Any] = {
    "vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False, "first_k_dense_replace": 0, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "n_routed_experts": 64, "n_shared_experts": 2, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "routed_scaling_factor": 1.0, "topk_method": "greedy", "norm_topk_prob": False, "v_head_dim": 128,
    "moe_intermediate_size": 1407,
}  # fmt: skip

_DEEPSEEK_V3: Mapping[str, Any] = {
    "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "hidden_act": "silu",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False, "rope_interleave": True, "attention_bias": False,
    "num_nextn_predict_layers": 1,
}  # fmt: skip

_DEEPSEEK_V32: Mapping[str, Any] = {
    **_DEEPSEEK_V3, "max_position_embeddings": 163840, "index_topk": 2048, "index_head_dim": 128,
    "index_n_heads": 64, "mlp_bias": False, "num_nextn_predict_layers": 0,
}  # fmt: skip

_GLM_MOE_DSA: Mapping[str, Any] = {
    "vocab_size": 154880, "hidden_size": 6144, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "num_hidden_layers": 78, "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 2048,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "hidden_act": "silu",
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False, "attention_bias": False, "index_topk": 2048, "index_head_dim": 128,
    "index_n_heads": 32, "mlp_bias": False, "first_k_dense_replace": 3, "index_topk_freq": 1,
    "index_skip_topk_offset": 2,
}  # fmt: skip

_GLM4_MOE_LITE: Mapping[str, Any] = {
    "vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536,
    "num_hidden_layers": 47, "num_attention_heads": 20, "num_key_value_heads": 20, "n_shared_experts": 1,
    "n_routed_experts": 64, "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768,
    "qk_rope_head_dim": 64, "v_head_dim": 256, "qk_nope_head_dim": 192, "n_group": 1, "topk_group": 1,
    "num_experts_per_tok": 4, "norm_topk_prob": True, "hidden_act": "silu",
    "max_position_embeddings": 202752, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
    "tie_word_embeddings": False, "rope_interleave": True, "attention_bias": False,
    "first_k_dense_replace": 1,
}  # fmt: skip

_GLM4_MOE: Mapping[str, Any] = {
    "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944, "num_hidden_layers": 46,
    "num_attention_heads": 96, "num_key_value_heads": 8, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "attention_bias": False, "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1,
    "n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False, "partial_rotary_factor": 0.5,
    "num_nextn_predict_layers": 1,
}  # fmt: skip

_DOTS1: Mapping[str, Any] = {
    "vocab_size": 152064, "hidden_size": 4608, "intermediate_size": 10944, "moe_intermediate_size": 1408,
    "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 0, "norm_topk_prob": False, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "routed_scaling_factor": 1.0, "sliding_window": 4096, "max_window_layers": 62,
}  # fmt: skip

_ERNIE4_5_MOE: Mapping[str, Any] = {
    "vocab_size": 103424, "bos_token_id": 1, "eos_token_id": 2, "hidden_size": 2560,
    "intermediate_size": 12288, "num_hidden_layers": 28, "num_attention_heads": 20,
    "num_key_value_heads": 4, "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "use_bias": False, "moe_intermediate_size": 1536, "moe_k": 6,
    "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
    "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12, "rope_theta": 500000.0,
}  # fmt: skip

_MIXTRAL: Mapping[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "num_experts_per_tok": 2, "num_local_experts": 8, "rope_theta": 1000000.0,
}  # fmt: skip

_OLMOE: Mapping[str, Any] = {
    "vocab_size": 50304, "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16,
    "num_attention_heads": 16, "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
    "eos_token_id": 50279, "tie_word_embeddings": False, "attention_bias": False, "num_experts_per_tok": 8,
    "num_experts": 64, "norm_topk_prob": False,
}  # fmt: skip

_LLAMA: Mapping[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False,
    "mlp_bias": False,
}  # fmt: skip

_GRANITEMOE: Mapping[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "hidden_act": "silu", "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "attention_bias": False,
    "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
    "attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip

_PHIMOE: Mapping[str, Any] = {
    "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 6400, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "bos_token_id": 1, "eos_token_id": 2,
    "tie_word_embeddings": False, "num_experts_per_tok": 2, "num_local_experts": 16,
    "attention_bias": False, "lm_head_bias": False, "rope_theta": 1000000.0, "router_jitter_noise": 0.01,
}  # fmt: skip

_LLAMA4: Mapping[str, Any] = {
    "vocab_size": 202048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "hidden_act": "silu", "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "bos_token_id": 1,
    "eos_token_id": 2, "num_experts_per_tok": 1, "num_local_experts": 16, "interleave_moe_layer_step": 1,
    "use_qk_norm": True, "no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attention_bias": False,
    "rope_theta": 500000.0, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1,
}  # fmt: skip

_DBRX: Mapping[str, Any] = {
    "d_model": 2048, "n_heads": 16, "n_layers": 24, "max_seq_len": 2048, "vocab_size": 32000,
    "tie_word_embeddings": False, "attn_config": {}, "ffn_config": {}, "layer_norm_eps": 1e-5,
}  # fmt: skip

_GPT_OSS: Mapping[str, Any] = {
    "num_hidden_layers": 36, "num_local_experts": 128, "vocab_size": 201088, "hidden_size": 2880,
    "intermediate_size": 2880, "head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 8,
    "sliding_window": 128, "tie_word_embeddings": False, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "attention_bias": True, "rope_theta": 150000.0,
    "rope_parameters": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}  # fmt: skip

_MINIMAX_M2: Mapping[str, Any] = {
    "vocab_size": 200064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu",
    "max_position_embeddings": 196608, "rms_norm_eps": 1e-6, "bos_token_id": 200034, "eos_token_id": 200020,
    "tie_word_embeddings": False, "num_experts_per_tok": 8, "num_local_experts": 256,
    "rope_theta": 5000000.0,
}  # fmt: skip

_NEMOTRON_H: Mapping[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "tie_word_embeddings": False, "bos_token_id": 1,
    "eos_token_id": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "intermediate_size": 21504, "mlp_hidden_act": "relu2",
    "mlp_bias": False, "ssm_state_size": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
    "conv_kernel": 4, "use_conv_bias": True, "n_routed_experts": 8, "n_shared_experts": 1,
    "moe_intermediate_size": 7688, "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "num_nextn_predict_layers": 0, "use_bias": False, "layer_norm_epsilon": 1e-5,
}  # fmt: skip

_GEMMA4: Mapping[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
    "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": True, "attention_bias": False,
    "sliding_window": 512, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
    "attention_k_eq_v": False, "num_kv_shared_layers": 0, "enable_moe_block": False,
    "use_double_wide_mlp": False, "global_head_dim": 512,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
        },
    },
}  # fmt: skip

DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "qwen2_moe": _QWEN2_MOE, "qwen3_moe": _QWEN3_MOE, "qwen3_vl_moe": _QWEN3_VL_MOE,
    "qwen3_next": _QWEN3_NEXT, "qwen3_5_moe": _QWEN3_5_MOE, "deepseek_v2": _DEEPSEEK_V2,
    "deepseek_v3": _DEEPSEEK_V3, "kimi_k2": _DEEPSEEK_V3, "kimi_k25": _DEEPSEEK_V3,
    "deepseek_v32": _DEEPSEEK_V32, "glm_moe_dsa": _GLM_MOE_DSA, "glm4_moe_lite": _GLM4_MOE_LITE,
    "glm4_moe": _GLM4_MOE, "dots1": _DOTS1, "ernie4_5_moe": _ERNIE4_5_MOE, "mixtral": _MIXTRAL,
    "olmoe": _OLMOE, "llama": _LLAMA, "granitemoe": _GRANITEMOE, "phimoe": _PHIMOE, "llama4": _LLAMA4,
    "dbrx": _DBRX, "gpt_oss": _GPT_OSS, "minimax_m2": _MINIMAX_M2, "nemotron_h": _NEMOTRON_H,
    "gemma4": _GEMMA4,
}  # fmt: skip
