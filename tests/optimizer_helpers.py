"""What tests of the optimizer share: parameters, gradients that any process can compute, and a ledger."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.comm.collectives import Work
from lightning_scape.scape.state import Step

RunRanks = Callable[..., list[Any]]
SIZES = ((37, 11), (5,), (1,), (300, 7), (3, 3, 3), (641,))
FP32 = {"wire_dtype": "fp32"}


def parameters(sizes: tuple[tuple[int, ...], ...] = SIZES, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]


def gradients(params: list[nn.Parameter], rank: int, step: int, whole: bool = False) -> list[Tensor]:
    """The gradients of a rank at a step: any process can compute any rank's. ``whole``: small whole numbers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if whole:
        return [torch.randint(-8, 9, p.shape, generator=generator).to(p.dtype) for p in params]
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in params]


def set_gradients(params: list[nn.Parameter], rank: int, step: int, whole: bool = False) -> None:
    for parameter, grad in zip(params, gradients(params, rank, step, whole), strict=True):
        parameter.grad = grad


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def gathered(tensor: Tensor) -> list[Tensor]:
    if not dist.is_initialized():
        return [tensor]
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor.contiguous())
    return everyone


def assert_replicas_equal(params: list[nn.Parameter]) -> None:
    for parameter in params:
        for other in gathered(parameter.detach()):
            assert torch.equal(other, parameter)


def kept_by_a_skipped_step(state: Any) -> list[Tensor | None]:
    """All that a state holds between steps, but for masters, which take over parameters; ``missed`` comes last."""
    names = (
        "residual",
        "exp_avg",
        "last_step",
        "step",
        "exp_avg_sq",
        "change_error",
        "missed",
    )
    return [getattr(state, name) for name in names]


@dataclass(kw_only=True, frozen=True)
class DenseFirst(ScapeConfig):
    """Sends everything in its first steps: a default warm-up begins below that."""

    dense_steps: int = 1

    def sent(self, step: int) -> int:
        return self.quota.block_size if step < self.dense_steps else super().sent(step - self.dense_steps)


def dense_first(optimizer: ScapeOptimizer, steps: int = 1) -> None:
    """Makes an optimizer's first steps send everything."""
    masks = optimizer.engine.masks
    masks.config = DenseFirst(**vars(masks.config), dense_steps=steps)


class Ledger:
    """Adds up, entry by entry, what this rank hands to the owners of the shards: to the wire, or to itself."""

    def __init__(self, optimizer: ScapeOptimizer) -> None:
        self.optimizer = optimizer
        self.sent: Tensor | None = None
        self._all_to_all, self._take = optimizer.communicator.all_to_all, optimizer.engine.shard.take
        optimizer.communicator.all_to_all = self.all_to_all  # type: ignore[method-assign]
        optimizer.engine.shard.take = self.take  # type: ignore[method-assign]

    def all_to_all(self, sent: Tensor) -> Work:
        for rows in self.optimizer.engine.shard.others.rows:
            self._enter(rows, sent[rows])
        return self._all_to_all(sent)

    def take(self, step: Step) -> Tensor:
        mine = self._take(step)
        self._enter(self.optimizer.engine.shard.rows, mine)
        return mine

    def _enter(self, rows: slice, values: Tensor) -> None:
        state, mask = self.optimizer.engine.state, self.optimizer.engine.masks.active
        assert state is not None
        if self.sent is None:
            self.sent = torch.zeros(state.residual.shape, dtype=torch.float64)
        once = torch.zeros_like(self.sent[rows])
        ops.scatter_blocks(once, None if mask is None else mask[rows], values.double())
        self.sent[rows] += once

    def totals(self) -> list[Tensor]:
        """Sent plus residual, by parameter."""
        engine = self.optimizer.engine
        assert engine.state is not None
        assert self.sent is not None
        flat, layout = (self.sent + engine.state.residual.double()).view(-1), engine.layout
        return [flat[piece.of_blocks(layout.block_size)] for piece in layout.pieces]
