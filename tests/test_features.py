"""What users of the Lightning Trainer expect to go on working, each on two ranks with ScapeStrategy.

Clipping, accumulation, precisions and schedulers stand in test_strategy.py, resuming and the LR finder in
test_strategy_life.py.
"""

from __future__ import annotations

import copy
import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainer_helpers import BATCHES, Regression, loader, make_trainer, ours, weights

from lightning_scape import ScapeMonitor, ScapeOptimizer, ScapeStrategy
from lightning_scape.scape.stats import PHASES

pytestmark = [
    pytest.mark.filterwarnings("ignore:No seed found"),
]


class Synced(Regression):
    """Logs the mean over ranks."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


class History(Callback):
    """Weights at the start of each epoch and after each step; the validation loss of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.losses: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append(weights(pl_module))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.steps.append(weights(pl_module))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


# ------------------------------------------------------------------------------------------------ checkpoints, stopping


def _top_k(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    history, saved = History(), ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    model = Synced(lr=5e-2)
    options = {"callbacks": [history, saved], "enable_checkpointing": True, "limit_val_batches": 1.0}
    make_trainer(max_epochs=4, **options).fit(model)
    best = Synced.load_from_checkpoint(saved.best_model_path)
    return {
        "losses": history.losses,
        "kept": sorted(Path(path).name for path in saved.best_k_models),
        "best": weights(best),
        "ends": [*history.epochs[1:], weights(model)],
    }


def test_model_checkpoint_keeps_the_best_k_and_the_last(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_top_k, 2, str(tmp_path))
    assert first["losses"] == second["losses"]  # one figure for all ranks
    order = sorted(range(4), key=lambda epoch: first["losses"][epoch])
    assert first["kept"] == sorted(f"epoch={epoch}.ckpt" for epoch in order[:2])
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == sorted([*first["kept"], "last.ckpt"])
    assert torch.equal(first["best"], first["ends"][order[0]])
    assert torch.equal(first["best"], second["best"])


def _stop_early(rank: int, world_size: int) -> tuple[int, int]:
    # The loss falls, so the larger-is-better rule sees no improvement after the first epoch.
    stopping = EarlyStopping("val_loss", mode="max", patience=1)
    trainer = make_trainer(max_epochs=9, callbacks=[stopping], limit_val_batches=1.0)
    trainer.fit(Synced())
    return trainer.current_epoch, ours(trainer).stats.step


def test_early_stopping_stops_all_ranks_at_the_same_step(run_ranks: Any) -> None:
    assert run_ranks(_stop_early, 2) == [(2, 2 * BATCHES)] * 2


# ------------------------------------------------------------------------------------------------ averaged weights


def _average(rank: int, world_size: int, kind: str, precision: str) -> dict[str, Any]:
    plain, averaged = History(), History()
    options = {"max_epochs": 4, "limit_val_batches": 1, "precision": precision}
    model = Synced(lr=2e-2)
    if kind == "swa":  # changes the learning rates, so it is its own reference
        make_trainer(callbacks=[plain, StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)], **options).fit(
            model
        )
        return {"end": weights(model), "steps": plain.steps, "epochs": plain.epochs}
    make_trainer(callbacks=[plain], **options).fit(Synced(lr=2e-2))
    make_trainer(callbacks=[averaged, EMAWeightAveraging(decay=0.7)], **options).fit(model)
    return {"end": weights(model), "steps": plain.steps, "with": averaged.steps}


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_ema_averages_the_weights_and_leaves_the_training_alone(run_ranks: Any, precision: str) -> None:
    first, second = run_ranks(_average, 2, "ema", precision)
    for alone, averaged in zip(first["steps"], first["with"], strict=True):
        assert torch.equal(alone, averaged)  # also in bf16: swapping weights for validation touches no master
    average = first["steps"][0]
    for step in first["steps"][1:]:
        average = 0.7 * average + 0.3 * step
    close = {"rtol": 1e-5, "atol": 1e-6} if precision == "32-true" else {"rtol": 5e-2, "atol": 2e-2}
    torch.testing.assert_close(first["end"], average, **close)
    assert torch.equal(first["end"], second["end"])
    assert not torch.equal(first["end"], first["steps"][-1])


