"""From the metadata of a GGUF file to the config.json that it was converted from, as far as it is told.

An architecture in `EXACT` becomes a config of its own model_type: sizes, layers and experts come out as in
the original. Any other is read by the usual keys, which the spec then says.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from moesaic.errors import CheckpointError, ConfigError
from moesaic.interop.gguf import Gguf, GgufTensor
from moesaic.spec.families import read_config
from moesaic.spec.model import COMPONENTS, Component, ModelSpec, StoredFormat

Config = dict[str, Any]
REASON = "weights in GGUF are not run yet: give the model's folder of safetensors"
_SIGMOID = 2  # of expert_gating_func; 1 is softmax


class Facts:
    """The metadata below `general.architecture`, and what the tensors add."""

    def __init__(self, file: Gguf) -> None:
        """Raises: CheckpointError without an architecture."""
        self.file = file
        arch = file.metadata.get("general.architecture")
        if not isinstance(arch, str) or not arch:
            raise CheckpointError(f"{file.path} has no general.architecture: it describes no model")
        self.arch = arch
        self.tensors: Mapping[str, GgufTensor] = {tensor.name: tensor for tensor in file.tensors}

    def get(self, key: str) -> Any:
        """A value of this architecture; None when absent."""
        return self.file.metadata.get(f"{self.arch}.{key}")

    def one(self, key: str) -> Any:
        """The same, where it may be written once per layer: the value that all layers share.

        Raises: ConfigError when layers differ, which no config here can say.
        """
        value = self.get(key)
        if not isinstance(value, tuple):
            return value
        if len(set(value)) == 1:
            return value[0]
        raise ConfigError(
            f"{self.file.path}: {self.arch}.{key} differs between layers ({', '.join(map(str, value[:6]))}, "
            "...), which is not read yet"
        )

    def has(self, tensor: str) -> bool:
        """Whether any layer has this tensor."""
        return any(name.startswith("blk.") and name.endswith(f".{tensor}") for name in self.tensors)

    @property
    def vocab(self) -> int | None:
        """Rows of the embedding, which a tokenizer may not fill."""
        embedding = self.tensors.get("token_embd.weight")
        if embedding is not None and len(embedding.shape) == 2:
            return embedding.shape[1]
        size: int | None = self.get("vocab_size")
        return size

    @property
    def num_layers(self) -> int | None:
        """Layers of the model itself; those of multi-token prediction are counted in block_count."""
        count, extra = self.get("block_count"), self.get("nextn_predict_layers")
        return count - extra if isinstance(count, int) and isinstance(extra, int) else count


def read_spec(file: Gguf) -> ModelSpec:
    """The model that a GGUF file holds, its weights in the formats they are stored in.

    Raises: CheckpointError or ConfigError for metadata that is missing or contradicts itself.
    """
    facts = Facts(file)
    if facts.get("expert_count") and facts.get("expert_used_count") is None:
        raise ConfigError(
            f"{file.path}: {facts.arch}.expert_used_count is missing; a file with experts ({facts.arch}."
            f"expert_count is {facts.get('expert_count')}) says how many a token takes: convert it again"
        )
    config = _drop_absent(_common(facts) | EXACT.get(facts.arch, _generic)(facts))
    try:
        spec = read_config(config, name=str(file.path))
    except ConfigError as error:
        raise ConfigError(_in_gguf_words(str(error), facts)) from error
    if spec.reader == "generic":
        spec = replace(
            spec,
            model_type=facts.arch,
            runnable_reasons=(
                f"GGUF architecture {facts.arch} is read by the usual keys, so counts may miss parts",
            ),
        )
    return replace(spec, stored=_stored(file.tensors), runnable_reasons=(REASON, *spec.runnable_reasons))


def component_bytes(tensors: tuple[GgufTensor, ...]) -> Mapping[Component, int]:
    """Bytes by component; every component has an entry."""
    sizes: Counter[Component] = Counter()
    for tensor in tensors:
        sizes[_component(tensor.name)] += tensor.num_bytes
    return MappingProxyType({component: sizes[component] for component in COMPONENTS})


def type_bytes(tensors: tuple[GgufTensor, ...]) -> Mapping[str, int]:
    """Bytes by tensor type, the largest first."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[tensor.kind] += tensor.num_bytes
    return MappingProxyType(dict(sizes.most_common()))


def _stored(tensors: tuple[GgufTensor, ...]) -> tuple[StoredFormat, ...]:
    """Per component: the type that most of its bytes have, and the bits of a weight over all of them."""
    found = []
    for component in COMPONENTS:
        own = tuple(tensor for tensor in tensors if _component(tensor.name) == component)
        items = sum(tensor.num_items for tensor in own)
        if items:
            bits = 8 * sum(tensor.num_bytes for tensor in own) / items
            found.append(
                StoredFormat(component=component, format=next(iter(type_bytes(own))).lower(), bits=bits)
            )
    return tuple(found)


