"""The optimizers of the two stages. Every parameter group carries its own `peak` learning rate.

Targets use AdamW throughout. Drafters have no embedding of their own, so all their matrices take Muon:
momentum, then the nearest orthogonal matrix as the update, which moves every direction of a small matrix
alike and reaches a given loss in fewer steps.
"""

from __future__ import annotations

import torch
from torch import nn

# Quintic Newton-Schulz step that pulls all singular values into about [0.7, 1.2] (K. Jordan's values).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def adamw(model: nn.Module, peak: float, device: str) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": 0.05, "peak": peak},
        {"params": vectors, "weight_decay": 0.0, "peak": peak},
    ]
    return [torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device == "cuda")]


def muon(model: nn.Module, peak: float, device: str) -> list[torch.optim.Optimizer]:
    """Muon at `peak` for matrices, AdamW at a tenth of it for norm weights."""
    vectors = [p for p in model.parameters() if p.ndim < 2]
    small = torch.optim.AdamW(
        [{"params": vectors, "weight_decay": 0.0, "peak": peak / 10}],
        lr=peak / 10,
        betas=(0.9, 0.95),
        fused=device == "cuda",
    )
    return [Muon([p for p in model.parameters() if p.ndim == 2], peak), small]


def orthogonal(updates: torch.Tensor) -> torch.Tensor:
    """[n, rows, columns], rows <= columns -> the nearest matrices whose singular values are about 1."""
    a, b, c = COEFFICIENTS
    x = updates.to(torch.bfloat16 if updates.is_cuda else torch.float32)
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(updates.dtype)


class Muon(torch.optim.Optimizer):
    """Matrices of one shape are stacked and orthogonalised together: few launches for many small layers."""

    def __init__(
        self, matrices: list[nn.Parameter], peak: float, momentum: float = 0.95, decay: float = 0.05
    ) -> None:
        shapes: dict[torch.Size, list[nn.Parameter]] = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        super().__init__(
            [{"params": same, "peak": peak} for same in shapes.values()],
            {"lr": peak, "momentum": momentum, "decay": decay},
        )

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            same = group["params"]
            for p in same:
                self.state[p].setdefault("momentum", torch.zeros_like(p))
            gradients, moments = [p.grad for p in same], [self.state[p]["momentum"] for p in same]
            torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
            updates = torch.stack(torch._foreach_lerp(gradients, moments, group["momentum"]))
            wide = updates.shape[1] <= updates.shape[2]
            updates = orthogonal(updates) if wide else orthogonal(updates.mT).mT
            scale = max(1.0, updates.shape[1] / updates.shape[2]) ** 0.5
            torch._foreach_mul_(same, 1 - group["lr"] * group["decay"])
            torch._foreach_add_(same, list(updates.unbind()), alpha=-group["lr"] * scale)
