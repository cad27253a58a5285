"""Under Lightning's Trainer: with everything sent, each habit of a module trains as under DDP, by both methods.

SCAPE at sparsity 0 is AdamW on the averaged gradient. SparseLoCo with an exchange of everything after each step of SGD
is SGD on the averaged gradient.
"""

from __future__ import annotations

import copy
import gc
import io
import os
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from trainer_helpers import (
    BATCHES,
    MARKS,
    SCHEDULERS,
    WIDTH,
    Recorder,
    Regression,
    gathered,
    loader,
    make_trainer,
    use_all,
    weights,
)

from lightning_scape import ScapeMonitor, ScapeStrategy, SparseLoCoStrategy

pytestmark = MARKS
METHODS = ["scape", "sparseloco"]


def sparse(method: str, **options: Any) -> Any:
    """Sparse from the first step; ranks are compared at every step or exchange."""
    if method == "scape":
        return ScapeStrategy(**{"sparsity": 0.8, "sparsity_warmup_steps": 0, "check_replicas_every": 1, **options})
    return SparseLoCoStrategy(**{"sync_every": 2, "density": 0.25, **options})


def sends_all(method: str) -> Any:
    if method == "scape":
        return ScapeStrategy(sparsity=0, wire_dtype="fp32", clip_norm="local")
    return SparseLoCoStrategy(sync_every=1, density=1.0, bits=None, error_decay=0.0)


# ------------------------------------------------------------------------------------------------ as under DDP


class Usual(pl.LightningModule):
    """The usual module; ``optimizer`` makes one of the method's."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.optimizer = optimizer
        self.net = nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh(), nn.Linear(11, 3))
        self.rates: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("constant", 1.0)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


class Scheduled(Usual):
    """Each of torch's kinds of schedulers; some hold others."""

    name = "lambda"

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        make, interval = SCHEDULERS[self.name]
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make(optimizer), "interval": interval, "monitor": "constant"},
        }


class Warmup(LRScheduler):
    """A scheduler of the user's own that keeps another one."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, after: LRScheduler) -> None:
        self.steps, self.after = steps, after
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:
        if self.last_epoch >= self.steps:
            return self.after.get_last_lr()
        return [base * (self.last_epoch + 1) / self.steps for base in self.base_lrs]

    def step(self, *epoch: Any) -> None:
        if getattr(self, "last_epoch", -1) >= self.steps:
            self.after.step()
        super().step(*epoch)


class NestedWarmup(Usual):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = Warmup(optimizer, 3, CosineAnnealingLR(optimizer, 12))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Frozen(Usual):
    """One layer takes no part, and one parameter never has a gradient: weight decay must leave it alone, too."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.net[0].bias.requires_grad_(False)
        self.later = nn.Linear(3, 3)


class UsedAtTimes(Usual):
    """A layer that in some steps one rank uses, and in some steps none."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.extra = nn.Linear(WIDTH, 3)

    def loss(self, batch: list[Tensor]) -> Tensor:
        step = self.trainer.global_step
        out = self.net(batch[0])
        if step % 3 == 0 or (step % 3 == 1 and self.global_rank == 1):
            out = out + self.extra(batch[0])
        return nn.functional.mse_loss(out, batch[1])


class TwoInTurns(Usual):
    """Manual optimization; two optimizers, kept by the module, toggled, and stepped in another order each time."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        self.kept = [self.optimizer(self.net[0].parameters()), self.optimizer(self.net[2].parameters())]
        return self.kept

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        own = self.optimizers()
        for number in (0, 1) if batch_idx % 2 else (1, 0):
            with own[number].toggle_model():
                own[number].zero_grad()
                self.manual_backward(self.loss(batch))
                own[number].step()


class Kept(TwoInTurns):
    """Steps what it returned, and not what ``self.optimizers()`` gives back."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.kept:
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        for optimizer in self.kept:
            optimizer.step()


class Accumulates(TwoInTurns):
    """Accumulates by hand."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        halves = [half.chunk(2) for half in batch]
        with self.trainer.strategy.block_backward_sync():
            self.manual_backward(self.loss([half[0] for half in halves]) / 2)
        self.manual_backward(self.loss([half[1] for half in halves]) / 2)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()


