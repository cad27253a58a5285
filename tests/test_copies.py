"""What a user may copy or pickle with DDP he may here, before, during and after a fit."""

from __future__ import annotations

import copy
import io
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim import lr_scheduler
from trainer_helpers import MARKS, Regression, make_trainer

from lightning_scape import (
    ScapeMonitor,
    ScapeStrategy,
    SparseLoCo,
    SparseLoCoMonitor,
    SparseLoCoStrategy,
)

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:A copy or pickle of a ScapeOptimizer")]


def written(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


class Keeps(Regression):
    """Keeps what it has been given, and what it gave."""

    def configure_optimizers(self) -> Any:
        self.mine = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.schedule = lr_scheduler.StepLR(self.mine, 1)
        return [self.mine], [self.schedule]

    def on_train_start(self) -> None:
        self.theirs = self.trainer.optimizers[0]


class Copies(Callback):
    """Knows its Trainer, and copies everything in mid-fit."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.trainer = trainer

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            copy_all(trainer, pl_module, self)


def copy_all(trainer: pl.Trainer, module: Any, callback: Callback) -> None:
    for make in (copy.deepcopy, written):
        copied = make(module)
        # One optimizer, over the copied parameters, which its scheduler steers.
        assert isinstance(copied.theirs, torch.optim.AdamW)
        assert copied.theirs is copied.mine is copied.schedule.optimizer
        assert copied.theirs.param_groups[0]["params"][0] is copied.net[0].weight
        copied.schedule.step()
        assert copied.mine.param_groups[0]["lr"] != module.mine.param_groups[0]["lr"]
        copied.mine.step()
        for each in (trainer, trainer.strategy, callback, trainer.callbacks, trainer.optimizers, module.schedule):
            make(each)
    copy.deepcopy(module.optimizers())


def _fit(rank: int, world_size: int, method: str) -> bool:
    scape = ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=4)
    strategy = scape if method == "scape" else SparseLoCoStrategy(sync_every=3, overlap_steps=1)
    monitors = [ScapeMonitor(1)] if method == "scape" else [SparseLoCoMonitor(), ScapeMonitor(1)]
    module, callback = Keeps(), Copies()
    trainer = make_trainer(strategy, callbacks=[callback, *monitors], enable_progress_bar=True)
    for make in (copy.deepcopy, written):
        make(trainer)
        make(trainer.strategy)
    trainer.fit(module)
    copy_all(trainer, module, callback)
    return bool(torch.isfinite(module.net[0].weight).all())


@pytest.mark.parametrize("method", ["scape", "sparseloco"])
def test_what_ddp_copies_is_copied_before_during_and_after_a_fit(run_ranks: Any, method: str) -> None:
    assert run_ranks(_fit, 2, method) == [True, True]


def test_what_holds_messages_under_way_is_named_where_it_is_copied() -> None:
    module = nn.Linear(2, 2)
    module.loco = SparseLoCo(torch.optim.AdamW(module.parameters()))
    with pytest.raises(TypeError, match="A SparseLoCo cannot be copied or pickled, .* process groups"):
        copy.deepcopy(module)
    with pytest.raises(TypeError, match="A SparseLoCo cannot be copied or pickled"):
        written(module)
    assert type(copy.deepcopy(module.loco.optimizer)) is torch.optim.AdamW
