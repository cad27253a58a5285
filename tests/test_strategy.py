"""ScapeStrategy under Lightning's own Trainer, on one or two ranks made by `run_ranks`."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import subprocess
import sys
import typing
import warnings
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ProgressBar,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import lightning_scape
from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer, ScapeStrategy
from lightning_scape.engine.stats import StepRecord
from lightning_scape.integrations import advice, rendezvous, swap
from lightning_scape.planning.cost_model import show_bytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:LightningCLI's args parameter"),  # it looks at sys.argv, which is pytest's
    pytest.mark.filterwarnings("ignore:No seed found"),
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning:torch"),  # SequentialLR's own
]

WIDTH, BATCH, BATCHES = 7, 4, 6
"""Features; samples per rank and batch; batches per rank and epoch, if there are two ranks."""


class GivenRanks(ClusterEnvironment):
    """The processes and their process group are there already: `run_ranks` made them, without any port."""

    creates_processes_externally = True
    main_address, main_port = "localhost", 0

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return dist.get_world_size()

    def global_rank(self) -> int:
        return dist.get_rank()

    local_rank = global_rank

    def node_rank(self) -> int:
        return 0

    def set_world_size(self, size: int) -> None: ...

    def set_global_rank(self, rank: int) -> None: ...


class Regression(pl.LightningModule):
    """Two layers, and every option that some test needs; `rank` makes what may differ between ranks differ."""

    def __init__(
        self,
        optimizer: str = "AdamW",
        lr: float = 1e-2,
        scheduler: str | None = None,
        batch_norm: bool = False,
        fail_at: int | None = None,
        inf_at: int | None = None,
    ) -> None:
        super().__init__()
        # Ranks start unequal: somebody has to see to it that they are not.
        torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        norm = [nn.BatchNorm1d(5)] if batch_norm else []
        self.net = nn.Sequential(nn.Linear(WIDTH, 5), *norm, nn.Tanh(), nn.Linear(5, 3))
        self.optimizer, self.lr, self.scheduler = optimizer, lr, scheduler
        self.fail_at, self.inf_at = fail_at, inf_at
        self.steps_seen = 0
        self.lrs: list[Any] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.fail_at == batch_idx:
            raise KeyError("the model's own mistake")
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.net(inputs), targets)
        self.log("constant", 1.0)
        self.log("loss", loss.detach())
        for group in self.trainer.optimizers[0].param_groups[:1]:
            self.lrs.append((group["lr"], tuple(group.get("betas", ()))))
        if self.inf_at == batch_idx and self.global_rank == 1:
            loss = loss * float("inf")
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer](self.parameters(), self.lr)
        if self.scheduler is None:
            return optimizer
        scheduler, interval = SCHEDULERS[self.scheduler]
        config = {"scheduler": scheduler(optimizer), "interval": interval, "monitor": "constant"}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def train_dataloader(self) -> DataLoader:
        return loader()

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


class TwoOptimizers(Regression):
    """Manual optimization: each layer has an optimizer of its own, toggled as in a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(self.net[0].parameters(), 1e-2), AdamS(self.net[2].parameters(), 1e-2)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            with optimizer.toggle_model():
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
                self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                optimizer.step()


def loader(batch: int = BATCH, samples: int = 2 * BATCH * BATCHES) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, WIDTH, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3] * 2 + 1), batch_size=batch)


def make_trainer(strategy: Any = None, **options: Any) -> pl.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "num_sanity_val_steps": 0,
    }
    options = quiet | {"max_epochs": 1, "limit_val_batches": 0, "plugins": []} | options
    options["plugins"] = [*options["plugins"], *([GivenRanks()] if dist.is_initialized() else [])]
    devices = dist.get_world_size() if dist.is_initialized() else 1
    # Sparse from the first step: by default so short a run would be warm-up to its end.
    strategy = ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0) if strategy is None else strategy
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=devices, **options)


def weights(module: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in module.parameters()])


def ours(trainer: pl.Trainer) -> ScapeOptimizer:
    (optimizer,) = swap.scape_optimizers(trainer.optimizers)
    return optimizer


OPTIMIZERS: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch.optim.Adam,
    "AdamS": lambda params, lr: AdamS(params, lr, weight_decay=0.1),
    "fused": lambda params, lr: torch.optim.AdamW(params, lr, fused=True),
    "SGD": torch.optim.SGD,
    "LBFGS": torch.optim.LBFGS,
}


def _sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    return lr_scheduler.SequentialLR(optimizer, [warmup, lr_scheduler.CosineAnnealingLR(optimizer, 3)], [3])


