"""What a run under ScapeStrategy is told: its warm-up, its first line, whether it is long enough, whether it pays."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
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
    under_scape,
)

from lightning_scape import AdamS, FabricMethodStrategy, MethodStrategy, ScapeConfig, ScapeOptimizer, ScapeStrategy
from lightning_scape.core.words import show_bytes
from lightning_scape.hosts.common import as_call
from lightning_scape.hosts.trainer import DensityBar
from lightning_scape.scape import advice
from lightning_scape.scape.advice import ScapeAdvice
from lightning_scape.scape.stats import StepRecord

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


def _densities_shown(rank: int, world_size: int, kind: str) -> tuple[list[dict[str, float]], int, bool]:
    class Bar(ProgressBar):
        def __init__(self) -> None:
            super().__init__()
            self.shown: list[dict[str, float]] = []

        def disable(self) -> None: ...

        def enable(self) -> None: ...

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            metrics = self.get_metrics(trainer, pl_module)
            self.shown.append({name: value for name, value in metrics.items() if "density" in name})

    looked: list[ScapeOptimizer] = []
    ScapeOptimizer.stats = property(lambda self: looked.append(self))
    bar, model = Bar(), {"one": Regression, "two": TwoOptimizers}[kind]()
    strategy = ScapeStrategy(sparsity=0.9, block_size=10, dense_steps=1, sparsity_warmup_steps=3)
    make_trainer(strategy, callbacks=[bar], enable_progress_bar=True).fit(model)
    return bar.shown, len(looked), "get_metrics" in vars(bar)


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "names"), [("one", [""]), ("two", ["0/", "1/"])])
def test_the_progress_bar_shows_the_density_while_the_warm_up_lasts_and_looks_at_no_tensor_for_it(
    run_ranks: Any, kind: str, names: list[str]
) -> None:
    for shown, looked, changed in run_ranks(_densities_shown, 2, kind):
        assert looked == 0
        assert not changed
        expected = [1.0, 0.6, 0.3, 0.2]  # the decay from 1 to 0.1, in tenths
        assert shown[:4] == [{f"{name}density": density for name in names} for density in expected]
        assert shown[4:] == [{}] * (BATCHES - 4)


def test_the_progress_bar_shows_short_names_and_leaves_the_modules_own() -> None:
    """A terminal of 80 columns showed `scape/compressio…`."""
    own = {"train_loss": 1.0, "scape/compression": 5.0, "scape/grad_norm": 2.0, "grad_norm": 3.0}
    bar = SimpleNamespace(get_metrics=lambda: own)
    optimizers = under_scape([torch.optim.AdamW([nn.Parameter(torch.ones(1000))])], ScapeConfig())
    shown = DensityBar(bar, SimpleNamespace(optimizers=optimizers))()
    assert shown == {"train_loss": 1.0, "compression": 5.0, "scape/grad_norm": 2.0, "grad_norm": 3.0}


# ------------------------------------------------------------------------------------------------ the first line


def line(options: dict[str, Any], steps: float | None, *dense: torch.optim.Optimizer) -> str:
    dense = dense or (torch.optim.AdamW([nn.Parameter(torch.ones(1000))]),)
    optimizers = under_scape(dense, ScapeConfig(**options), steps)
    return advice.summary(optimizers, steps, as_call("ScapeStrategy"))


@pytest.mark.parametrize(
    ("options", "steps", "said"),
    [
        ({}, None, "sends 1% of the entries per step (sparsity=0.99), 0 bytes with one rank, after a warm-up of 4,950"),
        ({}, 5000, "after a warm-up of 4,950 steps. Update"),
        ({}, 600, "after a warm-up of 4,950 steps (this run of 600 ends at 7.5%). Update"),
        ({"update": "adams"}, 5000, "after a warm-up of 1,000 steps. Update"),
        ({"update": "adams"}, 600, "after a warm-up of 600 steps (the whole run). Update"),
        ({"sparsity": 0.999, "dense_steps": 50}, 5000, "sends 0.1% of the entries per step (sparsity=0.999)"),
        ({"dense_steps": 50}, 5001, "after 50 dense steps and a warm-up of 4,950 steps. Update"),
        ({"dense_steps": 50}, 20, "(this run of 20 ends at 100%). Update"),  # was 1e+02%
        ({"sparsity_warmup_steps": 0}, 5000, "from the first step on. Update"),
        ({"sparsity_warmup_steps": 0}, 5000, "To change: ScapeStrategy(sparsity=..., sparsity_warmup_steps=None, upd"),
        ({"sparsity": 0}, 5000, "sends every entry at every step (sparsity=0), 0 bytes with one rank. Update"),
        ({"sparsity": 0}, 5000, 'To change: ScapeStrategy(sparsity=..., update="adams").'),
        ({}, 5000, "Update: AdamW's, your lr, betas and eps hold. To change: ScapeStrategy(sparsity=..., "),
        ({}, 5000, 'sparsity_warmup_steps=0, update="adams").'),
        ({"update": "adams"}, 5000, "Update: AdamS's, as in SCAPE's paper. To change: "),
        ({"update": "adams"}, 5000, 'sparsity_warmup_steps=0, update="adamw").'),
    ],
)
def test_the_first_line_says_what_holds_and_how_to_change_it(
    options: dict[str, Any], steps: float | None, said: str
) -> None:
    assert line(options, steps).startswith("SCAPE: sends ")
    assert said in line(options, steps)


def test_a_strategy_of_any_method_is_given_its_options_in_a_configuration() -> None:
    """It told to call MethodStrategy(sparsity=...), which is an error."""
    for strategy in (MethodStrategy, FabricMethodStrategy):
        written = strategy(ScapeConfig()).spelling()({"sparsity": "..."})
        assert written == f"{strategy.__name__}(ScapeConfig(sparsity=...))"
    assert ScapeStrategy().spelling()({"sparsity": "..."}) == "ScapeStrategy(sparsity=...)"


def test_the_first_line_names_both_updates_of_two_kinds_of_optimizers() -> None:
    dense = torch.optim.Adam([nn.Parameter(torch.ones(9))]), AdamS([nn.Parameter(torch.ones(9))])
    assert "AdamW's, your lr, betas and eps hold; AdamS's, as in SCAPE's paper." in line({}, None, *dense)


def _bytes_said(rank: int, world_size: int) -> tuple[str, int]:
    weight = nn.Parameter(torch.ones(4000))
    (optimizer,) = under_scape([torch.optim.AdamW([weight])], ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    for _ in range(3):
        weight.grad = torch.randn(4000)
        optimizer.step()
    optimizer.drain()
    stats = optimizer.stats
    return advice.summary([optimizer], None, as_call("ScapeStrategy")), stats.bytes_total - stats.bytes_norm


def test_the_bytes_of_the_first_line_are_those_that_a_step_at_its_end_counts(run_ranks: Any) -> None:
    for said, counted in run_ranks(_bytes_said, 2):
        assert f"(sparsity=0.9), {show_bytes(counted)} per rank and step beside the norm's message, from" in said


# -------------------------------------------------------------------------------------------- is it long enough?


def _warned_of_few_updates(rank: int, world_size: int, steps: int, options: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(ScapeStrategy(**options), max_epochs=-1, max_steps=steps).fit(Regression())
    return [str(w.message) for w in caught if "updated at least" in str(w.message)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("steps", "options", "advice"),
    [
        (120, {"sparsity": 0.9}, ""),  # 90 updates of each entry
        (120, {"sparsity": 0.9, "update": "adams"}, None),  # 47
        (120, {"sparsity": 0.9, "sparsity_warmup_steps": 0}, "here 1,424 instead of 0"),  # 12
        (120, {"sparsity": 0.9, "sparsity_warmup_steps": 100}, "here 1,424 instead of 100"),  # 41
        (120, {"sparsity": 0.9, "sparsity_warmup_steps": 100, "update": "adams"}, "here 120 instead of 100"),
        (120, {"sparsity": 0.9, "dense_steps": 60}, ""),  # 66 without a warm-up
        (240, {"sparsity": 0.99}, ""),  # 88
        (20, {"sparsity": 0.99}, ""),  # somebody tries whether it works
    ],
)
def test_a_run_too_short_for_its_sparsity_says_so_once_and_advises_nothing_that_is_set(
    run_ranks: Any, steps: int, options: dict[str, Any], advice: str | None
) -> None:
    """It advised a warm-up where one was set already."""
    (said,) = run_ranks(_warned_of_few_updates, 1, steps, options)
    assert len(said) == (advice != "")
    for message in said:
        assert f"in the {steps} steps of this run" in message
        assert "rain longer, or lower `sparsity` (now 0.9)" in message
        if advice is None:
            assert "sparsity_warmup_steps" not in message
        else:
            assert f"Leave `sparsity_warmup_steps` at its default ({advice})" in message


# ------------------------------------------------------------------------------------------------ does it pay?


def _warned_that_dense_is_faster(rank: int, world_size: int, message_seconds: float) -> list[str]:
    """Steps are real, but look as if their messages had taken so long, and dense ones had a large model's bytes."""
    summary = StepRecord.summary

    def made_up(self: StepRecord, *args: Any) -> Any:
        stats = summary(self, *args)
        spent = {**stats.seconds, "exchange": stats.seconds["exchange"] + message_seconds}
        sent = 100 * stats.bytes_total
        return replace(stats, message_seconds=message_seconds, seconds=spent, bytes_dense=sent)

    StepRecord.summary = made_up
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=6).fit(Regression())
    StepRecord.summary = summary
    return [str(w.message) for w in caught if "Dense training would be faster" in str(w.message)]