class Wrapped(Usual):
    """Returns Lightning's wrapper of its optimizer."""

    def configure_optimizers(self) -> Any:
        return LightningOptimizer(super().configure_optimizers())


class Halves(Usual):
    """Changes its gradients before the step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.grad.mul_(0.5)


class WithGroups(Usual):
    """Groups with options of their own, over hooks of the user's."""

    def configure_optimizers(self) -> Any:
        self.hooks: list[int] = []
        groups = [{"params": self.net[0].parameters(), "lr": 2e-3}, {"params": self.net[2].parameters()}]
        optimizer = self.optimizer(groups)
        optimizer.register_step_pre_hook(lambda *_: self.hooks.append(0))
        optimizer.register_step_post_hook(lambda *_: self.hooks.append(1))
        return optimizer

    def on_train_end(self) -> None:
        assert self.hooks == [0, 1] * self.trainer.global_step


class BetweenFits(Usual):
    """A hook on every layer, tied weights, and ``torch.compile`` on a part of it before the fit."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.net.append(nn.Linear(3, 3))
        self.net[3].bias = self.net[2].bias
        self.net[0].compile(backend="eager")


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "usual": (Usual, {}),
    "accumulation": (Usual, {"accumulate_grad_batches": 2}),
    "accumulation that changes": (Usual, {"callbacks": lambda: [GradientAccumulationScheduler({0: 1, 1: 3})]}),
    "nested warm-up": (NestedWarmup, {}),
    "frozen": (Frozen, {}),
    "two in turns": (TwoInTurns, {}),
    "steps the kept ones": (Kept, {}),
    "accumulates by hand": (Accumulates, {}),
    "halves its gradients": (Halves, {}),
    "wrapped": (Wrapped, {}),
    "groups and hooks": (WithGroups, {}),
    "tied and compiled": (BetweenFits, {}),
    "inf is no bound": (Usual, {"gradient_clip_val": 1e6}),
    **{
        f"schedule {name}": (type(f"Scheduled_{place}", (Scheduled,), {"name": name}), {})
        for place, name in enumerate(SCHEDULERS)
    },
}
OF_SCAPE = {"used at times": (UsedAtTimes, {})}
"""Under SparseLoCo a rank that does not use a layer does not step it."""
MAKE = {
    "scape": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.3),
    "sparseloco": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
}


def fit_case(method: str, case: str, strategy: Any, epochs: int = 2) -> tuple[Tensor, list[float], int]:
    kind, options = (CASES | OF_SCAPE)[case]
    options = {"max_epochs": epochs, **options}
    if "callbacks" in options:
        options["callbacks"] = options["callbacks"]()
    module = kind(MAKE[method])
    trainer = make_trainer(strategy, **options)
    trainer.fit(module, loader())
    return weights(module), module.rates, trainer.global_step


def as_under_ddp(rank: int, world_size: int, method: str) -> list[str]:
    wrong = []
    for case in CASES | (OF_SCAPE if method == "scape" else {}):
        dense, rates, steps = fit_case(method, case, DDPStrategy(find_unused_parameters=True))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            mine, my_rates, my_steps = fit_case(method, case, sends_all(method))
        off = float((mine - dense).abs().max())
        if off > 2e-5 or my_rates != rates or my_steps != steps:
            wrong.append(f"{case}: off by {off}, rates {my_rates} and {rates}, steps {my_steps} and {steps}")
        if not bool((gathered(mine) == mine).all()):
            wrong.append(f"{case}: ranks differ")
        if any("lr_scheduler.step" in str(each.message) for each in caught) and case != "schedule sequential":
            wrong.append(f"{case}: torch warns of the order of steps")
    return wrong


@pytest.mark.parametrize("method", METHODS)
def test_every_habit_trains_as_under_ddp(run_ranks: Any, method: str) -> None:
    assert run_ranks(as_under_ddp, 2, method) == [[], []]


# ------------------------------------------------------------------------------------------------ sparse


class OfOneRank(Callback):
    """In batch 2 the loss of rank 1 is inf or NaN; notes which steps moved the weights."""

    def __init__(self) -> None:
        self.moved: list[bool] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before = weights(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.moved.append(not torch.equal(self.before, weights(pl_module)))


def in_a_precision(rank: int, world_size: int, method: str, precision: str) -> None:
    plugins = []
    if precision == "16-mixed":
        plugins.append(MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256.0)))
    found = OfOneRank()
    module = Regression(inf_at=2, scheduler="lambda")
    start = weights(module)
    options = {"plugins": plugins} if plugins else {"precision": precision}
    trainer = make_trainer(sparse(method), callbacks=[found], gradient_clip_val=1.0, **options)
    trainer.fit(module)
    end = weights(module)
    assert bool((gathered(end) == end).all())
    assert bool(end.isfinite().all())
    assert not torch.equal(start, end)
    kind = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {parameter.dtype for parameter in module.parameters()} == {kind}
    if method == "scape":  # SparseLoCo drops the window in which a rank's weights are not finite
        assert found.moved == [True, True, False, True, True, True]
    if plugins:
        assert plugins[0].scaler.get_scale() == 128.0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("method", METHODS)
def test_a_loss_of_one_rank_that_is_not_finite_leaves_the_step_out_on_all(
    run_ranks: Any, method: str, precision: str
) -> None:
    run_ranks(in_a_precision, 2, method, precision)


class Norms(Callback):
    """The norm of the gradient's average over ranks, before each step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        mean = torch.cat([parameter.grad.flatten() for parameter in pl_module.parameters()])
        dist.all_reduce(mean)
        self.seen.append(float(mean.norm()) / dist.get_world_size())


