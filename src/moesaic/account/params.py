"""How many parameters a model has, by component, in all and per token. Arithmetic on a `ModelSpec` only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from moesaic.spec.model import (
    COMPONENTS,
    Component,
    DenseSpec,
    GqaSpec,
    LayerSpec,
    LinearSpec,
    MambaSpec,
    Mixer,
    MlaSpec,
    ModelSpec,
    MoeSpec,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParamCount:
    """Parameters by component. MTP layers and towers beside the text model are in neither.

    `active` counts what one token's forward uses: all but the routed experts it did not choose. Both
    embedding matrices count (a tied one once), although a token reads one row of the input embedding: so are
    the published numbers made (DeepSeek-V3 671.03B and 37.55B; without the input embedding 36.6B).
    """

    total: Mapping[Component, int]
    active: Mapping[Component, int]

    @property
    def num_total(self) -> int:
        """All parameters."""
        return sum(self.total.values())

    @property
    def num_active(self) -> int:
        """Parameters that take part in one token."""
        return sum(self.active.values())


def count_params(spec: ModelSpec) -> ParamCount:
    """Parameters of the text model."""
    total: dict[Component, int] = dict.fromkeys(COMPONENTS, 0)
    total["embedding"] = spec.vocab * spec.hidden
    total["head"] = 0 if spec.has_tied_head else spec.vocab * spec.hidden
    total["head"] += spec.vocab if spec.has_head_bias else 0
    total["norms"] = norm_params(spec)
    total["other"] = sum(count for _, count in spec.undescribed_params)
    active = dict(total)
    for layer in spec.layers:
        for component, count in layer_params(layer, spec.hidden, norm_params(spec)).items():
            total[component] += count
            active[component] += count
        if isinstance(layer.ffn, MoeSpec):
            idle = layer.ffn.num_experts - layer.ffn.experts_per_token
            active["routed_experts"] -= idle * expert_params(layer.ffn)
    return ParamCount(total=total, active=active)


def norm_params(spec: ModelSpec) -> int:
    """Parameters of one norm over the model's width."""
    return spec.hidden * (2 if spec.has_norm_bias else 1)


@lru_cache(maxsize=4096)
def layer_params(layer: LayerSpec, hidden: int, norm: int) -> Mapping[Component, int]:
    """Parameters of one layer by component; each half that is there has one norm before it."""
    num_halves = (layer.mixer is not None) + (layer.ffn is not None)
    found: dict[Component, int] = {"norms": norm * num_halves * (2 if layer.has_out_norms else 1)}
    found["norms"] += int(layer.has_scale)
    if layer.mixer is not None:
        found["attention"] = mixer_params(layer.mixer, hidden)
    if isinstance(layer.ffn, DenseSpec):
        found["dense_ffn"] = dense_params(layer.ffn, hidden)
    if isinstance(layer.ffn, MoeSpec):
        moe = layer.ffn
        found["norms"] += 3 * norm if moe.has_branch_norms else 0
        found["routed_experts"] = moe.num_experts * expert_params(moe)
        found["router"] = router_params(moe, hidden)
        found["shared_experts"] = 0 if moe.shared is None else dense_params(moe.shared, hidden)
        found["other"] = 2 * hidden * moe.row_width if moe.row_width != hidden else 0
    return found


def expert_params(moe: MoeSpec) -> int:
    """Parameters of one routed expert.

    Source: gate, up and down are three width x row matrices: 3 * 4096 * 1536 = 18,874,368 in Qwen3-235B-A22B.
    """
    return expert_weights(moe) + expert_biases(moe)


def expert_weights(moe: MoeSpec) -> int:
    """Numbers in the matrices of one routed expert."""
    return (3 if moe.is_gated else 2) * moe.row_width * moe.expert_width


def expert_biases(moe: MoeSpec) -> int:
    """Numbers in its biases."""
    if not moe.has_bias:
        return 0
    return (2 if moe.is_gated else 1) * moe.expert_width + moe.row_width


def router_params(moe: MoeSpec, hidden: int) -> int:
    """The gate's matrix, its biases and scales."""
    gate = moe.gate
    per_expert = hidden + gate.has_selection_bias + gate.has_logit_bias + gate.has_expert_scale
    return moe.num_experts * per_expert + (hidden if gate.has_input_norm else 0)


