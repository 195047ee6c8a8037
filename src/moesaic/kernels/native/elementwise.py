"""Native functions of single numbers, and softmax: bits follow the number (the row) alone, on every level."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FUNCTIONS = (
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
    "relu2",
    "swiglu_clamped",
    "sigmoid",
    "softcap",
    "softplus",
)
"""In the order of `Function` in elementwise.hpp."""


def code_of(function: str) -> int:
    """The number that the kernels know a function by."""
    return FUNCTIONS.index(function)


def act(
    kernels: Any,
    function: str,
    gate: Tensor,
    up: Tensor | None = None,
    *,
    out: torch.dtype,
    limit: float | None = None,
    slope: float = 1.0,
) -> Tensor:
    """function(gate) * up, or function(gate) without `up`, float32 inside, rounded to `out` once.

    Shapes:  gate and up alike, of any shape; columns of a wider matrix are read where they are.
    """
    gate_TF, up_TF = _rows(gate), None if up is None else _rows(up)
    assert up is None or up.shape == gate.shape, f"gate is {tuple(gate.shape)}, up {tuple(up.shape)}"
    if up_TF is not None and up_TF.dtype != gate_TF.dtype:
        gate_TF, up_TF = gate_TF.float(), up_TF.float()
    y = torch.empty(gate.shape, dtype=out)
    kernels.act(
        code_of(function),
        gate_TF.data_ptr(),
        0 if up_TF is None else up_TF.data_ptr(),
        y.data_ptr(),
        gate_TF.shape[0],
        gate_TF.shape[1],
        gate_TF.stride(0),
        0 if up_TF is None else up_TF.stride(0),
        math.inf if limit is None else limit,
        slope,
        gate_TF.dtype == torch.bfloat16,
        out == torch.float32,
    )
    return y


def softmax(kernels: Any, logits: Tensor) -> Tensor:
    """Softmax over the last dim, float32."""
    logits = logits.float().contiguous()
    y = torch.empty_like(logits)
    columns = logits.shape[-1]
    kernels.softmax(logits.data_ptr(), y.data_ptr(), logits.numel() // max(columns, 1), columns)
    return y


def _rows(x: Tensor) -> Tensor:
    """`x` as float32 or bfloat16 rows whose numbers are neighbours; a copy only where they are not."""
    if x.dtype != torch.bfloat16:
        x = x.float()
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    x = x.contiguous()
    return x.view(-1, x.shape[-1]) if x.dim() and x.numel() else x.view(1, -1)