def _chained(optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    parts = [lr_scheduler.ExponentialLR(optimizer, 0.9), lr_scheduler.StepLR(optimizer, 2)]
    return lr_scheduler.ChainedScheduler(parts, optimizer)


SCHEDULERS: dict[str, Any] = {
    "lambda": (lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.8**step), "step"),
    "cosine": (lambda o: lr_scheduler.CosineAnnealingLR(o, 6), "step"),
    "one-cycle": (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12), "step"),
    "sequential": (_sequential, "step"),
    "chained": (_chained, "step"),
    "plateau": (lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0), "epoch"),
    "epoch": (lambda o: lr_scheduler.StepLR(o, 1), "epoch"),
}


# ------------------------------------------------------------------------------------------------ end to end


def _against_ddp(rank: int, world_size: int, scheduler: str | None) -> tuple[Tensor, Tensor]:
    ends = []
    for strategy in (ScapeStrategy(sparsity=0, wire_dtype="fp32"), DDPStrategy()):
        model = Regression("AdamS", scheduler=scheduler)
        make_trainer(strategy).fit(model)
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.parametrize("scheduler", [None, "one-cycle"])
def test_sparsity_zero_equals_dense_adams_under_ddp(run_ranks: Any, scheduler: str | None) -> None:
    for scape, ddp in run_ranks(_against_ddp, 2, scheduler):
        torch.testing.assert_close(scape, ddp, rtol=2e-6, atol=2e-7)


def _precision(rank: int, world_size: int, precision: str) -> tuple[Tensor, list[float], torch.dtype]:
    losses: list[float] = []

    class Losses(Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            loss = sum(float(nn.functional.mse_loss(pl_module.net(x.to(kind)), y.to(kind))) for x, y in loader())
            losses.append(loss)

    model = Regression(lr=3e-2)
    kind = {"bf16-true": torch.bfloat16, "64-true": torch.float64}.get(precision, torch.float32)
    trainer = make_trainer(precision=precision, max_epochs=6, gradient_clip_val=1.0, callbacks=[Losses()])
    trainer.fit(model)
    return weights(model), losses, next(model.parameters()).dtype


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed"])
def test_training_in_every_precision_learns_and_keeps_replicas_equal(run_ranks: Any, precision: str) -> None:
    (first, losses, _), (second, _, _) = run_ranks(_precision, 2, precision)
    assert torch.equal(first, second)
    assert losses[-1] < 0.8 * losses[0]


def _sharded_scaler(rank: int, world_size: int) -> dict[str, Any]:
    class Steps(Callback):
        def __init__(self) -> None:
            self.taken: list[bool] = []
            self.before: Tensor | None = None

        def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            self.before = weights(pl_module)

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            self.taken.append(not torch.equal(self.before, weights(pl_module)))

    steps = Steps()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0))
    model = Regression(inf_at=2)
    make_trainer(plugins=[plugin], callbacks=[steps], gradient_clip_val=1.0).fit(model)
    return {"taken": steps.taken, "scale": plugin.scaler.get_scale(), "weights": weights(model)}


def test_an_inf_on_one_rank_makes_the_fp16_scaler_skip_the_step_on_all(run_ranks: Any) -> None:
    first, second = run_ranks(_sharded_scaler, 2)
    assert first["taken"] == second["taken"] == [True, True, False, True, True, True]
    assert first["scale"] == second["scale"] == 128.0
    assert torch.equal(first["weights"], second["weights"])


def test_the_sharded_scaler_goes_on_from_the_scale_of_the_plain_one(run_ranks: Any) -> None:
    assert run_ranks(_scaler_state, 2) == [(True, True, True, True)] * 2


def _scaler_state(rank: int, world_size: int) -> tuple[bool, ...]:
    plain = torch.amp.GradScaler("cpu", init_scale=3.0, growth_factor=5.0, backoff_factor=0.25, growth_interval=7)
    sharded = swap.sharded_scaler(plain)
    off = torch.amp.GradScaler("cpu", enabled=False)
    return (
        sharded.state_dict() == plain.state_dict(),
        type(sharded).__name__ == "ShardedGradScaler" and swap.sharded_scaler(sharded) is sharded,
        swap.sharded_scaler(None) is None,
        swap.sharded_scaler(off) is off,
    )


def _one_device(rank: int, world_size: int) -> tuple[int, bool]:
    start, model = weights(Regression()), Regression()
    trainer = make_trainer()
    trainer.fit(model)
    return ours(trainer).stats.bytes_total, torch.equal(start, weights(model))


def test_one_device_takes_the_same_path_and_sends_nothing(run_ranks: Any) -> None:
    assert run_ranks(_one_device, 1) == [(0, False)]


def _by_name(rank: int, world_size: int) -> str:
    trainer = make_trainer("scape")
    trainer.fit(Regression())
    return f"{type(trainer.strategy).__name__} {type(ours(trainer)).__name__} {trainer.strategy.config.sparsity}"