def dense_params(dense: DenseSpec, hidden: int) -> int:
    """A dense network, with its output gate where it has one."""
    matrices = 3 if dense.is_gated else 2
    biases = (matrices - 1) * dense.width + hidden if dense.has_bias else 0
    return matrices * hidden * dense.width + biases + (hidden if dense.has_output_gate else 0)


def mixer_params(mixer: Mixer, hidden: int) -> int:
    """Projections, inner norms and the rest of one mixer."""
    if isinstance(mixer, GqaSpec):
        return _gqa_params(mixer, hidden)
    if isinstance(mixer, MlaSpec):
        return _mla_params(mixer, hidden)
    if isinstance(mixer, LinearSpec):
        return _linear_params(mixer, hidden)
    return _mamba_params(mixer, hidden)


def _gqa_params(mixer: GqaSpec, hidden: int) -> int:
    q_width = mixer.num_heads * mixer.head_dim
    q_rows = q_width * (2 if mixer.has_output_gate else 1)
    kv_width = mixer.num_kv_heads * mixer.head_dim
    num_kv = 0 if mixer.kv_from is not None else 1 if mixer.value_is_key else 2
    count = hidden * (q_rows + num_kv * kv_width) + q_width * hidden
    if mixer.has_qkv_bias:
        count += q_rows + num_kv * kv_width
    if mixer.has_out_bias:
        count += hidden
    if mixer.qk_norm == "head":
        count += mixer.head_dim * (2 if num_kv else 1)
    if mixer.qk_norm == "full":
        count += q_width + (kv_width if num_kv else 0)
    return count + (mixer.num_heads if mixer.has_sinks else 0)


def _mla_params(mixer: MlaSpec, hidden: int) -> int:
    q_width = mixer.num_heads * (mixer.nope_dim + mixer.rope_dim)
    kv_a_width = mixer.kv_lora_rank + mixer.rope_dim
    # One projection, or down, norm and up.
    rank = mixer.q_lora_rank
    count = hidden * q_width if rank is None else rank * (hidden + 1 + q_width)
    count += hidden * kv_a_width + mixer.kv_lora_rank
    count += mixer.kv_lora_rank * mixer.num_heads * (mixer.nope_dim + mixer.value_dim)
    count += mixer.num_heads * mixer.value_dim * hidden
    if mixer.has_bias:
        count += (mixer.q_lora_rank or 0) + kv_a_width + hidden
    if mixer.index is not None:
        index = mixer.index
        rows = q_width if mixer.q_lora_rank is None else mixer.q_lora_rank
        # Query heads from the latent, one key head with its layer norm, a weight per head.
        count += rows * index.num_heads * index.head_dim + hidden * (index.head_dim + index.num_heads)
        count += 2 * index.head_dim
    return count


def _linear_params(mixer: LinearSpec, hidden: int) -> int:
    key_width = mixer.num_key_heads * mixer.key_dim
    value_width = mixer.num_value_heads * mixer.value_dim
    projections = hidden * (2 * key_width + 2 * value_width + 2 * mixer.num_value_heads)
    convolution = (2 * key_width + value_width) * mixer.conv_width
    # Decay and step per value head, a gated norm over a value head, the way back.
    return projections + convolution + 2 * mixer.num_value_heads + mixer.value_dim + value_width * hidden


def _mamba_params(mixer: MambaSpec, hidden: int) -> int:
    inner = mixer.num_heads * mixer.head_dim
    channels = inner + 2 * mixer.num_groups * mixer.state_dim
    rows = inner + channels + mixer.num_heads
    count = hidden * rows + channels * mixer.conv_width + 3 * mixer.num_heads + inner + inner * hidden
    if mixer.has_proj_bias:
        count += rows + hidden
    return count + (channels if mixer.has_conv_bias else 0)


def mtp_params(spec: ModelSpec) -> int:
    """Parameters of the layers that predict further tokens, without their copies of embedding and head.

    Each has a projection of two hidden states to one and three norms more than a layer (DeepSeek-V3's
    layout).
    """
    norm = norm_params(spec)
    layers = sum(sum(layer_params(layer, spec.hidden, norm).values()) for layer in spec.mtp_layers)
    return layers + len(spec.mtp_layers) * (2 * spec.hidden**2 + 3 * norm)
