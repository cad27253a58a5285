"""Habits of DDP's users where the module is not wrapped: which optimizers step, buffers, clipping, `no_sync`.

Trainer and Fabric, both methods, each case on two real ranks.
"""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from trainer_helpers import MARKS, WIDTH, Regression, loader, make_trainer, weights

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeOptimizer,
    ScapeStrategy,
    SparseLoCo,
    SparseLoCoStrategy,
)

pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore:.*does not have many workers")]
METHODS = ["scape", "sparseloco"]


def strategy_of(method: str, **options: Any) -> ScapeStrategy:
    if method == "sparseloco":
        return SparseLoCoStrategy(sync_every=4, **options)
    return ScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0, check_replicas_every=1, **options)


def spread(tensors: Any) -> float:
    """Largest difference between the two ranks."""
    own = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    return float((everyone[0] - everyone[1]).abs().max())


def said(run: Callable[[], Any], word: str) -> list[str]:
    """Warnings with this word, which rank 0 gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if word in str(each.message)]


# --------------------------------------------------------------------------------------------- the Trainer's optimizers


class Manual(Regression):
    """Keeps its optimizer, and steps the one that it is told to."""

    def __init__(self, which: str = "kept") -> None:
        super().__init__()
        self.automatic_optimization, self.which = False, which

    def configure_optimizers(self) -> Any:
        self.kept = torch.optim.AdamW(self.parameters(), self.lr)
        self.schedule = StepLR(self.kept, 1, 0.9)
        return [self.kept], [self.schedule]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.kept if self.which == "kept" else self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.between(batch_idx)
        optimizer.step()
        self.schedule.step()

    def between(self, batch_idx: int) -> None: ...


class Stranger(Manual):
    """Steps one that it never returned."""

    def between(self, batch_idx: int) -> None:
        if batch_idx == 2:
            torch.optim.SGD(self.net[0].parameters(), 0.1).step()


class Aside(Manual):
    """Steps one over parameters that are not the module's."""

    def between(self, batch_idx: int) -> None:
        other = nn.Parameter(torch.zeros(2))
        other.grad = torch.ones(2)
        torch.optim.SGD([other], 0.1).step()
        assert other[0] == -torch.tensor(0.1)


