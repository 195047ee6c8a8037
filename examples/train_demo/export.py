"""Write a training checkpoint as a Hugging Face DeepseekV3ForCausalLM folder: ``python export.py RUN OUT``.

Holds the only map between our parameter names and the checkpoint's; needs no ``transformers``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from data import ASSISTANT, BOS, EOS, USER
from model import DemoModel, ModelConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors
from torch import Tensor

# A system message is put before the first user message; user text is lower-cased, as the training text was.
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- set ns = namespace(system='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}"
    "{%- set ns.system = ns.system + (message['content'] | trim | lower) + ' ' -%}"
    "{%- elif message['role'] == 'user' -%}"
    f"{{{{- '{USER}' + ns.system + (message['content'] | trim | lower) -}}}}"
    "{%- set ns.system = '' -%}"
    "{%- elif message['role'] == 'assistant' -%}"
    f"{{{{- '{ASSISTANT}' + (message['content'] | trim) + eos_token -}}}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{- '{ASSISTANT}' -}}}}{{%- endif -%}}"
)


def load_model(checkpoint_path: Path) -> DemoModel:
    """Return the model of a training checkpoint, in float32 and in evaluation mode."""
    saved = torch.load(checkpoint_path, weights_only=True)
    model = DemoModel(ModelConfig(**saved["config"]))
    model.load_state_dict(saved["model"])
    return model.eval()


def _ffn_weights(prefix: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    return {
        f"{prefix}.gate_proj.weight": gate_up[0],
        f"{prefix}.up_proj.weight": gate_up[1],
        f"{prefix}.down_proj.weight": down,
    }


def hf_weights(model: DemoModel) -> dict[str, Tensor]:
    """Return the weights under their Hugging Face names, one tensor per expert, still in float32."""
    weights = {
        "model.embed_tokens.weight": model.embed_tokens.weight,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for layer_idx, layer in enumerate(model.layers):
        prefix = f"model.layers.{layer_idx}"
        for name in ("input_layernorm", "post_attention_layernorm", "self_attn"):
            for key, value in getattr(layer, name).state_dict().items():
                weights[f"{prefix}.{name}.{key}"] = value
        mlp = layer.mlp
        if layer_idx < model.config.num_dense_layers:
            weights |= _ffn_weights(f"{prefix}.mlp", mlp.gate_up, mlp.down)
            continue
        weights[f"{prefix}.mlp.gate.weight"] = mlp.gate_weight
        weights[f"{prefix}.mlp.gate.e_score_correction_bias"] = mlp.selection_bias
        weights |= _ffn_weights(f"{prefix}.mlp.shared_experts", mlp.shared.gate_up, mlp.shared.down)
        for expert_id in range(model.config.num_experts):
            expert = f"{prefix}.mlp.experts.{expert_id}"
            weights |= _ffn_weights(expert, mlp.gate_up[expert_id], mlp.down[expert_id])
    return {name: value.detach().clone() for name, value in weights.items()}


def hf_config(config: ModelConfig, bos_id: int, eos_id: int) -> dict:
    """Return config.json's contents."""
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_width,
        "moe_intermediate_size": config.expert_width,
        "num_hidden_layers": config.num_layers,
        "first_k_dense_replace": config.num_dense_layers,
        "moe_layer_freq": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "q_lora_rank": None,
        "kv_lora_rank": config.kv_latent_width,
        "qk_nope_head_dim": config.nope_width,
        "qk_rope_head_dim": config.rope_width,
        "v_head_dim": config.value_width,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": config.num_experts_per_token,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": config.routed_scale,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rope_interleave": True,
        "max_position_embeddings": config.max_positions,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "pad_token_id": None,
    }


def tokenizer_config(config: ModelConfig) -> dict:
    """Return tokenizer_config.json's contents."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "add_bos_token": True,
        "model_max_length": config.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def export(run: Path, out: Path) -> None:
    """Write config, weights (bfloat16; gate and selection bias float32), tokenizer, generation defaults."""
    out.mkdir(parents=True, exist_ok=True)
    model = load_model(run / "checkpoint.pt")
    weights = {
        name: value if ".gate." in name and ".mlp." in name else value.bfloat16()
        for name, value in hf_weights(model).items()
    }
    save_file(weights, str(out / "model.safetensors"), metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors leaves it readable by its owner alone
    tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    bos_id, eos_id = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    # Plain text starts with bos, as every document did in training; chat templates print it themselves.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos_id)]
    )
    tokenizer.save(str(out / "tokenizer.json"))
    files = {
        "config.json": hf_config(model.config, bos_id, eos_id),
        "tokenizer_config.json": tokenizer_config(model.config),
        "generation_config.json": {
            "bos_token_id": bos_id,
            "eos_token_id": eos_id,
            "do_sample": True,
            "temperature": 0.8,
            "top_p": 0.95,
            "max_new_tokens": 256,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Read the two folders and export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="train.py's --out folder")
    parser.add_argument("out", type=Path, help="folder to write")
    args = parser.parse_args()
    export(args.run, args.out)


if __name__ == "__main__":
    main()
