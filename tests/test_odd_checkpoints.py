"""Checkpoints in odd places and with odd content: what DDP saves and goes on from, both methods do, too."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from trainer_helpers import BATCHES, MARKS, Regression, loader, make_trainer, weights

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
    SparseLoCoStrategy,
    newest_checkpoint,
)
from lightning_scape.checkpoint.rng import rng_state, set_rng_state
from lightning_scape.checkpoint.saver import consolidate

pytestmark = MARKS


def strategy_of(method: str, **options: Any) -> Any:
    if method == "sparseloco":
        return SparseLoCoStrategy(sync_every=BATCHES, **options)
    return ScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0, **options)


class Table(LRScheduler):
    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.table = np.linspace(1, 0.1, 50)
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        return [base * float(self.table[self.last_epoch]) for base in self.base_lrs]


SCHEDULERS = {"numpy rate": lambda o: LambdaLR(o, lambda step: 0.5 * (1 + np.cos(step / 50))), "numpy table": Table}


class Scheduled(Regression):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), self.lr)
        return [optimizer], [{"scheduler": SCHEDULERS[self.kind](optimizer), "interval": "step"}]


def _resumes(rank: int, world_size: int, method: str, kind: str, options: dict[str, Any], folder: Path) -> None:
    def fit(epochs: int, **more: Any) -> tuple[Any, Any]:
        torch.manual_seed(0)
        module, trainer = Scheduled(kind), make_trainer(strategy_of(method, **options), max_epochs=epochs)
        trainer.fit(module, loader(), **more)
        return module, trainer

    path = folder / f"{method}.ckpt"
    fit(1)[1].save_checkpoint(path)
    # An array in a scheduler is read only by who trusts the file; a number is a number.
    trusted = {"weights_only": False} if kind == "numpy table" else {}
    found, expected = (weights(fit(2, **more)[0]) for more in ({"ckpt_path": path, **trusted}, {}))
    assert torch.equal(found, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["scape", "sparseloco"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("numpy rate", {}), ("numpy rate", {"state_dict_type": "sharded"}), ("numpy table", {})],
    ids=["rate-full", "rate-sharded", "table-full"],
)
def test_schedules_that_numpy_computes_are_saved_and_resumed(
    run_ranks: Any, tmp_path: Path, method: str, kind: str, options: dict[str, Any]
) -> None:
    run_ranks(_resumes, 2, method, kind, options, tmp_path)


def _at_home(rank: int, world_size: int, home: Path, options: dict[str, Any]) -> None:
    os.environ["HOME"] = str(home)
    first = make_trainer(strategy_of("scape", **options), max_steps=2)
    first.fit(Regression(), loader())
    first.save_checkpoint("~/run/a.ckpt")
    assert (home / "run" / "a.ckpt").exists()
    assert not Path("~").exists()
    second = make_trainer(strategy_of("scape"), max_epochs=-1, max_steps=4)
    second.fit(Regression(), loader(), ckpt_path="~/run/a.ckpt")
    assert second.global_step == 4


@pytest.mark.parametrize("options", [{}, {"state_dict_type": "sharded"}], ids=["full", "sharded"])
def test_a_tilde_is_the_users_home(run_ranks: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    run_ranks(_at_home, 2, tmp_path, options)


def _at_a_store(rank: int, world_size: int) -> None:
    trainer = make_trainer(strategy_of("scape", state_dict_type="sharded"), max_steps=2)
    trainer.fit(Regression(), loader())
    trainer.save_checkpoint("memory://bucket/a.ckpt")


def test_a_directory_at_a_store_is_refused_on_all_ranks(run_ranks: Any) -> None:
    for error in run_ranks(_at_a_store, 2, expect_errors=True):
        assert "must be at a path that all machines share, got 'memory://bucket/a.ckpt'" in str(error)
    assert not Path("memory:").exists()


def _explicit(rank: int, world_size: int, folder: Path) -> list[int]:
    os.environ.update(SLURM_NTASKS="2", SLURM_JOB_NAME="x")
    seen: list[int] = []

    class Start(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            seen.append(trainer.global_step)

    first = make_trainer(strategy_of("scape"), max_steps=3, default_root_dir=folder / "old")
    first.fit(Regression(), loader())
    for number in (1, 2):
        first.save_checkpoint(folder / "old" / f"hpc_ckpt_{number}.ckpt")
    for root in ("new", "old"):
        trainer = make_trainer(
            strategy_of("scape"), max_epochs=-1, max_steps=4, default_root_dir=folder / root, callbacks=[Start()]
        )
        trainer.fit(Regression(), loader(), ckpt_path=folder / "old" / "hpc_ckpt_1.ckpt")
    return seen


def test_a_checkpoint_that_is_named_as_slurms_is_loaded_where_it_is_asked_for(run_ranks: Any, tmp_path: Path) -> None:
    """It was passed over where it did not lie in ``default_root_dir``, and training began anew."""
    assert run_ranks(_explicit, 2, tmp_path) == [[3, 3], [3, 3]]


def test_a_pattern_may_have_folders(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    torch.save({}, tmp_path / "a" / "b" / "c.pt")
    assert newest_checkpoint(tmp_path, "**/*.pt") == tmp_path / "a" / "b" / "c.pt"


def test_a_loaded_state_keeps_its_own_learning_rate() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ScapeOptimizer(
        [parameter], lr=torch.tensor(0.01), config=ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0)
    )
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    optimizer.param_groups[0]["lr"].fill_(0.5)
    assert state["param_groups"][0]["lr"] == pytest.approx(0.01)


def test_numpys_other_generators_are_left_alone() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        saved, expected = rng_state(), random.random()
        set_rng_state(saved)
        assert random.random() == expected
    finally:
        np.random.set_bit_generator(before)


def _state_of_one_rank(rank: int, world_size: int) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=FabricScapeStrategy(sparsity=0.5))
    fabric.launch()
    module = nn.Linear(5, 5)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    for step in range(2):
        fabric.backward(model(torch.ones(3, 5)).sum())
        optimizer.step()
        if rank == step == 0:
            optimizer.state_dict()


def test_a_state_that_one_rank_asks_for_is_named_in_the_error(run_ranks: Any) -> None:
    for error in run_ranks(_state_of_one_rank, 2, expect_errors=True):
        assert "collecting the state of optimizer 0" in str(error), error
        assert "or a `state_dict()` that only some ranks call" in str(error)


# ------------------------------------------------------------------------------------------------ hooks on a state dict


def hooked(parameters: Any, seen: list[Any]) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(parameters, 1e-2)
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": len(seen)})
    optimizer.register_load_state_dict_pre_hook(lambda _, state: seen.append(state.pop("mine")))
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    return optimizer


class Hooked(Regression):
    def configure_optimizers(self) -> Any:
        self.seen: list[Any] = []
        return hooked(self.parameters(), self.seen)


def _hooks_of_a_trainer(rank: int, world_size: int, make: Any, folder: Path) -> None:
    path, module, trainer = folder / "trainer.ckpt", Hooked(), make_trainer(make())
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    assert module.seen == ["saving"]
    assert (torch.load(path) if path.is_file() else consolidate(path))["optimizer_states"][0]["mine"] == 1
    again = Hooked()
    make_trainer(make(), max_epochs=2).fit(again, loader(), ckpt_path=path)
    assert again.seen == [1, "loaded"]


def _hooks_of_fabric(rank: int, world_size: int, make: Any, folder: Path) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=make())
    fabric.launch()
    module, seen = nn.Linear(5, 5), []
    model, optimizer = fabric.setup(module, hooked(module.parameters(), seen))
    fabric.backward(model(torch.ones(3, 5)).sum())
    optimizer.step()
    fabric.save(folder / "fabric.ckpt", {"optimizer": optimizer})
    fabric.load(folder / "fabric.ckpt", {"optimizer": optimizer})
    assert seen == ["saving", 1, "loaded"]
    if (folder / "fabric.ckpt").is_file():
        optimizer.load_state_dict(optimizer.state_dict())
        assert seen[3:] == ["saving", 4, "loaded"]


MAKES = {
    "ddp": (pl.strategies.DDPStrategy, DDPStrategy),
    "scape": (ScapeStrategy, FabricScapeStrategy),
    "sparseloco": (SparseLoCoStrategy, FabricSparseLoCoStrategy),
}


def _hooks(rank: int, world_size: int, method: str, options: dict[str, Any], folder: Path) -> None:
    of_trainer, of_fabric = MAKES[method]
    _hooks_of_a_trainer(rank, world_size, partial(of_trainer, **options), folder)
    _hooks_of_fabric(rank, world_size, partial(of_fabric, **options), folder)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("ddp", {}),
        ("scape", {}),
        ("scape", {"state_dict_type": "sharded"}),
        ("sparseloco", {}),
        ("sparseloco", {"state_dict_type": "sharded"}),
    ],
    ids=["ddp", "scape-full", "scape-sharded", "sparseloco-full", "sparseloco-sharded"],
)
def test_hooks_on_the_optimizers_state_dict_run(
    run_ranks: Any, tmp_path: Path, method: str, options: dict[str, Any]
) -> None:
    """SCAPE dropped them; SparseLoCo dropped what they add."""
    run_ranks(_hooks, 2, method, options, tmp_path)
