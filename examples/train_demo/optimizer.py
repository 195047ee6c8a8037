"""Muon for (stacks of) matrices: momentum, then an orthogonal update by a batched Newton-Schulz iteration.

``torch.optim.Muon`` takes 2-D parameters only; here every leading dim is a stack, so one call orthogonalises
all experts of a layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Quintic coefficients and the sqrt(rows / columns) scale. Source: kellerjordan.github.io/posts/muon
_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonalize(matrices: Tensor, num_steps: int = 4) -> Tensor:
    """Return each matrix of [..., rows, columns] with its singular values pushed to about 1."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """Nesterov momentum with orthogonal updates and decoupled weight decay."""

    def __init__(self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter from its gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["velocity"] = torch.zeros_like(p)
                velocity = state["velocity"].lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(velocity, group["momentum"]))
                scale = max(1.0, p.shape[-2] / p.shape[-1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)
