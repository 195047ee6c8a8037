"""A random checkpoint of OLMoE's shape, as safetensors and as GGUF, written a layer at a time.

The GGUF has no vocabulary: benchmarks feed token ids. It needs the package `gguf`.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any


def olmoe_config(*, layers: int, experts: int, hidden: int, expert_width: int, vocab: int) -> dict[str, Any]:
    """OLMoE-1B-7B with other sizes. Source: allenai/OLMoE-1B-7B-0125, config.json."""
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": hidden,
        "intermediate_size": expert_width,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": experts,
        "num_experts_per_tok": min(8, experts),
        "norm_topk_prob": False,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "clip_qkv": None,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": vocab,
        "eos_token_id": 1,
        "pad_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def write_checkpoint(folder: Path, config: dict[str, Any]) -> None:
    """One shard per layer, each written before the next is made: a layer's memory is enough."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    D, F, V = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    num_files = config["num_hidden_layers"] + 1
    weight_map: dict[str, str] = {}
    total_bytes = 0

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).mul_(1 / math.sqrt(shape[-1])).bfloat16()

    def save(idx: int, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total_bytes
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
        name = f"model-{idx + 1:05d}-of-{num_files:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors = {f"{prefix}.self_attn.{name}_proj.weight": random(D, D) for name in "qkvo"}
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = torch.ones(D, dtype=torch.bfloat16)
        tensors[f"{prefix}.mlp.gate.weight"] = random(config["num_experts"], D)
        for expert in range(config["num_experts"]):
            for name, shape in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items():
                tensors[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = random(*shape)
        save(layer, tensors)
    norm = torch.ones(D, dtype=torch.bfloat16)
    save(
        num_files - 1,
        {
            "model.embed_tokens.weight": random(V, D),
            "lm_head.weight": random(V, D),
            "model.norm.weight": norm,
        },
    )
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(config, indent=2))


_OF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
}
_OF_MODEL = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}


def write_gguf(folder: Path, path: Path) -> None:
    """The checkpoint as llama.cpp reads it: matrices in bfloat16, vectors and routers in float32.

    Source:  names and keys of llama.cpp's own converter for OLMoE.
    """
    import gguf
    import numpy as np
    import torch
    from safetensors import safe_open

    config = json.loads((folder / "config.json").read_text())
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    writer = gguf.GGUFWriter(path, "olmoe", use_temp_file=False)
    head_width = config["hidden_size"] // config["num_attention_heads"]
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(head_width)
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")

    def read(key: str) -> torch.Tensor:
        with safe_open(folder / files[key], framework="pt") as file:
            return file.get_tensor(key)

    placed: list[tuple[str, list[str]]] = [(name, [f"{of}.weight"]) for name, of in _OF_MODEL.items()]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        placed += [(f"blk.{layer}.{name}", [f"{prefix}.{of}.weight"]) for name, of in _OF_LAYER.items()]
        for part in ("gate", "up", "down"):
            keys = [f"{prefix}.mlp.experts.{i}.{part}_proj.weight" for i in range(config["num_experts"])]
            placed.append((f"blk.{layer}.ffn_{part}_exps", keys))

    def content(keys: list[str]) -> np.ndarray:
        tensor = read(keys[0]) if len(keys) == 1 else torch.stack([read(key) for key in keys])
        if tensor.dim() == 1 or keys[0].endswith("mlp.gate.weight"):
            return tensor.float().numpy()
        return tensor.contiguous().view(torch.uint8).numpy()

    # Shapes first, then bytes, one tensor in memory at a time.
    for name, keys in placed:
        with safe_open(folder / files[keys[0]], framework="pt") as file:
            shape = tuple(file.get_slice(keys[0]).get_shape())
        shape = shape if len(keys) == 1 else (len(keys), *shape)
        if len(shape) == 1 or name.endswith("gate_inp"):
            writer.add_tensor_info(f"{name}.weight", shape, np.dtype(np.float32), math.prod(shape) * 4)
        else:
            wide = (*shape[:-1], 2 * shape[-1])  # in bytes, as the writer wants it
            kind = gguf.GGMLQuantizationType.BF16
            writer.add_tensor_info(
                f"{name}.weight", wide, np.dtype(np.uint8), math.prod(wide), raw_dtype=kind
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, keys in placed:
        writer.write_tensor_data(content(keys))
    writer.close()
