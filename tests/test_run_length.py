"""The length of a run under ScapeStrategy, and the warm-up that follows from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils.data import DataLoader
from trainer_helpers import (
    BATCH,
    BATCHES,
    MARKS,
    Regression,
    TwoOptimizers,
    loader,
    make_trainer,
    scape_optimizers,
)

from lightning_scape import ScapeStrategy

pytestmark = MARKS

# ------------------------------------------------------------------------------------------------ the warm-up


class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Batches, of which nobody knows how many there are."""

    def __iter__(self) -> Any:
        return iter(loader())


class EndlessRegression(Regression):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(Endless(), batch_size=None)


def _warmups(rank: int, world_size: int, model: type, options: dict[str, Any], given: dict[str, Any]) -> list[int]:
    trainer = make_trainer(ScapeStrategy(sparsity=0.9, **given), **options)
    trainer.fit(model())
    return [optimizer.schedule.warmup_steps for optimizer in scape_optimizers(trainer.optimizers)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "options", "warmups"),
    [
        (Regression, {"max_epochs": None, "max_steps": 4}, [4]),
        (Regression, {"max_epochs": 2}, [2 * BATCHES]),
        (Regression, {"max_epochs": 200, "limit_train_batches": 3, "max_time": {"seconds": 1}}, [600]),
        (Regression, {"max_epochs": 9999, "max_time": {"seconds": 1}}, [1000]),
        (Regression, {"max_epochs": -1, "max_time": {"seconds": 1}}, [1000]),  # nobody knows
        (Regression, {"max_epochs": 2, "accumulate_grad_batches": 4}, [4]),
        (Regression, {"max_epochs": 2, "max_steps": 5}, [5]),
        (Regression, {"max_epochs": 3, "overfit_batches": 1}, [3]),
        (Regression, {"max_epochs": None, "fast_dev_run": 2}, [2]),
        (EndlessRegression, {"max_epochs": 1}, [1000]),  # nobody knows
        (EndlessRegression, {"max_epochs": None, "max_steps": 3}, [3]),
        (TwoOptimizers, {"max_epochs": 1}, [1000, 1000]),  # nobody knows how often the module steps them
        (TwoOptimizers, {"max_epochs": None, "max_steps": 8}, [8, 8]),  # of both together: at most so many each
    ],
)
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_the_warm_up_of_adams_update_is_1000_steps_or_the_whole_of_a_shorter_run(
    run_ranks: Any, model: type, options: dict[str, Any], warmups: list[int]
) -> None:
    assert run_ranks(_warmups, 2, model, options, {"update": "adams"}) == [warmups] * 2


def test_with_the_update_of_adamw_the_warm_up_does_not_ask_for_the_length_of_the_run(run_ranks: Any) -> None:
    assert run_ranks(_warmups, 1, Regression, {"max_epochs": 2}, {}) == [[1424]]


@pytest.mark.few(1)
@pytest.mark.parametrize("given", [0, 3, 2000])
def test_a_warm_up_that_is_given_holds_however_long_the_run(run_ranks: Any, given: int) -> None:
    assert run_ranks(_warmups, 1, Regression, {}, {"sparsity_warmup_steps": given}) == [[given]]


class RandomOrder(Regression):
    """Draws random numbers wherever a module may, and notes those by which it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded, self.drawn = 0, torch.zeros(0)

    def draw(self) -> Tensor:
        self.drawn = torch.cat([self.drawn, torch.rand(1)])
        return self.drawn

    on_fit_start = on_train_start = draw

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.drawn = torch.cat([self.draw(), batch[0][:, 0]])
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> DataLoader:
        self.loaded += 1
        return DataLoader(loader().dataset, batch_size=BATCH, shuffle=True)


def _drawn(rank: int, world_size: int) -> list[tuple[int, Tensor]]:
    found = []
    for strategy in (ScapeStrategy(sparsity=0.9), DDPStrategy()):
        model = RandomOrder()
        torch.manual_seed(7)
        options = {"max_epochs": 2, "limit_val_batches": 1, "num_sanity_val_steps": 1}
        make_trainer(strategy, use_distributed_sampler=False, **options).fit(model)
        found.append((model.loaded, model.draw()))
    return found


@pytest.mark.few(0)
def test_knowing_the_steps_loads_no_data_twice_and_draws_no_random_number(run_ranks: Any) -> None:
    for (loaded, scape), (loaded_by_ddp, ddp) in run_ranks(_drawn, 2):
        assert loaded == loaded_by_ddp == 1
        assert len(scape) > 2 * BATCHES * BATCH
        assert torch.equal(scape, ddp)