class ClipsByHand(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()


def clip(rank: int, world_size: int) -> list[tuple[list[float], list[dict[str, float]]]]:
    found = []
    for module, options in ((Regression(), {"gradient_clip_val": 0.05}), (ClipsByHand(), {})):
        norms, logged = Norms(), Recorder()
        monitor = ScapeMonitor(every_n_steps=1)
        make_trainer(sparse("scape"), callbacks=[norms, monitor], logger=[logged], **options).fit(module)
        told = [each for _, each in logged.records if "scape/grad_norm" in each]
        found.append((norms.seen, told))
    return found


def test_clipping_is_by_the_norm_of_the_averaged_gradient(run_ranks: Any) -> None:
    for (norms, told), _ in zip(*run_ranks(clip, 2), strict=True):
        assert len(told) == BATCHES
        for norm, each in zip(norms, told, strict=True):
            assert each["scape/grad_norm"] == pytest.approx(norm, rel=0.05)  # an estimate, of the owners' parts
            assert each["scape/clip_factor"] == pytest.approx(0.05 / norm, rel=0.05)


def clips_its_own(rank: int, world_size: int) -> list[float]:
    """Of SparseLoCo: each rank bounds its own gradient."""
    norms: list[float] = []

    class Look(Callback):
        def on_before_zero_grad(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            grads = [each.grad for each in pl_module.parameters() if each.grad is not None]
            norms.extend([float(torch.stack([grad.norm() for grad in grads]).norm())] if grads else [])

    make_trainer(sparse("sparseloco"), callbacks=[Look()], gradient_clip_val=0.05).fit(Regression())
    return norms


class SharesALayer(TwoInTurns):
    def configure_optimizers(self) -> Any:
        return [self.optimizer(self.net.parameters()), self.optimizer(self.net[2].parameters())]


def test_under_sparseloco_two_optimizers_of_one_parameter_are_an_error() -> None:
    with pytest.raises(ValueError, match="each parameter must have one optimizer"):
        make_trainer(SparseLoCoStrategy()).fit(SharesALayer(torch.optim.SGD))


class ListsOneTwice(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), self.net[0].weight], self.lr)


def test_under_sparseloco_one_optimizer_may_list_a_parameter_twice() -> None:
    with pytest.warns(UserWarning, match="duplicate parameters"):
        make_trainer(SparseLoCoStrategy()).fit(ListsOneTwice())


