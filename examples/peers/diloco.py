"""DiLoCo (arXiv 2311.08105): H steps of AdamW, then a step of Nesterov's on the averaged pseudo-gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .base import PartingRanks, all_reduce_bytes


class DiLoCo(PartingRanks):
    """Outer SGD of rate 0.7 and momentum 0.9, as the paper has it."""

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        settings: dict[str, Any],
        sync_every: int = 15,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
    ) -> None:
        super().__init__(model, world_size, lambda own: torch.optim.AdamW(own, **settings), sync_every)
        self.start = [nn.Parameter(p.detach().clone()) for p in self.parameters]
        self.outer = torch.optim.SGD(self.start, outer_lr, momentum=outer_momentum, nesterov=True)

    @torch.no_grad()
    def exchange(self) -> float:
        for index, start in enumerate(self.start):
            start.grad = torch.stack([start - replica[index] for replica in self.replicas]).mean(dim=0)
        self.outer.step()
        for replica in self.replicas:
            for parameter, start in zip(replica, self.start, strict=True):
                parameter.copy_(start)
        return all_reduce_bytes(sum(start.numel() for start in self.start), self.world_size)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "start": [p.detach() for p in self.start], "outer": self.outer.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        with torch.no_grad():
            for start, saved in zip(self.start, state_dict["start"], strict=True):
                start.copy_(saved)
        self.outer.load_state_dict(state_dict["outer"])
