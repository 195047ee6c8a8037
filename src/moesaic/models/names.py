"""How a checkpoint spells our parameters: the values that a family file is made of. No tensors, no reading.

Keys of a layer are written below `layer_prefix`; where a checkpoint may use one of several spellings they
stand in a tuple, and the first that is there counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from moesaic.models.parameter import Half, Shape
from moesaic.spec import mxfp4


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The key of a vector [n] that the checkpoint stores as one row [1, n]."""

    key: str


Keys = str | tuple[str, ...] | Row


@dataclass(frozen=True, kw_only=True, slots=True)
class PerExpert:
    """One tensor per part of each expert, as a linear layer stores it: gate and up [F, D], down [D, F]."""

    gate: str  # each holds {expert}
    up: str
    down: str

    @property
    def first_key(self) -> str:
        """A key that is there exactly when a layer's experts are stored so."""
        return self.gate.format(expert=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacked:
    """A layer's experts in two tensors: gate_up [E, 2F, D], gate rows before up rows, and down [E, D, F].

    Biases, where experts have them, lie under the same keys with `_bias` behind: [E, 2F] and [E, D]. A packed
    format has two tensors of bytes instead of each matrix: `_blocks` and `_scales`.
    """

    gate_up: str
    down: str
    is_transposed: bool = False  # matrices as x @ W takes them: [E, D, 2F] and [E, F, D]
    is_interleaved: bool = False  # gate and up in turn: gate 0, up 0, gate 1, up 1, ...
    packed: Literal["mxfp4"] | None = None

    @property
    def first_key(self) -> str:
        """A key that is there exactly when a layer's experts are stored so."""
        return self.gate_up if self.packed is None else f"{self.gate_up}_blocks"

    def tensors(self, key: str, shape: Shape) -> dict[str, Shape]:
        """The tensors that hold the parameter `key` of our shape [E, rows, width] or [E, rows]."""
        if len(shape) == 2:
            return {key: shape}
        E, rows, width = shape
        if self.packed == "mxfp4":
            num_blocks = width // mxfp4.BLOCK
            return {
                f"{key}_blocks": (E, rows, num_blocks, mxfp4.BLOCK_BYTES),
                f"{key}_scales": (E, rows, num_blocks),
            }
        return {key: (E, width, rows) if self.is_transposed else shape}


@dataclass(frozen=True, kw_only=True, slots=True)
class Unused:
    """Keys that a family knows and the engine does not read.

    With a `marker`, `pattern`'s first group is a layer beyond the config's last, and the checkpoint must
    hold the key `marker` in it: so that a config with too few layers is not taken for a model with extra
    heads.
    """

    pattern: str  # matches whole keys
    reason: str
    marker: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightMap:
    """A family: which key fills which of our parameters, by the half of a layer it belongs to."""

    layers: Mapping[Half, Mapping[str, Keys]]  # our name -> key below the layer
    experts: tuple[PerExpert | Stacked, ...] = ()  # layouts in which the routed experts may come
    unused: tuple[Unused, ...] = ()
    embedding: str = "model.embed_tokens.weight"
    norm: str = "model.norm.weight"
    norm_bias: str = "model.norm.bias"
    head: str = "lm_head.weight"
    head_bias: str = "lm_head.bias"
    layer_prefix: str = "model.layers.{layer}."
    wrapped: WeightMap | None = None  # the same weights inside a model that also sees or hears

    def of(self, keys: Iterable[str]) -> WeightMap:
        """The map whose layers the keys are below: this one, or the wrapped one."""
        if self.wrapped is None:
            return self
        start = self.wrapped.layer_prefix.split("{", 1)[0]
        return self.wrapped if any(key.startswith(start) for key in keys) else self


def with_biases(names: Mapping[str, str]) -> Mapping[str, Keys]:
    """`{"q": "q_proj"}` as weights and their biases: q -> q_proj.weight, q_bias -> q_proj.bias."""
    found: dict[str, Keys] = {name: f"{module}.weight" for name, module in names.items()}
    found.update({f"{name}_bias": f"{module}.bias" for name, module in names.items()})
    return MappingProxyType(found)


def gated(prefix: str) -> Mapping[str, Keys]:
    """A gated feed-forward network in modules gate_proj, up_proj and down_proj below `prefix`."""
    return with_biases({part: f"{prefix}.{part}_proj" for part in ("gate", "up", "down")})


W123 = PerExpert(
    gate="block_sparse_moe.experts.{expert}.w1.weight",
    up="block_sparse_moe.experts.{expert}.w3.weight",
    down="block_sparse_moe.experts.{expert}.w2.weight",
)
"""Mixtral's names for the parts of an expert."""

NORMS: Mapping[str, Keys] = with_biases({"mixer": "input_layernorm", "ffn": "post_attention_layernorm"})
"""Llama's names for the norms before the two halves of a layer, taken over by most families."""

GQA: Mapping[str, Keys] = MappingProxyType(
    {
        **with_biases({part: f"self_attn.{part}_proj" for part in "qkvo"}),
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
    }
)
"""Llama's names for grouped-query attention, with the norms of queries and keys where a family has them."""

MLA: Mapping[str, Keys] = MappingProxyType(
    {
        **with_biases(
            {
                "q": "self_attn.q_proj",
                "q_a": "self_attn.q_a_proj",
                "q_b": "self_attn.q_b_proj",
                "kv_a": "self_attn.kv_a_proj_with_mqa",
                "kv_b": "self_attn.kv_b_proj",
                "o": "self_attn.o_proj",
            }
        ),
        "q_a_norm": "self_attn.q_a_layernorm.weight",
        "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    }
)
"""DeepSeek's names for latent attention."""

BIASED_GATE: Mapping[str, Keys] = MappingProxyType(
    {"weight": "mlp.gate.weight", "selection_bias": "mlp.gate.e_score_correction_bias"}
)
"""DeepSeek-V3's names for a router with a selection bias."""

DEEPSEEK_FFN: Mapping[Half, Mapping[str, Keys]] = MappingProxyType(
    {"dense": gated("mlp"), "router": BIASED_GATE, "shared": gated("mlp.shared_experts")}
)
"""DeepSeek-V3's names for dense networks, routers and shared experts, taken over by several families."""

PER_EXPERT = PerExpert(
    gate="mlp.experts.{expert}.gate_proj.weight",
    up="mlp.experts.{expert}.up_proj.weight",
    down="mlp.experts.{expert}.down_proj.weight",
)
STACKED = Stacked(gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj")
"""As transformers 5 holds experts in memory."""

MTP_LAYERS = Unused(
    pattern=r"model\.layers\.(\d+)\..*",
    reason="multi-token prediction layer, which only drafts tokens",
    marker="eh_proj.weight",
)
"""DeepSeek-V3's extra layers after the last."""

ROTARY_BUFFERS = Unused(
    pattern=r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq",
    reason="rotary frequencies follow from the config",
)
