"""signSGD with majority vote, with momentum (arXiv 1810.05291, Signum): one bit an entry, to a server and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .base import EqualRanks, Gradients, all_reduce_bytes


class SignSGD(EqualRanks):
    """Each rank sends the signs of its first moment; all step by the sign that most of them sent.

    One bit holds no tie. Where as many ranks say + as say -, a coin decides that all ranks know.
    """

    def __init__(self, model: nn.Module, world_size: int, settings: dict[str, Any], momentum: float = 0.9) -> None:
        # With the sign for a gradient SGD's step is the method's. Decoupled weight decay, as AdamW's.
        super().__init__(model, world_size, torch.optim.SGD(model.parameters(), settings["lr"]))
        self.weight_decay, self.momentum = settings["weight_decay"], momentum
        self.moments = [[torch.zeros_like(p) for p in self.parameters] for _ in range(world_size)]
        self.steps = torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def combine(self, gradients: list[Gradients]) -> tuple[Gradients, float]:
        for moments, own in zip(self.moments, gradients, strict=True):
            for moment, gradient in zip(moments, own, strict=True):
                moment.lerp_(gradient, 1 - self.momentum)
        self.steps += 1
        coins = torch.Generator().manual_seed(int(self.steps))
        votes = [vote(torch.stack(moments), coins) for moments in zip(*self.moments, strict=True)]
        lr = self.optimizer.param_groups[0]["lr"]
        for parameter in self.parameters:
            parameter.mul_(1 - lr * self.weight_decay)
        return votes, all_reduce_bytes(sum(vote.numel() for vote in votes), self.world_size, 1 / 8)

    def kept(self) -> dict[str, Any]:
        return {"moments": self.moments, "steps": self.steps}


def vote(moments: Tensor, coins: torch.Generator) -> Tensor:
    """+1 or -1 for each entry, from the first moments of all ranks ``[N, ...]``."""
    total = signs(moments, coins).sum(dim=0)
    return signs(total, coins)


def signs(values: Tensor, coins: torch.Generator) -> Tensor:
    """+1 or -1, for 0 by chance."""
    coin = torch.randint(0, 2, values.shape, generator=coins).to(values) * 2 - 1
    return torch.where(values == 0, coin, values.sign())