def test_the_name_scape_means_the_strategy_with_its_defaults(run_ranks: Any) -> None:
    assert run_ranks(_by_name, 2) == ["ScapeStrategy ScapeOptimizer 0.99"] * 2


# ------------------------------------------------------------------------------------------------ accumulation


def _accumulate(rank: int, world_size: int, batch: int, micro_batches: int) -> tuple[Tensor, int, int]:
    model = Regression()
    # Without a sampler: both ranks see all samples, and so does the run with the larger batch.
    trainer = make_trainer(accumulate_grad_batches=micro_batches, use_distributed_sampler=False, precision="64-true")
    trainer.fit(model, loader(batch, samples=32))
    return weights(model), ours(trainer).stats.step, ours(trainer).stats.bytes_total


def test_accumulation_compresses_once_per_optimizer_step(run_ranks: Any) -> None:
    for (_, steps, small), (_, once, large) in zip(
        run_ranks(_accumulate, 2, 4, 4), run_ranks(_accumulate, 2, 16, 1), strict=True
    ):
        assert steps == once == 2
        assert small == large > 0


def test_four_micro_batches_equal_one_large_batch(run_ranks: Any) -> None:
    (small, _, _), (large, _, _) = run_ranks(_accumulate, 2, 4, 4)[0], run_ranks(_accumulate, 2, 16, 1)[0]
    torch.testing.assert_close(small, large, rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------ clipping


def _clip_on_one_device(rank: int, world_size: int, algorithm: str) -> tuple[Tensor, Tensor, Tensor]:
    ends = []
    for strategy, bound in ((ScapeStrategy(sparsity=0, wire_dtype="fp32"), 0.05), ("auto", 0.05), ("auto", None)):
        model = Regression("AdamS")
        clip = {"gradient_clip_val": bound, "gradient_clip_algorithm": algorithm}
        # The sampler of distributed strategies would shuffle.
        make_trainer(strategy, use_distributed_sampler=False, **clip).fit(model)
        ends.append(weights(model))
    return ends[0], ends[1], ends[2]


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_on_one_device_equals_lightnings_own(run_ranks: Any, algorithm: str) -> None:
    ((scape, dense, unclipped),) = run_ranks(_clip_on_one_device, 1, algorithm)
    # torch clips by max_norm / (norm + 1e-6), too, but in another order.
    torch.testing.assert_close(scape, dense, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(dense, unclipped, rtol=1e-3)


class _Clipping(Callback):
    """Compares, at each step, what clipping recorded with the gradients of all ranks."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.factors: list[float] = []

    def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        stats = swap.unwrap_optimizer(optimizer).stats
        if stats is None:
            return
        mean = torch.cat([parameter.grad.flatten() for parameter in pl_module.parameters()])
        dist.all_reduce(mean)
        self.errors.append(abs(stats.grad_norm / float(mean.norm() / dist.get_world_size()) - 1))
        self.factors.append(stats.clip_factor)


def _clip_on_two_ranks(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    callback = _Clipping()
    make_trainer(gradient_clip_val=0.05, callbacks=[callback]).fit(Regression())
    return callback.errors, callback.factors


def test_clipping_by_norm_measures_the_averaged_gradient_and_is_alike_on_all_ranks(run_ranks: Any) -> None:
    (errors, factors), (_, other_factors) = run_ranks(_clip_on_two_ranks, 2)
    assert len(errors) == BATCHES - 1
    assert max(errors) < 0.05
    assert factors == other_factors
    assert all(0 < factor < 1 for factor in factors)


def test_clipping_leaves_the_plugin_as_it_found_it(run_ranks: Any) -> None:
    assert run_ranks(_plugin_after_fit, 1) == [True]


def _plugin_after_fit(rank: int, world_size: int) -> bool:
    trainer = make_trainer(gradient_clip_val=0.1)
    plugin = trainer.precision_plugin
    before = dict(vars(plugin))
    trainer.fit(Regression())
    return dict(vars(plugin)) == before


def test_clip_gradients_refuses_what_it_does_not_know() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig())
    with pytest.raises(ValueError, match='must be "norm" or "value", got \'agc\''):
        swap.clip_gradients(optimizer, 1.0, "agc")
    with pytest.raises(TypeError, match="needs a ScapeOptimizer, got SGD"):
        swap.clip_gradients(torch.optim.SGD([parameter]), 1.0)
    swap.clip_gradients(torch.optim.SGD([parameter]), 0.0)  # 0 is no clipping, as in Lightning


def _fused(rank: int, world_size: int) -> Tensor:
    model = Regression("fused")
    make_trainer(precision="bf16-mixed", gradient_clip_val=0.1).fit(model)
    return weights(model)


def test_clipping_works_with_a_fused_optimizer_in_mixed_precision(run_ranks: Any) -> None:
    first, second = run_ranks(_fused, 2)  # Lightning 2.6.6 raises here with DDP
    assert torch.equal(first, second)


# ------------------------------------------------------------------------------------------------ schedulers


def _learning_rates(rank: int, world_size: int, scheduler: str) -> tuple[list[Any], list[Any], list[str]]:
    runs = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for strategy in (ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0), "auto"):
            model = Regression("AdamW", scheduler=scheduler)
            make_trainer(strategy, max_epochs=3 if scheduler in ("plateau", "epoch") else 1).fit(model)
            runs.append(model.lrs)
    return runs[0], runs[1], [str(w.message) for w in caught if "scheduler.step" in str(w.message)]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_learning_rates_are_those_of_dense_adamw(run_ranks: Any, scheduler: str) -> None:
    ((scape, dense, complaints),) = run_ranks(_learning_rates, 1, scheduler)
    assert scape == dense
    assert len(set(scape)) > 1
    assert complaints == []


def test_retargeting_reaches_schedulers_inside_schedulers() -> None:
    old = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    new = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    bystander = torch.optim.AdamW([nn.Parameter(torch.ones(3))])

    class WarmUp:  # a wrapper of the user's own
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer
            self.after_scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 3)

    inner = [lr_scheduler.LinearLR(old), lr_scheduler.ConstantLR(old)]
    chained = lr_scheduler.ChainedScheduler(inner, old)
    sequential = lr_scheduler.SequentialLR(old, [chained, last := lr_scheduler.StepLR(old, 1)], [3])
    warm_up = WarmUp(old)
    other = lr_scheduler.StepLR(bystander, 1)
    swap.retarget_schedulers([sequential, warm_up, other], [(old, new)])
    for scheduler in (sequential, chained, *inner, last, warm_up, warm_up.after_scheduler):
        assert scheduler.optimizer is new
    assert other.optimizer is bystander


def test_a_scheduler_stepped_before_the_optimizer_still_makes_torch_warn() -> None:
    dense = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    scheduler = lr_scheduler.StepLR(dense, 1)
    swap.swap_optimizers([dense], [scheduler], ScapeConfig())
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_step_hooks_of_the_users_optimizer_go_on_being_called() -> None:
    parameter = nn.Parameter(torch.ones(3))
    dense = torch.optim.AdamW([parameter])
    called: list[str] = []
    handle = dense.register_step_post_hook(lambda optimizer, *_: called.append(type(optimizer).__name__))
    (scape,) = swap.swap_optimizers([dense], [], ScapeConfig())
    parameter.grad = torch.ones(3)
    scape.step()
    handle.remove()
    scape.step()
    assert called == ["ScapeOptimizer"]


# ------------------------------------------------------------------------------------------------ optimizers


@pytest.mark.parametrize("optimizer", ["SGD", "LBFGS"])
def test_other_optimizers_are_refused_by_name(run_ranks: Any, optimizer: str) -> None:
    with pytest.raises(TypeError, match=rf"AdamW.*Adam.*AdamS, got .*{optimizer}"):
        run_ranks(_fit, 2, optimizer)


def _fit(rank: int, world_size: int, optimizer: str) -> None:
    make_trainer().fit(Regression(optimizer))


def _two_optimizers(rank: int, world_size: int) -> tuple[Tensor, list[int], list[bool]]:
    start, model = weights(Regression()), TwoOptimizers()
    trainer = make_trainer()
    trainer.fit(model)
    steps = [optimizer.stats.step for optimizer in swap.scape_optimizers(trainer.optimizers)]
    clipped = [optimizer.stats.clip_factor < 1 for optimizer in swap.scape_optimizers(trainer.optimizers)]
    assert not torch.equal(start, weights(model))
    return weights(model), steps, clipped


def test_manual_optimization_with_two_toggled_optimizers_keeps_replicas_equal(run_ranks: Any) -> None:
    (first, steps, clipped), (second, _, _) = run_ranks(_two_optimizers, 2)
    assert torch.equal(first, second)
    assert steps == [BATCHES, BATCHES]
    assert any(clipped)


def _no_optimizer(rank: int, world_size: int) -> bool:
    model = Regression()
    model.configure_optimizers = lambda: None
    make_trainer(gradient_clip_val=None).fit(model)
    return True


def test_a_module_without_optimizer_runs_as_it_does_elsewhere(run_ranks: Any) -> None:
    assert run_ranks(_no_optimizer, 2) == [True, True]


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


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_resuming_from_a_checkpoint_is_bitwise_the_run_without_a_stop(
    run_ranks: Any, tmp_path: Path, precision: str
) -> None:
    for straight, resumed in run_ranks(_resume, 2, str(tmp_path), precision):
        assert torch.equal(straight, resumed)


def _resume_in_the_warm_up(rank: int, world_size: int, folder: str) -> tuple[Tensor, Tensor, list[int]]:
    straight, resumed = Regression(), Regression(lr=123.0)
    saved = ModelCheckpoint(dirpath=folder, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    first = make_trainer(ScapeStrategy(sparsity=0.9), max_epochs=2, enable_checkpointing=True, callbacks=[saved])
    first.fit(straight)
    second = make_trainer(ScapeStrategy(sparsity=0.9), max_epochs=2)
    second.fit(resumed, ckpt_path=f"{folder}/epoch=0.ckpt")
    return weights(straight), weights(resumed), [ours(trainer).schedule.warmup_steps for trainer in (first, second)]


def test_a_run_resumed_in_the_middle_of_its_warm_up_goes_on_bitwise(run_ranks: Any, tmp_path: Path) -> None:
    for straight, resumed, warmups in run_ranks(_resume_in_the_warm_up, 2, str(tmp_path)):
        assert warmups == [2 * BATCHES, 2 * BATCHES]
        assert torch.equal(straight, resumed)


def _resume_for_longer(rank: int, world_size: int, folder: str) -> list[int]:
    first = make_trainer(ScapeStrategy(sparsity=0.9), max_epochs=1)
    first.fit(Regression())
    first.save_checkpoint(f"{folder}/half.ckpt")
    second = make_trainer(ScapeStrategy(sparsity=0.9), max_epochs=3)
    second.fit(Regression(), ckpt_path=f"{folder}/half.ckpt")
    return [ours(trainer).schedule.warmup_steps for trainer in (first, second)]


def test_a_run_resumed_for_longer_keeps_the_warm_up_that_it_began_with(run_ranks: Any, tmp_path: Path) -> None:
    assert run_ranks(_resume_for_longer, 2, str(tmp_path)) == [[BATCHES, BATCHES]] * 2


def _checkpoint_callback(rank: int, world_size: int, folder: str, asynchronous: bool) -> str:
    callback = ModelCheckpoint(dirpath=folder, every_n_train_steps=3, save_top_k=-1, save_last=True)
    plugins = [AsyncCheckpointIO()] if asynchronous else []
    make_trainer(enable_checkpointing=True, callbacks=[callback], plugins=plugins).fit(Regression())
    return callback.last_model_path


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


def test_a_compiled_module_trains_as_the_plain_one(run_ranks: Any) -> None:
    for compiled, plain in run_ranks(_compiled, 2):
        torch.testing.assert_close(compiled, plain)


# ------------------------------------------------------------------------------------------------ options


def test_every_option_of_the_config_is_an_argument_of_the_same_type_and_default() -> None:
    arguments = inspect.signature(ScapeStrategy.__init__).parameters
    hints, rules = typing.get_type_hints(ScapeStrategy.__init__), typing.get_type_hints(ScapeConfig)
    for field in fields(ScapeConfig):
        assert arguments[field.name].default == field.default
        assert hints[field.name] == rules[field.name]
    assert not any(argument.kind is inspect.Parameter.VAR_KEYWORD for argument in arguments.values())
    assert set(arguments) <= set(hints) | {"self"}


def test_options_reach_the_config_by_name_by_position_and_as_a_whole() -> None:
    assert ScapeStrategy(0.9).config == ScapeStrategy(sparsity=0.9).config == ScapeConfig(sparsity=0.9)
    config = ScapeConfig(sparsity=0.9, dense_steps=3)
    assert ScapeStrategy(config=config).config is config
    assert ScapeStrategy(config=config, dense_steps=3, residual_dtype="float32").config is config


def test_an_option_given_differently_in_config_and_by_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"dense_steps=4 \(config: 3\).*Drop"):
        ScapeStrategy(config=ScapeConfig(dense_steps=3), dense_steps=4)
    with pytest.raises(TypeError, match=r"must be a ScapeConfig or None, got \{"):
        ScapeStrategy(config={"sparsity": 0.9})


def test_none_counts_as_not_given() -> None:
    config = ScapeConfig(sparsity_warmup_steps=0, update="adams")
    assert ScapeStrategy(config=config, sparsity_warmup_steps=None, update=None).config is config
    with pytest.raises(ValueError, match=r"update='adams' \(config: None\)"):
        ScapeStrategy(config=ScapeConfig(), update="adams")
    with pytest.raises(ValueError, match=r"sparsity_warmup_steps=0 \(config: None\)"):
        ScapeStrategy(config=ScapeConfig(), sparsity_warmup_steps=0)


def test_an_option_outside_its_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"`sparsity` must be a number in \[0, 1\), got 1.5"):
        ScapeStrategy(sparsity=1.5)


def test_importing_registers_the_name_and_registering_again_is_harmless() -> None:
    ScapeStrategy.register_strategies(StrategyRegistry)
    assert "scape" in StrategyRegistry
    assert isinstance(StrategyRegistry.get("scape"), ScapeStrategy)


def test_every_public_name_exists() -> None:
    assert all(hasattr(lightning_scape, name) for name in lightning_scape.__all__)


def test_the_trainer_of_pytorch_lightning_gets_a_clear_error() -> None:
    foreign = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ValueError, match="from lightning.pytorch import Trainer") as raised:
        foreign.Trainer(strategy=ScapeStrategy(sparsity=0.9), accelerator="cpu")
    assert "ScapeStrategy(sparsity=0.9)" in str(raised.value)
    assert "must be" in str(raised.value)


# ------------------------------------------------------------------------------------------------ LightningCLI


def run_cli(folder: Path, strategy: str) -> LightningCLI:
    (folder / "config.yaml").write_text(f"trainer:\n  accelerator: cpu\n  logger: false\n  strategy: {strategy}\n")
    arguments = ["--config", str(folder / "config.yaml")]
    return LightningCLI(Regression, args=arguments, run=False, save_config_callback=None)


def test_a_yaml_file_sets_every_kind_of_option(tmp_path: Path) -> None:
    options = (
        "{sparsity: 0.9, dense_steps: 2, wire_dtype: fp32, bias_correction: true, residual_dtype: float64,"
        " residual_device: cpu, block_size: 50, start_method: fork, timeout: '0:10:00'}"
    )
    cli = run_cli(tmp_path, f"{{class_path: lightning_scape.ScapeStrategy, init_args: {options}}}")
    assert cli.trainer.strategy.config == ScapeConfig(
        sparsity=0.9,
        dense_steps=2,
        wire_dtype="fp32",
        bias_correction=True,
        residual_dtype=torch.float64,
        residual_device="cpu",
        block_size=50,
    )
    assert cli.trainer.strategy._start_method == "fork"


@pytest.mark.parametrize("warmup", [None, 0, 7])
@pytest.mark.parametrize("update", [None, "adamw", "adams"])
def test_a_yaml_file_may_leave_warm_up_and_update_open(tmp_path: Path, warmup: int | None, update: str | None) -> None:
    options = f"{{sparsity_warmup_steps: {'null' if warmup is None else warmup}, update: {update or 'null'}}}"
    cli = run_cli(tmp_path, f"{{class_path: lightning_scape.ScapeStrategy, init_args: {options}}}")
    assert cli.trainer.strategy.config == ScapeConfig(sparsity_warmup_steps=warmup, update=update)


@pytest.mark.parametrize("dtype", ["", ", residual_dtype: float64"])
def test_a_yaml_file_may_give_the_config_as_a_block(tmp_path: Path, dtype: str) -> None:
    config = f"{{sparsity: 0.9, wire_dtype: fp32{dtype}}}"
    cli = run_cli(tmp_path, f"{{class_path: lightning_scape.ScapeStrategy, init_args: {{config: {config}}}}}")
    expected = ScapeConfig(sparsity=0.9, wire_dtype="fp32", residual_dtype="float64" if dtype else "float32")
    assert cli.trainer.strategy.config == expected


def test_a_yaml_file_may_give_just_the_name(tmp_path: Path) -> None:
    assert isinstance(run_cli(tmp_path, "scape").trainer.strategy, ScapeStrategy)


def _cli_fit(rank: int, world_size: int, folder: str) -> tuple[float, Tensor]:
    os.chdir(folder)
    arguments = ["fit", "--config", f"{folder}/config.yaml"]
    cli = LightningCLI(Regression, args=arguments)
    return cli.trainer.strategy.config.sparsity, weights(cli.model)


def test_a_cli_run_trains_and_the_configuration_it_saves_runs_again(run_ranks: Any, tmp_path: Path) -> None:
    strategy = "{class_path: lightning_scape.ScapeStrategy, init_args: {sparsity: 0.9}}"
    options = "accelerator: cpu, devices: 2, max_epochs: 1, limit_val_batches: 0, enable_checkpointing: false"
    plugins = "[{class_path: test_strategy.GivenRanks}]"
    (tmp_path / "config.yaml").write_text(f"trainer: {{strategy: {strategy}, plugins: {plugins}, {options}}}\n")
    first = run_ranks(_cli_fit, 2, str(tmp_path))
    (saved,) = tmp_path.glob("lightning_logs/version_0/config.yaml")
    saved.rename(tmp_path / "config.yaml")
    second = run_ranks(_cli_fit, 2, str(tmp_path))
    for sparsity, trained in (*first, *second):
        assert sparsity == 0.9
        assert torch.equal(trained, first[0][1])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("{sparsity: dense}", "sparsity"),
        ("{sparsity: 2.0}", r"`sparsity` must be a number in \[0, 1\), got 2.0"),
        ("{wire_dtype: fp8}", "wire_dtype"),
        ("{update: sgd}", "update"),
        ("{sparsity_warmup_steps: 0.5}", "sparsity_warmup_steps"),
        ("{sparcity: 0.9}", "sparcity"),
    ],
)
def test_a_wrong_value_in_a_yaml_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, complaint: str
) -> None:
    with pytest.raises((SystemExit, ValueError)) as raised:
        run_cli(tmp_path, f"{{class_path: lightning_scape.ScapeStrategy, init_args: {options}}}")
    assert re.search(complaint, capsys.readouterr().err + str(raised.value))


# ------------------------------------------------------------------------------------------------ launching

SCRIPT = """
import sys
from pathlib import Path
from lightning.pytorch import Trainer
from lightning_scape import ScapeStrategy
from test_strategy import Regression, ours, weights

class Reporting(Regression):
    def on_train_end(self):  # in the process that trained: only popen and torchrun return to the script there
        report = Path(__file__).with_name(f"rank-{self.global_rank}.txt")
        report.write_text(f"step {ours(self.trainer).stats.step}, weights {weights(self).tolist()}")

if __name__ == "__main__":
    strategy = ScapeStrategy(sparsity=0.9, start_method=sys.argv[1])
    options = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, limit_val_batches=0, **options)
    trainer.fit(Reporting())
"""


@pytest.mark.parametrize("launcher", ["torchrun", "popen", "spawn", "fork"])
def test_a_script_trains_on_two_ranks_started_by(tmp_path: Path, launcher: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable]
    if launcher == "torchrun":
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(script), "popen" if launcher == "torchrun" else launcher]
    here = Path(__file__).resolve().parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    first, second = (tmp_path / f"rank-{rank}.txt" for rank in (0, 1))
    assert first.read_text() == second.read_text()
    assert first.read_text().startswith(f"step {BATCHES}, ")
    said = [line for line in (run.stdout + run.stderr).splitlines() if "SCAPE: " in line]
    assert len(said) == 1  # by default, and by rank 0 alone
    assert said[0].startswith("SCAPE: sends 10% of the entries per step (sparsity=0.9), ")
    assert f"after a warm-up of {BATCHES} steps (the whole run)" in said[0]


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("Timed out after 11 seconds waiting for clients. 2/3 clients joined.", r"\(2 are expected\)"),
        ("Failed to recv, got 0 bytes. Connection was likely closed.", r"\(2 are expected\)"),  # rank 0 gave up first
        ("[c10d] recvBytes failed: Connection reset by peer", r"\(2 are expected\)"),
        ("The client socket has timed out after 10000ms while trying to connect.", "MASTER_ADDR is the first node's"),
        ("Unable to find address for: eth7", "Set GLOO_SOCKET_IFNAME"),
    ],
)
def test_ranks_that_do_not_meet_are_told_what_to_check(problem: str, remedy: str) -> None:
    environment = SimpleNamespace(world_size=lambda: 2, global_rank=lambda: 1)
    expected = pytest.raises(dist.DistNetworkError, match=rf"All 2 ranks must meet at .* got on rank 1: .*{remedy}")
    with expected, rendezvous.explained_rendezvous(environment):
        raise dist.DistNetworkError(problem)


def test_other_errors_of_the_rendezvous_are_left_alone() -> None:
    environment = SimpleNamespace(world_size=lambda: 2, global_rank=lambda: 1)
    with pytest.raises(RuntimeError, match="^out of ports$"), rendezvous.explained_rendezvous(environment):
        raise RuntimeError("out of ports")


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
    return [optimizer.schedule.warmup_steps for optimizer in swap.scape_optimizers(trainer.optimizers)]


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
def test_the_warm_up_is_1000_steps_or_the_whole_of_a_shorter_run(
    run_ranks: Any, model: type, options: dict[str, Any], warmups: list[int]
) -> None:
    assert run_ranks(_warmups, 2, model, options, {}) == [warmups] * 2


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


@pytest.mark.parametrize(("kind", "names"), [("one", ["scape"]), ("two", ["scape-0", "scape-1"])])
def test_the_progress_bar_shows_the_density_while_the_warm_up_lasts_and_looks_at_no_tensor_for_it(
    run_ranks: Any, kind: str, names: list[str]
) -> None:
    for shown, looked, changed in run_ranks(_densities_shown, 2, kind):
        assert looked == 0
        assert not changed
        expected = [1.0, 0.6, 0.3, 0.2]  # the decay from 1 to 0.1, in tenths
        assert shown[:4] == [{f"{name}/density": density for name in names} for density in expected]
        assert shown[4:] == [{}] * (BATCHES - 4)


# ------------------------------------------------------------------------------------------------ the first line


def line(options: dict[str, Any], steps: float | None, *dense: torch.optim.Optimizer) -> str:
    dense = dense or (torch.optim.AdamW([nn.Parameter(torch.ones(1000))]),)
    optimizers = swap.swap_optimizers(dense, [], ScapeConfig(**options), total_steps=steps)
    return advice.what_holds(optimizers, steps, advice.as_call("ScapeStrategy"))


@pytest.mark.parametrize(
    ("options", "steps", "said"),
    [
        ({}, None, "sends 1% of the entries per step (sparsity=0.99), 0 bytes with one rank, after a warm-up of 1,000"),
        ({}, 5000, "after a warm-up of 1,000 steps. Update"),
        ({}, 600, "after a warm-up of 600 steps (the whole run). Update"),
        ({"sparsity": 0.999, "dense_steps": 50}, 5000, "sends 0.1% of the entries per step (sparsity=0.999)"),
        ({"dense_steps": 50}, 5000, "after 50 dense steps and a warm-up of 1,000 steps. Update"),
        ({"sparsity_warmup_steps": 0}, 5000, "from the first step on. Update"),
        ({"sparsity_warmup_steps": 0}, 5000, "To change: ScapeStrategy(sparsity=..., sparsity_warmup_steps=1000, upd"),
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


def test_the_first_line_names_both_updates_of_two_kinds_of_optimizers() -> None:
    dense = torch.optim.Adam([nn.Parameter(torch.ones(9))]), AdamS([nn.Parameter(torch.ones(9))])
    assert "AdamW's, your lr, betas and eps hold; AdamS's, as in SCAPE's paper." in line({}, None, *dense)


def _bytes_said(rank: int, world_size: int) -> tuple[str, int]:
    weight = nn.Parameter(torch.ones(4000))
    (optimizer,) = swap.swap_optimizers(
        [torch.optim.AdamW([weight])], [], ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)
    )
    for _ in range(3):
        weight.grad = torch.randn(4000)
        optimizer.step()
    optimizer.drain()
    stats = optimizer.stats
    return advice.what_holds([optimizer], None, advice.as_call("ScapeStrategy")), stats.bytes_total - stats.bytes_norm


def test_the_bytes_of_the_first_line_are_those_that_a_step_at_its_end_counts(run_ranks: Any) -> None:
    for said, counted in run_ranks(_bytes_said, 2):
        assert f"(sparsity=0.9), {show_bytes(counted)} per rank and step, from the first" in said


# -------------------------------------------------------------------------------------------- is it long enough?


def _warned_of_few_updates(rank: int, world_size: int, steps: int, options: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(ScapeStrategy(**options), max_epochs=-1, max_steps=steps).fit(Regression())
    return [str(w.message) for w in caught if "updated at least" in str(w.message)]


@pytest.mark.parametrize(
    ("steps", "options", "advice"),
    [
        (120, {"sparsity": 0.9}, None),  # 47 updates of each entry
        (120, {"sparsity": 0.9, "sparsity_warmup_steps": 0}, "here 120 instead of 0"),  # 12
        (120, {"sparsity": 0.9, "sparsity_warmup_steps": 100}, "here 120 instead of 100"),  # 41
        (120, {"sparsity": 0.9, "dense_steps": 60}, ""),  # 66 without a warm-up
        (240, {"sparsity": 0.99}, ""),  # 51
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
        spent = {**stats.seconds, "synchronize": stats.seconds["synchronize"] + message_seconds}
        sent = 100 * stats.bytes_total
        return replace(stats, message_seconds=message_seconds, seconds=spent, bytes_dense=sent)

    StepRecord.summary = made_up
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(max_epochs=6).fit(Regression())
    StepRecord.summary = summary
    return [str(w.message) for w in caught if "Dense training would be faster" in str(w.message)]


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
    (optimizer,) = swap.swap_optimizers(
        [torch.optim.AdamW([weight])], [], ScapeConfig(sparsity=0.9, dense_steps=1, sparsity_warmup_steps=2)
    )

    def timed_by(check: advice.PayoffCheck) -> list[bool]:
        timed = []
        for _ in range(6):
            weight.grad = torch.ones(100)
            optimizer.step()
            check.look(optimizer, torch.device("cpu"))
            timed.append(optimizer.communicator.at_once)
        return timed

    assert timed_by(advice.PayoffCheck(1, 2)) == [False] * 3 + [True, True, False]
    assert timed_by(advice.PayoffCheck(1, 2)) == [True, True, False, False, False, False]  # resumed after the warm-up


def test_a_run_in_which_messages_are_dear_is_silent(run_ranks: Any) -> None:
    assert run_ranks(_warned_that_dense_is_faster, 2, 10.0) == [[], []]
