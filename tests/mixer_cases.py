"""Attention layers of transformers beside ours, over the same random weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from kv_cases import BLOCK
from torch import Tensor, nn

from moesaic.kernels.kv_view import KvPlaces, KvRow, KvView
from moesaic.steps import drive


def randomise(module: nn.Module, *, seed: int = 0) -> dict[str, Tensor]:
    """Fill every parameter; norms around 1. Returns them by name."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.data = values + 1.0 if "norm" in name else values
    return dict(module.named_parameters())


def run_whole(module: nn.Module, rotary: nn.Module, x_TD: Tensor, *, window: int | None = None) -> Tensor:
    """The layer of transformers over one sequence, with a causal mask written out."""
    num_tokens = len(x_TD)
    query, key = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    visible = (key <= query) if window is None else (key <= query) & (key > query - window)
    mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None]
    positions = torch.arange(num_tokens)[None]
    with torch.no_grad():
        embeddings = rotary(x_TD[None], positions)
        out, _ = module(hidden_states=x_TD[None], position_embeddings=embeddings, attention_mask=mask)
    return out[0]


class Runner:
    """Our layer over a pool of its own: one sequence, computed in parts."""

    def __init__(self, mixer: Any, pools: tuple[Tensor, Tensor | None]) -> None:
        self.mixer, self.pools = mixer, pools

    def run(self, x_TD: Tensor, sizes: Sequence[int]) -> Tensor:
        """The rows of `x_TD` in steps of the given sizes."""
        for pool in self.pools:
            if pool is not None:
                pool.zero_()
        found, at = [], 0
        for size in sizes:
            blocks = tuple(range(-(-(at + size) // BLOCK)))
            row = KvRow(first_row=0, num_tokens=size, start_idx=at, blocks=blocks)
            view = KvView(key_pool=self.pools[0], value_pool=self.pools[1], places=KvPlaces.of((row,), BLOCK))
            positions_T = torch.arange(at, at + size)
            with torch.inference_mode():
                found += drive([self.mixer.forward(x_TD[at : at + size], positions_T, view)], 1.0)
            at += size
        return torch.cat(found)


def pools_of(
    num_groups: int, *widths: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor | None]:
    """Pools of ten blocks for keys and, with a second width, for values."""
    made = [torch.zeros(11, num_groups, BLOCK, width, dtype=dtype) for width in widths]
    return made[0], made[1] if len(made) > 1 else None