def test_clipping_by_value_is_an_error_that_names_the_norm() -> None:
    with pytest.raises(ValueError, match=r"must be clipped by norm, got gradient_clip_algorithm='value'"):
        make_trainer(gradient_clip_val=1.0, gradient_clip_algorithm="value").fit(Regression())


def test_under_sparseloco_each_rank_clips_its_own_gradient(run_ranks: Any) -> None:
    first, second = run_ranks(clips_its_own, 2)
    assert max(first + second) <= 0.05 * 1.001
    assert first != second


# ------------------------------------------------------------------------------------------------ callbacks


class Synced(Regression):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)


class History(Callback):
    """Weights at the start of each epoch and after each step; the validation loss of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[Tensor] = []
        self.steps: list[Tensor] = []
        self.losses: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.epochs.append(weights(pl_module))

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.steps.append(weights(pl_module))

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.losses.append(float(trainer.callback_metrics["val_loss"]))


def fit(method: str, module: Any, *callbacks: Callback, **options: Any) -> pl.Trainer:
    trainer = make_trainer(sparse(method), callbacks=[*callbacks], **options)
    trainer.fit(module)
    return trainer


def alike(module: nn.Module) -> bool:
    mine = weights(module)
    return bool((gathered(mine) == mine).all())


def average_with_ema(rank: int, method: str, folder: str) -> None:
    plain, averaged, model = History(), History(), Synced(lr=2e-2)
    fit(method, Synced(lr=2e-2), plain, max_epochs=3, limit_val_batches=1)
    fit(method, model, averaged, EMAWeightAveraging(decay=0.7), max_epochs=3, limit_val_batches=1)
    average = plain.steps[0]
    for alone, other in zip(plain.steps, averaged.steps, strict=True):
        assert torch.equal(alone, other)  # the swap for a validation leaves the training alone
        average = 0.7 * average + 0.3 * alone if alone is not plain.steps[0] else average
    assert alike(model)
    if method == "scape":
        torch.testing.assert_close(weights(model), average, rtol=1e-5, atol=1e-6)
    assert not torch.equal(weights(model), averaged.steps[-1])


def average_with_swa(rank: int, method: str, folder: str) -> None:
    history, model = History(), Synced(lr=2e-2)
    averages = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)
    fit(method, model, history, averages, max_epochs=4, limit_val_batches=1)
    assert alike(model)
    if method == "scape":
        torch.testing.assert_close(weights(model), torch.stack(history.epochs[1:]).mean(0), rtol=1e-5, atol=1e-6)


class WithAverage(Regression):
    """Its average is a submodule: in the optimizer, without gradients, and written after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.twin: list[nn.Module] = []  # which the optimizer does not know

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.twin:
            self.twin.append(copy.deepcopy(self.average))
        for average in (self.average, *self.twin):
            average.update_parameters(self.net)


def average_in_a_submodule(rank: int, method: str, folder: str) -> None:
    if method == "sparseloco":  # which sends whatever is trained
        return
    for precision in ("32-true", "bf16-true"):
        model = WithAverage()
        fit(method, model, precision=precision)
        for mine, theirs in zip(model.average.parameters(), model.twin[0].parameters(), strict=True):
            assert torch.equal(mine, theirs)


class Overwrite(Callback):
    """In batch 3 all weights become 5, written by hand or through the strategy."""

    def __init__(self, by_hand: bool) -> None:
        self.by_hand = by_hand

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 3:
            return
        if self.by_hand:
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.fill_(5.0)
        else:
            state = {name: torch.full_like(value, 5.0) for name, value in pl_module.state_dict().items()}
            trainer.strategy.load_model_state_dict({"state_dict": state})


def overwrite_weights(rank: int, method: str, folder: str) -> None:
    """Also where an fp32 copy of narrower weights is kept."""
    wires: list[dict[str, Any]] = [{}, {"wire_dtype": "fp32"}] if method == "scape" else [{}]
    for precision in ("32-true", "bf16-true"):
        for by_hand in (True, False):
            for wire in wires:
                model = Regression(lr=1e-3)
                callbacks = [Overwrite(by_hand)]
                make_trainer(sparse(method, **wire), callbacks=callbacks, precision=precision).fit(model)
                assert alike(model)
                assert 4.9 < float(weights(model).min()) <= float(weights(model).max()) < 5.1