class Copied(Manual):
    """Copies itself in mid-fit."""

    def between(self, batch_idx: int) -> None:
        torch.save(self.kept, io.BytesIO())
        twin, aside = copy.deepcopy((self.net, self.kept)), weights(self)
        for parameter in twin[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        before = weights(twin[0])
        twin[1].step()
        assert not torch.equal(weights(twin[0]), before)
        assert torch.equal(weights(self), aside)


class Replaced(Callback):
    """Puts another optimizer in the place of the first, inside a window of SparseLoCo."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 3:
            return
        if self.how == "set up again":
            trainer.strategy.setup_optimizers(trainer)
        elif self.how == "the list's member":
            trainer.strategy.optimizers[0] = torch.optim.AdamW(module.parameters(), 1e-3)
        else:
            trainer.optimizers = [torch.optim.AdamW(module.parameters(), 1e-3)]


def kept_is_torchs(module: Manual) -> None:
    """One rank alone may step the user's optimizer again, as often as it likes."""
    assert not {"zero_grad", "state_dict", "add_param_group"} & vars(module.kept).keys()
    assert module.schedule.optimizer is module.kept
    if dist.get_rank() == 0:
        before = weights(module)
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        for _ in range(5):
            module.kept.step()
        assert not torch.equal(before, weights(module))


def fit(module: Regression, method: str, callbacks: list[Callback] | None = None, **options: Any) -> Any:
    trainer = make_trainer(strategy_of(method, **options), callbacks=callbacks or [])
    trainer.fit(module)
    return trainer


def fits_with_other_optimizers(rank: int, world_size: int, method: str) -> None:
    by_kept, by_given = Manual("kept"), Manual("given")
    assert not said(lambda: fit(by_kept, method), "lr_scheduler")
    fit(by_given, method)
    assert torch.equal(weights(by_kept), weights(by_given))
    assert by_kept.kept.param_groups[0]["lr"] == pytest.approx(by_kept.lr * 0.9**6)
    kept_is_torchs(by_kept)
    for module in (Aside(), Copied()):
        fit(module, method)
        assert spread(module.parameters()) == 0
    with pytest.raises(RuntimeError, match=r"got a step of SGD over 'net\.0\.\w+', which the strategy was not given"):
        fit(Stranger(), method)
    for how in ("set up again", "the list's member", "assigned"):
        for module in (Manual("kept" if how == "set up again" else "given"), Regression()):
            start = weights(module)
            trainer = fit(module, method, [Replaced(how)])
            assert spread(module.parameters()) == 0, how
            assert not torch.equal(weights(module), start)
            assert how != "assigned" or trainer.optimizers[0].param_groups[0]["lr"] == 1e-3
            (steps,) = trainer.optimizers
            assert how == "the list's member" or isinstance(steps, ScapeOptimizer) or SparseLoCo.of(steps) is not None


@pytest.mark.few(0)
@pytest.mark.parametrize("method", METHODS)
def test_every_optimizer_of_a_fit_is_under_the_method_or_refused(run_ranks: Any, method: str) -> None:
    run_ranks(fits_with_other_optimizers, 2, method)


class Unfreezes(Regression):
    """Trains its first layer from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], self.lr)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.first = self.net[0].weight.clone()
            self.net[0].requires_grad_(True)
            self.trainer.strategy.setup_optimizers(self.trainer)


def unfreeze(rank: int, world_size: int, method: str) -> None:
    module = Unfreezes()
    make_trainer(strategy_of(method), max_epochs=2).fit(module)
    assert spread(module.parameters()) == 0
    assert not torch.equal(module.first, module.net[0].weight)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_what_is_unfrozen_trains_once_optimizers_are_set_up_again(run_ranks: Any, method: str) -> None:
    run_ranks(unfreeze, 2, method)


def test_a_second_fit_with_the_kept_optimizer_and_scheduler_trains() -> None:
    module = Manual()
    module.configure_optimizers()
    module.configure_optimizers = lambda: ([module.kept], [module.schedule])  # type: ignore[method-assign]
    for _ in range(2):
        before = weights(module)
        fit(module, "scape")
        assert not torch.equal(before, weights(module))
    assert module.kept.param_groups[0]["lr"] == pytest.approx(module.lr * 0.9**24)


# ------------------------------------------------------------------------------------------------------------- Fabric


class Normed(nn.Sequential):
    """Updates a buffer from its own batch, which the next forward pass uses."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(self.mean.clone())
        outputs = super().forward(inputs - self.mean)
        if torch.is_grad_enabled():
            self.mean.lerp_(inputs.mean(0), 0.1)
        return outputs


def fabric_of(method: str, **options: Any) -> L.Fabric:
    strategy: Any
    if method == "sparseloco":
        strategy = FabricSparseLoCoStrategy(sync_every=3, **options)
    elif method == "scape":
        strategy = FabricScapeStrategy(sparsity=0.5, sparsity_warmup_steps=0, check_replicas_every=1, **options)
    else:
        strategy = method
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    fabric.launch()
    return fabric


def loop(
    fabric: L.Fabric, model: Any, optimizer: Any, clip: Callable[[], object] = bool, scheduler: Any = None
) -> Tensor:
    """Six steps; the weights then."""
    for step in range(6):
        inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + fabric.global_rank))
        optimizer.zero_grad()
        fabric.backward(nn.functional.mse_loss(model(inputs), inputs[:, :3]))
        clip()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return weights(model)


def fabric_scripts(rank: int, world_size: int, method: str, folder: str) -> None:
    ended = []
    for steps in ("the one given back", "the one given", "saved"):
        fabric, net = fabric_of(method, broadcast_buffers=True), Normed()
        adamw = torch.optim.AdamW(net.parameters(), 1e-2)
        before = StepLR(adamw, 1, 0.9)
        model, returned = fabric.setup(net, adamw)
        optimizer = returned if steps == "the one given back" else adamw
        del returned
        state = {"model": model, "optimizer": optimizer, "schedule": before}
        if steps == "saved":
            fabric.load(Path(folder, "c.ckpt"), state)
        after = StepLR(adamw, 10)
        clip = lambda: fabric.clip_gradients(model, optimizer, max_norm=0.5)  # noqa: B023, E731 - called at once
        assert not said(lambda: loop(fabric, model, optimizer, clip, before), "lr_scheduler")  # noqa: B023
        after.step()
        assert spread(net.parameters()) == 0
        if steps == "the one given back":
            fabric.save(Path(folder, "c.ckpt"), state)
            loop(fabric, model, optimizer, clip, before)  # what the third goes on to
        elif steps == "the one given":
            loop(fabric, model, optimizer, clip, before)
        ended.append((weights(net), adamw.param_groups[0]["lr"]))
    for other in ended[1:]:
        assert torch.equal(ended[0][0], other[0])
        assert other[1] == pytest.approx(1e-2 * 0.9**12)

    fabric, net = fabric_of(method), Normed()
    forgotten = torch.optim.AdamW(net.parameters(), 1e-2)
    with pytest.raises(RuntimeError, match=r"got a step of AdamW over '0\.weight'.*Give it to fabric\.setup"):
        loop(fabric, fabric.setup_module(net), forgotten)
    loop(fabric, net, fabric.setup_optimizers(forgotten))

    fabric, net = fabric_of(method), Normed()
    model, first, _ = fabric.setup(net, *(torch.optim.AdamW(part.parameters()) for part in (net, net[0])))
    if method == "scape":
        loop(fabric, model, first)
    else:  # the second has taken the first one's place, as where a training goes on with it
        with pytest.raises(ValueError, match=r"one optimizer, got one of shape \(5, 7\) in optimizers 0 and 1"):
            loop(fabric, model, first)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_fabric_trains_by_the_optimizer_that_it_was_given(run_ranks: Any, tmp_path: Path, method: str) -> None:
    """Stepped, clipped, saved, loaded and steered: as the one that it gave back. One that it never saw is refused."""
    run_ranks(fabric_scripts, 2, method, str(tmp_path))


