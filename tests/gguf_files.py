"""GGUF files written by hand: any metadata, any tensors, no weights worth reading."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BLOCKS = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "MXFP4": (39, 32, 17),
}


def gguf_bytes(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]] | None = None,
    *,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """A whole file; tensors as name -> (type, shape with the fastest dim first)."""
    tensors = tensors or {}
    out = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += _text(key) + _typed(value)
    at = 0
    for name, (kind, shape) in tensors.items():
        number, block, size = BLOCKS[kind]
        out += _text(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
        out += struct.pack("<IQ", number, at)
        num_bytes = size
        for i, dim in enumerate(shape):
            num_bytes = num_bytes * dim // (block if i == 0 else 1)
        at += -(-num_bytes // alignment) * alignment
    return out + bytes(-len(out) % alignment) + bytes(at)


def write_gguf(path: Path, *arguments: Any, **options: Any) -> Path:
    path.write_bytes(gguf_bytes(*arguments, **options))
    return path


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _typed(value: Any) -> bytes:
    if isinstance(value, list):
        item = _typed(value[0])
        body = b"".join(_typed(one)[4:] for one in value)
        return struct.pack("<I", 9) + item[:4] + struct.pack("<Q", len(value)) + body
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    return struct.pack("<I", 8) + _text(value)


def metadata_of(arch: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """`general.architecture` and the values below it; None is left out."""
    return {"general.architecture": arch} | {
        f"{arch}.{key}": value for key, value in values.items() if value is not None
    }


def from_config(arch: str, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Metadata and marking tensors as llama.cpp's converter writes them for a config.json, written anew."""
    c = config
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    experts = next((c[k] for k in ("num_experts", "num_local_experts", "n_routed_experts") if k in c), None)
    extra = c.get("num_nextn_predict_layers", 0)
    values: dict[str, Any] = {
        "block_count": c["num_hidden_layers"] + extra,
        "context_length": c["max_position_embeddings"],
        "embedding_length": hidden,
        "feed_forward_length": c.get("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": c["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": c["rms_norm_eps"],
        "attention.key_length": c.get("head_dim"),
        "rope.freq_base": float(c["rope_theta"]),
        "expert_count": experts,
        "expert_used_count": c.get("num_experts_per_tok"),
        "expert_feed_forward_length": c.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": c.get("shared_expert_intermediate_size"),
        "expert_shared_count": c.get("n_shared_experts"),
        "leading_dense_block_count": c.get("first_k_dense_replace"),
        "nextn_predict_layers": extra or None,
        "attention.sliding_window": c.get("sliding_window") if arch == "gpt-oss" else None,
    }
    tensors: dict[str, Any] = {
        "token_embd.weight": ("F16", (hidden, c["vocab_size"])),
        "blk.0.attn_q.weight": ("F16", (hidden, hidden)),
    }
    if not c["tie_word_embeddings"]:
        tensors["output.weight"] = ("F16", (hidden, c["vocab_size"]))
    if c.get("attention_bias"):
        tensors["blk.0.attn_q.bias"] = ("F32", (hidden,))
    if "kv_lora_rank" in c:
        rope, lora = c["qk_rope_head_dim"], c["kv_lora_rank"]
        values |= {
            "attention.head_count_kv": 1,
            "attention.key_length": lora + rope,
            "attention.value_length": lora,
            "attention.key_length_mla": c["qk_nope_head_dim"] + rope,
            "attention.value_length_mla": c["v_head_dim"],
            "attention.kv_lora_rank": lora,
            "attention.q_lora_rank": c["q_lora_rank"],
            "rope.dimension_count": rope,
            "expert_gating_func": 2 if c["model_type"] == "deepseek_v3" else 1,
            "expert_weights_scale": float(c.get("routed_scaling_factor", 1.0)),
            "expert_weights_norm": c.get("norm_topk_prob", False),
            "expert_group_count": c.get("n_group"),
            "expert_group_used_count": c.get("topk_group"),
        }
    if arch == "glm4moe":
        values["rope.dimension_count"] = int(c["partial_rotary_factor"] * c["head_dim"])
    if arch == "granitemoe":
        names = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
                 "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}  # fmt: skip
        values |= {key: float(c[name]) for key, name in names.items()}
    return metadata_of(arch, values), tensors