def stop_early(rank: int, method: str, folder: str) -> None:
    """Which nobody knew: of SparseLoCo a window is open, and ends with the fit."""
    # The loss falls, so the larger-is-better rule sees no improvement after the first epoch.
    stopping, model = EarlyStopping("val_loss", mode="max", patience=1), Synced()
    strategy = sparse(method, **({"sync_every": 5} if method == "sparseloco" else {}))
    trainer = make_trainer(strategy, callbacks=[stopping], max_epochs=9, limit_val_batches=1.0)
    trainer.fit(model)
    assert (trainer.current_epoch, trainer.global_step) == (2, 2 * BATCHES)
    assert alike(model)


def keep_the_best(rank: int, method: str, folder: str) -> None:
    history, model = History(), Synced(lr=5e-2)
    saved = ModelCheckpoint(folder, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    fit(method, model, history, saved, max_epochs=4, limit_val_batches=1.0, enable_checkpointing=True)
    order = sorted(range(4), key=lambda epoch: history.losses[epoch])
    kept = sorted(path.name for path in Path(folder).glob("*.ckpt"))
    assert kept == sorted([*(f"epoch={epoch}.ckpt" for epoch in order[:2]), "last.ckpt"])
    best = Synced.load_from_checkpoint(saved.best_model_path)
    if method == "scape":
        assert torch.equal(weights(best), [*history.epochs[1:], weights(model)][order[0]])
    last = torch.load(f"{folder}/last.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(torch.cat([value.double().flatten() for value in last.values()]), weights(model))


def save_on_an_exception(rank: int, method: str, folder: str) -> None:
    saved = OnExceptionCheckpoint(folder, "broken")
    with pytest.raises(KeyError, match="the model's own mistake"):
        fit(method, Regression(fail_at=3), saved, enable_checkpointing=True)
    dist.barrier()
    assert torch.load(f"{folder}/broken.ckpt", weights_only=True)["global_step"] == 3


def find_a_learning_rate(rank: int, method: str, folder: str) -> None:
    trainer = make_trainer(sparse(method), max_epochs=2, default_root_dir=folder)
    model = Regression()
    before = weights(model)
    finder = Tuner(trainer).lr_find(model, num_training=8, update_attr=True)
    assert len(finder.results["lr"]) == 8
    assert torch.equal(weights(model), gathered(before)[0])
    assert torch.equal(*gathered(torch.tensor(model.lr)))
    trainer.fit(model)
    assert alike(model)
    fit(method, model, LearningRateFinder(num_training_steps=8), default_root_dir=folder)  # inside the fit
    assert alike(model)


def log_learning_rates(rank: int, method: str, folder: str) -> None:
    model, logger = Synced(scheduler="lambda"), CSVLogger(folder, flush_logs_every_n_steps=1)
    monitor = LearningRateMonitor(logging_interval="step")
    fit(method, model, monitor, logger=logger, log_every_n_steps=1, limit_val_batches=1.0)
    if rank == 0:
        lines = [line.split(",") for line in next(Path(folder).rglob("metrics.csv")).read_text().splitlines()]
        column = next(place for place, name in enumerate(lines[0]) if name.startswith("lr-"))
        assert [float(line[column]) for line in lines[1:] if line[column]] == pytest.approx([lr for lr, _ in model.lrs])


CALLBACKS = [
    average_with_ema,
    average_with_swa,
    average_in_a_submodule,
    overwrite_weights,
    stop_early,
    keep_the_best,
    save_on_an_exception,
    find_a_learning_rate,
    log_learning_rates,
]


@pytest.mark.parametrize("method", METHODS)
def test_lightnings_callbacks_do_what_they_do_under_ddp(run_ranks: Any, tmp_path: Path, method: str) -> None:
    assert run_ranks(use_all, 2, CALLBACKS, method, str(tmp_path)) == [len(CALLBACKS)] * 2


# ------------------------------------------------------------------------------------------------ the life of a Trainer


class Buffered(Regression):
    """A buffer that each rank updates from its own batch, and one that differs at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("noise", torch.randn(3))
        self.first: Tensor | None = None
        self.seen: list[Tensor] = []
        self.validated: list[Tensor] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.validated.append(self.mean.clone())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append(self.mean.clone())
        if self.first is None:
            self.first = torch.cat([weights(self), self.noise.double()])
        self.mean.lerp_(batch[0].mean(0), 0.1)
        return super().training_step([batch[0] - self.mean, batch[1]], batch_idx)


def start_equal(rank: int, method: str, folder: str) -> None:
    model = Buffered()
    own = torch.cat([weights(model), model.noise.double()])
    fit(method, model, limit_val_batches=2)
    assert model.first is not None
    assert torch.equal(model.first, gathered(own)[0])
    assert not torch.equal(model.first, gathered(own)[1])
    assert not torch.equal(*gathered(torch.stack(model.seen)))
    assert torch.equal(*gathered(model.mean))  # at the end it is rank 0's
    assert torch.equal(*gathered(torch.stack(model.validated)))


def evaluate_without_a_fit(rank: int, method: str, folder: str) -> None:
    trainer, model = make_trainer(sparse(method), limit_val_batches=2), Regression()
    assert "val_loss" in trainer.validate(model, verbose=False)[0]
    assert "val_loss" in trainer.test(model, verbose=False)[0]
    assert len(trainer.predict(model)) == BATCHES
    trainer.fit(model)
    trainer.validate(model, verbose=False)
    assert alike(model)


class Keeps(Regression):
    """Gives every fit the same optimizer and scheduler."""

    def configure_optimizers(self) -> Any:
        if not hasattr(self, "kept"):
            self.kept = torch.optim.AdamW(self.parameters(), 1e-2)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.kept, 1, 0.5)
        return [self.kept], [self.schedule]


def fit_twice(rank: int, method: str, folder: str) -> None:
    model = Keeps()
    for turn in (1, 2):
        before = weights(model)
        fit(method, model)
        assert alike(model)
        assert not torch.equal(weights(model), before)
        assert model.kept.param_groups[0]["lr"] == 1e-2 * 0.5**turn
    model.schedule.step()  # which steers the user's own still
    assert model.kept.param_groups[0]["lr"] == 1e-2 * 0.5**3
    trainer, model = make_trainer(sparse(method)), Regression()
    trainer.fit(model)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    assert (trainer.current_epoch, trainer.global_step) == (2, 2 * BATCHES)
    assert alike(model)


def fit_after_an_error(rank: int, method: str, folder: str) -> None:
    for hook in (
        "training_step",
        "on_train_start",
        "on_train_batch_end",
        "on_validation_start",
        "configure_optimizers",
    ):
        model = Regression()
        setattr(model, hook, mistake)
        with pytest.raises(KeyError, match="the user's own"):
            make_trainer(sparse(method), limit_val_batches=1).fit(model)
    model, alone = Regression(), Regression()
    fit(method, model)
    fit(method, alone)
    assert alike(model)
    assert torch.equal(weights(model), weights(alone))


def mistake(*_: Any, **__: Any) -> Any:
    raise KeyError("the user's own")


class Silent(Regression):
    """Logs nothing: Dynamo fails on LightningModule.log."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])


def compile_all(rank: int, method: str, folder: str) -> None:
    compiled, plain = Silent(), Silent()
    fit(method, torch.compile(compiled, backend="eager"))
    fit(method, plain)
    torch.testing.assert_close(weights(compiled), weights(plain))


class Unfreezes(Regression):
    """Trains its first layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], self.lr)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first = self.net[0].weight.clone()
            self.net[0].requires_grad_(True)
            self.trainer.strategy.setup_optimizers(self.trainer)


def unfreeze(rank: int, method: str, folder: str) -> None:
    model = Unfreezes()
    fit(method, model, max_epochs=2)
    assert alike(model)
    assert not torch.equal(model.first, model.net[0].weight)


class Replaces(Callback):
    """Puts an optimizer of its own in the place of the first, in mid-run."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.strategy.optimizers = [torch.optim.AdamW(pl_module.parameters(), 1e-3)]


class Finetunes(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = self.net[0], self.net[2]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], self.lr)


def unfreeze_by_a_callback(rank: int, method: str, folder: str) -> None:
    """It adds a group to the optimizer, which would go without a word."""
    with pytest.raises(ValueError, match=r"`trainer\.strategy\.setup_optimizers\(trainer\)`"):
        fit(method, Finetunes(), BackboneFinetuning(1, verbose=False), max_epochs=3)


def pickle_the_trainer(rank: int, method: str, folder: str) -> None:
    """It is written, or refused in words."""
    trainer = fit(method, Regression())
    try:
        torch.save(trainer, io.BytesIO())
    except Exception as error:
        said = str(error)
    else:
        said = ""
    assert "weakref" not in said


def put_another_in_its_place(rank: int, method: str, folder: str) -> None:
    """An optimizer that the Trainer steps and that is not under the method is an error, or is put under it."""
    model = Regression()
    try:
        fit(method, model, Replaces())
    except (RuntimeError, ValueError) as error:
        said = str(error)
    else:
        said = "optimizer" * alike(model)
    assert "optimizer" in said


def run_for_a_look(rank: int, method: str, folder: str) -> None:
    trainer = make_trainer(sparse(method), fast_dev_run=2, default_root_dir=folder, max_epochs=None)
    trainer.fit(Synced())
    assert trainer.global_step == 2
    assert not list(Path(folder).rglob("*.ckpt"))
    without = Regression()
    without.configure_optimizers = lambda: None  # type: ignore[method-assign]
    fit(method, without)  # a module without an optimizer runs as it does elsewhere


LIFE = [
    start_equal,
    evaluate_without_a_fit,
    fit_twice,
    fit_after_an_error,
    compile_all,
    unfreeze,
    unfreeze_by_a_callback,
    pickle_the_trainer,
    put_another_in_its_place,
    run_for_a_look,
]


@pytest.mark.parametrize("method", METHODS)
def test_a_trainers_life_is_as_under_ddp(run_ranks: Any, tmp_path: Path, method: str) -> None:
    assert run_ranks(use_all, 2, LIFE, method, str(tmp_path)) == [len(LIFE)] * 2


def hold(rank: int, world_size: int, method: str, folder: str) -> list[tuple[int, int]]:
    """Open files and threads after each of some fits, which make process groups and threads of their own."""
    held = []
    for number in range(4):
        trainer = fit(method, Regression())
        trainer.save_checkpoint(f"{folder}/{number}.ckpt")
        trainer.strategy.teardown()
        gc.collect()
        time.sleep(1.0)  # a thread that looks twice in a second has ended
        held.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return held


@pytest.mark.parametrize("method", METHODS)
def test_further_fits_hold_no_further_files_and_threads(run_ranks: Any, tmp_path: Path, method: str) -> None:
    for held in run_ranks(hold, 2, method, str(tmp_path), fresh=True):
        assert held[1:] == held[1:2] * 3, held


@pytest.mark.parametrize("call", ["fit", "validate"])
@pytest.mark.parametrize("method", METHODS)
def test_a_mistake_in_the_call_gets_lightnings_own_error(method: str, call: str) -> None:
    with pytest.raises(pl.utilities.exceptions.MisconfigurationException, match="cannot pass"):
        getattr(make_trainer(sparse(method)), call)(Regression(), loader(), datamodule=pl.LightningDataModule())


def batch_norm(rank: int, world_size: int, synchronized: bool) -> str:
    kinds: list[str] = []

    class Kinds(Callback):
        def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
            kinds.append(type(pl_module.net[1]).__name__)

    # torch has no SyncBatchNorm on a CPU: no step is taken.
    options = {"sync_batchnorm": synchronized, "max_steps": 0, "callbacks": [Kinds()]}
    make_trainer(sparse("scape"), **options).fit(Regression(batch_norm=True))
    return kinds[0]


def test_sync_batchnorm_puts_its_layers_in(run_ranks: Any) -> None:
    assert run_ranks(batch_norm, 2, False)[0] == "BatchNorm1d"
    assert run_ranks(batch_norm, 2, True)[0] == "SyncBatchNorm"
