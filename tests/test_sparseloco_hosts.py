"""SparseLoCo as a strategy of the Trainer and of Fabric, on two ranks."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from trainer_helpers import MARKS, GivenRanks, Regression, TwoOptimizers, make_trainer, weights

import lightning_scape
from lightning_scape import (
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    SparseLoCo,
    SparseLoCoMonitor,
    SparseLoCoStrategy,
)

pytestmark = MARKS
OPTIONS: dict[str, Any] = {"sync_every": 4, "density": 1 / 4}


def strategy(**options: Any) -> SparseLoCoStrategy:
    return SparseLoCoStrategy(**{**OPTIONS, **options})


class Watch(Callback):
    """Each rank's weights after every batch, and the norm of its gradient as the optimizer takes it."""

    def __init__(self) -> None:
        self.steps: list[Tensor] = []
        self.norms: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        self.norms.append(0.0)  # clipping comes next

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        grads = [p.grad for p in pl_module.parameters() if p.grad is not None]
        if grads and self.norms:
            self.norms[-1] = float(torch.stack([grad.norm() for grad in grads]).norm())

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self.steps.append(weights(pl_module))


def _fit(rank: int, world_size: int, options: dict[str, Any], module: dict[str, Any], trainer: dict[str, Any]) -> Any:
    watch, model = Watch(), Regression(**module)
    fitted = make_trainer(strategy(**options), callbacks=[watch], max_epochs=2, **trainer)
    fitted.fit(model)
    (loco,) = (SparseLoCo.of(optimizer) for optimizer in fitted.optimizers)
    assert loco is not None
    return {"steps": watch.steps, "end": weights(model), "exchanges": loco.progress.exchanges, "norms": watch.norms}


