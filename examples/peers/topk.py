"""Top-k with error feedback (arXiv 1809.07599): each rank sends its k largest entries, and keeps the others."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from .base import EqualRanks, Gradients, mean_of


class TopK(EqualRanks):
    """Per tensor; AdamW takes the mean of the sparse gradients. An entry travels as fp32 with a position."""

    def __init__(self, model: nn.Module, world_size: int, settings: dict[str, Any], density: float = 0.01) -> None:
        super().__init__(model, world_size, torch.optim.AdamW(model.parameters(), **settings))
        self.density = density
        self.errors = [[torch.zeros_like(p) for p in self.parameters] for _ in range(world_size)]

    def combine(self, gradients: list[Gradients]) -> tuple[Gradients, float]:
        sent = [
            [self._take(error.add_(gradient)) for error, gradient in zip(errors, own, strict=True)]
            for errors, own in zip(self.errors, gradients, strict=True)
        ]
        bits = sum(self._count(p) * (32 + math.ceil(math.log2(p.numel()))) for p in self.parameters if p.numel() > 1)
        # The entries of N ranks are different ones: an all-gather, in which a rank passes on those of N - 1.
        return mean_of(sent), bits / 8 * (self.world_size - 1)

    def _count(self, tensor: Tensor) -> int:
        return max(1, round(self.density * tensor.numel()))

    def _take(self, error: Tensor) -> Tensor:
        largest = error.view(-1).abs().topk(self._count(error)).indices
        sent = torch.zeros_like(error)
        sent.view(-1)[largest] = error.view(-1)[largest]
        error -= sent
        return sent

    def kept(self) -> dict[str, Any]:
        return {"errors": self.errors}
