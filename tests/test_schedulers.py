"""Schedulers in schedulers: saved as data, resumed alive, and given back to the user's optimizer after a fit."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from trainer_helpers import MARKS, Regression, make_trainer

from lightning_scape import FabricScapeStrategy, ScapeStrategy, SparseLoCoStrategy
from lightning_scape.core.method import find
from lightning_scape.hosts.schedulers import as_data, retarget_schedulers, with_live

pytestmark = MARKS


class Warmup(lr_scheduler.LRScheduler):
    """The usual pattern: linear at first, then as another scheduler says. Keeps a bound method, too."""

    def __init__(self, optimizer: Any, steps: int, after: Any) -> None:
        self.steps, self.after, self.rule = steps, after, self.get_lr
        self.others = {"of no use": collections.OrderedDict(inner=[lr_scheduler.StepLR(optimizer, 1)])}
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch >= self.steps:
            return self.after.get_last_lr()
        return [base * (self.last_epoch + 1) / self.steps for base in self.base_lrs]

    def step(self, *args: Any) -> None:
        if getattr(self, "last_epoch", -1) >= self.steps:
            self.after.step()
        super().step(*args)


class Wrapper:
    """A user's own, without a state dict; its optimizer has another name."""

    def __init__(self, optimizer: Any) -> None:
        self.driven, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1


class Warm(Regression):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        warmup = Warmup(optimizer, 2, lr_scheduler.CosineAnnealingLR(optimizer, 100))
        return [optimizer], [{"scheduler": warmup, "interval": "step"}]


def strategy(method: str) -> ScapeStrategy:
    return SparseLoCoStrategy(sync_every=4) if method == "sparseloco" else ScapeStrategy(sparsity=0.9)


def test_a_scheduler_in_a_scheduler_is_saved_as_data_and_resumed(tmp_path: Path) -> None:
    for method in ("scape", "sparseloco"):
        path = tmp_path / f"{method}.ckpt"
        straight, half, resumed = Warm(), Warm(), Warm()
        make_trainer(strategy(method), max_epochs=2).fit(straight)
        first = make_trainer(strategy(method))
        first.fit(half)
        first.save_checkpoint(path)
        (saved,) = torch.load(path, weights_only=True)["lr_schedulers"]
        assert saved["after"]["scape_scheduler"]["T_max"] == 100
        assert "rule" not in saved  # no state: the run that loads it has its own
        second = make_trainer(strategy(method), max_epochs=2)
        second.fit(resumed, ckpt_path=path)
        assert half.lrs + resumed.lrs == straight.lrs
        warmup = second.lr_scheduler_configs[0].scheduler
        assert isinstance(warmup.after, lr_scheduler.CosineAnnealingLR)
        assert warmup.rule == warmup.get_lr


def test_under_fabric_a_scheduler_in_a_scheduler_is_saved_as_data_and_resumed(tmp_path: Path) -> None:
    for kind in ("full", "sharded"):
        fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricScapeStrategy(0.5, state_dict_type=kind))
        fabric.launch()
        found = []
        for load in (False, True):
            model, optimizer = fabric.setup(module := nn.Linear(2, 2), torch.optim.AdamW(module.parameters()))
            after = lr_scheduler.CosineAnnealingLR(optimizer, 9)
            state = {"model": model, "optimizer": optimizer, "scheduler": Warmup(optimizer, 2, after)}
            if load:
                fabric.load(tmp_path / kind, state)
                assert state["scheduler"].after is after
            else:
                for _ in range(4):
                    fabric.backward(model(torch.ones(1, 2)).sum())
                    optimizer.step()
                    state["scheduler"].step()
                fabric.save(tmp_path / kind, state)
            found.append((after.last_epoch, state["scheduler"].get_last_lr()))
        assert found[0] == found[1]


def build() -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    parameters = [nn.Parameter(torch.zeros(2))]
    return torch.optim.AdamW(parameters), torch.optim.AdamW(parameters)


