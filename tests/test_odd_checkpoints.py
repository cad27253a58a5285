"""Checkpoints in odd places and with odd content: what DDP saves and goes on from, both methods do, too."""

from __future__ import annotations

import copy
import os
import random
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.fabric.strategies import DDPStrategy as FabricDDPStrategy
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from trainer_helpers import BATCHES, MARKS, Regression, loader, make_trainer, weights

from lightning_scape import (
    CheckpointError,
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
    SparseLoCo,
    SparseLoCoStrategy,
    newest_checkpoint,
)
from lightning_scape.checkpoint.rng import rng_state, set_rng_state
from lightning_scape.checkpoint.saver import RNG, consolidate
from lightning_scape.hosts.checkpoint_io import ScapeCheckpointIO
from lightning_scape.tools.commands import main

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


@pytest.mark.few(1)
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


@pytest.mark.few(1)
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


class HooksItsOptimizer(Regression):
    def configure_optimizers(self) -> Any:
        self.seen: list[Any] = []
        return hooked(self.parameters(), self.seen)


def _hooks_of_a_trainer(rank: int, world_size: int, make: Any, folder: Path) -> None:
    path, module, trainer = folder / "trainer.ckpt", HooksItsOptimizer(), make_trainer(make())
    trainer.fit(module, loader())
    trainer.save_checkpoint(path)
    assert module.seen == ["saving"]
    assert (torch.load(path) if path.is_file() else consolidate(path))["optimizer_states"][0]["mine"] == 1
    again = HooksItsOptimizer()
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
    "ddp": (DDPStrategy, FabricDDPStrategy),
    "scape": (ScapeStrategy, FabricScapeStrategy),
    "sparseloco": (SparseLoCoStrategy, FabricSparseLoCoStrategy),
}


def _hooks(rank: int, world_size: int, method: str, options: dict[str, Any], folder: Path) -> None:
    of_trainer, of_fabric = MAKES[method]
    _hooks_of_a_trainer(rank, world_size, partial(of_trainer, **options), folder)
    _hooks_of_fabric(rank, world_size, partial(of_fabric, **options), folder)


@pytest.mark.few(1)
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