def another_strategy(rank: int, world_size: int, method: str) -> None:
    """Trains, then goes on with plain DDP, as Fabric's users may with two of its own strategies."""
    first, net = fabric_of(method, broadcast_buffers=True), Normed()
    ours = first.setup(net, torch.optim.AdamW(net.parameters(), 1e-2))
    loop(first, *ours)
    first.strategy.sync()
    twin = Normed()
    twin.load_state_dict(net.state_dict())

    def train_densely(module: nn.Module) -> Tensor:
        second = fabric_of("ddp")
        model, optimizer = second.setup(module, torch.optim.AdamW(module.parameters(), 1e-2))
        return loop(second, model, optimizer)

    with pytest.raises((RuntimeError, ValueError), match=r"another strategy trains the module .* teardown\(\) before"):
        train_densely(net)
    first.strategy.teardown()
    net.mean.fill_(rank)
    net(torch.zeros(1, WIDTH))
    assert net.seen[-1].eq(rank).all()  # nobody hands buffers on any more
    net.load_state_dict(twin.state_dict())
    assert torch.equal(train_densely(net), train_densely(twin))
    assert spread(net.parameters()) == 0
    loop(first, *first.setup(net, torch.optim.AdamW(net.parameters(), 1e-2)))  # and may come back
    first.strategy.sync()
    assert spread(net.parameters()) == 0


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_another_strategy_may_train_the_module_after_teardown(run_ranks: Any, method: str) -> None:
    run_ranks(another_strategy, 2, method)


# ------------------------------------------------------------------------------------------------------------ buffers


class OwnMean(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.net = Normed()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)

    train_dataloader = val_dataloader = lambda self: loader(samples=24)  # noqa: E731 - a method


