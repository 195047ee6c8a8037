"""A model as facts: what each layer computes and what it keeps. No tensors, no key names, no file formats.

`families` turns a config.json into a `ModelSpec`; `account` counts it, `models` builds it, `planner` prices
it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from moesaic.spec.numerics import DTYPE_BYTES, DType, KvFormat, kv_row_bytes, tail_bytes

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"]
"""`swiglu_clamped` is gpt-oss': clamp, gate * sigmoid(alpha * gate), times (up + 1)."""

Component = Literal[
    "embedding", "head", "attention", "router", "routed_experts", "shared_experts", "dense_ffn",
    "norms", "other",
]  # fmt: skip
COMPONENTS: tuple[Component, ...] = get_args(Component)
STORED_AS = "weights stored as"
"""How a reason begins that lies in how the weights are stored and not in the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings; unused fields keep their neutral values."""

    kind: Literal["linear", "dynamic", "yarn", "llama3", "longrope", "proportional"]
    factor: float = 1.0
    original_max_position: int | None = None
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn, DeepSeek: None means absent from the config, which is not 0
    mscale_all_dim: float | None = None
    attention_factor: float | None = None  # yarn, longrope: None derives it from the factor
    truncate: bool = True  # yarn: round the correction range to whole dims
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    short_factor: tuple[float, ...] = ()  # longrope
    long_factor: tuple[float, ...] = ()  # longrope
    proportion: float = 1.0  # proportional (Gemma 4): part of the frequencies that turn at all


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the first `dim` of a head."""

    theta: float
    dim: int
    is_interleaved: bool = False  # pairs are (0, 1), (2, 3), ... instead of (0, dim/2), ...
    scaling: RopeScaling | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TemperatureSpec:
    """Queries times 1 + scale * log(1 + floor((position + 1) / interval)).

    Source: Llama 4's reference code, after arXiv:2501.19399.
    """

    scale: float
    interval: int


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSpec:
    """Sparse-attention index (DeepSeek-V3.2, GLM-5): heads that score which tokens a query may see."""

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSpec:
    """What a mixer keeps between steps; the ledger and `account/memory` know only this."""

    kind: Literal["tokens", "window", "state"]
    bytes_per_token: int = 0
    bytes_per_sequence: int = 0
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class GqaSpec:
    """Grouped-query attention (multi-head when num_kv_heads == num_heads)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    softmax_scale: float
    has_qkv_bias: bool = False
    has_out_bias: bool = False
    qk_norm: Literal["none", "head", "full", "l2"] = "none"  # full: over all heads; l2: no weight, after rope
    qkv_clip: float | None = None
    window: int | None = None  # positions visible, the query's own included
    is_chunked: bool = False  # the window starts at a multiple of itself (Llama 4), it does not trail
    temperature: TemperatureSpec | None = None  # layers without rope (Llama 4)
    has_sinks: bool = False  # one learned logit per head joins the softmax
    has_output_gate: bool = False  # Qwen3-Next: sigmoid gate from q_proj's second half
    has_value_norm: bool = False  # values are normed over each head, without a weight (Gemma 4)
    value_is_key: bool = False  # no value projection: the values are the keys before norm and rope (Gemma 4)
    kv_from: int | None = None  # layer whose keys and values are read instead of own ones (Gemma 4)

    def caches(self, kv_format: KvFormat) -> tuple[CacheSpec, ...]:
        """K and V of every token, or of the window; nothing where another layer's are read.

        A chunk lies inside the window that trails, so both keep the same tokens.
        """
        if self.kv_from is not None:
            return ()
        size = 2 * self.num_kv_heads * kv_row_bytes(kv_format, self.head_dim)
        if self.window is None:
            return (CacheSpec(kind="tokens", bytes_per_token=size),)
        return (CacheSpec(kind="window", bytes_per_token=size, window=self.window),)


@dataclass(frozen=True, kw_only=True, slots=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1)."""

    num_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec
    softmax_scale: float
    has_bias: bool = False
    index: IndexSpec | None = None

    def caches(self, kv_format: KvFormat) -> tuple[CacheSpec, ...]:
        """The latent and the rotary key of every token, and the index keys where there are any."""
        size = kv_row_bytes(kv_format, self.kv_lora_rank + self.rope_dim)
        if self.index is not None:
            size += kv_row_bytes(kv_format, self.index.head_dim)
        return (CacheSpec(kind="tokens", bytes_per_token=size),)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSpec:
    """Gated delta-rule linear attention (Qwen3-Next)."""

    num_key_heads: int
    num_value_heads: int  # a multiple of the key heads: consecutive value heads share one
    key_dim: int  # per head
    value_dim: int  # per head
    conv_width: int
    activation: Activation = "silu"  # after the convolution
    is_fused: bool = False  # all that is projected for a key head lies together in one matrix (Qwen3-Next)

    @property
    def conv_channels(self) -> int:
        """Numbers of a token that go through the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    def caches(self, kv_format: KvFormat) -> tuple[CacheSpec, ...]:
        """A float32 state matrix per value head and the tail of the convolution; constant in the context."""
        state = self.num_value_heads * self.key_dim * self.value_dim * 4
        tail = self.conv_channels * (self.conv_width - 1) * tail_bytes(kv_format)
        return (CacheSpec(kind="state", bytes_per_sequence=state + tail),)


