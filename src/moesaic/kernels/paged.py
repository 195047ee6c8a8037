"""Attention over a paged KV pool in float32, with one fixed tree per row whatever else is in the step.

A position's block belongs to lane `block_idx % lanes`. Per row and head:

    lane 0  <- blocks 0, 4, 8, ...    peak: greatest score of the lane (a maximum has no order)
    lane 1  <- blocks 1, 5, 9, ...    value: sum of exp(score - peak) v, block after block, from +0
    lane 2  <- blocks 2, 6, ...       mass: sum of exp(score - peak), a block's halves, then blocks as
    lane 3  <- blocks 3, 7, ...             neighbours by their absolute number
                                      lanes meet as (0, 2), (1, 3), then those two; a sink comes last

Blocks that are missing, or that the mask hides whole, add exact zeros: bits do not follow the padding.

Source:  merging by log-sum-exp: arXiv:2205.14135, sec. 3.1; arXiv:1805.02867.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from moesaic.kernels.elementwise import exp
from moesaic.kernels.invariance import MAX_ROWS, ProofTable, Tiling, Trial
from moesaic.kernels.kv_format import pack_rows, row_width, unpack_rows
from moesaic.kernels.kv_view import KvPlaces, KvView
from moesaic.kernels.matmul import noise, pad_rows
from moesaic.kernels.tile import Geometry, Tile, cut

LOWEST = -1e38  # below every score; finite, so that -inf - LOWEST is -inf and not NaN
MAX_KEYS = 512  # positions of one call: what the proof covers
TILE_BYTES = 4 * 2**20  # guess: small enough to stay in a cache, large enough for few calls


class Parts(NamedTuple):
    """Softmaxes over lanes: peaks [B, G, L, R, 1] and sums [B, G, L, R, C + 1], which are value | mass.

    Of a lane without a visible position the peak is LOWEST and the sums are 0.
    """

    peaks: Tensor
    sums: Tensor


class PagedAttention:
    """Causal attention of a step's rows over a pool.

    Units:   holds some ten times `tile_bytes` (scores, weights, keys or values) at a time; more only where a
             single position's scores, or one step's keys, exceed it.
    """

    def __init__(
        self, table: ProofTable, *, kv_block: int, num_lanes: int, tile_bytes: int = TILE_BYTES
    ) -> None:
        self._table = table
        self._kv_block = kv_block
        self._num_lanes = num_lanes
        self._tile_bytes = tile_bytes

    def __call__(
        self,
        q_THC: Tensor,
        view: KvView,
        *,
        softmax_scale: float,
        window: int | None,
        is_chunked: bool,
        sinks_H: Tensor | None,
        value_width: int | None,
    ) -> Tensor:
        """[T, H, value width] float32."""
        value_pool = view.key_pool if view.value_pool is None else view.value_pool
        geometry = Geometry(
            num_heads=q_THC.shape[1],
            num_groups=view.key_pool.shape[1],
            key_width=q_THC.shape[2],
            value_width=value_width or row_width(value_pool),
            kv_block=self._kv_block,
            num_lanes=self._num_lanes,
            window=window,
            is_chunked=is_chunked,
            tile_bytes=self._tile_bytes,
        )
        tiling = self.prove(geometry.key_width, geometry.value_width)
        plan_key = (geometry, tiling)
        tiles = view.places.plans.get(plan_key)
        if tiles is None:
            null_block = view.key_pool.shape[0] - 1
            tiles = view.places.plans[plan_key] = tuple(cut(view.places, geometry, tiling, null_block))
        q_THC = q_THC.float() * softmax_scale
        out_THC = q_THC.new_empty((q_THC.shape[0], geometry.num_heads, geometry.value_width))
        for tile in tiles:
            out_THC[tile.rows_N] = _attend(tile, geometry, q_THC, view.key_pool, value_pool, sinks_H)
        return out_THC

    def prove(self, key_width: int, value_width: int) -> Tiling:
        """The tiling of rows under which scores and weighted sums keep their bits.

        Raises: KernelUnavailable when there is none.
        """
        stride, kv_block = self._kv_block * self._num_lanes, self._kv_block
        scores = self._table.tiling(("scores", key_width, stride), lambda: _score_trial(key_width, stride))
        values = self._table.tiling(("values", value_width), lambda: _value_trial(kv_block, value_width))
        quantum, max_rows = max(scores.quantum, values.quantum), min(scores.max_rows, values.max_rows)
        return Tiling(quantum=quantum, max_rows=max_rows)


def write(view: KvView, key_TGC: Tensor, value_TGC: Tensor | None) -> None:
    """Store a step's keys and values in their slots.

    A block whose first token is written is cleared whole: what a former owner left there is multiplied by
    exact zeros later, and zero times infinity is not zero.
    """
    _write(view.key_pool, view.places, key_TGC)
    if view.value_pool is not None:
        assert value_TGC is not None, "a pool with values needs values"
        _write(view.value_pool, view.places, value_TGC)


def _write(pool: Tensor, places: KvPlaces, new_TGC: Tensor) -> None:
    num_groups, kv_block, row_size = pool.shape[1:]
    if places.fresh_blocks.numel():
        pool.index_fill_(0, places.fresh_blocks, 0)
    index_N = places.plans.get(num_groups)
    if index_N is None:
        block_T1, offset_T1 = (places.slot_T // kv_block)[:, None], (places.slot_T % kv_block)[:, None]
        index_N = ((block_T1 * num_groups + torch.arange(num_groups)) * kv_block + offset_T1).view(-1)
        places.plans[num_groups] = index_N
    pool.view(-1, row_size).index_copy_(0, index_N, pack_rows(new_TGC, pool.dtype).reshape(-1, row_size))


def _attend(
    tile: Tile,
    geometry: Geometry,
    q_THC: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    sinks_H: Tensor | None,
) -> Tensor:
    """[B * P, H, value width] float32 of scaled queries."""
    batch, positions, groups = tile.num_sequences, tile.num_positions, geometry.num_groups
    q = q_THC.index_select(0, tile.rows_N).view(batch, positions, groups, -1, geometry.key_width)
    q = q.transpose(1, 2).reshape(batch * groups, -1, geometry.key_width)
    scores = _scores(tile, geometry, pad_rows(q, tile.num_rows), key_pool)
    hidden = tile.key_J11L1S > tile.query_1B11R1
    if geometry.window is not None:
        hidden |= tile.key_J11L1S < geometry.oldest(tile.query_1B11R1)
    scores.masked_fill_(hidden, float("-inf"))
    peaks = scores.amax(dim=(0, 5)).clamp_min_(LOWEST).unsqueeze(-1)
    weights = exp(scores.sub_(peaks))
    values = _weighted(tile, geometry, weights, value_pool).view(*peaks.shape[:-1], geometry.value_width)
    parts = Parts(peaks, torch.cat((values, _mass(weights, tile.first_step)), dim=-1))
    while parts.peaks.shape[2] > 1:
        parts = merge(parts)
    if sinks_H is not None:
        parts = merge(_with_sink(tile, geometry, sinks_H, parts))
    sums = parts.sums[:, :, 0, : positions * geometry.heads_per_group]
    out = (sums[..., :-1] / sums[..., -1:]).view(
        batch, groups, positions, geometry.heads_per_group, geometry.value_width
    )
    return out.transpose(1, 2).reshape(batch * positions, geometry.num_heads, geometry.value_width)


def _scores(tile: Tile, geometry: Geometry, q: Tensor, key_pool: Tensor) -> Tensor:
    """Scores [J, B, G, L, R, positions of a block] of q [B * G, R, C]."""
    lanes, kv_block = geometry.num_lanes, geometry.kv_block
    batch, groups, rows = tile.num_sequences, geometry.num_groups, tile.num_rows
    scores = q.new_empty((tile.num_steps, batch, groups, lanes, rows, kv_block))
    pool = key_pool.view(-1, kv_block, key_pool.shape[3])
    for low, high in _chunks(tile, geometry, geometry.key_width):
        index = tile.key_index[:, :, low * lanes : high * lanes].reshape(-1)
        keys = unpack_rows(pool.index_select(0, index)).view(batch * groups, -1, geometry.key_width)
        part = torch.bmm(q, keys.transpose(1, 2)).view(batch, groups, rows, high - low, lanes, kv_block)
        scores[low:high] = part.permute(3, 0, 1, 4, 2, 5)
    return scores


def _weighted(tile: Tile, geometry: Geometry, weights: Tensor, value_pool: Tensor) -> Tensor:
    """Each lane's sum of weights times values, block after block: [B * G * L, R, value width]."""
    kv_block, width = geometry.kv_block, geometry.value_width
    weights = weights.view(tile.num_steps, -1, tile.num_rows, kv_block)
    total = weights.new_zeros((weights.shape[1], tile.num_rows, width))
    pool = value_pool.view(-1, kv_block, value_pool.shape[3])
    for low, high in _chunks(tile, geometry, row_width(value_pool)):
        values = unpack_rows(pool.index_select(0, tile.value_index[low:high].view(-1)))[..., :width]
        values = values.view(high - low, -1, kv_block, width)
        for j in range(low, high):
            total.baddbmm_(weights[j], values[j - low])
    return total


