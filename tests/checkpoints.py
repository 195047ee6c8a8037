"""Tiny random checkpoints in the Hugging Face layout, for every family that runs. Needs no transformers.

Every tensor is random (norms around one, biases, selection bias, all of them) and scaled so that logits are
of order one to five and each feature of the architecture changes them: a feature left out fails a comparison.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import checkpoints_stacked
import torch
from family_configs import FAMILY_CONFIGS
from safetensors.torch import save_file
from torch import Tensor

Config = dict[str, Any]
Shape = tuple[int, ...]
Layout = Literal["per_expert", "stacked", "mxfp4"]

VOCAB = 288  # 256 bytes, then the special tokens of `write_tokenizer`
SPECIAL_TOKENS = ("<bos>", "<eos>", "<user>", "<assistant>", "<system>")
BOS_ID, EOS_ID = 256, 257

_COMMON: Config = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-2,  # large enough that a wrong one shows
    "rope_theta": 1000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}


def llama_config(**changes: Any) -> Config:
    """Dense: three layers with llama3 rope scaling past its original 64 positions."""
    return _COMMON | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    } | changes  # fmt: skip


def qwen3_moe_config(**changes: Any) -> Config:
    """Three layers, the middle one dense; per-head q and k norms; heads wider than hidden / num_heads."""
    return _COMMON | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 3,
        "head_dim": 32,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "use_sliding_window": False,
        "rope_scaling": None,
    } | changes  # fmt: skip


def olmoe_config(**changes: Any) -> Config:
    """Two layers; q and k norms over all heads at once; clipped q, k and v; weights not renormalised."""
    return _COMMON | {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": False,
        "clip_qkv": 1.5,
        "rope_scaling": None,
    } | changes  # fmt: skip


def mixtral_config(**changes: Any) -> Config:
    """Two layers, two of eight experts, a window of 24 positions in every layer."""
    return _COMMON | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "router_jitter_noise": 0.0,
    } | changes  # fmt: skip


def deepseek_v3_config(**changes: Any) -> Config:
    """Three layers, the first dense; low-rank queries; grouped sigmoid gate; yarn past 32 positions."""
    return _COMMON | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.7,
        "q_lora_rank": 24,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "rope_interleave": True,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4,
            "beta_slow": 0.25,
            "mscale": 0.8,
            "mscale_all_dim": 1.2,
        },
        "num_nextn_predict_layers": 0,
    } | changes  # fmt: skip


def gpt_oss_config(**changes: Any) -> Config:
    """See `checkpoints_stacked.GPT_OSS`."""
    return _COMMON | checkpoints_stacked.GPT_OSS | changes


def llama4_config(**changes: Any) -> Config:
    """See `checkpoints_stacked.LLAMA4`: the text model alone."""
    return _COMMON | checkpoints_stacked.LLAMA4 | changes


def gemma4_config(**changes: Any) -> Config:
    """See `checkpoints_stacked.GEMMA4`: the text model alone."""
    return _COMMON | checkpoints_stacked.GEMMA4 | changes


def family_config(family: str, **changes: Any) -> Config:
    """One of the families of `family_configs`."""
    return _COMMON | FAMILY_CONFIGS[family] | changes


_DELTA: Config = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "partial_rotary_factor": 0.5,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
}


def qwen3_next_config(**changes: Any) -> Config:
    """Three layers, the middle one with gated attention and dense; three value heads to a key head."""
    return _COMMON | _DELTA | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "intermediate_size": 96,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "rope_scaling": None,
    } | changes  # fmt: skip


def qwen3_5_moe_config(**changes: Any) -> Config:
    """The text model alone, every layer sparse; per-axis positions, which are plain ones on text."""
    config = _COMMON | _DELTA | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.5,
            "mrope_interleaved": True,
            "mrope_section": [3, 3, 2],
        },
    } | changes  # fmt: skip
    del config["rope_theta"], config["partial_rotary_factor"]
    return config


CONFIGS: Mapping[str, Callable[..., Config]] = {
    "llama": llama_config,
    "qwen3_moe": qwen3_moe_config,
    "olmoe": olmoe_config,
    "mixtral": mixtral_config,
    "deepseek_v3": deepseek_v3_config,
    "gpt_oss": gpt_oss_config,
    "llama4": llama4_config,
    "gemma4": gemma4_config,
    **{family: partial(family_config, family) for family in FAMILY_CONFIGS},
    "qwen3_next": qwen3_next_config,
    "qwen3_5_moe": qwen3_5_moe_config,
}


def cheap_cases(*cheap: str) -> list[Any]:
    """CONFIGS as test parameters: of `family_configs` all are long but those in `cheap`."""
    import pytest

    is_long = set(FAMILY_CONFIGS) - set(cheap)
    return [pytest.param(name, marks=pytest.mark.long) if name in is_long else name for name in CONFIGS]


W123 = ("mixtral", "minimax_m2", "phimoe")
"""Families whose files call the parts of an expert w1, w3 and w2 of block_sparse_moe."""
SELECTION_BIAS = {
    "minimax_m2": "block_sparse_moe.e_score_correction_bias",
    "ernie4_5_moe": "mlp.moe_statics.e_score_correction_bias",
} | dict.fromkeys(
    ("deepseek_v3", "glm4_moe", "glm4_moe_lite", "dots1"), "mlp.gate.e_score_correction_bias"
)  # fmt: skip


def tensor_shapes(config: Config) -> dict[str, Shape]:
    """Every tensor of a checkpoint of `config`, experts one by one, by its Hugging Face name."""
    if config["model_type"] in checkpoints_stacked.SHAPES:
        return checkpoints_stacked.SHAPES[config["model_type"]](config)
    D = config["hidden_size"]
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config["vocab_size"], D),
        "model.norm.weight": (D,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], D)
    if config.get("lm_head_bias") or config.get("use_bias"):
        shapes["lm_head.bias"] = (config["vocab_size"],)
    for layer_idx in range(config["num_hidden_layers"]):
        layer = f"model.layers.{layer_idx}"
        shapes |= {f"{layer}.input_layernorm.weight": (D,), f"{layer}.post_attention_layernorm.weight": (D,)}
        if is_linear(config, layer_idx):
            shapes |= {f"{layer}.linear_attn.{name}": shape for name, shape in _delta_shapes(config).items()}
        else:
            attention = _mla_shapes(config) if "kv_lora_rank" in config else _gqa_shapes(config)
            shapes |= {f"{layer}.self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {f"{layer}.{name}": shape for name, shape in _ffn_shapes(config, layer_idx).items()}
    if config["model_type"] == "phimoe":
        shapes |= {f"{k.removesuffix('weight')}bias": v for k, v in shapes.items() if "norm." in k}
    return shapes


def _gqa_shapes(config: Config) -> dict[str, Shape]:
    D, H, G = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    C = config.get("head_dim") or D // H
    kind, is_gated = config["model_type"], "linear_num_key_heads" in config
    has_bias = config.get("qkv_bias") or config.get("use_bias") or config["attention_bias"]
    sizes = {"q_proj": (H * C * (2 if is_gated else 1), D), "k_proj": (G * C, D), "v_proj": (G * C, D)}
    shapes = _linears(sizes, has_bias=has_bias)
    has_out_bias = has_bias and kind not in ("qwen2_moe", "glm4_moe")
    shapes |= _linears({"o_proj": (D, H * C)}, has_bias=has_out_bias)
    if kind in ("qwen3_moe", "dots1") or config.get("use_qk_norm") or is_gated:
        shapes |= {"q_norm.weight": (C,), "k_norm.weight": (C,)}
    if kind in ("olmoe", "minimax_m2"):
        shapes |= {"q_norm.weight": (H * C,), "k_norm.weight": (G * C,)}
    return shapes


def _delta_shapes(config: Config) -> dict[str, Shape]:
    D, H = config["hidden_size"], config["linear_num_value_heads"]
    key = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    value = H * config["linear_value_head_dim"]
    if config["model_type"] == "qwen3_next":
        sizes = {"in_proj_qkvz": (2 * key + 2 * value, D), "in_proj_ba": (2 * H, D)}
    else:
        sizes = {
            "in_proj_qkv": (2 * key + value, D),
            "in_proj_z": (value, D),
            "in_proj_b": (H, D),
            "in_proj_a": (H, D),
        }
    return _linears(sizes | {"out_proj": (D, value)}, has_bias=False) | {
        "conv1d.weight": (2 * key + value, 1, config["linear_conv_kernel_dim"]),
        "A_log": (H,),
        "dt_bias": (H,),
        "norm.weight": (config["linear_value_head_dim"],),
    }


def _mla_shapes(config: Config) -> dict[str, Shape]:
    D, H, M = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    rank, has_bias = config["q_lora_rank"], config["attention_bias"]
    shapes = _linears({"kv_a_proj_with_mqa": (M + rope, D), "o_proj": (D, H * value)}, has_bias=has_bias)
    shapes |= {"kv_a_layernorm.weight": (M,), "kv_b_proj.weight": (H * (nope + value), M)}
    if rank is None:
        return shapes | {"q_proj.weight": (H * (nope + rope), D)}
    shapes |= _linears({"q_a_proj": (rank, D)}, has_bias=has_bias)
    return shapes | {"q_a_layernorm.weight": (rank,), "q_b_proj.weight": (H * (nope + rope), rank)}


def _ffn_shapes(config: Config, layer_idx: int) -> dict[str, Shape]:
    D, kind = config["hidden_size"], config["model_type"]
    has_bias = bool(config.get("mlp_bias") or config.get("use_bias"))
    if not is_sparse(config, layer_idx):
        return _gated_shapes("mlp", D, config["intermediate_size"], has_bias=has_bias)
    E, F = num_experts(config), config.get("moe_intermediate_size", config.get("intermediate_size"))
    if kind == "granitemoe":
        return {
            "block_sparse_moe.router.layer.weight": (E, D),
            "block_sparse_moe.input_linear.weight": (E, 2 * F, D),
            "block_sparse_moe.output_linear.weight": (E, D, F),
        }
    block = "block_sparse_moe" if kind in W123 else "mlp"
    gate, up, down = ("w1", "w3", "w2") if kind in W123 else ("gate_proj", "up_proj", "down_proj")
    shapes: dict[str, Shape] = {f"{block}.gate.weight": (E, D)}
    for expert in range(E):
        prefix = f"{block}.experts.{expert}"
        shapes |= {f"{prefix}.{gate}.weight": (F, D), f"{prefix}.{up}.weight": (F, D)}
        shapes[f"{prefix}.{down}.weight"] = (D, F)
    if kind in SELECTION_BIAS:
        shapes[SELECTION_BIAS[kind]] = (1, E) if kind == "ernie4_5_moe" else (E,)
    num_shared = config.get("n_shared_experts") or config.get("moe_num_shared_experts")
    if num_shared:
        shapes |= _gated_shapes("mlp.shared_experts", D, F * num_shared, has_bias=has_bias)
    if "shared_expert_intermediate_size" in config:
        F = config["shared_expert_intermediate_size"]
        shapes |= _gated_shapes("mlp.shared_expert", D, F, has_bias=False)
        shapes["mlp.shared_expert_gate.weight"] = (1, D)
    return shapes


def _gated_shapes(prefix: str, D: int, F: int, *, has_bias: bool) -> dict[str, Shape]:
    sizes = {"gate_proj": (F, D), "up_proj": (F, D), "down_proj": (D, F)}
    return {f"{prefix}.{k}": v for k, v in _linears(sizes, has_bias=has_bias).items()}


def _linears(sizes: Mapping[str, Shape], *, has_bias: bool) -> dict[str, Shape]:
    shapes = {f"{name}.weight": shape for name, shape in sizes.items()}
    return shapes | ({f"{name}.bias": shape[:1] for name, shape in sizes.items()} if has_bias else {})


def num_experts(config: Config) -> int:
    """Experts per sparse layer, 0 for a dense model."""
    keys = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((config[key] for key in keys if key in config), 0)


def is_sparse(config: Config, layer_idx: int) -> bool:
    """Whether a layer has experts."""
    step = config.get("decoder_sparse_step", config.get("moe_layer_interval", 1))
    first = config.get("first_k_dense_replace", config.get("moe_layer_start_index", 0))
    last = config.get("moe_layer_end_index", -1) % config["num_hidden_layers"]
    is_due = (layer_idx + 1) % step == 0 and first <= layer_idx <= last
    return num_experts(config) > 0 and is_due and layer_idx not in config.get("mlp_only_layers", ())


def is_linear(config: Config, layer_idx: int) -> bool:
    """Whether a layer has linear attention."""
    if config.get("layer_types"):
        return config["layer_types"][layer_idx] == "linear_attention"
    return bool((layer_idx + 1) % config.get("full_attention_interval", 1))


def random_tensors(config: Config, *, seed: int = 0) -> dict[str, Tensor]:
    """Float32 values for `tensor_shapes`, each tensor from its own name and the seed."""
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        noise = torch.randn(shape, generator=generator)
        special = checkpoints_stacked.scaled(config, name, noise)
        tensors[name] = _scaled(name, noise) if special is None else special
        if "linear_num_key_heads" in config and "norm" in name and ".linear_attn." not in name:
            tensors[name] -= 1.0  # stored as the distance from 1
    if config["tie_word_embeddings"]:  # it is the head as well
        tensors["model.embed_tokens.weight"] *= 2.0 / math.sqrt(config["hidden_size"])
    return tensors


def _scaled(name: str, noise: Tensor) -> Tensor:
    if name.endswith("A_log"):
        return 0.7 * noise - 1.5  # a state that forgets half in one to ten tokens
    if name.endswith("dt_bias"):
        return 0.5 * noise
    if "conv1d" in name:
        return 0.6 * noise
    if name.endswith("e_score_correction_bias"):
        return 0.2 * noise
    if name.endswith(".bias"):
        return 0.4 * noise
    if "norm" in name:
        return 1.0 + 0.3 * noise
    if "embed_tokens" in name:
        return noise
    fan_in = noise.shape[-1]
    gain = 1.0
    if re.search(r"\.(q_proj|k_proj|q_b_proj|kv_b_proj)\.", name):
        gain = 1.6  # attention that looks somewhere
    elif re.search(r"\.gate\.weight$|router\.|shared_expert_gate|lm_head", name):
        gain = 2.0  # choices and tokens without near ties
    return noise * (gain / math.sqrt(fan_in))


def stack_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same weights, a layer's experts in two tensors: gate_up_proj [E, 2F, D] and down_proj [E, D, F].

    This is how transformers 5 holds them in memory; gate rows come before up rows.
    """
    pattern = re.compile(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
    out: dict[str, Tensor] = {}
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, value in tensors.items():
        if match := pattern.fullmatch(name):
            layer, expert, part = match.groups()
            part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(part, part)
            experts.setdefault(layer, {})[int(expert), part] = value
        else:
            out[_name_in_memory(name)] = value
    for layer, parts in experts.items():
        ids = sorted({expert for expert, _ in parts})
        gate_up = [torch.cat((parts[expert, "gate_proj"], parts[expert, "up_proj"])) for expert in ids]
        out[f"{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        out[f"{layer}.mlp.experts.down_proj"] = torch.stack([parts[expert, "down_proj"] for expert in ids])
    return out


def _name_in_memory(name: str) -> str:
    if name.endswith(("linear.weight", "router.layer.weight")):  # Granite
        name = name.replace("input_linear.weight", "experts.gate_up_proj")
        name = name.replace("output_linear.weight", "experts.down_proj")
        return name.replace("router.layer.", "router.")
    return name.replace(".block_sparse_moe.", ".mlp.")


def write_checkpoint(
    folder: Path,
    config: Config,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    layout: Layout = "per_expert",
    num_files: int = 1,
    tensors: Mapping[str, Tensor] | None = None,
    has_tokenizer: bool = False,
) -> Path:
    """Write config.json, the weights and, if asked for, a tokenizer and chat template; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": names[dtype]}, indent=2) + "\n")
    values = dict(random_tensors(config, seed=seed) if tensors is None else tensors)
    if layout == "stacked":
        values = stack_experts(values)
    if layout == "mxfp4":
        values = checkpoints_stacked.pack_mxfp4(values)
    values = {k: v if v.dtype == torch.uint8 else v.to(dtype).contiguous() for k, v in values.items()}
    write_tensors(folder, values, num_files)
    if has_tokenizer:
        write_tokenizer(folder)
    return folder


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], num_files: int = 1) -> None:
    """Write `model.safetensors`, or so many shards and their index (tensors dealt out in turn)."""
    if num_files == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05d}-of-{num_files:05d}.safetensors" for i in range(num_files)]
    weight_map = {name: files[i % num_files] for i, name in enumerate(sorted(tensors))}
    for file in files:
        part = {name: tensors[name] for name, place in weight_map.items() if place == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    total = sum(value.numel() * value.element_size() for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: ids 0 to 255 are the bytes in `ByteLevel`'s alphabet, then `SPECIAL_TOKENS`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "model_max_length": 512,
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(content, indent=2) + "\n")