@dataclass(frozen=True, kw_only=True, slots=True)
class MambaSpec:
    """Mamba-2 state-space mixer (Nemotron-H)."""

    num_heads: int
    head_dim: int
    state_dim: int
    num_groups: int
    conv_width: int
    has_proj_bias: bool = False
    has_conv_bias: bool = True

    def caches(self, kv_format: KvFormat) -> tuple[CacheSpec, ...]:
        """A float32 state per head and the tail of the convolution; constant in the context."""
        channels = self.num_heads * self.head_dim + 2 * self.num_groups * self.state_dim
        state = self.num_heads * self.head_dim * self.state_dim * 4
        tail = channels * (self.conv_width - 1) * tail_bytes(kv_format)
        return (CacheSpec(kind="state", bytes_per_sequence=state + tail),)


Mixer = GqaSpec | MlaSpec | LinearSpec | MambaSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSpec:
    """How a router turns logits into choices and weights. Always float32, whatever the experts use."""

    score: Literal["softmax", "sigmoid", "sparsemixer"]  # sparsemixer: Phi-3.5-MoE
    order: Literal["score_then_topk", "topk_then_score"] = "score_then_topk"
    is_renormalised: bool = True  # weights of the chosen divided by their sum
    scale: float = 1.0  # routed_scaling_factor: applied whether or not renormalised
    has_selection_bias: bool = False  # added to the scores for the choice only (DeepSeek-V3)
    has_logit_bias: bool = False  # added to the logits (gpt-oss)
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    has_input_norm: bool = False  # it reads rows normed, then scaled by a vector / sqrt(D) (Gemma 4)
    has_expert_scale: bool = False  # weights times a learned factor of each expert, after all else (Gemma 4)
    renormalise_epsilon: float = 0.0  # added to the sum before dividing (DeepSeek-V3: 1e-20)
    renormalise_floor: float = 0.0  # the least sum that is divided by (ERNIE 4.5)
    jitter: float = (
        0.0  # sparsemixer: a logit further below the best than twice this, relatively, is left out
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSpec:
    """A dense feed-forward network; as `MoeSpec.shared` it runs on every token beside the routed experts."""

    width: int
    activation: Activation = "silu"
    is_gated: bool = True  # gate and up projections; False: up only
    has_bias: bool = False
    has_output_gate: bool = False  # shared expert times sigmoid of a learned scalar gate (Qwen2-MoE)


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeSpec:
    """The routed experts of one layer and their gate."""

    num_experts: int
    experts_per_token: int
    expert_width: int
    gate: GateSpec
    shared: DenseSpec | None
    row_width: int  # width at the seam: the model's, or the latent one (Nemotron Super: 1024)
    activation: Activation = "silu"
    is_gated: bool = True
    has_bias: bool = False
    activation_limit: float | None = None  # swiglu_clamped: bound of gate and up
    activation_alpha: float = 1.702  # swiglu_clamped: slope inside the sigmoid
    has_branch_norms: bool = False  # router, experts and shared each read the residual by norms of their own
    weight_on: Literal["output", "input"] = "output"  # "input": Llama 4 scales the row, not the result


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSpec:
    """One layer; either half may be None (Nemotron-H alternates mixers and feed-forward layers)."""

    mixer: Mixer | None
    ffn: DenseSpec | MoeSpec | None
    has_out_norms: bool = False  # what a half adds to the residual is normed (Gemma)
    has_scale: bool = False  # the residual after the layer times a learned number (Gemma 4)
    index_from: int | None = None  # layer whose sparse-attention index is reused (GLM-5.2)

    def caches(self, kv_format: KvFormat) -> tuple[CacheSpec, ...]:
        """What this layer keeps between steps."""
        return () if self.mixer is None else self.mixer.caches(kv_format)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredFormat:
    """How a checkpoint stores the matrices of one component."""

    component: Component
    format: str  # as `ModelSpec.weight_format`
    bits: float  # per weight, with its share of scales and zero points


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """A whole model. `family` names the reader; `runnable_reasons` is empty when the engine runs it."""

    model_type: str
    family: str
    reader: Literal["exact", "generic"]
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_position: int
    dtype: DType  # of the checkpoint's unquantised tensors; float32 for a float16 one, which it holds exactly
    has_tied_head: bool
    weight_format: str  # of the routed experts in the checkpoint: "bfloat16", "fp8", "nvfp4", "mxfp4", ...
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    stored: tuple[StoredFormat, ...] = ()  # components that are not stored in `dtype`
    norm: Literal["rms", "layer"] = "rms"
    has_norm_bias: bool = False
    norm_offset: float = 0.0  # added to a stored norm weight (Qwen3-Next stores its distance from 1)
    has_head_bias: bool = False
    residual_scale: float = 1.0  # what a layer adds to the residual is multiplied by it (Granite)
    logit_softcap: float | None = None  # cap * tanh(logit / cap) (Gemma)
    mtp_layers: tuple[LayerSpec, ...] = ()  # predict further tokens; beside the model, in no total
    undescribed_params: tuple[tuple[str, int], ...] = ()  # part of the text model that no field describes
    other_params: tuple[tuple[str, int | None], ...] = ()  # beside the text model; None: uncounted
    runnable_reasons: tuple[str, ...] = ()  # each names one feature that the engine lacks

    @property
    def moe_layers(self) -> tuple[tuple[int, MoeSpec], ...]:
        """(layer_idx, spec) of the sparse layers, ascending."""
        return tuple((i, layer.ffn) for i, layer in enumerate(self.layers) if isinstance(layer.ffn, MoeSpec))

    def stored_format(self, component: Component) -> StoredFormat:
        """How the matrices of a component are stored in the checkpoint."""
        for stored in self.stored:
            if stored.component == component:
                return stored
        return StoredFormat(component=component, format=self.dtype, bits=8.0 * DTYPE_BYTES[self.dtype])

    @property
    def is_runnable(self) -> bool:
        """Whether the engine runs it."""
        return not self.runnable_reasons