@pytest.mark.parametrize(
    ("options", "module", "trainer", "exchanges"),
    [
        ({"overlap_steps": 2, "sync_every": 5}, {"optimizer": "SGD"}, {}, 3),
        ({}, {"scheduler": "sequential"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, 2),
        ({}, {"optimizer": "Adam", "scheduler": "one-cycle"}, {"precision": "bf16-true"}, 3),
    ],
)
def test_a_fit_exchanges_every_so_many_steps_and_ends_with_equal_ranks(
    run_ranks: Any, options: dict[str, Any], module: dict[str, Any], trainer: dict[str, Any], exchanges: int
) -> None:
    first, second = run_ranks(_fit, 2, options, module, trainer)
    assert first["exchanges"] == second["exchanges"] == exchanges
    assert torch.equal(first["end"], second["end"])
    assert not torch.equal(first["steps"][2], second["steps"][2])  # inside a window ranks are apart
    if "gradient_clip_val" in trainer:
        assert max(first["norms"]) <= 0.1 * 1.001
        assert first["norms"] != second["norms"]  # each clips its own
    elif "overlap_steps" not in options:
        assert torch.equal(first["steps"][3], second["steps"][3])


def _resume(rank: int, world_size: int, folder: str, kind: str) -> tuple[Tensor, Tensor]:
    """Goes on in a new Trainer from the end of the first epoch: after 6 steps, in the middle of a window of 4."""
    straight = Regression(scheduler="one-cycle")
    saved = ModelCheckpoint(folder, "at-{step}", every_n_epochs=1, save_top_k=-1)
    options = {"max_epochs": 2, "callbacks": [saved], "enable_checkpointing": True}
    make_trainer(strategy(state_dict_type=kind), **options).fit(straight)
    resumed = Regression(scheduler="one-cycle", lr=9.0)
    make_trainer(strategy(state_dict_type=kind), max_epochs=2).fit(resumed, ckpt_path=f"{folder}/at-step=6.ckpt")
    return weights(straight), weights(resumed)


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_a_resumed_fit_ends_as_an_uninterrupted_one_bit_for_bit(run_ranks: Any, tmp_path: Path, kind: str) -> None:
    for straight, resumed in run_ranks(_resume, 2, str(tmp_path), kind):
        assert torch.equal(straight, resumed)


def _saved_last(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """What the fit's last checkpoint holds, and what the fit ends with; neither end falls on a window's."""
    model = Regression()
    saved = ModelCheckpoint(folder, save_last=True)
    make_trainer(strategy(sync_every=5), callbacks=[saved], enable_checkpointing=True, **options).fit(model)
    held = torch.load(f"{folder}/last.ckpt", weights_only=True)["state_dict"]
    return torch.cat([value.flatten() for value in held.values()]), weights(model)


@pytest.mark.parametrize(
    "options",
    [
        {"max_epochs": None, "max_steps": 8},
        {"max_epochs": 2, "accumulate_grad_batches": 3},
    ],
)
def test_the_last_checkpoint_holds_the_model_that_the_fit_ends_with(
    run_ranks: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """It was written before the fit's end ended the window: it held rank 0's weights alone."""
    (saved, first), (_, second) = run_ranks(_saved_last, 2, str(tmp_path), options)
    assert torch.equal(saved, first)
    assert torch.equal(first, second)


class Keeps(Regression):
    """Gives every fit the same optimizer."""

    kept: torch.optim.Optimizer | None = None

    def configure_optimizers(self) -> Any:
        self.kept = self.kept or torch.optim.AdamW(self.parameters(), 1e-2)
        return self.kept


def _fit_twice(rank: int, world_size: int) -> tuple[Tensor, int]:
    model = Keeps()
    for _ in range(2):
        fitted = make_trainer(strategy(), max_epochs=1)
        fitted.fit(model)
    (loco,) = (SparseLoCo.of(optimizer) for optimizer in fitted.optimizers)
    assert loco is not None
    return weights(model), loco.progress.exchanges


def test_an_optimizer_that_the_module_keeps_may_be_fitted_twice(run_ranks: Any) -> None:
    first, second = run_ranks(_fit_twice, 2)
    assert torch.equal(first[0], second[0])
    assert first[1] == second[1] == 2  # after 4 of 6 steps, and at the end


def _monitored(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    logger = CSVLogger(folder)
    fitted = make_trainer(strategy(), callbacks=[SparseLoCoMonitor()], logger=[logger], max_epochs=2)
    fitted.fit(Regression())
    return {name: float(value) for name, value in fitted.callback_metrics.items() if "sparseloco" in name}


def test_the_monitor_logs_every_exchange(run_ranks: Any, tmp_path: Path) -> None:
    shown, _ = run_ranks(_monitored, 2, str(tmp_path))
    assert set(shown) == {"sparseloco/compression", "sparseloco/delta_norm"}
    lines = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()
    column = lines[0].split(",").index("sparseloco/exchange")
    assert [line.split(",")[column] for line in lines[1:] if line.split(",")[column]] == ["1.0", "2.0", "3.0"]


def _manual(rank: int, world_size: int) -> tuple[Tensor, int]:
    model = TwoOptimizers()
    fitted = make_trainer(strategy(sync_every=2))
    fitted.fit(model)
    return weights(model), len([loco for loco in map(SparseLoCo.of, fitted.optimizers) if loco is not None])


def test_several_optimizers_are_wrapped_one_by_one(run_ranks: Any) -> None:
    first, second = run_ranks(_manual, 2)
    assert first[1] == second[1] == 2
    assert torch.equal(first[0], second[0])


def test_a_short_run_is_told_and_names_are_registered(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "pytorch_lightning", raising=False)  # else its users get a remedy, too
    trainer = make_trainer("sparseloco", max_steps=2)
    trainer.fit(Regression())
    assert isinstance(trainer.strategy, SparseLoCoStrategy)
    assert any("fewer than sync_every=30" in str(warning.message) for warning in recwarn)
    assert repr(strategy(bits=None)) == "<SparseLoCoStrategy(sync_every=4, density=0.25, bits=None)>"


def test_an_optimizer_that_exchanges_itself_is_refused() -> None:
    class Model(Regression):
        def configure_optimizers(self) -> Any:
            return ScapeOptimizer(self.parameters(), config=ScapeConfig())

    with pytest.raises(TypeError, match="works on one rank, got a ScapeOptimizer"):
        make_trainer(strategy()).fit(Model())


@pytest.mark.parametrize("name", ["SparseLoCoStrategy", "FabricSparseLoCoStrategy"])
def test_a_yaml_file_gives_every_option_with_its_type(name: str) -> None:
    jsonargparse = pytest.importorskip("jsonargparse", reason="reading YAML into classes needs jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(getattr(lightning_scape, name), "strategy")
    given = {"sync_every": 5, "density": 0.25, "bits": None, "device": "cpu", "reduction": "gathered"}
    parsed = parser.parse_object({"strategy": {"class_path": f"lightning_scape.{name}", "init_args": given}})
    built = parser.instantiate_classes(parsed).strategy
    expected = {**given, "device": torch.device("cpu")}
    assert {key: getattr(built.config, key) for key in given} == expected
    wrong = {"class_path": f"lightning_scape.{name}", "init_args": {"sync_every": "often"}}
    with pytest.raises(jsonargparse.ArgumentError, match="sync_every"):
        parser.parse_object({"strategy": wrong})


# ------------------------------------------------------------------------------------------------ Fabric


def _fabric_run(
    rank: int, path: str, kind: str, first: int, stop: int, resume: bool, order: tuple[str, str]
) -> tuple[L.Fabric, nn.Module, dict[str, Any]]:
    plan = FabricSparseLoCoStrategy(**OPTIONS, state_dict_type=kind, total_steps=10)  # type: ignore[arg-type]
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=plan, plugins=[GivenRanks()])
    fabric.launch()
    torch.manual_seed(rank)
    net = nn.Sequential(nn.Linear(7, 30), nn.Tanh(), nn.Linear(30, 3))
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
    objects = {"model": model, "optimizer": optimizer, "step": 0}
    state: dict[str, Any] = {name: objects[name] for name in (*order, "step")}
    if resume:
        fabric.load(path, state)
        assert state["step"] == first
    for step in range(first, stop):
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = torch.randn(4, 7, generator=generator)
        with fabric.no_backward_sync(model, enabled=True):
            fabric.backward((model(x) - x[:, :3]).square().mean() / 2)
        fabric.backward((model(-x) - x[:, :3]).square().mean() / 2)
        assert fabric.clip_gradients(model, optimizer, max_norm=0.5) > 0
        optimizer.step()
        optimizer.zero_grad()
        state["step"] = step + 1
    return fabric, net, state


def _fabric(rank: int, world_size: int, folder: str, kind: str, order: tuple[str, str]) -> Any:
    path = f"{folder}/saved.ckpt"
    fabric, inside, state = _fabric_run(rank, path, kind, 0, 6, False, order)
    fabric.save(path, state)
    mid = copy.deepcopy(weights(inside))
    _, straight, _ = _fabric_run(rank, path, kind, 0, 10, False, order)
    _, resumed, _ = _fabric_run(rank, path, kind, 6, 10, True, order)
    return mid, weights(straight), weights(resumed)


@pytest.mark.parametrize(
    ("kind", "order"),
    [("full", ("optimizer", "model")), ("sharded", ("model", "optimizer"))],
)
def test_fabric_trains_saves_inside_a_window_and_goes_on_bit_for_bit(
    run_ranks: Any, tmp_path: Path, kind: str, order: tuple[str, str]
) -> None:
    first, second = run_ranks(_fabric, 2, str(tmp_path), kind, order)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])  # the last step ended its window
    for _, straight, resumed in (first, second):
        assert torch.equal(straight, resumed)


def _not_finite(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    plan = FabricSparseLoCoStrategy(**OPTIONS)  # type: ignore[arg-type]
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=plan, plugins=[GivenRanks()])
    fabric.launch()
    net = nn.Linear(3, 2)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    before = copy.deepcopy(weights(net))
    for step in range(OPTIONS["sync_every"]):
        value = float("nan") if (rank, step) == (1, 0) else 1.0
        fabric.backward(model(torch.full((2, 3), value)).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    return before, weights(net)


def test_a_gradient_that_is_not_finite_on_one_rank_drops_the_window_and_raises_on_none(run_ranks: Any) -> None:
    """Fabric's clipping would raise on that rank alone, and the other would wait for it."""
    for before, after in run_ranks(_not_finite, 2):
        assert torch.equal(before, after)
