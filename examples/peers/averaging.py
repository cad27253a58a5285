"""Local SGD (arXiv 1805.09767), any optimizer inside: parameters are averaged every H steps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import PartingRanks, all_reduce_bytes, mean_of


class Averaging(PartingRanks):
    """AdamW inside; its moments stay each rank's own."""

    def __init__(self, model: nn.Module, world_size: int, settings: dict[str, Any], sync_every: int = 15) -> None:
        super().__init__(model, world_size, lambda own: torch.optim.AdamW(own, **settings), sync_every)

    @torch.no_grad()
    def exchange(self) -> float:
        means = mean_of([[p.detach() for p in replica] for replica in self.replicas])
        for replica in self.replicas:
            for parameter, mean in zip(replica, means, strict=True):
                parameter.copy_(mean)
        return all_reduce_bytes(sum(mean.numel() for mean in means), self.world_size)
