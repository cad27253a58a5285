"""How a run ends: the user's error is what the user sees, every part is ended, and the next run works."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback, TQDMProgressBar
from lightning.pytorch.strategies import DDPStrategy
from torch.multiprocessing import ProcessRaisedException
from trainer_helpers import MARKS, Regression, loader, make_trainer

from lightning_scape import ScapeMonitor, ScapeStrategy, SparseLoCoStrategy
from lightning_scape.hosts import ending
from lightning_scape.hosts.checkpoint_io import ScapeCheckpointIO

pytestmark = MARKS
STRATEGIES = [ScapeStrategy, SparseLoCoStrategy]


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_a_mistake_in_the_call_gets_lightnings_own_error(call: str) -> None:
    def outcome(strategy: Any) -> str:
        with pytest.raises(Exception, match="both|cannot pass") as caught:
            getattr(make_trainer(strategy), call)(Regression(), loader(), datamodule=LightningDataModule())
        return repr(caught.value)

    assert {outcome(make()) for make in STRATEGIES} == {outcome(DDPStrategy())}


@pytest.mark.parametrize("make", STRATEGIES)
def test_an_error_of_forked_ranks_comes_out_of_the_process_that_started_them(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(make(start_method="fork"), callbacks=[ScapeMonitor(report=tmp_path)])

    def launch(*args: Any, **kwargs: Any) -> None:  # nothing is set up here: the forked processes did all
        raise ProcessRaisedException("the module's own text", 0, 1)

    monkeypatch.setattr(trainer.strategy.launcher, "launch", launch)
    for _ in range(2):
        with pytest.raises(ProcessRaisedException, match="the module's own text"):
            trainer.fit(Regression())


HOOKS = (
    *("setup", "configure_model", "configure_optimizers", "on_fit_start", "train_dataloader", "on_train_start"),
    *("training_step", "on_before_zero_grad", "on_train_epoch_end", "on_train_end", "on_fit_end", "teardown"),
)


@pytest.mark.few(1)
@pytest.mark.parametrize("make", STRATEGIES)
def test_an_error_of_any_hook_comes_out_as_it_is_and_the_next_fit_works(make: Any) -> None:
    trainer = make_trainer(make(), max_epochs=20, limit_train_batches=2)
    for hook in (*HOOKS, None):
        trainer.fit_loop.max_epochs = trainer.current_epoch + 2
        module = Regression()
        if hook is None:
            trainer.fit(module)
            continue

        def fail(*_: Any, **__: Any) -> None:
            raise KeyError("the module's own mistake")

        setattr(module, hook, fail)
        with pytest.raises(KeyError, match="the module's own mistake"):
            trainer.fit(module)


class BreaksDown(ScapeCheckpointIO):
    def teardown(self) -> None:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("make", STRATEGIES)
def test_the_end_hides_no_error_and_ends_every_part(make: Any) -> None:
    bar = TQDMProgressBar()
    options = {"callbacks": [bar], "enable_progress_bar": True}
    trainer = make_trainer(make(checkpoint_io=BreaksDown()), **options)
    with pytest.raises(KeyError, match="the model's own mistake"), pytest.warns(UserWarning, match="the disk is gone"):
        trainer.fit(Regression(fail_at=1))
    assert "get_metrics" not in vars(bar)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "At the end of the run")
        with pytest.raises(KeyError, match="the model's own mistake"):
            trainer.fit(Regression(fail_at=1))
    with pytest.raises(OSError, match="the disk is gone"):  # where there is no other error, it is one
        make_trainer(make(checkpoint_io=BreaksDown()), **options).fit(Regression())


def test_all_parts_of_an_end_are_tried_and_the_first_error_is_raised() -> None:
    tried: list[int] = []

    def part(number: int) -> None:
        tried.append(number)
        if number:
            raise ValueError(f"part {number}")

    with pytest.raises(ValueError, match="part 1"), pytest.warns(UserWarning, match="part 2"):
        ending.run_all([lambda n=n: part(n) for n in (0, 1, 2)], quiet=False)
    with pytest.warns(UserWarning, match="part 1"):
        ending.run_all([lambda n=n: part(n) for n in (0, 1, 0)], quiet=True)
    assert tried == [0, 1, 2, 0, 1, 0]


class CtrlC(Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            raise KeyboardInterrupt


def _interrupted(rank: int, world_size: int, method: str) -> bool:
    make = ScapeStrategy if method == "scape" else SparseLoCoStrategy
    module = Regression()
    with pytest.raises(SystemExit):
        make_trainer(make(), callbacks=[CtrlC()]).fit(module)
    make_trainer(make(), max_epochs=1).fit(module)
    return bool(torch.isfinite(module.net[0].weight).all())


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["scape", "sparseloco"])
def test_after_ctrl_c_the_next_fit_trains(run_ranks: Any, method: str) -> None:
    assert run_ranks(_interrupted, 2, method) == [True, True]


def test_a_report_that_cannot_be_ended_hides_no_error(tmp_path: Path) -> None:
    monitor = ScapeMonitor(report=tmp_path)

    class Spoils(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            (tmp_path / "figures.jsonl").unlink()
            (tmp_path / "figures.jsonl").mkdir()

    trainer = make_trainer(callbacks=[monitor, Spoils()])
    with pytest.raises(KeyError, match="the model's own mistake"), pytest.warns(UserWarning, match="The report must"):
        trainer.fit(Regression(fail_at=1))


def test_a_report_at_a_name_that_is_none_is_the_error_of_all_ranks() -> None:
    with pytest.raises(ValueError, match="`report` must name a folder"):
        make_trainer(callbacks=[ScapeMonitor(report="a\0b")]).fit(Regression())
