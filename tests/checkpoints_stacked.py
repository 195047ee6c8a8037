"""Tiny configs, shapes and scales of the families whose checkpoints stack their experts."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Config = dict[str, Any]
Shape = tuple[int, ...]

GPT_OSS: Config = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
    "head_dim": 16,
    "attention_bias": True,
    "intermediate_size": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "swiglu_limit": 1.5,  # small enough that it clamps
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
        "beta_slow": 0.25,
        "truncate": False,
    },
}
"""Three layers, a window of 24 on first and last; sinks; clamped, biased experts; yarn past 32 positions."""


def gpt_oss_shapes(config: Config) -> dict[str, Shape]:
    """Experts as x @ W takes them, gate and up columns in turn."""
    D, F, E = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    shapes = _around(config, "model")
    for layer in _layers(config, "model"):
        shapes |= _norms(layer, D, "input_layernorm", "post_attention_layernorm")
        shapes |= _attention(config, layer, config["head_dim"], config["num_key_value_heads"])
        shapes[f"{layer}.self_attn.sinks"] = (config["num_attention_heads"],)
        shapes |= {f"{layer}.mlp.router.weight": (E, D), f"{layer}.mlp.router.bias": (E,)}
        experts = f"{layer}.mlp.experts"
        shapes |= {f"{experts}.gate_up_proj": (E, D, 2 * F), f"{experts}.down_proj": (E, F, D)}
        shapes |= {f"{experts}.gate_up_proj_bias": (E, 2 * F), f"{experts}.down_proj_bias": (E, D)}
    return shapes


LLAMA4: Config = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "num_hidden_layers": 3,
    "no_rope_layers": [1, 0, 1],
    "attention_chunk_size": 24,
    "use_qk_norm": True,
    "attn_temperature_tuning": True,
    "floor_scale": 16,
    "attn_scale": 0.5,
    "head_dim": 16,
    "moe_layers": [1, 2],
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
"""Chunks of 24 with rope around a full layer without, whose queries grow every 16 positions; one dense."""


def llama4_shapes(config: Config) -> dict[str, Shape]:
    """Of the text model alone. Experts as x @ W takes them, gate columns before up columns."""
    D, F, E = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    step = config.get("interleave_moe_layer_step", 1)
    sparse = config["moe_layers"] or range(step - 1, config["num_hidden_layers"], step)
    shapes = _around(config, "model")
    for layer_idx, layer in enumerate(_layers(config, "model")):
        shapes |= _norms(layer, D, "input_layernorm", "post_attention_layernorm")
        shapes |= _attention(config, layer, config["head_dim"], config["num_key_value_heads"])
        block = f"{layer}.feed_forward"
        if layer_idx not in sparse:
            shapes |= _gated(block, D, config["intermediate_size_mlp"])
            continue
        shapes |= {f"{block}.router.weight": (E, D), **_gated(f"{block}.shared_expert", D, F)}
        shapes |= {f"{block}.experts.gate_up_proj": (E, D, 2 * F), f"{block}.experts.down_proj": (E, F, D)}
    return shapes


GEMMA4: Config = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 24,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 4.0,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5000.0},
    },
}
"""One window, two full layers with wider heads, fewer of keys, which are the values; experts everywhere."""


def gemma4_shapes(config: Config) -> dict[str, Shape]:
    """Of the text model alone. Keys are values in full layers where the config says so."""
    D, E, F = config["hidden_size"], config["num_experts"], config["moe_intermediate_size"]
    shapes = _around(config, "model")
    for layer, kind in zip(_layers(config, "model"), config["layer_types"], strict=True):
        is_full = kind == "full_attention"
        is_shared = is_full and config["attention_k_eq_v"]
        C = config["global_head_dim"] if is_full else config["head_dim"]
        G = config["num_global_key_value_heads"] if is_shared else config["num_key_value_heads"]
        attention = _attention(config, layer, C, G)
        shapes |= {name: shape for name, shape in attention.items() if not (is_shared and "v_proj" in name)}
        shapes |= {f"{layer}.self_attn.{name}_norm.weight": (C,) for name in "qk"}
        shapes |= _norms(layer, D, "input_layernorm", "post_attention_layernorm")
        shapes |= _norms(layer, D, "pre_feedforward_layernorm", "post_feedforward_layernorm")
        shapes |= {f"{layer}.layer_scalar": (1,), **_gated(f"{layer}.mlp", D, config["intermediate_size"])}
        if config["enable_moe_block"]:
            shapes |= _norms(layer, D, "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
            shapes |= _norms(layer, D, "pre_feedforward_layernorm_2")
            shapes |= {f"{layer}.router.proj.weight": (E, D), f"{layer}.router.scale": (D,)}
            shapes[f"{layer}.router.per_expert_scale"] = (E,)
            experts = f"{layer}.experts"
            shapes |= {f"{experts}.gate_up_proj": (E, 2 * F, D), f"{experts}.down_proj": (E, D, F)}
    return shapes


SHAPES: Mapping[str, Callable[[Config], dict[str, Shape]]] = {
    "gpt_oss": gpt_oss_shapes,
    "llama4_text": llama4_shapes,
    "gemma4_text": gemma4_shapes,
}


def scaled(config: Config, name: str, noise: Tensor) -> Tensor | None:
    """The noise of a tensor that only these families have, scaled; None for the others."""
    if re.search(r"(sinks|proj_bias|router\.bias)$", name):
        return 0.6 * noise
    if re.search(r"(layer_scalar|router\.scale|per_expert_scale)$", name):
        return 1.0 + 0.3 * noise
    if re.search(r"router(\.proj)?\.weight$", name):
        return noise * (2.0 / noise.shape[-1] ** 0.5)
    if re.search(r"experts\.\w+$", name) and noise.dim() == 3:
        return noise * noise.shape[-1 if config["model_type"] == "gemma4_text" else -2] ** -0.5
    return None


def pack_mxfp4(tensors: Mapping[str, Tensor], *, seed: int = 0) -> dict[str, Tensor]:
    """The same tensors with random MXFP4 experts in the place of plain ones."""
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if not (re.search(r"experts\.\w+_proj$", name) and value.dim() == 3):
            out[name] = value
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        E, width, rows = value.shape
        shape = (E, rows, width // 32)
        out[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        out[f"{name}_scales"] = torch.randint(120, 124, shape, generator=generator, dtype=torch.uint8)
    return out


def _around(config: Config, root: str, head: str = "lm_head") -> dict[str, Shape]:
    table = (config["vocab_size"], config["hidden_size"])
    shapes: dict[str, Shape] = {f"{root}.embed_tokens.weight": table, f"{root}.norm.weight": table[1:]}
    return shapes if config["tie_word_embeddings"] else shapes | {f"{head}.weight": table}


def _layers(config: Config, root: str) -> list[str]:
    return [f"{root}.layers.{layer_idx}" for layer_idx in range(config["num_hidden_layers"])]


def _norms(layer: str, width: int, *names: str) -> dict[str, Shape]:
    return {f"{layer}.{name}.weight": (width,) for name in names}


def _gated(prefix: str, width: int, inner: int) -> dict[str, Shape]:
    sizes = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"{prefix}.{name}.weight": shape for name, shape in sizes.items()}


def _attention(config: Config, layer: str, head_dim: int, num_kv_heads: int) -> dict[str, Shape]:
    D, query, key = config["hidden_size"], config["num_attention_heads"] * head_dim, num_kv_heads * head_dim
    sizes = {"q_proj": (query, D), "k_proj": (key, D), "v_proj": (key, D), "o_proj": (D, query)}
    shapes: dict[str, Shape] = {f"{layer}.self_attn.{name}.weight": shape for name, shape in sizes.items()}
    if config["attention_bias"]:
        shapes |= {f"{layer}.self_attn.{name}.bias": shape[:1] for name, shape in sizes.items()}
    return shapes