def test_every_holder_of_the_optimizer_is_pointed_at_the_new_one() -> None:
    old, new = build()
    inner, wrapper = lr_scheduler.StepLR(old, 3), Wrapper(old)
    outer = lr_scheduler.ReduceLROnPlateau(old)
    outer.table = {"a": [inner], "b": collections.deque([wrapper])}
    method = lr_scheduler.LambdaLR(old, lambda step: 1.0)
    outer.call, outer.all, outer.again = method.get_lr, (frozenset({outer}),), outer
    outer.drives = [old]
    retarget_schedulers([outer], [(old, new)])
    assert {id(each) for each in (outer.optimizer, inner.optimizer, wrapper.driven, method.optimizer)} == {id(new)}
    assert outer.drives == [new]


def test_a_state_as_data_takes_every_container_and_circle_back_to_life() -> None:
    states, wrappers = [], []
    for steps in (5, 0):
        optimizer, _ = build()
        outer, wrapper = lr_scheduler.ReduceLROnPlateau(optimizer), Wrapper(optimizer)
        outer.table = {"a": [wrapper], "b": collections.deque([1, Wrapper(optimizer)])}
        wrapper.around, outer.milestones = outer, collections.Counter({3: 1})
        wrapper.count = outer.table["b"][1].count = steps
        states.append(as_data(outer.state_dict()))
        wrappers.append((outer, wrapper))
    outer, wrapper = wrappers[1]
    outer.load_state_dict(with_live(outer, states[0]))
    assert outer.table["a"] == [wrapper]
    assert wrapper.around is outer
    assert (wrapper.count, outer.table["b"][0], outer.table["b"][1].count) == (5, 1, 5)
    assert isinstance(outer.milestones, collections.Counter)
    assert as_data([3]) == with_live(outer, [3]) == [3]  # a user's own may give anything
    del outer.table["a"][:]
    with pytest.raises(ValueError, match=r"got none at 'table\.a\.0'"):
        with_live(outer, states[0])


class Keeps(Regression):
    """Keeps its optimizer and its scheduler, and returns the same two at every fit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.kept = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        self.schedule = lr_scheduler.StepLR(self.kept, step_size=1, gamma=0.5)

    def configure_optimizers(self) -> Any:
        return [self.kept], [self.schedule]


@pytest.mark.filterwarnings("ignore:An optimizer that was trained before begins anew")
def test_a_kept_optimizer_and_its_scheduler_train_again_after_a_fit_and_after_an_exception() -> None:
    for method in ("scape", "sparseloco"):
        module = Keeps(fail_at=2)
        with pytest.raises(KeyError, match="the model's own mistake"):
            make_trainer(strategy(method)).fit(module)
        module.fail_at = None
        for fit in (1, 2):
            assert module.schedule.optimizer is module.kept
            before = module.net[0].weight.detach().clone()
            make_trainer(strategy(method)).fit(module)
            assert not torch.equal(before, module.net[0].weight)
            assert module.kept.param_groups[0]["lr"] == 0.1 * 0.5**fit
        module.schedule.step()
        assert module.kept.param_groups[0]["lr"] == 0.1 * 0.5**3


def test_that_a_second_fit_of_a_kept_optimizer_begins_anew_is_said() -> None:
    module = Keeps()
    make_trainer(strategy("scape")).fit(module)
    with pytest.warns(UserWarning, match="begins anew, got a second fit or set-up of the same AdamW"):
        make_trainer(strategy("scape")).fit(module)


@pytest.mark.filterwarnings("error:An optimizer that was trained before begins anew")
def test_a_kept_optimizer_with_a_state_does_not_begin_anew() -> None:
    module = Keeps()
    make_trainer(strategy("scape")).fit(module)
    module.net(torch.ones(1, module.net[0].in_features)).sum().backward()
    module.kept.step()  # on its own again
    with pytest.warns(UserWarning, match=r"first and second moments and step \(1\) carry over"):
        make_trainer(strategy("scape")).fit(module)


def test_after_a_fit_the_users_optimizer_steps_on_its_own(tmp_path: Path) -> None:
    module = Keeps()
    trainer = make_trainer(strategy("sparseloco"))
    trainer.fit(module)
    loco = find(trainer.optimizers[0]).loco
    steps = loco.progress.steps
    module.kept.step()
    assert loco.progress.steps == steps
    trainer.save_checkpoint(tmp_path / "a.ckpt")  # and what it was trained with is still there
    (state,) = torch.load(tmp_path / "a.ckpt", weights_only=True)["optimizer_states"]
    assert state["sparseloco"]["progress"]["steps"] == steps
