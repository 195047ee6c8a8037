"""Floating-point operations of a forward, by component. A multiply and its add are two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moesaic.account.params import count_params
from moesaic.spec.model import Component, GqaSpec, LayerSpec, LinearSpec, MambaSpec, MlaSpec, ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenFlops:
    """Operations for one token. `matrices` do not depend on the context, `context` does.

    Units:  floating-point operations.
    """

    matrices: Mapping[Component, int]
    context: int

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.matrices.values()) + self.context


def token_flops(spec: ModelSpec, context_len: int) -> TokenFlops:
    """Operations to compute one token that sees `context_len` positions, its own included; head included.

    Source: every active weight is one multiply-add. Norms and embedding rows cost nothing beside it, nor do
    the few biases that this counts as if they were multiplied.
    """
    matrices = {
        component: 2 * count
        for component, count in count_params(spec).active.items()
        if component not in ("embedding", "norms")
    }
    matrices["other"] -= 2 * sum(count for _, count in spec.undescribed_params)
    if spec.has_tied_head:
        matrices["head"] = 2 * spec.vocab * spec.hidden
    return TokenFlops(
        matrices=matrices, context=sum(context_flops(layer, context_len) for layer in spec.layers)
    )


def context_flops(layer: LayerSpec, context_len: int) -> int:
    """Operations of a layer's mixer that are no weight matrix: scores, weighted sums, state updates.

    Latent attention is counted absorbed, as it decodes: scores over latent and rope, sums over the latent.

    Source: DeepSeek-V2, arXiv:2405.04434, sec. 2.1 (absorbed); Gated DeltaNet, arXiv:2412.06464, eq. 10;
    Mamba-2, arXiv:2405.21060, sec. 6.
    """
    mixer = layer.mixer
    if isinstance(mixer, GqaSpec):
        seen = context_len if mixer.window is None else min(context_len, mixer.window)
        if mixer.window is not None and mixer.is_chunked:
            seen = context_len and (context_len - 1) % mixer.window + 1
        return 2 * 2 * mixer.num_heads * mixer.head_dim * seen
    if isinstance(mixer, MlaSpec):
        seen, scored = context_len, 0
        if mixer.index is not None:
            scored = 2 * mixer.index.num_heads * mixer.index.head_dim * context_len
            seen = min(context_len, mixer.index.top_k)
        width = 2 * mixer.kv_lora_rank + mixer.rope_dim
        return 2 * mixer.num_heads * width * seen + scored
    if isinstance(mixer, LinearSpec):
        # Decay the state (1), read it at the key (2), add the outer product (2), read it at the query (2).
        return 7 * mixer.num_value_heads * mixer.key_dim * mixer.value_dim
    if isinstance(mixer, MambaSpec):
        # Decay (1), add the outer product (2), read (2).
        return 5 * mixer.num_heads * mixer.head_dim * mixer.state_dim
    return 0


def prefill_flops(spec: ModelSpec, num_tokens: int, *, cached: int = 0) -> int:
    """Operations to compute positions cached .. cached + num_tokens, each seeing all before it; one head row.

    Latent attention in its absorbed form, which this engine uses for every position.
    """
    matrices = dict(token_flops(spec, 0).matrices)
    head = matrices.pop("head")
    fixed = num_tokens * sum(matrices.values()) + head
    return fixed + sum(_layer_prefill(layer, cached, num_tokens) for layer in spec.layers)


def _layer_prefill(layer: LayerSpec, cached: int, num_tokens: int) -> int:
    """Sum of `context_flops` over the positions: linear in the context, with a bend at window or top-k."""
    mixer = layer.mixer
    bend: int | None = None
    if isinstance(mixer, GqaSpec):
        bend = mixer.window
    elif isinstance(mixer, MlaSpec) and mixer.index is not None:
        bend = mixer.index.top_k
    elif not isinstance(mixer, MlaSpec):
        return num_tokens * context_flops(layer, 1)
    first, last = cached + 1, cached + num_tokens
    if num_tokens <= 0:
        return 0
    if bend is not None and isinstance(mixer, GqaSpec) and mixer.is_chunked:
        return context_flops(layer, 1) * (_seen_in_chunks(last, bend) - _seen_in_chunks(cached, bend))
    if bend is None or last <= bend or first > bend:
        return _trapezoid(layer, first, last)
    return _trapezoid(layer, first, bend) + _trapezoid(layer, bend + 1, last)


def _seen_in_chunks(num_tokens: int, chunk: int) -> int:
    """What the first positions see, added up: 1 + 2 + .. + chunk, again and again."""
    whole, rest = divmod(num_tokens, chunk)
    return (whole * chunk * (chunk + 1) + rest * (rest + 1)) // 2


def _trapezoid(layer: LayerSpec, first: int, last: int) -> int:
    ends = context_flops(layer, first) + context_flops(layer, last)
    return ends * (last - first + 1) // 2