def buffers(rank: int, world_size: int, method: str) -> None:
    ddp = OwnMean()
    make_trainer("ddp", max_epochs=2, limit_val_batches=1).fit(ddp)
    module = OwnMean()
    sent = make_trainer(strategy_of(method, broadcast_buffers=True), max_epochs=2, limit_val_batches=1)
    assert not said(lambda: sent.fit(module), "buffers")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(module.net.seen, ddp.net.seen, strict=True))
    trainers = [make_trainer(strategy_of(method), max_epochs=2, limit_val_batches=val) for val in (0, 1)]
    for told in [said(lambda each=each: each.fit(OwnMean()), "same buffers") for each in trainers]:
        assert len(told) == (rank == 0)
        assert not told or f"'net.mean'. {type(trainers[0].strategy).__name__} sends no buffers" in told[0]

    theirs, own = Normed(), Normed()
    for name, net in (("ddp", theirs), (method, own)):
        fabric = fabric_of(name, **({} if name == "ddp" else {"broadcast_buffers": True}))
        loop(fabric, *fabric.setup(net, torch.optim.AdamW(net.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(own.seen, theirs.seen, strict=True))
    fabric, net = fabric_of(method), Normed()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    told = said(lambda: [loop(fabric, model, optimizer) for _ in range(17)], "same buffers")  # 102 steps
    assert len(told) == (rank == 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_buffers_that_differ_are_named_once_or_handed_on_as_ddp_does(run_ranks: Any, method: str) -> None:
    run_ranks(buffers, 2, method)


class Taught(Regression):
    """Its teacher is a running average of what it trains, frozen, and written through ``.data``."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.backbone = copy.deepcopy(self.net).requires_grad_(False), nn.Linear(30, 30)
        self.backbone.requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        for teacher, parameter in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            teacher.data.mul_(0.5).add_(parameter.data, alpha=0.5)


def teach(rank: int, world_size: int, method: str) -> None:
    module = Taught()
    told = said(lambda: make_trainer(strategy_of(method)).fit(module, loader()), "no optimizer trains")
    assert len(told) == (rank == 0 and method == "sparseloco")
    assert not told or "different values of 'teacher.0.weight', 'teacher.0.bias', 'teacher.2.weight'" in told[0]
    module, trainer = Taught(), make_trainer(strategy_of(method, broadcast_buffers=True))
    sent: list[int] = []
    broadcast = dist.broadcast
    dist.broadcast = lambda flat, *a, **k: (sent.append(len(flat)), broadcast(flat, *a, **k))[1]
    trainer.fit(module, loader())
    assert spread(module.teacher.parameters()) == spread(module.parameters()) == 0
    teacher = sum(each.nbytes for each in module.teacher.parameters())
    # At the start all; then after the exchange of step 4, where ranks have come to differ, and at the end.
    assert sent[1:] == ([] if method == "scape" else [teacher] * 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("method", METHODS)
def test_a_teacher_that_differs_is_named_or_handed_on_without_the_frozen_backbone(run_ranks: Any, method: str) -> None:
    run_ranks(teach, 2, method)


# ---------------------------------------------------------------------------------------------- clipping, and no_sync


class ClipsItself(Regression):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        before = self.net[0].weight.grad.clone()
        if self.how == "Lightning's":
            self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            assert torch.equal(self.net[0].weight.grad, before)
        elif self.how == "norm":
            nn.utils.clip_grad_norm_(self.parameters(), 0.1)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.how == "value":
            nn.utils.clip_grad_value_(self.parameters(), 0.1)
        elif self.how == "another":
            self.net[0].weight.grad = self.net[0].weight.grad.clamp(-0.1, 0.1)


def clip_own(rank: int, world_size: int) -> None:
    for how, tells in (("Lightning's", False), ("none", False), ("norm", True), ("value", True), ("another", True)):
        told = said(lambda how=how: fit(ClipsItself(how), "scape"), "Gradients should stay")
        assert len(told) == (tells and rank == 0), how
        assert not told or "Clip by `self.clip_gradients(optimizer" in told[0]
    assert not said(lambda: fit(ClipsItself("norm"), "sparseloco"), "Gradients should stay")  # meant there
    for backward in ("fabric's", "torch's"):
        fabric, net = fabric_of("scape"), Normed()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
        if backward == "torch's":
            fabric.backward = lambda loss: loss.backward()  # type: ignore[method-assign]
        clip = lambda net=net: nn.utils.clip_grad_norm_(net.parameters(), 0.1)  # noqa: E731
        told = said(lambda f=fabric, m=model, o=optimizer, c=clip: loop(f, m, o, c), "Gradients should stay")
        assert len(told) == (rank == 0)
        assert not told or "Clip by `fabric.clip_gradients(model" in told[0]


def test_clipping_of_a_ranks_own_gradient_is_noticed(run_ranks: Any) -> None:
    run_ranks(clip_own, 2)


class Accumulates(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        with self.trainer.model.no_sync():
            self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        self.optimizers().step()
        self.optimizers().zero_grad()


def accumulate(rank: int, world_size: int) -> None:
    for method, nodes in (("scape", 1), ("sparseloco", 1), ("scape", 2)):
        module = Accumulates()
        fit(module, method, local_group_size=nodes, wrap=["Linear"] if nodes == 2 else [])
        assert nodes == 2 or spread(module.parameters()) == 0
        assert not hasattr(module, "no_sync")


def test_no_sync_of_the_trainers_model_works_as_ddps(run_ranks: Any) -> None:
    run_ranks(accumulate, 2)


@pytest.mark.parametrize("strategy", [FabricScapeStrategy, FabricSparseLoCoStrategy])
def test_fabric_takes_a_plain_backward_in_full_precision(strategy: Any) -> None:
    fabric = L.Fabric(strategy=strategy(), accelerator="cpu", devices=1)
    fabric.launch()
    net = nn.Linear(3, 1)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), 0.1))
    before = weights(net)
    model(torch.ones(2, 3)).mean().backward()
    optimizer.step()
    assert not torch.equal(before, weights(net))


def test_load_from_checkpoint_of_a_directory_says_what_to_do(tmp_path: Path) -> None:
    trainer = make_trainer(ScapeStrategy(state_dict_type="sharded"), max_steps=1)
    trainer.fit(Regression())
    trainer.save_checkpoint(tmp_path / "c.ckpt")
    with pytest.raises(IsADirectoryError, match=r"must be one file|one file.*lightning-scape consolidate .*c\.ckpt"):
        Regression.load_from_checkpoint(tmp_path / "c.ckpt")