def _chunks(tile: Tile, geometry: Geometry, width: int) -> Iterator[tuple[int, int]]:
    """Ranges of steps whose widened keys or values stay within tile_bytes and MAX_KEYS."""
    step_bytes = tile.num_sequences * geometry.num_groups * geometry.stride * width * 4
    count = min(geometry.tile_bytes // step_bytes, MAX_KEYS // geometry.stride) or 1
    for low in range(0, tile.num_steps, count):
        yield low, min(low + count, tile.num_steps)


def _mass(weights: Tensor, first_step: int) -> Tensor:
    """Sum of weights [J, .., S] over S and J as [.., 1].

    Steps are paired by their absolute number, so that zero steps before or behind change nothing.
    """
    while weights.shape[-1] > 1:
        half = weights.shape[-1] // 2
        weights = weights[..., :half] + weights[..., half:]
    while weights.shape[0] > 1:
        odd = first_step % 2
        even = odd + (weights.shape[0] - odd) // 2 * 2
        pairs = weights[odd:even:2] + weights[odd + 1 : even : 2]
        is_uneven = odd or even < weights.shape[0]
        weights = torch.cat((weights[:odd], pairs, weights[even:])) if is_uneven else pairs
        first_step //= 2
    return weights[0]


def _with_sink(tile: Tile, geometry: Geometry, sinks_H: Tensor, parts: Parts) -> Parts:
    """Beside the one lane left, a logit per head that takes part in the softmax and has no value."""
    batch, groups, positions = tile.num_sequences, geometry.num_groups, tile.num_positions
    peaks = sinks_H.float().view(1, groups, 1, 1, -1).expand(batch, groups, 1, positions, -1)
    peaks = pad_rows(peaks.reshape(batch, groups, 1, -1, 1), tile.num_rows)
    sums = torch.zeros_like(parts.sums)
    sums[..., -1] = 1.0
    return Parts(torch.cat((parts.peaks, peaks), dim=2), torch.cat((parts.sums, sums), dim=2))


def merge(parts: Parts) -> Parts:
    """Lanes i and i + L / 2 as one softmax over the positions of both; of an absent lane nothing remains."""
    batch, groups, lanes, rows, _ = parts.peaks.shape
    pairs = parts.peaks.view(batch, groups, 2, lanes // 2, rows, 1)
    peaks = torch.maximum(pairs[:, :, 0], pairs[:, :, 1])
    weights = exp(pairs - peaks.unsqueeze(2))
    sums = parts.sums.view(batch, groups, 2, lanes // 2, rows, -1) * weights
    return Parts(peaks, sums[:, :, 0] + sums[:, :, 1])


def _score_trial(width: int, stride: int) -> Trial:
    num_keys = max(MAX_KEYS, stride)
    keys = noise((3, num_keys, width), seed=1)

    def whole(rows: Tensor) -> Tensor:
        return torch.bmm(rows, keys.transpose(1, 2))

    def by_item(rows: Tensor) -> Tensor:
        return torch.cat([torch.bmm(rows[i : i + 1], keys[i : i + 1].transpose(1, 2)) for i in range(3)])

    def by_step(rows: Tensor) -> Tensor:
        steps = [step.contiguous().transpose(1, 2) for step in keys.split(stride, dim=1)]
        return torch.cat([torch.bmm(rows, step) for step in steps], dim=2)

    return Trial(
        name=f"attention scores over {width}",
        calls=(whole, by_item, by_step),
        rows=noise((3, MAX_ROWS, width)),
        flops_per_row=2.0 * 3 * 3 * num_keys * width,
        allow_fixed=False,
    )


def _value_trial(kv_block: int, width: int) -> Trial:
    values = noise((3, kv_block, width), seed=1)

    def whole(rows: Tensor) -> Tensor:
        # The sum so far is a function of the row alone, as it is in use.
        return rows[:, :, :1].repeat(1, 1, width).baddbmm_(rows, values)

    def by_item(rows: Tensor) -> Tensor:
        before = rows[:, :, :1].repeat(1, 1, width)
        return torch.cat([before[i : i + 1].baddbmm_(rows[i : i + 1], values[i : i + 1]) for i in range(3)])

    return Trial(
        name=f"attention values of {width}",
        calls=(whole, by_item),
        rows=noise((3, MAX_ROWS, kv_block)),
        flops_per_row=2.0 * 2 * 3 * kv_block * width,
        allow_fixed=False,
    )
