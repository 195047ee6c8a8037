"""A decoder-only language model over passed-in parts; knows no checkpoint, no family and no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from moesaic.experts.contract import Tag
from moesaic.kernels.ops import Ops
from moesaic.kv.pool import BatchLayout, KvPool
from moesaic.layers.attention import KvView
from moesaic.layers.norm import RmsNorm
from moesaic.models.moe_block import Dense, MoeBlock, Observe
from moesaic.steps import Steps


class Mixer(Protocol):
    """The half of a layer in which tokens see each other."""

    def forward(self, x_TD: Tensor, positions_T: Tensor, view: KvView) -> Steps[Tensor]:
        """[T, D] in the seam dtype; writes this step's KV to the pool, then reads only the pool."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixerHalf:
    """x + mixer(norm(x))."""

    norm: RmsNorm
    mixer: Mixer

    def forward(self, x_TD: Tensor, positions_T: Tensor, view: KvView) -> Steps[Tensor]:
        """The residual stream after it, in the seam dtype."""
        return x_TD + (yield from self.mixer.forward(self.norm(x_TD), positions_T, view))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FfnHalf:
    """x + ffn(norm(x))."""

    norm: RmsNorm
    ffn: Dense | MoeBlock

    def forward(self, x_TD: Tensor, tag: Tag, observe: Observe | None) -> Steps[Tensor]:
        """The residual stream after it, in the seam dtype."""
        if isinstance(self.ffn, MoeBlock):
            return x_TD + (yield from self.ffn.forward(self.norm(x_TD), tag, observe))
        return x_TD + self.ffn(self.norm(x_TD))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderLayer:
    """One layer; a half that is None is left out."""

    mixer: MixerHalf | None
    ffn: FfnHalf | None


class Decoder:
    """Token ids to hidden states, and hidden states to logits."""

    def __init__(
        self,
        *,
        embedding_VD: Tensor,
        layers: Sequence[DecoderLayer],
        norm: RmsNorm,
        head_VD: Tensor,
        ops: Ops,
    ) -> None:
        self.embedding_VD = embedding_VD
        self.layers = tuple(layers)
        self.norm = norm
        self.head_VD = head_VD
        self.ops = ops

    def forward(
        self, tokens_T: Tensor, batch: BatchLayout, pool: KvPool, tag: Tag, observe: Observe | None = None
    ) -> Steps[Tensor]:
        """Hidden states after the final norm; every rank of a step takes part, also with T = 0.

        Shapes:  tokens_T [T] int64; returns hidden_TD [T, D] in the seam dtype.
        """
        x_TD = self.embedding_VD[tokens_T]
        for layer_idx, layer in enumerate(self.layers):
            if layer.mixer is not None:
                view = pool.view(layer_idx, batch)
                x_TD = yield from layer.mixer.forward(x_TD, batch.positions_T, view)
            if layer.ffn is not None:
                x_TD = yield from layer.ffn.forward(x_TD, replace(tag, layer_idx=layer_idx), observe)
        return self.norm(x_TD)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """logits_BV [B, V] float32 of the rows that are to be sampled."""
        return self.ops.logits(hidden_BD, self.head_VD)