@pytest.mark.few(0)
def test_swa_ends_with_the_mean_of_the_weights_at_its_epochs(run_ranks: Any) -> None:
    first, second = run_ranks(_average, 2, "swa", "32-true")
    torch.testing.assert_close(first["end"], torch.stack(first["epochs"][1:]).mean(0), rtol=1e-5, atol=1e-6)
    assert torch.equal(first["end"], second["end"])
    assert not torch.equal(first["end"], first["steps"][-1])


def _overwrite(rank: int, world_size: int, precision: str, sparsity: float) -> tuple[float, float]:
    """Weights overwritten behind the strategy's back."""

    class Overwrite(Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 3:
                with torch.no_grad():
                    for parameter in pl_module.parameters():
                        parameter.fill_(5.0)

    model = Regression(lr=1e-3)
    strategy = ScapeStrategy(sparsity=sparsity, sparsity_warmup_steps=0)
    make_trainer(strategy, precision=precision, callbacks=[Overwrite()]).fit(model)
    return float(weights(model).min()), float(weights(model).max())


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("precision", "sparsity"), [("bf16-true", 0.0), ("bf16-true", 0.9), ("16-true", 0.9), ("32-true", 0.9)]
)
def test_weights_overwritten_by_a_callback_are_trained_on_from(run_ranks: Any, precision: str, sparsity: float) -> None:
    first, second = run_ranks(_overwrite, 2, precision, sparsity)
    assert first == second
    assert 4.9 < first[0] <= first[1] < 5.1


