"""DeMo (arXiv 2411.19870): ranks exchange the largest cosine components of their momentum, chunk by chunk."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .base import EqualRanks, Gradients


@cache
def cosines(length: int) -> Tensor:
    """``[length, length]``: the orthonormal discrete cosine transform (DCT-II)."""
    place = torch.arange(length, dtype=torch.float64)
    table = torch.cos(math.pi / length * (place + 0.5) * place.unsqueeze(1)) * math.sqrt(2 / length)
    table[0] /= math.sqrt(2)
    return table.float()


def transform(tensor: Tensor, chunk: int) -> Tensor:
    """Chunks of ``chunk x chunk`` (vectors: ``chunk``), transformed, ``[chunks, entries]``; filled up with zeros."""
    rows = tensor.view(len(tensor), -1) if tensor.dim() > 1 else tensor.view(1, -1)
    high = min(chunk, len(rows))
    wide = min(chunk, rows.shape[1])
    filled = pad(rows, (0, -rows.shape[1] % wide, 0, -len(rows) % high))
    blocks = filled.view(len(filled) // high, high, -1, wide).transpose(1, 2)
    return (cosines(high) @ blocks @ cosines(wide).T).reshape(-1, high * wide)


def inverse(chunks: Tensor, like: Tensor, chunk: int) -> Tensor:
    """The reverse of :func:`transform`."""
    n, m = (len(like), like[0].numel()) if like.dim() > 1 else (1, like.numel())
    high, wide = min(chunk, n), min(chunk, m)
    blocks = chunks.view(-(-n // high), -(-m // wide), high, wide)
    rows = (cosines(high).T @ blocks @ cosines(wide)).transpose(1, 2).reshape(-1, blocks.shape[1] * wide)
    return rows[:n, :m].reshape(like.shape)


class DeMo(EqualRanks):
    """The k largest coefficients of each chunk leave the rank's momentum; all step by the sign of their mean.

    The mean of a coefficient is over the ranks that have sent it, as in the authors' code.
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int,
        settings: dict[str, Any],
        decay: float = 0.999,
        chunk: int = 64,
        top: int = 32,
    ) -> None:
        super().__init__(model, world_size, torch.optim.SGD(model.parameters(), settings["lr"]))
        self.weight_decay, self.decay, self.chunk, self.top = settings["weight_decay"], decay, chunk, top
        self.momenta = [[torch.zeros_like(p) for p in self.parameters] for _ in range(world_size)]

    @torch.no_grad()
    def combine(self, gradients: list[Gradients]) -> tuple[Gradients, float]:
        bits, signs = 0.0, []
        for index, parameter in enumerate(self.parameters):
            total, senders = None, None
            for momenta, own in zip(self.momenta, gradients, strict=True):
                momentum = momenta[index].mul_(self.decay).add_(own[index])
                chunks = transform(momentum, self.chunk)
                places = chunks.abs().topk(min(self.top, chunks.shape[1]), dim=1).indices
                sent = torch.zeros_like(chunks).scatter_(1, places, chunks.gather(1, places))
                momentum -= inverse(sent, momentum, self.chunk)
                marks = torch.zeros_like(chunks).scatter_(1, places, 1.0)
                total, senders = (sent, marks) if total is None else (total + sent, senders + marks)
            bits += places.numel() * (32 + max(1, math.ceil(math.log2(chunks.shape[1]))))
            signs.append(inverse(total / senders.clamp(min=1), parameter, self.chunk).sign())
        lr = self.optimizer.param_groups[0]["lr"]
        for parameter in self.parameters:
            parameter.mul_(1 - lr * self.weight_decay)
        return signs, bits / 8 * (self.world_size - 1)

    def kept(self) -> dict[str, Any]:
        return {"momenta": self.momenta}
