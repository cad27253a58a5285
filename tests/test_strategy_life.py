"""ScapeStrategy through the life of a Trainer: fits, failures, checkpoints, callbacks, the tuner."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.plugins import AsyncCheckpointIO
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from trainer_helpers import BATCHES, MARKS, Regression, loader, make_trainer, ours, weights

from lightning_scape import ScapeOptimizer, ScapeStrategy, SparseLoCoStrategy

pytestmark = MARKS

# ------------------------------------------------------------------------------------------------ life of a Trainer


def _equal_at_the_start(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    seen: list[Tensor] = []

    class Start(Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(torch.cat([weights(pl_module), pl_module.noise.double()]))

    model = Regression()
    model.register_buffer("noise", torch.randn(3))
    before = torch.cat([weights(model), model.noise.double()])
    make_trainer(callbacks=[Start()]).fit(model)
    return before, seen[0]


def test_ranks_start_from_the_parameters_and_buffers_of_rank_zero(run_ranks: Any) -> None:
    (own, first), (other, second) = run_ranks(_equal_at_the_start, 2)
    assert not torch.equal(own, other)
    assert torch.equal(own, first)
    assert torch.equal(own, second)


def _evaluate_only(rank: int, world_size: int) -> tuple[bool, bool, int]:
    trainer = make_trainer(limit_val_batches=2)
    model = Regression()
    (validation,) = trainer.validate(model, verbose=False)
    (test,) = trainer.test(model, verbose=False)
    predictions = trainer.predict(model)
    return "val_loss" in validation, "val_loss" in test, len(predictions)


def test_validate_test_and_predict_work_without_a_fit(run_ranks: Any) -> None:
    assert run_ranks(_evaluate_only, 2) == [(True, True, BATCHES)] * 2


def _fit_twice(rank: int, world_size: int) -> tuple[Tensor, bool, int, float]:
    trainer = make_trainer()
    model = Regression()
    trainer.fit(model)
    first = ours(trainer)
    trainer.validate(model, loader(), verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    same = ours(trainer).communicator.mask_group is first.communicator.mask_group is not None
    return weights(model), same and ours(trainer) is not first, ours(trainer).stats.step, trainer.current_epoch


def test_a_second_fit_starts_a_fresh_optimizer_over_the_same_groups(run_ranks: Any) -> None:
    (first, same, steps, epoch), (second, *_) = run_ranks(_fit_twice, 2)
    assert torch.equal(first, second)
    assert same
    assert (steps, epoch) == (BATCHES, 2)


STRATEGIES: dict[str, Callable[[], Any]] = {
    "scape": lambda: ScapeStrategy(sparsity=0.9, state_dict_type="sharded", async_save=True),
    "sparseloco": lambda: SparseLoCoStrategy(sync_every=4, overlap_steps=1),
    "two levels": lambda: ScapeStrategy(sparsity=0.9, local_group_size=2, wire_dtype="fp32", clip_norm="local"),
}


def _held_after_each_fit(rank: int, world_size: int, kind: str, folder: Path) -> list[tuple[int, int]]:
    held = []
    for number in range(4):
        trainer = make_trainer(STRATEGIES[kind]())
        trainer.fit(Regression(), loader())
        trainer.save_checkpoint(folder / f"{number}.ckpt")
        trainer.strategy.teardown()
        gc.collect()
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return held


@pytest.mark.few(0)
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says which files and threads a process has")
@pytest.mark.parametrize("kind", STRATEGIES)
def test_further_fits_hold_no_further_files_and_threads(run_ranks: Any, tmp_path: Path, kind: str) -> None:
    """Each made process groups of its own, which last as long as the process: 5 files and 3 threads."""
    for held in run_ranks(_held_after_each_fit, 2, kind, tmp_path):
        assert held[1:] == held[1:2] * 3, held


def _fail_then_fit(rank: int, world_size: int) -> tuple[Tensor, str]:
    message = ""
    try:
        make_trainer().fit(Regression(fail_at=3))
    except KeyError as error:
        message = str(error)
    model = Regression()
    make_trainer().fit(model)
    return weights(model), message


def test_after_an_exception_the_next_fit_trains(run_ranks: Any) -> None:
    (first, message), (second, _) = run_ranks(_fail_then_fit, 2)
    assert "the model's own mistake" in message
    assert torch.equal(first, second)


def _fail_alone(rank: int, world_size: int) -> None:
    make_trainer().fit(Regression(fail_at=3 if rank == 1 else None))


def test_an_exception_on_one_rank_comes_out_as_it_is(run_ranks: Any) -> None:
    _, mistake = run_ranks(_fail_alone, 2, timeout=60, expect_errors=True)
    assert isinstance(mistake, KeyError)


def _drained(rank: int, world_size: int, fail_at: int | None) -> int:
    calls = []
    ScapeOptimizer.drain = lambda self: calls.append(self)
    trainer = make_trainer()
    with contextlib.suppress(KeyError):
        trainer.fit(Regression(fail_at=fail_at))
    return len(calls)


def test_the_mask_exchange_is_awaited_when_training_ends(run_ranks: Any) -> None:
    assert all(calls > 0 for calls in run_ranks(_drained, 2, None))


def test_no_rank_is_waited_for_after_an_exception(run_ranks: Any) -> None:
    assert run_ranks(_drained, 2, 3) == [0, 0]


def _batch_norm(rank: int, world_size: int, synchronized: bool) -> tuple[list[str], list[str]]:
    kinds: list[str] = []

    class Kinds(Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            kinds.append(type(pl_module.net[1]).__name__)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # torch has no SyncBatchNorm forward on CPU: no step is taken.
        make_trainer(sync_batchnorm=synchronized, max_steps=0, callbacks=[Kinds()]).fit(Regression(batch_norm=True))
    return kinds, [str(w.message) for w in caught if "BatchNorm" in str(w.message)]


def test_batch_norm_statistics_of_single_ranks_are_warned_of_with_the_remedy(run_ranks: Any) -> None:
    (kinds, warned), (_, quiet) = run_ranks(_batch_norm, 2, False)
    assert kinds == ["BatchNorm1d"]
    assert len(warned) == 1
    assert "sync_batchnorm=True" in warned[0]
    assert quiet == []  # rank 0 speaks for all


def test_sync_batchnorm_converts_the_model_and_needs_no_warning(run_ranks: Any) -> None:
    assert run_ranks(_batch_norm, 2, True)[0] == (["SyncBatchNorm"], [])


# ------------------------------------------------------------------------------------------------ checkpoints


def _resume(rank: int, world_size: int, folder: str, precision: str) -> tuple[Tensor, Tensor]:
    straight = Regression(scheduler="one-cycle")
    make_trainer(max_epochs=2, precision=precision).fit(straight)

    half = Regression(scheduler="one-cycle")
    first = make_trainer(max_epochs=1, precision=precision)
    first.fit(half)
    first.save_checkpoint(f"{folder}/half.ckpt")

    resumed = Regression(scheduler="one-cycle", lr=123.0)
    make_trainer(max_epochs=2, precision=precision).fit(resumed, ckpt_path=f"{folder}/half.ckpt")
    return weights(straight), weights(resumed)


@pytest.mark.few(1)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_resuming_from_a_checkpoint_is_bitwise_the_run_without_a_stop(
    run_ranks: Any, tmp_path: Path, precision: str
) -> None:
    for straight, resumed in run_ranks(_resume, 2, str(tmp_path), precision):
        assert torch.equal(straight, resumed)


def _resume_in_the_warm_up(rank: int, world_size: int, folder: str, update: str) -> tuple[Tensor, Tensor, list[int]]:
    straight, resumed = Regression(), Regression(lr=123.0)
    saved = ModelCheckpoint(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    options = {"sparsity": 0.9, "update": update}
    first = make_trainer(ScapeStrategy(**options), max_epochs=2, enable_checkpointing=True, callbacks=[saved])
    first.fit(straight)
    second = make_trainer(ScapeStrategy(**options), max_epochs=2)
    second.fit(resumed, ckpt_path=f"{folder}/epoch=0.ckpt")
    return weights(straight), weights(resumed), [ours(trainer).schedule.warmup_steps for trainer in (first, second)]


@pytest.mark.few(0)
@pytest.mark.parametrize(("update", "steps"), [("adamw", 1424), ("adams", 2 * BATCHES)])
def test_a_run_resumed_in_the_middle_of_its_warm_up_goes_on_bitwise(
    run_ranks: Any, tmp_path: Path, update: str, steps: int
) -> None:
    for straight, resumed, warmups in run_ranks(_resume_in_the_warm_up, 2, str(tmp_path), update):
        assert warmups == [steps, steps]
        assert torch.equal(straight, resumed)


def _resume_for_longer(rank: int, world_size: int, folder: str) -> list[int]:
    first = make_trainer(ScapeStrategy(sparsity=0.9, update="adams"), max_epochs=1)
    first.fit(Regression())
    first.save_checkpoint(f"{folder}/half.ckpt")
    second = make_trainer(ScapeStrategy(sparsity=0.9, update="adams"), max_epochs=3)
    second.fit(Regression(), ckpt_path=f"{folder}/half.ckpt")
    return [ours(trainer).schedule.warmup_steps for trainer in (first, second)]


def test_a_run_resumed_for_longer_keeps_the_warm_up_that_it_began_with(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(_resume_for_longer, 2, str(tmp_path)) == [[BATCHES, BATCHES]] * 2


def _checkpoint_callback(rank: int, world_size: int, folder: str, asynchronous: bool) -> str:
    callback = ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1, save_last=True)
    plugins = [AsyncCheckpointIO()] if asynchronous else []
    make_trainer(enable_checkpointing=True, callbacks=[callback], plugins=plugins).fit(Regression())
    return callback.last_model_path


@pytest.mark.few(1)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_model_checkpoint_writes_the_state_of_all_ranks(run_ranks: Any, tmp_path: Path, asynchronous: bool) -> None:
    path = run_ranks(_checkpoint_callback, 2, str(tmp_path), asynchronous)[0]
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert [file.name for file in checkpoints] == ["epoch=0-step=3.ckpt", "epoch=0-step=6.ckpt", "last.ckpt"]
    steps = []
    for file in checkpoints:
        (state,) = torch.load(file, weights_only=True)["optimizer_states"]
        assert len(state["scape"]["residuals"]) == 2
        steps.append(state["scape"]["step"])
    assert path.endswith("last.ckpt")
    assert steps == [3, 6, 6]


def test_the_checkpoint_knows_parameters_by_their_names(run_ranks: Any, tmp_path: Path) -> None:
    path = run_ranks(_checkpoint_callback, 1, str(tmp_path), False)[0]
    (state,) = torch.load(path, weights_only=True)["optimizer_states"]
    assert list(state["scape"]["names"].values()) == ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]


def _kept_by_a_hook(rank: int, world_size: int, path: str) -> tuple[set[str], set[str]]:
    kept: dict[str, Any] = {}
    given: set[str] = set()

    class Keep(Callback):
        def on_save_checkpoint(self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: Any) -> None:
            nonlocal kept
            kept = checkpoint
            given.update(checkpoint)

    trainer = make_trainer(callbacks=[Keep()])
    trainer.fit(Regression())
    trainer.save_checkpoint(path)
    return given, set(kept)


def test_what_a_hook_kept_of_a_checkpoint_stays_as_it_was(run_ranks: Any, tmp_path: Path) -> None:
    ((given, kept),) = run_ranks(_kept_by_a_hook, 1, str(tmp_path / "kept.ckpt"))
    assert kept == given
    assert set(torch.load(tmp_path / "kept.ckpt", weights_only=True)) > kept  # and every rank's random numbers


def _overwrite(rank: int, world_size: int) -> tuple[float, float]:
    """bf16 weights overwritten in mid-training, by a callback that goes through the strategy."""

    class Overwrite(Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 3:
                state = {name: torch.full_like(value, 5.0) for name, value in pl_module.state_dict().items()}
                trainer.strategy.load_model_state_dict({"state_dict": state})

    model = Regression(lr=1e-3)
    make_trainer(ScapeStrategy(sparsity=0), precision="bf16-true", callbacks=[Overwrite()]).fit(model)
    return float(weights(model).min()), float(weights(model).max())


def test_weights_loaded_during_training_are_not_undone_by_master_weights(run_ranks: Any) -> None:
    for least, most in run_ranks(_overwrite, 2):
        assert 4.9 < least <= most < 5.1


# ------------------------------------------------------------------------------------------------ callbacks, tuner


def _with_callback(rank: int, world_size: int, name: str) -> Tensor:
    callback: Callback = {
        "ema": lambda: EMAWeightAveraging(decay=0.5),
        "swa": lambda: StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1),
        "lr": lambda: pl.callbacks.LearningRateMonitor(),
    }[name]()
    model = Regression(scheduler="lambda")
    logger = pl.loggers.CSVLogger(os.environ["PYTEST_TMP"])
    make_trainer(max_epochs=3, callbacks=[callback], limit_val_batches=1, logger=logger).fit(model)
    return weights(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["ema", "swa", "lr"])
def test_lightnings_callbacks_that_touch_weights_and_schedulers_work(
    run_ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PYTEST_TMP", str(tmp_path))
    first, second = run_ranks(_with_callback, 2, name)
    assert torch.equal(first, second)
    assert first.isfinite().all()


def _tune(rank: int, world_size: int, folder: str) -> tuple[int, float]:
    trainer = make_trainer(max_epochs=2, default_root_dir=folder)
    model = Regression()
    finder = Tuner(trainer).lr_find(model, num_training=8, update_attr=True)
    trainer.fit(model)
    return len(finder.results["lr"]), model.lr


@pytest.mark.few(0)
def test_the_learning_rate_finder_works(run_ranks: Any, tmp_path: Path) -> None:
    first, second = run_ranks(_tune, 2, str(tmp_path))
    assert first == second
    assert first[0] == 8


class Silent(Regression):
    """Logs nothing: Dynamo (torch 2.13) fails on LightningModule.log."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


def _compiled(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    compiled, plain = Silent(), Silent()
    make_trainer().fit(torch.compile(compiled, backend="eager"))
    make_trainer().fit(plain)
    return weights(compiled), weights(plain)


@pytest.mark.few(0)
def test_a_compiled_module_trains_as_the_plain_one(run_ranks: Any) -> None:
    for compiled, plain in run_ranks(_compiled, 2):
        torch.testing.assert_close(compiled, plain)
