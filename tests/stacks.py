"""Whole models whose layers go as one native call, and the same models half by half."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from checkpoints import family_config, write_checkpoint
from paged import PagedModel
from torch import Tensor

from moesaic.experts.contract import Routing
from moesaic.kernels import native
from moesaic.models.build import LoadedModel, load
from moesaic.models.decoder import Decoder, _OneLayer
from moesaic.models.stack import LayerStack
from moesaic.spec.numerics import DType, Format

VOCAB = 288


def write_model(folder: Path, num_layers: int, dtype: DType = "float32", **changes: Any) -> Path:
    """Every layer with 16 experts and a shared one; the first sees all, the others a window of 24."""
    config = family_config(
        "dots1", num_hidden_layers=num_layers, first_k_dense_replace=0, n_routed_experts=16
    )
    return write_checkpoint(folder, config | changes, dtype=getattr(torch, dtype))


def load_stack(
    folder: Path,
    num_layers: int,
    dtype: DType = "float32",
    format: Format | None = None,
    *,
    num_threads: int = 1,
    level: str | None = None,
    **changes: Any,
) -> LoadedModel:
    """`level` is the best of this processor unless said."""
    write_model(folder, num_layers, dtype, **changes)
    backend = f"native/{level or native.levels()[-1]}"
    return load(folder, num_threads=num_threads, backend=backend, format=format)


def in_halves(model: LoadedModel) -> LoadedModel:
    """The same weights, each half of a layer a call of its own: the oracle."""
    decoder = copy(model.decoder)
    decoder._parts = [_OneLayer(layer_idx=i, layer=layer) for i, layer in enumerate(decoder.layers)]
    return replace(model, decoder=decoder)


def stacks(decoder: Decoder) -> list[LayerStack]:
    return [part for part in decoder._parts if isinstance(part, LayerStack)]


class Told:
    """An observer that keeps copies."""

    def __init__(self) -> None:
        self.routings: list[tuple[int, Tensor, Tensor]] = []

    def __call__(self, moe_idx: int, routing: Routing) -> None:
        self.routings.append((moe_idx, routing.experts_TK.clone(), routing.weights_TK.clone()))


def results(paged: PagedModel, steps: list[list[tuple[str, list[int]]]]) -> list[Tensor]:
    """Logits and routings of some steps, then what the pools hold."""
    found: list[Tensor] = []
    for rows in steps:
        told = Told()
        found += paged.step(*rows, observe=told)
        assert [moe_idx for moe_idx, _, _ in told.routings] == list(range(len(told.routings)))
        found += [one for _, experts_TK, weights_TK in told.routings for one in (experts_TK, weights_TK)]
    pairs = (paged.pool.tensors(layer_idx) for layer_idx in range(len(paged.model.decoder.layers)))
    return [*found, *(one for pair in pairs for one in pair if one is not None)]


def check_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