@pytest.mark.few(0)
def test_a_run_in_which_dense_would_be_faster_says_so_once_with_figures(run_ranks: Any) -> None:
    # Messages that take no time at all: the bytes of a dense step would not either, and its optimizer does less.
    first, second = run_ranks(_warned_that_dense_is_faster, 2, 1e-7)
    assert len(first) == 1
    assert re.search(
        r"SCAPE's part of a step takes .* for messages; at the .* Gbit/s .* about .*strategy=.ddp.", first[0]
    )
    assert second == []


def test_steps_of_the_warm_up_are_not_judged_whenever_a_run_begins() -> None:
    weight = nn.Parameter(torch.ones(100))
    (optimizer,) = under_scape(
        [torch.optim.AdamW([weight])], ScapeConfig(sparsity=0.9, dense_steps=1, sparsity_warmup_steps=2)
    )

    def timed_by(check: ScapeAdvice) -> list[bool]:
        timed = []
        for _ in range(6):
            weight.grad = torch.ones(100)
            optimizer.step()
            check.after_step(torch.device("cpu"))
            timed.append(optimizer.communicator.at_once)
        return timed

    assert timed_by(ScapeAdvice(optimizer, 1, 2)) == [False] * 3 + [True, True, False]
    resumed = timed_by(ScapeAdvice(optimizer, 1, 2))  # after the warm-up
    assert resumed == [True, True, False, False, False, False]


@pytest.mark.few(0)
def test_a_run_in_which_messages_are_dear_is_silent(run_ranks: Any) -> None:
    assert run_ranks(_warned_that_dense_is_faster, 2, 10.0) == [[], []]