def _component(name: str) -> Component:
    """By llama.cpp's names: blk.3.ffn_gate_exps.weight, blk.3.attn_q.weight, output.weight, ..."""
    if name.startswith("token_embd"):
        return "embedding"
    if name == "output.weight":
        return "head"
    short = name.split(".", 2)[-1] if name.startswith("blk.") else name
    for start, component in _COMPONENTS:
        if start in short:
            return component
    return "other"


_COMPONENTS: tuple[tuple[str, Component], ...] = (
    ("_norm", "norms"), ("ffn_gate_inp_shexp", "shared_experts"), ("ffn_gate_inp", "router"),
    ("exp_probs_b", "router"), ("_exps", "routed_experts"), ("_shexp", "shared_experts"),
    ("attn", "attention"), ("ffn_", "dense_ffn"),
)  # fmt: skip


def _drop_absent(config: Config) -> Config:
    """Absent keys take the defaults of the class; an absent low rank of queries means that there is none."""
    return {key: value for key, value in config.items() if value is not None or key == "q_lora_rank"}


_GGUF_KEYS: Mapping[str, str] = MappingProxyType(
    {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "intermediate_size": "feed_forward_length",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
        "num_experts": "expert_count",
        "num_local_experts": "expert_count",
        "n_routed_experts": "expert_count",
        "num_experts_per_tok": "expert_used_count",
        "moe_intermediate_size": "expert_feed_forward_length",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
        "n_shared_experts": "expert_shared_count",
        "n_group": "expert_group_count",
        "topk_group": "expert_group_used_count",
        "routed_scaling_factor": "expert_weights_scale",
        "first_k_dense_replace": "leading_dense_block_count",
        "num_nextn_predict_layers": "nextn_predict_layers",
        "q_lora_rank": "attention.q_lora_rank",
        "kv_lora_rank": "attention.kv_lora_rank",
        "qk_rope_head_dim": "rope.dimension_count",
        "v_head_dim": "attention.value_length",
        "sliding_window": "attention.sliding_window",
        "clip_qkv": "attention.clamp_kqv",
        "attention_multiplier": "attention.scale",
        "embedding_multiplier": "embedding_scale",
        "residual_multiplier": "residual_scale",
        "logits_scaling": "logit_scale",
    }
)
"""Where the metadata holds what a config calls otherwise, for messages."""


def _in_gguf_words(message: str, facts: Facts) -> str:
    """A complaint about a config, with the keys that the file itself has."""
    where, _, text = message.partition(": ")
    for key, name in _GGUF_KEYS.items():
        text = re.sub(rf"\b{key}\b", f"{facts.arch}.{name}", text)
    return f"{where}: {text}"


def _common(facts: Facts) -> Config:
    heads, hidden = facts.one("attention.head_count"), facts.get("embedding_length")
    head_dim = facts.get("attention.key_length")
    if head_dim is None and isinstance(heads, int) and isinstance(hidden, int) and heads:
        head_dim = hidden // heads
    return {
        "hidden_size": hidden,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": facts.one("attention.head_count_kv") or heads,
        "head_dim": head_dim,
        "intermediate_size": facts.one("feed_forward_length") or facts.get("expert_feed_forward_length"),
        "vocab_size": facts.vocab,
        "max_position_embeddings": facts.get("context_length"),
        "rms_norm_eps": facts.get("attention.layer_norm_rms_epsilon"),
        "rope_theta": facts.get("rope.freq_base"),
        "rope_scaling": _rope_scaling(facts),
        "tie_word_embeddings": "output.weight" not in facts.tensors,
        "attention_bias": facts.has("attn_q.bias"),
        "num_experts_per_tok": facts.get("expert_used_count"),
        "num_nextn_predict_layers": facts.get("nextn_predict_layers"),
        "torch_dtype": "float32",
    }


def _rope_scaling(facts: Facts) -> Config | None:
    kind, factor = facts.get("rope.scaling.type"), facts.get("rope.scaling.factor")
    if kind not in ("linear", "yarn") or factor is None:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    original = facts.get("rope.scaling.original_context_length")
    return scaling if original is None else scaling | {"original_max_position_embeddings": original}


def _llama(facts: Facts) -> Config:
    """Mixtral was converted as a llama with experts."""
    if not facts.get("expert_count"):
        return {"model_type": "llama"}
    return {"model_type": "mixtral", "num_local_experts": facts.get("expert_count")}


