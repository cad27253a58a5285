"""Ranks whose data loaders differ in length: an error on all ranks that says so, in place of a wait without an end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from trainer_helpers import MARKS, WIDTH, Regression, make_trainer

from lightning_scape import ScapeConfig, ScapeOptimizer, ScapeStrategy, SparseLoCoStrategy
from lightning_scape.checkpoint import saver
from lightning_scape.comm.collectives import Communicator
from lightning_scape.core.epoch_end import EpochEnd

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


@pytest.mark.few(3)
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


@pytest.mark.few(1)
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
    assert run_ranks(fit, 2, batches, known, options, timeout=60.0) == [steps, steps]


def fit_by(rank: int, world_size: int, method: str, batches: list[int], known: bool, options: dict[str, Any]) -> int:
    if method == "sparseloco":
        strategy: Any = SparseLoCoStrategy(sync_every=3)
    else:
        strategy = ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0, local_group_size=2)
    return fit(rank, world_size, batches, known, {**options, "strategy": strategy})


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("method", "batches", "known", "options", "words"),
    [
        ("sparseloco", [6, 5], True, {}, "got 6 on rank 0, 5 on rank 1"),
        ("sparseloco", [6, 5], False, {}, "got more than 5 on rank 0, 5 on rank 1"),
        ("sparseloco", [5, 4], False, {"accumulate_grad_batches": 2}, "got more than 4 on rank 0, 4 on rank 1"),
        ("nodes", [6, 6, 6, 5], True, {}, "6 on rank 2, 5 on rank 3"),
        ("nodes", [6, 5, 6, 5], False, {}, "got more than 5 on rank 0, 5 on rank 1, more than 5 on rank 2, 5 on"),
    ],
)
def test_so_do_the_ranks_of_sparseloco_and_those_of_a_node(
    run_ranks: RunRanks, method: str, batches: list[int], known: bool, options: dict[str, Any], words: str
) -> None:
    """SparseLoCo waited at the next exchange. Ranks of a node waited in FSDP2's messages: their flags never met."""
    errors = run_ranks(fit_by, len(batches), method, batches, known, options, expect_errors=True, timeout=60.0)
    for error in errors:
        assert isinstance(error, ValueError), error
        assert words in str(error)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["sparseloco", "nodes"])
def test_these_too_train_where_all_stop_before_any_runs_out(run_ranks: RunRanks, method: str) -> None:
    batches = [6, 9] if method == "sparseloco" else [6, 9, 7, 8]
    ends = run_ranks(fit_by, len(batches), method, batches, False, {"max_steps": 6}, timeout=60.0)
    assert ends == [6] * len(batches)


def fit_and_save(rank: int, world_size: int, folder: str) -> int:
    seen: list[bool] = []

    def write(path: Path, tensors: Any, rest: bytes, communicator: Communicator, *_: Any) -> None:
        time.sleep(0.02 * rank)
        seen.append(communicator.all_gather_object(rank) == [0, 1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saver, "write_directory", write)
        strategy = ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0, state_dict_type="sharded", async_save=True)
        often = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)
        options = {"accumulate_grad_batches": 3, "callbacks": [often], "enable_checkpointing": True, "max_epochs": 1}
        steps = fit(rank, world_size, [24, 24], False, {**options, "strategy": strategy})
    assert len(seen) >= 8
    assert all(seen)
    return steps


@pytest.mark.few(0)
def test_batches_are_compared_beside_a_write_in_the_background(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Both sent on one group, each from its own thread."""
    assert run_ranks(fit_and_save, 2, str(tmp_path), timeout=60.0) == [8, 8]


class OnDevice:
    """A count that is still on a GPU."""

    device = torch.device("cuda")

    def __init__(self, value: int | None) -> None:
        self.value = value

    def __int__(self) -> int:
        assert self.value is not None, "the host must not wait for the device"
        return self.value


def test_on_a_gpu_a_flag_lasts_until_its_own_step_and_only_announced_steps_are_read() -> None:
    """The count of the step before was read between a flag's being set and being sent, and took the flag away."""
    ranks = Communicator.alone()
    ranks.world_size = 2
    ranks.all_gather_object = lambda value: [value, "more than 7"]  # type: ignore[method-assign]
    end = EpochEnd(ranks)
    end.compare(OnDevice(None))  # type: ignore[arg-type]
    end.announce(6, False)
    end.compare(OnDevice(0))  # type: ignore[arg-type]
    end.announce(7, True)
    assert end.reached
    with pytest.raises(ValueError, match="got 7 on rank 0, more than 7 on rank 1"):
        end.compare(OnDevice(1))  # type: ignore[arg-type]


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
