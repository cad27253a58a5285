"""Ranks whose data loaders differ in length: an error on all ranks that says so, in place of a wait without an end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from trainer_helpers import MARKS, WIDTH, Regression, make_trainer

from lightning_scape import ScapeConfig, ScapeOptimizer

RunRanks = Callable[..., list[Any]]
pytestmark = MARKS


class Stream(IterableDataset):
    """Samples without a known number."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[list[Tensor]]:
        for number in range(self.samples):
            yield [torch.full((WIDTH,), float(number)), torch.zeros(3)]


class Own(Regression):
    """As many batches as it is told, by rank."""

    def __init__(self, batches: list[int], known: bool) -> None:
        super().__init__()
        self.batches, self.known = batches, known

    def train_dataloader(self) -> DataLoader:
        mine = self.batches[dist.get_rank()]
        if not self.known:
            return DataLoader(Stream(mine), batch_size=1)
        return DataLoader(TensorDataset(torch.ones(mine, WIDTH), torch.zeros(mine, 3)), batch_size=1)

    val_dataloader = train_dataloader


def fit(rank: int, world_size: int, batches: list[int], known: bool, options: dict[str, Any]) -> int:
    trainer = make_trainer(use_distributed_sampler=False, **{"max_epochs": 3, **options})
    trainer.fit(Own(batches, known))
    return int(trainer.global_step)


@pytest.mark.parametrize(
    ("batches", "known", "options", "words"),
    [
        ([6, 5], True, {}, "got 6 on rank 0, 5 on rank 1: the ranks with more would wait"),
        ([5, 8], True, {"max_steps": 6}, "got 5 on rank 0, 8 on rank 1"),
        ([6, 5], False, {}, "got more than 5 on rank 0, 5 on rank 1"),
        ([4, 7], False, {"gradient_clip_val": 1.0}, "got 4 on rank 0, more than 4 on rank 1"),
        ([5, 4, 5], False, {"accumulate_grad_batches": 4}, "more than 4 on rank 0, 4 on rank 1, more than 4 on rank 2"),
        ([6, 5], True, {"accumulate_grad_batches": 3}, "got 6 on rank 0, 5 on rank 1"),  # as many steps, yet
        ([6, 5], False, {"accumulate_grad_batches": 3}, "got more than 5 on rank 0, 5 on rank 1"),
        ([5, 4], False, {"limit_val_batches": 1}, "got more than 4 on rank 0, 4 on rank 1"),
    ],
)
def test_ranks_that_run_out_of_batches_apart_raise_together(
    run_ranks: RunRanks, batches: list[int], known: bool, options: dict[str, Any], words: str
) -> None:
    """The rank with more batches waited for the other until the timeout, 30 minutes by default."""
    errors = run_ranks(fit, len(batches), batches, known, options, expect_errors=True, timeout=60.0)
    for error in errors:
        assert isinstance(error, ValueError), error
        assert "All ranks must have as many training batches in an epoch" in str(error)
        assert words in str(error)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("batches", "options", "steps"),
    [
        ([5, 5], {}, 15),
        ([6, 9], {"max_steps": 6}, 6),  # all stop before any runs out
        ([9, 9], {"accumulate_grad_batches": 2}, 15),
        ([9, 7], {"limit_train_batches": 5}, 15),
    ],
)
def test_ranks_that_end_together_train(
    run_ranks: RunRanks, batches: list[int], known: bool, options: dict[str, Any], steps: int
) -> None:
    assert run_ranks(fit, 2, batches, known, options, timeout=20.0) == [steps, steps]


def fit_with_sampler(rank: int, world_size: int) -> int:
    trainer = make_trainer(max_epochs=2)
    model = Own([7, 7], True)
    trainer.fit(model)
    return int(trainer.global_step)


def test_lightnings_own_sampler_goes_on_making_ends_meet(run_ranks: RunRanks) -> None:
    assert run_ranks(fit_with_sampler, 2, timeout=60.0) == [8, 8]


def announce(rank: int, world_size: int) -> int:
    parameter = torch.nn.Parameter(torch.ones(300))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    for batch in range(1, 4):
        parameter.grad = torch.ones(300)
        optimizer.announce_batch(batch, last=batch == 3 or (batch == 2 and rank == 1 and world_size == 3))
        optimizer.step()
    return optimizer.steps_taken


def test_a_loop_of_ones_own_may_announce_its_batches(run_ranks: RunRanks) -> None:
    assert run_ranks(announce, 2) == [3, 3]
    for error in run_ranks(announce, 3, expect_errors=True, timeout=60.0):
        assert "got more than 2 on rank 0, 2 on rank 1, more than 2 on rank 2" in str(error)
