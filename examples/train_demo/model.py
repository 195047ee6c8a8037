"""The demo model's training network: DeepSeek-V3 maths (MLA, sigmoid gate, shared expert) in plain PyTorch.

Knows nothing about data, optimisers or the Hugging Face file layout (see ``export.py``). Shape letters:
B sequences, S positions, T = B*S tokens, D model width, H heads, C head width, M latent width, E experts,
F expert width, K experts per token, N = T*K choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Sizes of the demo model. Every width that feeds a matrix product is a multiple of 128."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 6
    num_dense_layers: int = 1  # the first layers have a dense FFN, the others experts
    dense_width: int = 512
    num_heads: int = 4
    nope_width: int = 64  # per head, without position
    rope_width: int = 32  # per head, with rotary position; the key part is shared by all heads
    value_width: int = 64  # per head
    kv_latent_width: int = 128
    num_experts: int = 16
    num_experts_per_token: int = 4
    expert_width: int = 128  # also the width of the shared expert
    routed_scale: float = 2.5  # the chosen weights sum to this
    rope_theta: float = 10000.0
    max_positions: int = 1024
    norm_eps: float = 1e-6


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x over its root mean square, times the gain."""
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [max_positions, rope_width / 2], float32."""
    steps = torch.arange(0, config.rope_width, 2, dtype=torch.float32) / config.rope_width
    angles_SC = torch.outer(torch.arange(config.max_positions).float(), config.rope_theta**-steps)
    return angles_SC.cos(), angles_SC.sin()


def apply_rope(x_BHSC: Tensor, cos_SC: Tensor, sin_SC: Tensor) -> Tensor:
    """Rotate interleaved pairs (x0, x1), (x2, x3), ... and return them as two halves.

    The order of the output channels does not matter to q.k as long as q and k share it; DeepSeek checkpoints
    (``rope_interleave`` true) store the input channels interleaved.
    """
    even, odd = x_BHSC[..., 0::2], x_BHSC[..., 1::2]
    return torch.cat((even * cos_SC - odd * sin_SC, odd * cos_SC + even * sin_SC), dim=-1)


class LatentAttention(nn.Module):
    """Multi-head latent attention, expanded form (keys and values are built from the latent)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = c = config
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * (c.nope_width + c.rope_width), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(c.hidden_size, c.kv_latent_width + c.rope_width, bias=False)
        self.kv_a_layernorm = RMSNorm(c.kv_latent_width, c.norm_eps)
        self.kv_b_proj = nn.Linear(
            c.kv_latent_width, c.num_heads * (c.nope_width + c.value_width), bias=False
        )
        self.o_proj = nn.Linear(c.num_heads * c.value_width, c.hidden_size, bias=False)

    def forward(
        self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor, cache: list[Tensor] | None = None
    ) -> Tensor:
        """Return [B, S, D]; ``cache``, [] at first, gathers the latents and rotated keys of all positions."""
        c = self.config
        B, S, _ = x_BSD.shape
        q_BHSC = self.q_proj(x_BSD).view(B, S, c.num_heads, -1).transpose(1, 2)
        q_nope, q_rope = q_BHSC.split((c.nope_width, c.rope_width), dim=-1)
        latent_BSM, k_rope_BSC = self.kv_a_proj_with_mqa(x_BSD).split(
            (c.kv_latent_width, c.rope_width), dim=-1
        )
        k_rope_BSC = apply_rope(k_rope_BSC, cos_SC, sin_SC)
        if cache is not None:
            if cache:
                latent_BSM = torch.cat((cache[0], latent_BSM), dim=1)
                k_rope_BSC = torch.cat((cache[1], k_rope_BSC), dim=1)
            cache[:] = [latent_BSM, k_rope_BSC]
        num_keys = latent_BSM.shape[1]
        kv_BHSC = self.kv_b_proj(self.kv_a_layernorm(latent_BSM)).view(B, num_keys, c.num_heads, -1)
        k_nope, v_BHSC = kv_BHSC.transpose(1, 2).split((c.nope_width, c.value_width), dim=-1)
        k_rope = k_rope_BSC[:, None].expand(-1, c.num_heads, -1, -1)
        q = torch.cat((q_nope, apply_rope(q_rope, cos_SC, sin_SC)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        # The fused CPU kernel wants one head width for q, k and v: zero channels of v leave y unchanged.
        v = F.pad(v_BHSC, (0, q.shape[-1] - c.value_width))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=num_keys == S)[..., : c.value_width]
        return self.o_proj(y.transpose(1, 2).reshape(B, S, -1))


class DenseFFN(nn.Module):
    """SwiGLU feed-forward; ``gate_up`` is [2, F, D] so that each of the two is trained on its own."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(2, width, hidden_size) * hidden_size**-0.5)
        self.down = nn.Parameter(torch.randn(hidden_size, width) * width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Return the shape of x."""
        gate, up = F.linear(x, self.gate_up.flatten(0, 1)).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down)


