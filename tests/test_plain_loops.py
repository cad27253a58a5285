"""Loops without Lightning: on groups that have ranks in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer, SparseLoCo

PLAIN = {"density": 1.0, "bits": None, "error_decay": 1.0}


def _net() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(7, 3)


def _scape(net: nn.Module, **options: Any) -> ScapeOptimizer:
    config = ScapeConfig(sparsity=0, wire_dtype="fp32")
    return ScapeOptimizer.from_optimizer(torch.optim.AdamW(net.parameters(), 1e-2), config, **options)


def _backward(net: nn.Module, step: int, rank: int = 0) -> None:
    net(torch.linspace(-1, 1, 7).add(step + 0.1 * rank)).square().sum().backward()


# --------------------------------------------------------------------------------------------------- overlapping groups


def _in_two_groups(rank: int, world_size: int, build: Callable[..., Any]) -> list[Tensor]:
    """Rank 1 trains one model with rank 0 and another with rank 2."""
    ended = []
    for ranks, group in [(ranks, dist.new_group(ranks)) for ranks in ([0, 1], [1, 2])]:
        if rank in ranks:
            net = _net()
            optimizer = build(net, process_group=group)
            for step in range(2):
                _backward(net, step, rank)
                optimizer.step()
                optimizer.zero_grad()
            ended.append(net.weight.detach())
    return ended


def _loco(net: nn.Module, **options: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    SparseLoCo(optimizer, sync_every=1, **PLAIN, **options)
    return optimizer


@pytest.mark.parametrize("build", [_scape, _loco])
def test_groups_may_have_ranks_in_common(run_ranks: Any, build: Callable[..., Any]) -> None:
    (first,), (with_first, with_last), (last,) = run_ranks(_in_two_groups, 3, build)
    assert torch.equal(first, with_first)
    assert torch.equal(last, with_last)
    assert not torch.equal(first, last)
