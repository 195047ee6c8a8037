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


SHAPES: Mapping[str, Callable[[Config], dict[str, Shape]]] = {
    "gpt_oss": gpt_oss_shapes,
    "llama4_text": llama4_shapes,
}


def scaled(config: Config, name: str, noise: Tensor) -> Tensor | None:
    """The noise of a tensor that only these families have, scaled; None for the others."""
    if re.search(r"(sinks|proj_bias|router\.bias)$", name):
        return 0.6 * noise
    if name.endswith("router.weight"):
        return noise * (2.0 / noise.shape[-1] ** 0.5)
    if re.search(r"experts\.\w+$", name) and noise.dim() == 3:
        return noise * noise.shape[-2] ** -0.5
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
