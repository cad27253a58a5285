"""The word of all ranks before each batch: what it brings to all after the same batch; nothing waits for it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from trainer_helpers import BATCHES, MARKS, Regression, make_trainer

from lightning_scape import ScapeStrategy, SparseLoCoStrategy
from lightning_scape.comm.collectives import group_beside
from lightning_scape.hosts.words import Words

pytestmark = MARKS
LAG = 8


def speak(rank: int, world_size: int) -> tuple[list[bool], float]:
    """Rank 1 comes to its first batch late, and is told to stop in its second one."""
    words, heard = Words(group_beside(None, "words"), LAG), []
    dist.barrier()
    began = time.monotonic()
    time.sleep(rank)
    for batch in range(20):
        words.begin_batch()
        if batch == LAG - 2:
            seconds = time.monotonic() - began - rank
        words.stop |= (rank, batch) == (1, 1)
        words.end_batch(stepped=True)
        heard.append(words.stop_heard)
    words.hear()
    return heard, seconds


def test_a_word_is_heard_after_the_same_batch_and_a_rank_goes_ahead_as_long(run_ranks: Any) -> None:
    (first, waited), (second, _) = run_ranks(speak, 2)
    assert first == second == [batch >= LAG + 1 for batch in range(20)]
    assert waited < 0.5


class Slow:
    """A message that is longer on its way."""

    waited: ClassVar[list[float]] = []

    def __init__(self, work: Any) -> None:
        self.work, self.there = work, time.monotonic() + 0.06

    def is_completed(self) -> bool:
        return time.monotonic() >= self.there and bool(self.work.is_completed())

    def wait(self, *_: Any) -> None:
        self.waited.append(max(0.0, self.there - time.monotonic()))
        time.sleep(self.waited[-1])
        self.work.wait()


def speak_slowly(rank: int, world_size: int) -> tuple[list[bool], float]:
    """Batches of 5 ms that no step ends; rank 1 is told to stop in the middle."""
    words, heard, send = Words(group_beside(None, "words"), 1), [], dist.all_reduce
    dist.all_reduce = lambda *args, **options: Slow(send(*args, **options))
    for batch in range(200):
        words.begin_batch()
        words.stop |= (rank, batch) == (1, 150)
        time.sleep(0.005)
        words.end_batch(stepped=False)
        heard.append(words.stop_heard)
    dist.all_reduce = send
    return heard, sum(Slow.waited[len(Slow.waited) // 2 :])


def test_ranks_that_must_wait_for_words_say_fewer_and_wait_no_more(run_ranks: Any) -> None:
    (first, waited), (second, also) = run_ranks(speak_slowly, 2)
    assert first == second
    assert True in first[151:]
    assert max(waited, also) < 0.1


class Told(Regression):
    """Some ranks get SIGTERM in the middle of one batch, of the training or of the validation."""

    def __init__(self, ranks: list[int], training: int | None = None, validation: int | None = None) -> None:
        super().__init__()
        self.ranks, self.at = ranks, {"train": training, "validate": validation}
        self.seen = {"train": 0, "validate": 0}

    def count(self, stage: str, batch_idx: int) -> None:
        self.seen[stage] += 1
        if batch_idx == self.at[stage] and self.global_rank in self.ranks:
            os.kill(os.getpid(), signal.SIGTERM)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.count("train", batch_idx)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.count("validate", batch_idx)
        time.sleep(0.02 + 0.1 * self.global_rank)  # a rank that went its own way would be at the end by then
        self.log("constant", 1.0, sync_dist=True)


def end_by_signal(rank: int, world_size: int, method: str, folder: str, told: dict[str, Any], options: Any) -> Any:
    module = Told(**told)
    strategy = ScapeStrategy(sparsity=0.5) if method == "scape" else SparseLoCoStrategy(sync_every=3)
    saves = ModelCheckpoint(folder, "stopped", save_on_exception=True)
    options = {"max_epochs": 50, "limit_val_batches": 1.0, "enable_checkpointing": True, **options}
    trainer = make_trainer(strategy, callbacks=[saves], **options)
    with pytest.raises(SIGTERMException):
        trainer.fit(module)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    saved = torch.load(Path(folder, "stopped.ckpt"), weights_only=True)["global_step"]
    return trainer.global_step, saved, module.seen


@pytest.mark.parametrize("method", ["scape", "sparseloco"])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_sigterm_in_a_validation_ends_it_on_all_ranks_after_the_same_batch(
    run_ranks: Any, tmp_path: Path, method: str, ranks: list[int]
) -> None:
    told = {"ranks": ranks, "validation": 1}
    first, second = run_ranks(end_by_signal, 2, method, str(tmp_path), told, {})
    step, saved, seen = first
    assert first == second
    assert step == saved == seen["train"] == BATCHES
    assert 2 <= seen["validate"] < BATCHES


@pytest.mark.parametrize("method", ["scape", "sparseloco"])
@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_sigterm_in_the_last_batch_of_a_fit_ends_it_by_lightnings_exception(
    run_ranks: Any, tmp_path: Path, method: str, ranks: list[int]
) -> None:
    told, options = {"ranks": ranks, "training": BATCHES - 1}, {"limit_val_batches": 0, "max_epochs": 1}
    for step, saved, seen in run_ranks(end_by_signal, 2, method, str(tmp_path), told, options):
        assert step == saved == seen["train"] == BATCHES


def test_sigterm_ends_a_step_of_many_batches_after_the_next_one(run_ranks: Any, tmp_path: Path) -> None:
    told, options = {"ranks": [1], "training": 2}, {"accumulate_grad_batches": 3, "limit_val_batches": 0}
    for step, saved, seen in run_ranks(end_by_signal, 2, "scape", str(tmp_path), told, options):
        assert (step, saved, seen["train"]) == (1, 1, 5)
