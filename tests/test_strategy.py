"""ScapeStrategy under Lightning's own Trainer, on one or two ranks made by `run_ranks`: training."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import lr_scheduler
from trainer_helpers import (
    BATCHES,
    MARKS,
    SCHEDULERS,
    Regression,
    TwoOptimizers,
    loader,
    make_trainer,
    ours,
    scape_optimizers,
    under_scape,
    weights,
)

from lightning_scape import ScapeConfig, ScapeOptimizer, ScapeStrategy
from lightning_scape.hosts import setup
from lightning_scape.hosts.schedulers import retarget_schedulers

pytestmark = MARKS

# ------------------------------------------------------------------------------------------------ end to end


def _against_ddp(rank: int, world_size: int, scheduler: str | None) -> tuple[Tensor, Tensor]:
    ends = []
    for strategy in (ScapeStrategy(sparsity=0, wire_dtype="fp32"), DDPStrategy()):
        model = Regression("AdamS", scheduler=scheduler)
        make_trainer(strategy).fit(model)
        ends.append(weights(model))
    return ends[0], ends[1]


@pytest.mark.few(1)
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


@pytest.mark.few(1)
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
    sharded = setup.sharded_scaler(plain)
    off = torch.amp.GradScaler("cpu", enabled=False)
    return (
        sharded.state_dict() == plain.state_dict(),
        type(sharded).__name__ == "ShardedGradScaler" and setup.sharded_scaler(sharded) is sharded,
        setup.sharded_scaler(None) is None,
        setup.sharded_scaler(off) is off,
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


@pytest.mark.few(0)
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
        stats = setup.stepped(optimizer).stats
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
        setup.clip_gradients(optimizer, 1.0, "agc")
    with pytest.raises(TypeError, match="needs an optimizer that was given to the strategy, got SGD"):
        setup.clip_gradients(torch.optim.SGD([parameter]), 1.0)
    setup.clip_gradients(torch.optim.SGD([parameter]), 0.0)  # 0 is no clipping, as in Lightning


def _fused(rank: int, world_size: int) -> Tensor:
    model = Regression("fused")
    make_trainer(precision="bf16-mixed", gradient_clip_val=0.1).fit(model)
    return weights(model)


@pytest.mark.few(0)
def test_clipping_works_with_a_fused_optimizer_in_mixed_precision(run_ranks: Any) -> None:
    first, second = run_ranks(_fused, 2)  # Lightning 2.6.6 raises here with DDP
    assert torch.equal(first, second)


# ------------------------------------------------------------------------------------------------ schedulers


def _learning_rates(rank: int, world_size: int, scheduler: str) -> list[tuple[list[Any], set[str]]]:
    """Of SCAPE and of dense AdamW: the rates, and what torch says of ``scheduler.step``."""
    runs = []
    for strategy in (ScapeStrategy(sparsity=0.9, sparsity_warmup_steps=0), "auto"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = Regression("AdamW", scheduler=scheduler)
            make_trainer(strategy, max_epochs=3 if scheduler in ("plateau", "epoch") else 1).fit(model)
        runs.append((model.lrs, {str(w.message) for w in caught if "scheduler.step" in str(w.message)}))
    return runs


@pytest.mark.few(1)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_learning_rates_are_those_of_dense_adamw(run_ranks: Any, scheduler: str) -> None:
    (((scape, complaints), (dense, of_torch)),) = run_ranks(_learning_rates, 1, scheduler)
    assert scape == dense
    assert len(set(scape)) > 1
    assert complaints <= of_torch  # torch 2.7's SequentialLR complains of its own call


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
    retarget_schedulers([sequential, warm_up, other], [(old, new)])
    for scheduler in (sequential, chained, *inner, last, warm_up, warm_up.after_scheduler):
        assert scheduler.optimizer is new
    assert other.optimizer is bystander


def test_a_scheduler_stepped_before_the_optimizer_still_makes_torch_warn() -> None:
    dense = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    scheduler = lr_scheduler.StepLR(dense, 1)
    (scape,) = under_scape([dense], ScapeConfig())
    retarget_schedulers([scheduler], [(dense, scape)])
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()


def test_step_hooks_of_the_users_optimizer_go_on_being_called() -> None:
    parameter = nn.Parameter(torch.ones(3))
    dense = torch.optim.AdamW([parameter])
    called: list[str] = []
    handle = dense.register_step_post_hook(lambda optimizer, *_: called.append(type(optimizer).__name__))
    (scape,) = under_scape([dense], ScapeConfig())
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
    steps = [optimizer.stats.step for optimizer in scape_optimizers(trainer.optimizers)]
    clipped = [optimizer.stats.clip_factor < 1 for optimizer in scape_optimizers(trainer.optimizers)]
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
