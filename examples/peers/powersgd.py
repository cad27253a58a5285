"""PowerSGD (arXiv 1905.13727): a gradient matrix M travels as P Q^T of a low rank, found by one power iteration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import EqualRanks, Gradients, all_reduce_bytes, mean_of


def power_iteration(matrices: list[Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of the ranks' matrices ``[n, m]``, approximated; and the next ``q [m, r]``.

    Each sum over ranks is an all-reduce of the method.
    """
    p = torch.stack([matrix @ q for matrix in matrices]).mean(dim=0)
    p = torch.linalg.qr(p).Q
    q = torch.stack([matrix.T @ p for matrix in matrices]).mean(dim=0)
    return p @ q.T, q


class PowerSGD(EqualRanks):
    """With error feedback and a warm start; vectors travel whole. AdamW takes the result, as with torch's DDP hook."""

    def __init__(self, model: nn.Module, world_size: int, settings: dict[str, Any], rank: int = 2) -> None:
        super().__init__(model, world_size, torch.optim.AdamW(model.parameters(), **settings))
        generator = torch.Generator().manual_seed(0)
        self.errors = [[torch.zeros_like(p) for p in self.parameters] for _ in range(world_size)]
        widths = [p[0].numel() if p.dim() > 1 else 0 for p in self.parameters]
        drawn = [torch.randn(width, rank, generator=generator) for width in widths]
        self.qs = [q.to(p.device) for q, p in zip(drawn, self.parameters, strict=True)]

    def combine(self, gradients: list[Gradients]) -> tuple[Gradients, float]:
        combined, sent = mean_of(gradients), 0.0
        for index, (parameter, q) in enumerate(zip(self.parameters, self.qs, strict=True)):
            if parameter.dim() < 2:
                sent += parameter.numel()
                continue
            for errors, own in zip(self.errors, gradients, strict=True):
                errors[index] += own[index]
            matrices = [errors[index].view(len(parameter), -1) for errors in self.errors]
            approximation, new = power_iteration(matrices, q)
            q.copy_(new)
            sent += q.numel() + len(parameter) * q.shape[1]
            for matrix in matrices:
                matrix -= approximation
            combined[index] = approximation.view_as(parameter)
        return combined, all_reduce_bytes(sent, self.world_size)

    def kept(self) -> dict[str, Any]:
        return {"errors": self.errors, "qs": self.qs}
