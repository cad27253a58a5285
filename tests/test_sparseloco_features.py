"""What users of the Lightning Trainer expect to go on working, each on two ranks with SparseLoCoStrategy.

The table of docs/sparseloco.md names these tests. Clipping, accumulation, precisions, schedulers, resuming and several
optimizers stand in test_sparseloco_hosts.py, nodes of several ranks in test_sparseloco_nodes_hosts.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)
from lightning.pytorch.tuner import Tuner
from test_features import History, Synced
from torch import Tensor
from trainer_helpers import BATCHES, MARKS, Regression, make_trainer, weights

from lightning_scape import SparseLoCo, SparseLoCoStrategy

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:You requested to overfit")]


def strategy() -> SparseLoCoStrategy:
    return SparseLoCoStrategy(sync_every=4, density=1 / 4)


def steps_of(trainer: Any) -> int:
    (loco,) = (SparseLoCo.of(optimizer) for optimizer in trainer.optimizers)
    assert loco is not None
    return loco.progress.steps


def _top_k(rank: int, world_size: int, folder: str) -> tuple[list[float], list[str], Tensor]:
    history, saved = History(), ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    options: dict[str, Any] = {"callbacks": [history, saved], "enable_checkpointing": True, "limit_val_batches": 1.0}
    make_trainer(strategy(), max_epochs=3, **options).fit(Synced(lr=5e-2))
    best = Synced.load_from_checkpoint(saved.best_model_path)
    return history.losses, sorted(Path(path).name for path in saved.best_k_models), weights(best)


def test_model_checkpoint_keeps_the_best_k(run_ranks: Any, tmp_path: Path) -> None:
    (losses, kept, best), (other_losses, other_kept, other) = run_ranks(_top_k, 2, str(tmp_path))
    assert losses == other_losses  # the mean over ranks, which differ inside a window
    order = sorted(range(3), key=lambda epoch: losses[epoch])
    assert kept == other_kept == sorted(f"epoch={epoch}.ckpt" for epoch in order[:2])
    assert torch.equal(best, other)


def _callbacks(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    stopping = make_trainer(
        strategy(), max_epochs=9, callbacks=[EarlyStopping("val_loss", mode="max", patience=1)], limit_val_batches=1.0
    )
    stopping.fit(Synced())
    found["stopped"] = steps_of(stopping)
    accumulating = make_trainer(strategy(), max_epochs=2, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])
    accumulating.fit(Regression())
    found["accumulated"] = steps_of(accumulating)
    history = History()
    overfitting = make_trainer(strategy(), max_epochs=30, overfit_batches=1, limit_val_batches=1.0, callbacks=[history])
    overfitting.fit(Synced(lr=5e-2))
    found["overfit"] = history.losses[-1] / history.losses[0]
    quick = make_trainer(strategy(), fast_dev_run=2, default_root_dir=folder, max_epochs=None)
    quick.fit(Synced())
    found["quick"] = steps_of(quick), [path.name for path in Path(folder).rglob("*.ckpt")]
    return found


def test_callbacks_and_debugging_aids_work(run_ranks: Any, tmp_path: Path) -> None:
    for found in run_ranks(_callbacks, 2, str(tmp_path)):
        assert found["stopped"] == 2 * BATCHES
        assert found["accumulated"] == BATCHES + BATCHES // 3
        assert found["overfit"] < 0.7
        assert found["quick"] == (2, [])


def _find_rate(rank: int, world_size: int, folder: str) -> tuple[int, float, Tensor, Tensor]:
    # One folder for all ranks: the finder keeps the model there while it looks.
    trainer, model = (
        make_trainer(strategy(), max_epochs=20, default_root_dir=folder, enable_checkpointing=True),
        Regression(),
    )
    before = weights(model)
    finder = Tuner(trainer).lr_find(model, max_lr=1e-2, num_training=30, update_attr=True, early_stop_threshold=None)
    assert finder is not None
    return len(finder.results["lr"]), model.lr, before, weights(model)


def test_the_learning_rate_finder_suggests_one_rate_and_puts_the_weights_back(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_find_rate, 2, str(tmp_path))
    assert first[:2] == second[:2]
    assert first[0] == 30
    for _, _, _, after in (first, second):
        assert torch.equal(after, first[2])  # rank 0's, with which all begin
