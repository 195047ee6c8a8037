"""A decoder-only language model over passed-in parts; knows no checkpoint, no family and no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from moesaic.experts.contract import Observe, SparseHalf, Tag
from moesaic.kernels.ops import Ops
from moesaic.kernels.panel import Weight
from moesaic.kv.pool import BatchLayout, KvPool
from moesaic.layers.attention import FusedGqa
from moesaic.models.moe_block import Dense, MoeBlock, Norm
from moesaic.models.stack import FusedLayerHalves, LayerStack
from moesaic.steps import Steps


class Mixer(Protocol):
    """The half of a layer in which tokens see each other."""

    def forward(self, x_TD: Tensor, positions_T: Tensor, view: Any, micro_batch: int = 0) -> Steps[Tensor]:
        """[T, D] in the seam dtype; writes this step's KV to the pool, then reads only the pool.

        `view` is what the pool has of the layer: a `KvView`, or a `StateView` where the mixer is recurrent.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MixerHalf:
    """x + scale * out_norm(mixer(norm(x)))."""

    norm: Norm
    mixer: Mixer
    out_norm: Norm | None = None
    scale: float = 1.0

    def forward(self, x_TD: Tensor, positions_T: Tensor, view: Any, micro_batch: int) -> Steps[Tensor]:
        """The residual stream after it, in the seam dtype."""
        y_TD = yield from self.mixer.forward(self.norm(x_TD), positions_T, view, micro_batch)
        y_TD = y_TD if self.out_norm is None else self.out_norm(y_TD)
        return x_TD + _scaled(y_TD, self.scale)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FfnHalf:
    """x + scale * out_norm(ffn(norm(x))); without `norm` the sparse half has norms of its own."""

    layer_idx: int
    norm: Norm | None
    ffn: Dense | MoeBlock
    out_norm: Norm | None = None
    scale: float = 1.0

    def forward(self, x_TD: Tensor, tag: Tag, observe: Observe | None) -> Steps[Tensor]:
        """The residual stream after it, in the seam dtype."""
        y_TD = x_TD if self.norm is None else self.norm(x_TD)
        if isinstance(self.ffn, MoeBlock):
            tag = replace(tag, layer_idx=self.layer_idx)
            y_TD = yield from self.ffn.forward(y_TD, tag, observe)
        else:
            y_TD = yield from self.ffn.forward(y_TD, tag.micro_batch)
        y_TD = y_TD if self.out_norm is None else self.out_norm(y_TD)
        return x_TD + _scaled(y_TD, self.scale)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class DecoderLayer:
    """One layer; a half that is None is left out, and `scale` [1] multiplies what comes out."""

    mixer: MixerHalf | FusedGqa | None
    ffn: FfnHalf | SparseHalf | None
    scale: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Head:
    """softcap * tanh(scale * (weight @ h + bias) / softcap), of which a model has the weight at least.

    Shapes:  weight_VD [V, D]; bias_V [V] or None.
    """

    weight_VD: Weight
    ops: Ops
    bias_V: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, hidden_BD: Tensor) -> Tensor:
        """logits_BV [B, V] float32."""
        logits_BV = _scaled(self.ops.logits(hidden_BD, self.weight_VD, self.bias_V), self.scale)
        return logits_BV if self.softcap is None else self.ops.softcap(logits_BV, self.softcap)


class Decoder:
    """Token ids to hidden states, and hidden states to logits.

    Consecutive layers whose halves are native calls go as one call, a `LayerStack`: the bits are the same.

    Shapes:  embedding_VD [V, D], the head's own weight where the two are tied, unless that is rounded.
    """

    def __init__(
        self,
        *,
        embedding_VD: Tensor,
        layers: Sequence[DecoderLayer],
        norm: Norm,
        head: Head,
        embedding_scale: float = 1.0,
    ) -> None:
        self.embedding_VD = embedding_VD
        self.layers = tuple(layers)
        self.norm = norm
        self.head = head
        self.embedding_scale = embedding_scale

    @property
    def layers(self) -> tuple[DecoderLayer, ...]:
        """One by one, whatever calls they are part of."""
        return self._layers

    @layers.setter
    def layers(self, layers: tuple[DecoderLayer, ...]) -> None:
        self._layers = layers
        self._parts = _parts(layers)

    def forward(
        self, tokens_T: Tensor, batch: BatchLayout, pool: KvPool, tag: Tag, observe: Observe | None = None
    ) -> Steps[Tensor]:
        """Hidden states after the final norm; every rank of a step takes part, also with T = 0.

        Shapes:  tokens_T [T] int64; returns hidden_TD [T, D] in the seam dtype.
        """
        x_TD = _scaled(self.embedding_VD.index_select(0, tokens_T), self.embedding_scale)
        for part in self._parts:
            x_TD = yield from part.forward(x_TD, batch, pool, tag, observe)
        return self.norm(x_TD)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """logits_BV [B, V] float32 of the rows that are to be sampled."""
        return self.head(hidden_BD)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _OneLayer:
    """A layer by itself, half by half."""

    layer_idx: int
    layer: DecoderLayer

    def forward(
        self, x_TD: Tensor, batch: BatchLayout, pool: KvPool, tag: Tag, observe: Observe | None
    ) -> Steps[Tensor]:
        """The residual stream after it."""
        layer = self.layer
        if layer.mixer is not None:
            view: Any = pool.view(self.layer_idx, batch)
            x_TD = yield from layer.mixer.forward(x_TD, batch.positions_T, view, tag.micro_batch)
        if layer.ffn is not None:
            x_TD = yield from layer.ffn.forward(x_TD, tag, observe)
        return x_TD if layer.scale is None else x_TD * layer.scale


def _parts(layers: Sequence[DecoderLayer]) -> list[_OneLayer | LayerStack]:
    """Runs of layers that one call can have, and the others one by one."""
    parts: list[_OneLayer | LayerStack] = []
    run: list[FusedLayerHalves] = []
    for layer_idx, layer in enumerate(layers):
        halves = None
        if layer.scale is None:
            halves = FusedLayerHalves.of(layer_idx, layer.mixer, layer.ffn)
        if run and (halves is None or not halves.follows(run[-1])):
            parts.append(LayerStack(run))
            run = []
        if halves is None:
            parts.append(_OneLayer(layer_idx=layer_idx, layer=layer))
        else:
            run.append(halves)
    return [*parts, LayerStack(run)] if run else parts


def _scaled(x: Tensor, scale: float) -> Tensor:
    """x * scale, rounded once to x's dtype; x itself where the scale is 1."""
    return x if scale == 1.0 else x * scale
