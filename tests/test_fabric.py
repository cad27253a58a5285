"""Under Lightning Fabric: it trains as the Trainer and as the optimizer in a plain loop, and as under Fabric's DDP."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from trainer_helpers import MARKS, WIDTH, GivenRanks, gathered, make_trainer, use_all, weights

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
    SparseLoCo,
    SparseLoCoStrategy,
)

pytestmark = MARKS
METHODS = ["scape", "sparseloco"]
SCAPE: dict[str, Any] = {"sparsity": 0.8, "sparsity_warmup_steps": 0}
LOCO: dict[str, Any] = {"sync_every": 3, "density": 0.25}
STEPS = 7


def fabric_of(method: str, precision: Any = "32-true", **options: Any) -> L.Fabric:
    strategy: Any = method
    if method == "scape":
        strategy = FabricScapeStrategy(**SCAPE, check_replicas_every=1, **options)
    elif method == "sparseloco":
        strategy = FabricSparseLoCoStrategy(**LOCO, **options)
    plugins = [GivenRanks()] if dist.is_initialized() else []
    devices = dist.get_world_size() if dist.is_initialized() else 1
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=precision, plugins=plugins)
    fabric.launch()
    return fabric


class Net(nn.Sequential):
    """Updates a buffer from its own batch, which the next forward pass uses."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        super().__init__(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.seen: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.append(self.mean.clone())
        outputs = super().forward(inputs - self.mean.to(inputs.dtype))
        if torch.is_grad_enabled():
            self.mean.lerp_(inputs.detach().float().mean(0).to(self.mean.dtype), 0.1)
        return outputs


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch).float() - batch[:, :3].sin()).square().mean()