class Frozen(Regression):
    """The first layer is trained or is not; the optimizer has all parameters."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.net[0].requires_grad_(trained)


def _refreezes(rank: int, world_size: int, make: Callable[[], Any], trained: bool, path: Path) -> torch.Tensor:
    for epochs, first_layer, more in ((1, trained, {}), (2, not trained, {"ckpt_path": path})):
        module, trainer = Frozen(first_layer), make_trainer(make(), max_epochs=epochs)
        trainer.fit(module, loader(), **more)
        trainer.save_checkpoint(path)
    return weights(module)


@pytest.mark.few(1)
@pytest.mark.parametrize(("trained", "state_dict_type"), [(False, "sharded"), (True, "full")])
def test_a_run_goes_on_with_other_parameters_frozen(
    run_ranks: Any, tmp_path: Path, trained: bool, state_dict_type: Any
) -> None:
    """As with DDP: what stays keeps its state, what is unfrozen begins anew."""
    scape = partial(ScapeStrategy, sparsity=0, wire_dtype="fp32", state_dict_type=state_dict_type)
    found = run_ranks(_refreezes, 2, scape, trained, tmp_path / "scape.ckpt")
    expected = run_ranks(_refreezes, 2, partial(DDPStrategy), trained, tmp_path / "ddp.ckpt")
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=2e-5)


def _in_a_window(trained: bool, saved: Any = None) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    net[0].requires_grad_(trained)
    optimizer = torch.optim.AdamW(net.parameters())
    loco = SparseLoCo(optimizer, sync_every=4, overlap_steps=2)
    if saved is not None:
        with pytest.warns(UserWarning, match="was trained with other parameters frozen"):
            loco.load_state_dict(saved[0])
        net.load_state_dict(saved[1])
        loco.restore_parameters()
    for _ in range(5):  # the exchange is under way
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer, loco


@pytest.mark.parametrize("trained", [False, True], ids=["unfrozen", "frozen"])
def test_a_window_goes_on_with_other_parameters_frozen(trained: bool, recwarn: pytest.WarningsRecorder) -> None:
    net, optimizer, loco = _in_a_window(trained)
    saved, before = copy.deepcopy((loco.state_dict(), net.state_dict())), net[0].weight.clone()
    after, other, goes_on = _in_a_window(not trained, saved)
    assert not [each for each in recwarn if "changed after" in str(each.message)]
    assert int(other.state[after[1].weight]["step"]) == 10
    assert goes_on.progress.steps == 10
    if trained:
        assert torch.equal(after[0].weight, before)
    else:
        assert int(other.state[after[0].weight]["step"]) == 5
        assert 0 < float((after[0].weight - before).abs().max()) < 0.02  # moved by its steps, from where it was


def test_a_state_of_adamw_may_hold_what_is_frozen_now() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    dense = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    dense.step()
    parameters[0].requires_grad_(False)
    optimizer = ScapeOptimizer(parameters, config=ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0))
    with pytest.warns(UserWarning, match="carry over"):
        optimizer.load_state_dict(dense.state_dict())
    assert [*optimizer.state_dict()["state"]] == [1]


class Own:
    """What only executing code loads."""

    number = 3


class WithOwn(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"own": Own()}, logger=False)


@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_a_class_of_the_users_own_is_loaded_by_the_users_word_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state_dict_type: Any
) -> None:
    def fit(steps: int, **more: Any) -> None:
        saves = ModelCheckpoint(tmp_path, every_n_train_steps=2, save_top_k=-1)
        strategy = strategy_of("scape", resume="auto", state_dict_type=state_dict_type)
        trainer = make_trainer(strategy, max_epochs=-1, max_steps=steps, callbacks=[saves], enable_checkpointing=True)
        trainer.fit(WithOwn(), loader(), **more)
        assert trainer.global_step == steps

    fit(2)
    with pytest.raises(CheckpointError, match="one of them must load"), pytest.warns(UserWarning, match="executing"):
        fit(4)
    fit(4, weights_only=False)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    fit(6)
    with pytest.raises(CheckpointError), pytest.warns(UserWarning, match="executing"):
        fit(8, weights_only=True)


def test_fabric_loads_a_directory_by_the_users_word(tmp_path: Path) -> None:
    strategy = FabricScapeStrategy(sparsity=0.5, state_dict_type="sharded")
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    module = nn.Linear(5, 5)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    state = {"model": model, "optimizer": optimizer, "own": Own()}
    fabric.save(tmp_path / "c", state)
    with pytest.raises(CheckpointError, match="executing its code"):
        fabric.load(tmp_path / "c", state)
    state["own"] = None
    fabric.load(tmp_path / "c", state, weights_only=False)
    assert state["own"].number == 3


def test_a_state_is_made_adamws_wherever_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0))
    parameter.grad = torch.ones(3)
    optimizer.step()
    state = optimizer.state_dict()
    for content in (state, {"train": [{"optimizer": state}]}):
        torch.save(content, tmp_path / "a.pt")
        assert main(["consolidate", "--optimizer", "adamw", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]) == 0
        assert "state as AdamW's" in capsys.readouterr().err
        found = torch.load(tmp_path / "b.pt")
        found = found if content is state else found["train"][0]["optimizer"]
        torch.optim.AdamW([parameter]).load_state_dict(found)
        assert set(found) == {"state", "param_groups"}
        (tmp_path / "b.pt").unlink()


def test_names_that_are_no_texts_load_from_a_directory(tmp_path: Path) -> None:
    strategy = FabricScapeStrategy(sparsity=0.5, state_dict_type="sharded")
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    module = nn.Linear(5, 5)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    fabric.save(tmp_path / "c", {0: model, 1: optimizer, 2: 3, (4, "b"): 5})
    weight, state = module.weight.detach().clone(), {0: model, 1: optimizer, 2: None}
    module.weight.data.zero_()
    assert fabric.load(tmp_path / "c", state) == {(4, "b"): 5}
    assert torch.equal(module.weight, weight)
    assert state[2] == 3


class Keeps(Regression):
    def configure_optimizers(self) -> Any:
        self.kept = super().configure_optimizers()
        return self.kept


def _clips_after_a_fit(rank: int, world_size: int) -> list[str]:
    module, trainer = Keeps(), make_trainer(strategy_of("scape"))
    trainer.fit(module, loader())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.net(next(iter(loader()))[0]).sum().backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
        module.kept.step()
    return [str(each.message) for each in caught if "Gradients should stay" in str(each.message)]


@pytest.mark.few(0)
def test_what_watches_gradients_ends_with_the_fit(run_ranks: Any) -> None:
    assert run_ranks(_clips_after_a_fit, 2) == [[], []]


def _note_rate(checkpoint: dict[str, Any], trainer: Any) -> None:
    checkpoint["rate"] = checkpoint["optimizer_states"][0]["param_groups"][0]["lr"]


def _drop(checkpoint: dict[str, Any], trainer: Any) -> None:
    for name in ("optimizer_states", "state_dict", "loops", "callbacks", "lr_schedulers"):
        del checkpoint[name]


def _drop_on_rank_0(checkpoint: dict[str, Any], trainer: Any) -> None:
    if trainer.is_global_zero:
        del checkpoint["optimizer_states"]


def _halve(checkpoint: dict[str, Any], trainer: Any) -> None:
    for state in checkpoint["optimizer_states"]:
        state["halved"] = True
        for entry in state["state"].values():
            entry["exp_avg"] = entry["exp_avg"].half()


def _look(checkpoint: dict[str, Any], trainer: Any) -> None:
    checkpoint["norm"] = checkpoint["optimizer_states"][0]["state"][0]["exp_avg"].norm()


def _copy(checkpoint: dict[str, Any], trainer: Any) -> None:
    checkpoint["optimizer_states"] = [{**state} for state in checkpoint["optimizer_states"]]


def _change(checkpoint: dict[str, Any], trainer: Any) -> None:
    checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.5


class Hooked(Regression):
    hook: Callable[[dict[str, Any], Any], None] | None = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.hook is not None:
            self.hook(checkpoint, self.trainer)


_SAVED = {"epoch", "global_step", "pytorch-lightning_version"}


def _saved_with_hooks(rank: int, world_size: int, options: dict[str, Any], folder: Path) -> None:
    module, trainer = Hooked(), make_trainer(strategy_of("scape", **options), max_steps=2)
    trainer.fit(module, loader())
    for number, hook in enumerate((_note_rate, _drop, _drop_on_rank_0, _halve, _look, _copy, _change)):
        module.hook = hook
        path = folder / str(number)
        if options and hook in (_halve, _look, _copy, _change) or hook is _look:
            with pytest.raises((KeyError, ValueError), match="must take a state where its tensors are"):
                trainer.save_checkpoint(path)
            continue
        trainer.save_checkpoint(path)
        if rank > 0:
            continue
        whole = consolidate(path)
        assert whole.get("rate", 0.01) == 0.01
        assert hook is not _drop or set(whole) - {RNG} == _SAVED
        assert hook is not _drop_on_rank_0 or "optimizer_states" not in whole
        if hook is _halve:
            (state,) = whole["optimizer_states"]
            assert state["halved"]
            assert state["state"][0]["exp_avg"].dtype == torch.float16


@pytest.mark.few(1)
@pytest.mark.parametrize("options", [{}, {"state_dict_type": "sharded"}, {"async_save": True}], ids=str)
def test_a_hook_finds_what_it_takes_or_an_error_that_says_where_that_is(
    run_ranks: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    run_ranks(_saved_with_hooks, 2, options, tmp_path)


class WithoutOptimizer(Regression):
    def configure_optimizers(self) -> None:
        return None


def test_a_directory_may_hold_no_optimizer(tmp_path: Path) -> None:
    for epochs, more in ((1, {}), (2, {"ckpt_path": tmp_path / "c"})):
        trainer = make_trainer(strategy_of("scape", state_dict_type="sharded"), max_epochs=epochs)
        trainer.fit(WithoutOptimizer(), loader(), **more)
        trainer.save_checkpoint(tmp_path / "c")


class Late(ScapeCheckpointIO):
    """Writes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = threading.Event()

    def save_checkpoint(self, *arguments: Any, **options: Any) -> None:
        assert self.moved.wait(10)
        super().save_checkpoint(*arguments, **options)


def test_a_background_save_lands_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "elsewhere"):
        (tmp_path / name).mkdir()
    late = Late()
    strategy = FabricScapeStrategy(sparsity=0.5, async_save=True, checkpoint_io=late)
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=strategy)
    fabric.launch()
    module = nn.Linear(5, 5)
    model, optimizer = fabric.setup(module, torch.optim.AdamW(module.parameters()))
    monkeypatch.chdir(tmp_path / "here")
    fabric.save("a.pt", {"model": model, "optimizer": optimizer})
    monkeypatch.chdir(tmp_path / "elsewhere")
    late.moved.set()
    strategy.wait_for_checkpoint()
    assert (tmp_path / "here" / "a.pt").exists()