class MoEFFN(nn.Module):
    """Routed experts plus one shared expert.

    ``selection_bias`` is added to the scores for the choice only and is moved by ``balance`` against the load
    error instead of by a loss (DeepSeek-V3, arXiv:2412.19437, sec. 2.1.2).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = c = config
        self.gate_weight = nn.Parameter(torch.randn(c.num_experts, c.hidden_size) * 0.02)
        self.gate_up = nn.Parameter(
            torch.randn(c.num_experts, 2, c.expert_width, c.hidden_size) * c.hidden_size**-0.5
        )
        self.down = nn.Parameter(
            torch.randn(c.num_experts, c.hidden_size, c.expert_width) * c.expert_width**-0.5
        )
        self.shared = DenseFFN(c.hidden_size, c.expert_width)
        self.register_buffer("selection_bias", torch.zeros(c.num_experts))
        self.register_buffer("load", torch.zeros(c.num_experts), persistent=False)

    def route(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights_TK (sum = routed_scale) and experts_TK int64, scored in float32."""
        c = self.config
        scores_TE = F.linear(x_TD.float(), self.gate_weight.float()).sigmoid()
        experts_TK = (
            (scores_TE.detach() + self.selection_bias).topk(c.num_experts_per_token, sorted=False).indices
        )
        weights_TK = scores_TE.gather(1, experts_TK)
        return weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20) * c.routed_scale, experts_TK

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Return [B, S, D]: the weighted experts of each token, and the shared one."""
        c = self.config
        x_TD = x_BSD.reshape(-1, c.hidden_size)
        weights_TK, experts_TK = self.route(x_TD)
        order_N = experts_TK.flatten().argsort(stable=True)
        counts = experts_TK.flatten().bincount(minlength=c.num_experts)
        self.load += counts
        token_N = order_N // c.num_experts_per_token
        rows_per_expert = counts.tolist()
        gate_up_E, down_E = self.gate_up.flatten(1, 2).unbind(0), self.down.unbind(0)
        outputs = []
        for expert_id, x_RD in enumerate(x_TD[token_N].split(rows_per_expert)):
            gate, up = F.linear(x_RD, gate_up_E[expert_id]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down_E[expert_id]))
        y_ND = torch.cat(outputs) * weights_TK.flatten()[order_N, None].to(x_TD.dtype)
        y_TD = self.shared(x_TD).index_add(0, token_N, y_ND)
        return y_TD.view_as(x_BSD)

    @torch.no_grad()
    def balance(self, rate: float) -> float:
        """Move each expert's bias against its load error; return the hottest load over the mean.

        In proportion to the error: a sign step that is large enough for a short run would never settle.
        """
        mean = self.load.mean()
        imbalance = (self.load.max() / mean).item()
        self.selection_bias += rate * ((mean - self.load) / mean).clamp(-1, 1)
        self.load.zero_()
        return imbalance


class Block(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: ModelConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        is_dense = layer_idx < config.num_dense_layers
        self.mlp = DenseFFN(config.hidden_size, config.dense_width) if is_dense else MoEFFN(config)

    def forward(
        self, x_BSD: Tensor, cos_SC: Tensor, sin_SC: Tensor, cache: list[Tensor] | None = None
    ) -> Tensor:
        """Return the residual stream after this layer."""
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), cos_SC, sin_SC, cache)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class DemoModel(nn.Module):
    """Token ids in, logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.3)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        nn.init.zeros_(self.lm_head.weight)
        for layer in self.layers:  # the residual stream starts as the embedding alone
            nn.init.zeros_(layer.self_attn.o_proj.weight)
        cos_SC, sin_SC = rope_tables(config)
        self.register_buffer("cos_SC", cos_SC, persistent=False)
        self.register_buffer("sin_SC", sin_SC, persistent=False)

    @property
    def moe_layers(self) -> list[MoEFFN]:
        """The sparse feed-forwards, in layer order."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoEFFN)]

    def forward(self, ids_BS: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        """Return logits [B, S, vocab].

        ``caches``, one list per layer and empty at first, keep what came before: the first call takes a whole
        prompt, every later one a single position.
        """
        start = caches[0][0].shape[1] if caches and caches[0] else 0
        cos_SC, sin_SC = (table[start : start + ids_BS.shape[1]] for table in (self.cos_SC, self.sin_SC))
        x_BSD = self.embed_tokens(ids_BS)
        for layer_idx, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, cos_SC, sin_SC, None if caches is None else caches[layer_idx])
        return self.lm_head(self.norm(x_BSD))