class WithAverage(Regression):
    """Its average is a submodule: in the optimizer, without gradients, and written after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.twin: list[nn.Module] = []  # what the optimizer does not know

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.twin:
            self.twin.append(copy.deepcopy(self.average))
        for average in (self.average, *self.twin):
            average.update_parameters(self.net)


def _average_as_submodule(rank: int, world_size: int, precision: str, sparsity: float) -> None:
    model = WithAverage()
    strategy = ScapeStrategy(sparsity=sparsity, sparsity_warmup_steps=0)
    make_trainer(strategy, max_epochs=2, precision=precision).fit(model)
    for mine, theirs in zip(model.average.parameters(), model.twin[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(model.average.module[0].weight, model.net[0].weight)


@pytest.mark.few(1)
@pytest.mark.parametrize(("precision", "sparsity"), [("bf16-true", 0.0), ("bf16-true", 0.5), ("32-true", 0.5)])
def test_an_average_that_is_a_submodule_is_what_the_user_made_it(
    run_ranks: Any, precision: str, sparsity: float
) -> None:
    run_ranks(_average_as_submodule, 2, precision, sparsity)


# ------------------------------------------------------------------------------------------------ finetuning callbacks


class Backbone(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[0], self.net[2]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(filter(lambda parameter: parameter.requires_grad, self.parameters()), 1e-2)


def _unfreeze(rank: int, world_size: int) -> None:
    make_trainer(max_epochs=3, callbacks=[BackboneFinetuning(1, verbose=False)]).fit(Backbone())


def test_unfreezing_in_mid_training_is_an_error_that_says_so_on_every_rank(run_ranks: Any) -> None:
    for error in run_ranks(_unfreeze, 2, expect_errors=True):
        assert isinstance(error, ValueError)
        assert "Parameter groups must be given when the optimizer is built" in str(error)
        assert "call `trainer.strategy.setup_optimizers(trainer)`" in str(error)


def _schedule_accumulation(rank: int, world_size: int) -> tuple[int, Tensor]:
    model = Regression()
    trainer = make_trainer(max_epochs=2, callbacks=[GradientAccumulationScheduler({0: 1, 1: 3})])
    trainer.fit(model)
    return ours(trainer).stats.step, weights(model)


def test_accumulation_may_change_between_epochs(run_ranks: Any) -> None:
    (steps, first), (_, second) = run_ranks(_schedule_accumulation, 2)
    assert steps == BATCHES + BATCHES // 3
    assert torch.equal(first, second)


# ------------------------------------------------------------------------------------------------ debugging aids


def _overfit(rank: int, world_size: int) -> tuple[int, float, float]:
    history = History()
    trainer = make_trainer(max_epochs=30, overfit_batches=1, limit_val_batches=1.0, callbacks=[history])
    trainer.fit(Synced(lr=5e-2))
    return ours(trainer).stats.step, history.losses[0], history.losses[-1]


@pytest.mark.few(0)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_overfit_batches_overfits_its_batch(run_ranks: Any) -> None:
    first, second = run_ranks(_overfit, 2)
    assert first[0] == second[0] == 30
    assert first[2] < 0.7 * first[1]


def _fast_dev_run(rank: int, world_size: int, folder: str) -> tuple[int, list[str]]:
    trainer = make_trainer(fast_dev_run=2, default_root_dir=folder, max_epochs=None, callbacks=[ScapeMonitor()])
    trainer.fit(Synced())
    return ours(trainer).stats.step, [path.name for path in Path(folder).rglob("*.ckpt")]


@pytest.mark.few(0)
def test_fast_dev_run_takes_its_steps_and_writes_nothing(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(_fast_dev_run, 2, str(tmp_path)) == [(2, [])] * 2


def _profile(rank: int, world_size: int, folder: str) -> tuple[set[str], set[str]]:
    simple = SimpleProfiler()
    make_trainer(profiler=simple).fit(Regression())
    deep = PyTorchProfiler(folder, "trace", export_to_chrome=False, schedule=None, row_limit=-1)
    make_trainer(profiler=deep).fit(Regression())
    events = {event.name for event in deep.function_events}
    return {name.split("]")[-1].split(".")[-1] for name in simple.recorded_durations}, events


@pytest.mark.few(0)
def test_profilers_see_the_step_and_its_phases(run_ranks: Any, tmp_path: Path) -> None:
    for actions, events in run_ranks(_profile, 2, str(tmp_path)):
        assert "run_training_batch" in actions
        assert "optimizer_step" in actions
        assert {f"scape::{phase}" for phase in PHASES} <= events


# ------------------------------------------------------------------------------------------------ loggers


def _log(rank: int, world_size: int, folder: str) -> list[float]:
    model = Synced(scheduler="lambda")
    loggers = [CSVLogger(folder, "csv", flush_logs_every_n_steps=1), TensorBoardLogger(folder, "tb")]
    callbacks = [LearningRateMonitor(logging_interval="step"), ScapeMonitor(every_n_steps=1)]
    make_trainer(logger=loggers, callbacks=callbacks, log_every_n_steps=1, limit_val_batches=1.0).fit(model)
    return [lr for lr, _ in model.lrs]


def test_loggers_get_metrics_learning_rates_and_scapes_figures(run_ranks: Any, tmp_path: Path) -> None:
    rates = run_ranks(_log, 2, str(tmp_path))[0]
    rows = list(csv.DictReader((tmp_path / "csv" / "version_0" / "metrics.csv").open()))
    assert [float(row["lr-ScapeOptimizer"]) for row in rows if row["lr-ScapeOptimizer"]] == pytest.approx(rates)
    assert len({float(row["scape/density"]) for row in rows if row["scape/density"]}) == 1
    assert sum(bool(row["val_loss"]) for row in rows) == 1

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tb" / "version_0"))
    events.Reload()
    assert [event.value for event in events.Scalars("lr-ScapeOptimizer")] == pytest.approx(rates)
    assert {"loss", "val_loss", "scape/density"} <= set(events.Tags()["scalars"])


# ------------------------------------------------------------------------------------------------ several fits


def _fits(rank: int, world_size: int) -> list[Tensor]:
    ends = []
    for _ in range(2):
        model = Regression()
        make_trainer(precision="bf16-mixed", gradient_clip_val=1.0).fit(model)
        ends.append(weights(model))
    return ends


def test_two_trainers_in_one_process_train_as_one_alone(run_ranks: Any) -> None:
    (first, again), (other, _) = run_ranks(_fits, 2)
    assert torch.equal(first, again)
    assert torch.equal(first, other)


def _batch_sizes(rank: int, world_size: int) -> tuple[list[str], bool]:
    """Uneven data: the sampler pads, every rank takes the same number of steps."""
    trainer = make_trainer()
    trainer.fit(Regression(), loader(samples=2 * BATCHES * 4 - 5))
    steps = [None] * world_size
    dist.all_gather_object(steps, ours(trainer).stats.step)
    return steps, isinstance(ours(trainer), ScapeOptimizer)


def test_uneven_data_is_padded_by_the_sampler(run_ranks: Any) -> None:
    for steps, is_ours in run_ranks(_batch_sizes, 2):
        assert steps[0] == steps[1] > 0
        assert is_ours
