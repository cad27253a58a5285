"""Messages that are on their way when their optimizer goes: no later one on the same group meets them."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_sparseloco import SPARSE, flat, gradient, model

from lightning_scape import ScapeConfig, ScapeOptimizer, SparseLoCo
from lightning_scape.comm import under_way
from lightning_scape.comm.work import Work


def _replaced(rank: int, world_size: int, votes: int) -> None:
    """Ten optimizers over the same groups, each dropped with its mask under way; sizes change, and so would masks."""
    masks = dist.new_group()
    for turn in range(10):
        weight = torch.nn.Parameter(torch.full(([500, 3000][turn % 2],), float(turn)))
        config = ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0, mask_votes=votes, check_replicas_every=1)
        optimizer = ScapeOptimizer.from_optimizer(torch.optim.AdamW([weight], 1e-2), config, mask_group=masks)
        for step in range(2):
            weight.grad = torch.randn(len(weight), generator=torch.Generator().manual_seed(10 * step + rank))
            optimizer.step()
        assert optimizer.engine.masks.pending is not None
    del optimizer
    gc.collect()
    under_way.settle()


@pytest.mark.parametrize("votes", [0, 2])
def test_a_new_optimizer_never_meets_the_mask_of_the_one_before(run_ranks: Any, votes: int) -> None:
    run_ranks(_replaced, 2, votes)


def _exchanges_replaced(rank: int, world_size: int) -> list[torch.Tensor]:
    group, ends = dist.new_group(), []
    for turn in range(6):
        net = model()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        loco = SparseLoCo(optimizer, **SPARSE, overlap_steps=2, exchange_group=group)
        for step in range(3):
            gradient(net, rank, step)
            optimizer.step()
        assert loco.progress.under_way
        if turn % 2:
            loco.close()
        del optimizer, loco
        gc.collect()
    again = SparseLoCo(torch.optim.AdamW(net.parameters(), 1e-2), **SPARSE, overlap_steps=2, exchange_group=group)
    for parameter in net.parameters():
        parameter.data.zero_()
    gradient(net, rank, 9)
    again.optimizer.step()
    again.sync()
    ends.append(flat(net))
    return ends


def test_an_exchange_beside_the_steps_ends_before_the_next_wrapper_speaks(run_ranks: Any) -> None:
    """Both spoke on one group at once: gloo aborted the process."""
    first, second = run_ranks(_exchanges_replaced, 2, timeout=30)
    assert torch.equal(first[0], second[0])


def test_a_message_that_failed_says_so_to_its_owner_though_another_one_has_waited_first(run_ranks: Any) -> None:
    run_ranks(_failed, 1)


def _failed(rank: int, world_size: int) -> None:
    def fail() -> None:
        raise ValueError("lost")

    work = Work(torch.zeros(1), handle=SimpleNamespace(wait=fail))
    under_way.note(None, work)
    under_way.settle(None)
    assert work.done()
    for _ in range(2):
        with pytest.raises(ValueError, match="lost"):
            work.wait()