def plain_net(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


# ---------------------------------------------------------------------------------------------- three ways, one result


def by_fabric(method: str, together: bool) -> Tensor:
    fabric = fabric_of(method, total_steps=STEPS)
    net = plain_net(seed=1 + fabric.global_rank)  # setup makes ranks equal to rank 0
    if together:
        model, optimizer = fabric.setup(net, adamw(net))
    else:
        model = fabric.setup_module(net)
        optimizer = fabric.setup_optimizers(adamw(net))
    for step in range(STEPS):
        for half, batch in enumerate(batch_of(fabric.global_rank, step).chunk(2)):
            with fabric.no_backward_sync(model, enabled=half == 0):
                fabric.backward(loss_of(model, batch) / 2)
        assert fabric.clip_gradients(model, optimizer, max_norm=0.5) > 0
        optimizer.step()
        optimizer.zero_grad()
    return weights(net)


def by_a_plain_loop(method: str) -> Tensor:
    net = plain_net()
    optimizer: Any = adamw(net)
    if method == "scape":
        optimizer = ScapeOptimizer.from_optimizer(optimizer, ScapeConfig(**SCAPE))
    else:
        loco = SparseLoCo(optimizer, **LOCO)
    for step in range(STEPS):
        for batch in batch_of(dist.get_rank(), step).chunk(2):
            (loss_of(net, batch) / 2).backward()
        if method == "scape":
            optimizer.clip_grad_norm(0.5)
        else:
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if method == "sparseloco":
        loco.sync()
    return weights(net)


class Halves(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[Tensor]:
        for step in range(STEPS):
            yield from batch_of(dist.get_rank(), step).chunk(2)


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = plain_net()

    def training_step(self, batch: Tensor) -> Tensor:
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def by_the_trainer(method: str) -> Tensor:
    strategy = ScapeStrategy(**SCAPE) if method == "scape" else SparseLoCoStrategy(**LOCO)
    module = Module()
    trainer = make_trainer(strategy, max_steps=STEPS, max_epochs=None, accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(module, torch.utils.data.DataLoader(Halves(), batch_size=None))
    return weights(module)


def three_ways(rank: int, world_size: int, method: str) -> None:
    expected = by_a_plain_loop(method)
    assert torch.equal(*gathered(expected))
    for other in (by_fabric(method, True), by_fabric(method, False), by_the_trainer(method)):
        assert torch.equal(expected, other)


@pytest.mark.parametrize("method", METHODS)
def test_fabric_trainer_and_plain_loop_end_bitwise_equal(run_ranks: Any, method: str) -> None:
    run_ranks(three_ways, 2, method)


# ------------------------------------------------------------------------------------------------ as under Fabric's DDP


def loop(
    fabric: L.Fabric, model: Any, optimizer: Any, clip: Callable[[], object] = bool, scheduler: Any = None
) -> Tensor:
    """Six steps, two windows of SparseLoCo; the weights then."""
    for step in range(6):
        fabric.backward(loss_of(model, batch_of(fabric.global_rank, step)))
        clip()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
    return weights(model)


def said(run: Callable[[], Any], word: str) -> list[str]:
    """Warnings with this word, which rank 0 gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if word in str(each.message)]


def step_what_was_given(rank: int, method: str, folder: str) -> None:
    """The optimizer given to ``setup`` serves as the one given back; a scheduler steers it, built before or after."""
    ended = []
    for steps in ("the one given back", "the one given", "loaded"):
        fabric, net = fabric_of(method), plain_net()
        given = adamw(net)
        before = StepLR(given, 1, 0.9)
        model, returned = fabric.setup(net, given)
        optimizer: Any = returned if steps == "the one given back" else given
        del returned
        state = {"model": model, "optimizer": optimizer, "schedule": before}
        if steps == "loaded":
            fabric.load(Path(folder, "c.ckpt"), state)
        after = StepLR(given, 10)

        def clip(f: Any = fabric, m: Any = model, o: Any = optimizer) -> None:
            f.clip_gradients(m, o, max_norm=0.5)

        def train(f: Any = fabric, m: Any = model, o: Any = optimizer, s: Any = before, c: Any = clip) -> None:
            loop(f, m, o, c, s)

        assert not said(train, "lr_scheduler")
        after.step()
        assert torch.equal(*gathered(weights(net)))
        if steps == "the one given back":
            fabric.save(Path(folder, "c.ckpt"), state)
        if steps != "loaded":
            train()
        ended.append((weights(net), given.param_groups[0]["lr"]))
    for other, rate in ended[1:]:
        assert torch.equal(ended[0][0], other)
        assert rate == pytest.approx(1e-2 * 0.9**12)


def refuse_what_is_not_under_the_method(rank: int, method: str, folder: str) -> None:
    fabric, net = fabric_of(method), Net()
    forgotten = adamw(net)
    fabric.setup_module(net)
    with pytest.raises(RuntimeError, match=r"must be under the strategy's method, got AdamW.*fabric\.setup"):
        fabric.strategy.optimizer_step(forgotten)
    if method == "scape":
        fabric, net = fabric_of(method), Net()
        with pytest.raises(TypeError, match=r"must be torch.optim.AdamW"):
            fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))


def hand_buffers_on(rank: int, method: str, folder: str) -> None:
    """Before a save, and at the end, all ranks take those of rank 0, of what all still have."""
    fabric, former, net = fabric_of(method), Net(), Net()
    fabric.setup_module(former)
    if rank == 1:
        del former
    model, optimizer = fabric.setup(net, adamw(net))
    for meet in (lambda: fabric.save(Path(folder, "buffers.ckpt"), {"model": model}), fabric.strategy.sync):
        loop(fabric, model, optimizer)
        own = gathered(net.mean)
        assert not torch.equal(*own)
        meet()
        assert torch.equal(net.mean, own[0])


def let_another_strategy_train_on(rank: int, method: str, folder: str) -> None:
    def densely(module: nn.Module) -> Tensor:
        second = fabric_of("ddp")
        return loop(second, *second.setup(module, adamw(module)))

    first, net, twin = fabric_of(method), plain_net(), plain_net()
    loop(first, *first.setup(net, adamw(net)))
    first.strategy.sync()
    twin.load_state_dict(net.state_dict())
    assert torch.equal(densely(net), densely(twin))
    loop(first, *first.setup(net, adamw(net)))  # and the first may come back
    assert torch.equal(*gathered(weights(net)))


def take_a_plain_backward(rank: int, method: str, folder: str) -> None:
    """As with DDP in full precision: ``loss.backward()`` in place of ``fabric.backward(loss)``."""
    ends = []
    for plain in (False, True):
        fabric, net = fabric_of(method), plain_net()
        model, optimizer = fabric.setup(net, adamw(net))
        if plain:
            fabric.backward = lambda loss: loss.backward()  # type: ignore[method-assign]
        ends.append(loop(fabric, model, optimizer))
    assert torch.equal(*ends)


def clip_and_tell_of_a_nan(rank: int, method: str, folder: str) -> None:
    fabric, net = fabric_of(method), plain_net()
    model, optimizer = fabric.setup(net, adamw(net))
    fabric.backward(loss_of(model, batch_of(rank, 0)))
    mean = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    if method == "scape":
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    assert float(fabric.clip_gradients(model, optimizer, max_norm=0.5)) == pytest.approx(float(mean.norm()), rel=0.05)
    optimizer.step()
    optimizer.zero_grad()
    fabric.backward(loss_of(model, batch_of(rank, 1)) * (float("nan") if rank else 1.0))
    if method == "scape":
        with pytest.raises(RuntimeError, match=r"must be finite, got nan .on every rank"):
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
        assert not fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isfinite()
        before = weights(net)
        optimizer.step()  # left out on all ranks
        assert torch.equal(before, weights(net))
        for step in (2, 3):  # who leaves it out by the error goes on with finite gradients
            optimizer.zero_grad()
            fabric.backward(loss_of(model, batch_of(rank, step)) * (1.0 if step == 3 else float("nan")))
            with pytest.raises(RuntimeError, match="must be finite") if step == 2 else nullcontext():
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        assert not torch.equal(before, weights(net))
        return
    fabric.clip_gradients(model, optimizer, max_norm=1.0)  # of one rank alone it is no error: its window is dropped
    for step in (2, 3):
        optimizer.step()
        optimizer.zero_grad()
        fabric.backward(loss_of(model, batch_of(rank, step)))
    assert bool(weights(net).isfinite().all())
    assert torch.equal(*gathered(weights(net)))


def train_the_weights_that_were_loaded(rank: int, method: str, folder: str) -> None:
    """After the set-up, and in bf16, where an fp32 copy of the weights must follow."""
    source = plain_net(seed=5).bfloat16()
    torch.save(source.state_dict(), f"{folder}/raw-{rank}.pt")
    fabric = fabric_of(method, "bf16-true")
    net = plain_net(seed=8)
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-6))
    fabric.load_raw(f"{folder}/raw-{rank}.pt", model)
    for step in range(3):
        fabric.backward(loss_of(model, batch_of(rank, step).bfloat16()))
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(weights(net), weights(source), rtol=1e-2, atol=1e-2)


def skip_a_step_that_one_rank_scales_too_high(rank: int, method: str, folder: str) -> None:
    plugin = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0))
    strategy = FabricScapeStrategy(**SCAPE) if method == "scape" else FabricSparseLoCoStrategy(**LOCO)
    fabric = L.Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[plugin, GivenRanks()])
    fabric.launch()
    net = plain_net()
    model, optimizer = fabric.setup(net, adamw(net))
    moved = []
    for step in range(4):  # of which a window of SparseLoCo takes three
        before = weights(net)
        fabric.backward(loss_of(model, batch_of(rank, step)) * (float("inf") if (step, rank) == (1, 1) else 1.0))
        optimizer.step()
        optimizer.zero_grad()
        moved.append(not torch.equal(before, weights(net)))
    assert moved[0]
    assert not moved[1]
    assert torch.equal(*gathered(weights(net)))


def train_a_compiled_model(rank: int, method: str, folder: str) -> None:
    """Compiled before it is set up, as LitGPT does."""
    ends = []
    for compiled in (False, True):
        fabric, net = fabric_of(method), plain_net()
        model: Any = torch.compile(net, backend="aot_eager") if compiled else net
        ends.append(loop(fabric, *fabric.setup(model, adamw(net))))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)


class Steps(L.LightningModule):
    """Has a ``training_step``, and a method that is marked as one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = plain_net()
        self.seen: list[torch.dtype] = []

    def training_step(self, batch: Tensor) -> Tensor:
        self.seen.append(self.net(batch).dtype)
        return self.net(batch).square().mean()

    def embed(self, batch: Tensor) -> Tensor:
        return self.training_step(batch)


def call_other_methods_than_forward(rank: int, method: str, folder: str) -> None:
    """They run in the precision of ``forward``."""
    fabric, module = fabric_of(method, precision="bf16-mixed"), Steps()
    model, optimizer = fabric.setup(module, adamw(module))
    model.mark_forward_method("embed")
    for act in (model.training_step, model.embed):
        fabric.backward(act(batch_of(rank, 0)))
        optimizer.step()
    assert module.seen == [torch.bfloat16] * 2


USES = [
    call_other_methods_than_forward,
    step_what_was_given,
    refuse_what_is_not_under_the_method,
    hand_buffers_on,
    let_another_strategy_train_on,
    take_a_plain_backward,
    clip_and_tell_of_a_nan,
    train_the_weights_that_were_loaded,
    skip_a_step_that_one_rank_scales_too_high,
    train_a_compiled_model,
]


@pytest.mark.parametrize("method", METHODS)
def test_scripts_for_fabrics_ddp_run_as_they_are(run_ranks: Any, tmp_path: Path, method: str) -> None:
    assert run_ranks(use_all, 2, USES, method, str(tmp_path)) == [len(USES)] * 2


@pytest.mark.parametrize("method", METHODS)
def test_one_device_takes_the_same_path(method: str) -> None:
    fabric, net = fabric_of(method), plain_net()
    before = weights(net)
    assert not torch.equal(before, loop(fabric, *fabric.setup(net, adamw(net))))


def test_the_names_stand_for_the_strategies_with_their_defaults() -> None:
    for name, kind in (("scape", FabricScapeStrategy), ("sparseloco", FabricSparseLoCoStrategy)):
        strategy = L.Fabric(accelerator="cpu", devices=1, strategy=name).strategy
        assert isinstance(strategy, kind)
        assert strategy.config == kind().config
