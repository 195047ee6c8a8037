"""Functions of single numbers, and sums of rows, whose bits do not follow the size or place of the batch.

torch computes transcendental functions in vectors and what is left over one by one, with another formula: the
bits of a number then depend on where in the tensor it stands. Single sums, products, quotients and roots are
rounded correctly everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional as F

from moesaic.spec.model import Activation

VECTOR = 64  # numbers; covers two vectors of every instruction set, the unit of torch's vectorised loops
GRAIN = 32_768  # numbers from which torch gives each thread a share; at::internal::GRAIN_SIZE

Elementwise = Callable[[Tensor], Tensor]


def vectorised(function: Elementwise, x: Tensor) -> Tensor:
    """`function` of every number of `x` as float32, each computed inside a whole vector.

    Cut where no thread's share can end inside a vector:

        | a multiple of GRAIN * threads | a multiple of GRAIN | less than GRAIN, padded |
    """
    flat = x.float().contiguous().view(-1)
    numel = flat.numel()
    if numel % VECTOR:
        flat = F.pad(flat, (0, -numel % VECTOR))
    num_threads = torch.get_num_threads()
    if num_threads == 1 or flat.numel() < GRAIN:
        return function(flat)[:numel].view(x.shape)
    cut, end = GRAIN * num_threads, flat.numel()
    bounds = sorted({0, end // cut * cut, end // GRAIN * GRAIN, end})
    parts = [function(flat[low:high]) for low, high in pairwise(bounds)]
    return torch.cat(parts)[:numel].view(x.shape)


def biased(y_TF: Tensor, bias_F: Tensor | None, seam: torch.dtype) -> Tensor:
    """What a matmul gave, its bias added, in the seam dtype."""
    if bias_F is not None:
        y_TF = y_TF + bias_F
    return y_TF if y_TF.dtype == seam else y_TF.to(seam)


def exp(x: Tensor) -> Tensor:
    """e to the x, float32."""
    return vectorised(torch.exp, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x), float32."""
    return vectorised(torch.sigmoid, x)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), float32."""
    return vectorised(torch.tanh, x.float() / cap) * cap


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), float32."""
    return vectorised(F.softplus, x)


def sum_last(x: Tensor) -> Tensor:
    """The sum over the last dim, kept as size 1: halves are added until one number is left."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        total = x[..., :half] + x[..., half : 2 * half]
        if x.shape[-1] % 2:
            total[..., :1] += x[..., -1:]
        x = total
    return x


def softmax_last(logits: Tensor) -> Tensor:
    """Softmax over the last dim, float32."""
    logits = logits.float()
    if logits.numel() == 0:
        return logits
    weights = exp(logits - logits.amax(dim=-1, keepdim=True))
    return weights / sum_last(weights)


def swiglu_clamped(gate: Tensor, up: Tensor, *, limit: float | None, slope: float) -> Tensor:
    """(up + 1) * gate * sigmoid(slope * gate) in float32, gate below and up within `limit`.

    Source:  gpt-oss, arXiv:2508.10925, sec. 2; its reference code.
    """
    gate, up = gate.float(), up.float()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1.0) * (gate * sigmoid(gate * slope))


def activate(gate: Tensor, up: Tensor | None, kind: Activation) -> Tensor:
    """act(gate) * up in float32, or act(gate) without `up`; `swiglu_clamped` has a function of its own."""
    gate = gate.float()
    up = None if up is None else up.float()
    if kind == "relu":
        acted = gate.relu()
    elif kind == "relu2":
        acted = gate.relu()
        acted = acted * acted
    else:
        acted = vectorised(_TRANSCENDENTAL[kind], gate)
    return acted if up is None else acted * up


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


_TRANSCENDENTAL: dict[str, Elementwise] = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": _gelu_tanh}