def _olmoe(facts: Facts) -> Config:
    return {
        "model_type": "olmoe",
        "num_experts": facts.get("expert_count"),
        "norm_topk_prob": False,
        "clip_qkv": facts.get("attention.clamp_kqv"),
    }


def _qwen2_moe(facts: Facts) -> Config:
    return {
        "model_type": "qwen2_moe",
        "num_experts": facts.get("expert_count"),
        "norm_topk_prob": False,
        "moe_intermediate_size": facts.get("expert_feed_forward_length"),
        "shared_expert_intermediate_size": facts.get("expert_shared_feed_forward_length"),
        "use_sliding_window": False,
    }


def _qwen3_moe(facts: Facts) -> Config:
    return {
        "model_type": "qwen3_moe",
        "num_experts": facts.get("expert_count"),
        "norm_topk_prob": True,
        "moe_intermediate_size": facts.get("expert_feed_forward_length"),
    }


def _deepseek(facts: Facts) -> Config:
    """Newer files hold latent attention absorbed: their plain head widths end in _mla."""
    key = facts.get("attention.key_length_mla") or facts.get("attention.key_length")
    rope = facts.get("rope.dimension_count")
    heads = facts.one("attention.head_count")
    is_v3 = facts.get("expert_gating_func") == _SIGMOID or facts.has("exp_probs_b.bias")
    return {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "num_key_value_heads": heads,
        "head_dim": None,
        "q_lora_rank": facts.get("attention.q_lora_rank"),
        "kv_lora_rank": facts.get("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rope if isinstance(key, int) and isinstance(rope, int) else None,
        "qk_rope_head_dim": rope,
        "v_head_dim": facts.get("attention.value_length_mla") or facts.get("attention.value_length"),
        "first_k_dense_replace": facts.get("leading_dense_block_count"),
        **_shared_experts(facts),
    }


def _glm4_moe(facts: Facts) -> Config:
    rope, head_dim = facts.get("rope.dimension_count"), facts.get("attention.key_length")
    partial = rope / head_dim if isinstance(rope, int) and isinstance(head_dim, int) and head_dim else None
    return {
        "model_type": "glm4_moe",
        "partial_rotary_factor": partial,
        "use_qk_norm": facts.has("attn_q_norm.weight"),
        "first_k_dense_replace": facts.get("leading_dense_block_count"),
        **_shared_experts(facts),
    }


def _shared_experts(facts: Facts) -> Config:
    return {
        "n_routed_experts": facts.get("expert_count"),
        "n_shared_experts": facts.get("expert_shared_count"),
        "moe_intermediate_size": facts.get("expert_feed_forward_length"),
        "routed_scaling_factor": facts.get("expert_weights_scale"),
        "norm_topk_prob": facts.get("expert_weights_norm"),
        "n_group": facts.get("expert_group_count") or 1,
        "topk_group": facts.get("expert_group_used_count") or 1,
    }


def _gpt_oss(facts: Facts) -> Config:
    return {
        "model_type": "gpt_oss",
        "num_local_experts": facts.get("expert_count"),
        "intermediate_size": facts.get("expert_feed_forward_length"),
        "sliding_window": facts.get("attention.sliding_window"),
    }


def _granite(facts: Facts) -> Config:
    return {
        "model_type": "granitemoe",
        "num_local_experts": facts.get("expert_count"),
        "attention_multiplier": facts.get("attention.scale"),
        "embedding_multiplier": facts.get("embedding_scale"),
        "residual_multiplier": facts.get("residual_scale"),
        "logits_scaling": facts.get("logit_scale"),
    }


def _generic(facts: Facts) -> Config:
    return {
        "model_type": f"gguf {facts.arch}",
        "num_experts": facts.get("expert_count"),
        "n_shared_experts": facts.get("expert_shared_count"),
        "moe_intermediate_size": facts.get("expert_feed_forward_length"),
        "first_k_dense_replace": facts.get("leading_dense_block_count"),
        "n_group": facts.get("expert_group_count"),
        "topk_group": facts.get("expert_group_used_count"),
    }


EXACT: Mapping[str, Callable[[Facts], Config]] = MappingProxyType(
    {
        "llama": _llama,
        "olmoe": _olmoe,
        "qwen2moe": _qwen2_moe,
        "qwen3moe": _qwen3_moe,
        "deepseek2": _deepseek,
        "glm4moe": _glm4_moe,
        "gpt-oss": _gpt_oss,
        "granitemoe": _granite,
    }
)
"""Architectures of llama.cpp whose sizes come out as in the config.json they stand for."""
