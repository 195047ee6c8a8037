"""Sequences in a paged pool for tests of attention, and plain attention in float64 to compare with."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from moesaic.kernels.kv_format import pool_zeros
from moesaic.kernels.kv_view import KvPlaces, KvRow, KvView
from moesaic.kernels.ops import Ops, choose
from moesaic.spec.numerics import DType, KvFormat, preset

BLOCK = 16


def reference_ops(
    dtype: DType = "float32", *, num_threads: int = 1, kv_lanes: int = 4, kv_format: KvFormat | None = None
) -> Ops:
    """The reference ops with the portable numerics."""
    numerics = preset("portable", dtype=dtype, kv_format=kv_format).with_leaves(kv_lanes=kv_lanes)
    return choose(numerics, num_threads=num_threads)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The shape of an attention; `value_width` below `key_width` means that the value is part of the key."""

    num_heads: int
    num_groups: int
    key_width: int
    value_width: int | None = None
    window: int | None = None
    is_chunked: bool = False
    has_sinks: bool = False


class Sequence:
    """One sequence of random queries, keys and values, and a pool that holds its blocks in shuffled order."""

    def __init__(
        self,
        heads: Heads,
        num_tokens: int,
        ops: Ops,
        *,
        seed: int = 0,
        dtype=torch.float32,
        kv_block: int = BLOCK,
        kv_format: KvFormat | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.heads, self.ops, self.num_tokens = heads, ops, num_tokens
        self.q_THC = draw(num_tokens, heads.num_heads, heads.key_width)
        self.key_TGC = draw(num_tokens, heads.num_groups, heads.key_width)
        is_split = heads.value_width is None
        self.value_TGC = draw(num_tokens, heads.num_groups, heads.key_width) if is_split else None
        self.sinks_H = draw(heads.num_heads) if heads.has_sinks else None
        self.kv_block = kv_block
        num_blocks = -(-num_tokens // kv_block)
        ids = list(range(num_blocks + 3))
        random.Random(seed).shuffle(ids)
        self.blocks = tuple(ids[:num_blocks])
        shape = (num_blocks + 4, heads.num_groups, kv_block, heads.key_width)
        stored: KvFormat = kv_format or ("bfloat16" if dtype == torch.bfloat16 else "float32")
        self.key_pool = pool_zeros(shape, stored)
        self.value_pool = pool_zeros(shape, stored) if is_split else None

    def view(self, *parts: tuple[int, int]) -> KvView:
        """A step of (start, count) parts of the sequence, each as if it were a sequence of its own."""
        rows, first = [], 0
        for start, count in parts:
            blocks = self.blocks[: -(-(start + count) // self.kv_block)]
            rows.append(KvRow(first_row=first, num_tokens=count, start_idx=start, blocks=blocks))
            first += count
        places = KvPlaces.of(tuple(rows), self.kv_block)
        return KvView(key_pool=self.key_pool, value_pool=self.value_pool, places=places)

    def write(self, start: int, count: int) -> None:
        """Store the keys and values of some positions."""
        span = slice(start, start + count)
        values = None if self.value_TGC is None else self.value_TGC[span]
        self.ops.write_kv(self.view((start, count)), self.key_TGC[span], values)

    def attend(self, *parts: tuple[int, int]) -> Tensor:
        """Attention of the parts in one step, laid end to end."""
        q_THC = torch.cat([self.q_THC[start : start + count] for start, count in parts])
        return self.ops.attention(
            q_THC,
            self.view(*parts),
            softmax_scale=self.scale,
            window=self.heads.window,
            is_chunked=self.heads.is_chunked,
            sinks_H=self.sinks_H,
            value_width=self.heads.value_width,
        )

    @property
    def scale(self) -> float:
        """The softmax scale."""
        return self.heads.key_width**-0.5

    def exact(self) -> Tensor:
        """Plain attention of the whole sequence in float64."""
        return plain_attention(self, torch.float64)


def plain_attention(case: Sequence, dtype: torch.dtype, start: int = 0) -> Tensor:
    """Softmax attention as in the textbook, of the positions from `start` on."""
    heads = case.heads
    shared = heads.num_heads // heads.num_groups
    keys = case.key_TGC.to(dtype).repeat_interleave(shared, dim=1)
    values = case.key_TGC[..., : heads.value_width] if case.value_TGC is None else case.value_TGC
    values = values.to(dtype).repeat_interleave(shared, dim=1)
    scores = torch.einsum("thc,shc->hts", case.q_THC[start:].to(dtype), keys) * case.scale
    key = torch.arange(case.num_tokens)
    query = key[start:, None]
    visible = key <= query
    if heads.window is not None:
        start = query // heads.window * heads.window if heads.is_chunked else query - heads.window + 1
        visible &= key >= start
    scores = scores.masked_fill(~visible, float("-inf"))
    if case.sinks_H is not None:
        sinks = case.sinks_H.to(dtype).view(-1, 1, 1).expand(-1, len(query), 1)
        scores = torch.cat((scores, sinks), dim=-1)
    return torch.einsum("hts,shc->thc", scores.softmax(dim=-1)[..., : case.num_tokens], values)
