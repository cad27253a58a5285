"""Ranks never train apart without a word, and never wait for what cannot come."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from trainer_helpers import BATCHES, MARKS, Regression, make_trainer, scape_optimizers, weights

from lightning_scape import (
    FabricScapeStrategy,
    FabricSparseLoCoStrategy,
    ScapeConfig,
    ScapeOptimizer,
    ScapeStrategy,
    SparseLoCoStrategy,
)
from lightning_scape.comm import channel
from lightning_scape.core.words import show_error
from lightning_scape.scape.first_message import Standing, difference

pytestmark = MARKS
RunRanks = Callable[..., list[Any]]
CONFIG = ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0)


def make(entries: int = 300, **options: Any) -> tuple[nn.Parameter, ScapeOptimizer]:
    parameter = nn.Parameter(torch.ones(entries))
    return parameter, ScapeOptimizer([parameter], lr=0.1, config=CONFIG, **options)


def give_gradient(parameter: nn.Parameter, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    parameter.grad = torch.randn(parameter.shape, generator=generator)


def texts(errors: list[Any]) -> list[str]:
    assert all(isinstance(error, Exception) for error in errors), errors
    return [str(error) for error in errors]


# ------------------------------------------------------------------------------------------- what a rank's digest says


def test_any_difference_in_standing_is_seen_by_every_rank() -> None:
    one = Standing(0, 7, groups=((0.9, 0.999, 1e-3, 1e-8, 0.1, 0.0),))
    others = [
        one._replace(optimizer=1),
        one._replace(step=8),
        one._replace(left_out=1),
        one._replace(batch=3),
        one._replace(compared=False),
        one._replace(max_norm=1.0),
        one._replace(groups=((0.9, 0.999, 1.0001e-3, 1e-8, 0.1, 0.0),)),
        one._replace(problem="no"),
    ]
    for ranks in (2, 3, 64, 4096):
        for other in others:
            sums = one.digest(ranks) * (ranks - 1) + other.digest(ranks)
            assert sums.max() < 2**24
            assert (sums != one.digest(ranks) * ranks).any()
            assert (sums != other.digest(ranks) * ranks).any()
        assert torch.equal(sum(one.digest(ranks) for _ in range(ranks)), one.digest(ranks) * ranks)


def test_the_error_names_the_first_thing_that_differs() -> None:
    one = Standing(0, 7, groups=((0.9, 0.999, 1e-3, 1e-8, 0.1, 0.0),))
    slower = one._replace(groups=((0.9, 0.999, 1e-4, 1e-8, 0.1, 0.0),))
    assert "lr = 0.001 on rank 0 and 0.0001 on rank 2 (group 0)" in difference([one, one, slower])
    assert "step 8 of optimizer 0 on rank 0 and step 8 of optimizer 1 on rank 1" in difference(
        [one, one._replace(optimizer=1)]
    )
    assert "step 8 of optimizer 0 at batch 9 after 1 gradients" in difference(
        [one._replace(batch=8), one._replace(batch=9, left_out=1)]
    )


# ------------------------------------------------------------------------------------------- ranks


def step_in_another_order(rank: int, world_size: int, clip: bool) -> None:
    pairs = [make(300), make(5000)]
    for step in range(4):
        for parameter, optimizer in reversed(pairs) if step == 2 and rank == 1 else pairs:
            give_gradient(parameter, rank, step)
            if clip:
                optimizer.clip_grad_norm(1.0)
            optimizer.step()


@pytest.mark.few(1)
@pytest.mark.parametrize("clip", [False, True])
def test_optimizers_that_step_in_another_order_are_an_error_on_every_rank(run_ranks: RunRanks, clip: bool) -> None:
    for text in texts(run_ranks(step_in_another_order, 2, clip, expect_errors=True, timeout=60.0)):
        assert "step 3 of optimizer 0 on rank 0 and step 3 of optimizer 1 on rank 1" in text
        assert "Take a step on all ranks or on none: `optimizer.all_finite()`" in text


def step_unlike_models_in_another_order(rank: int, world_size: int, clip: bool) -> None:
    """From the first step on: no earlier message says how long those of the other optimizer are."""
    pairs = []
    for count in (1, 300):
        parameters = [nn.Parameter(torch.ones(40)) for _ in range(count)]
        pairs.append((parameters, ScapeOptimizer(parameters, lr=0.1, config=CONFIG)))
    for parameters, optimizer in reversed(pairs) if rank == 1 else pairs:
        for parameter in parameters:
            give_gradient(parameter, rank, 0)
        if clip:
            optimizer.clip_grad_norm(1.0)
        optimizer.step()


@pytest.mark.parametrize("clip", [False, True])
def test_another_order_from_the_first_step_on_is_an_error_and_no_abort(run_ranks: RunRanks, clip: bool) -> None:
    for text in texts(run_ranks(step_unlike_models_in_another_order, 2, clip, expect_errors=True, timeout=60.0)):
        assert "step 1 of optimizer 0 on rank 0 and step 1 of optimizer 1 on rank 1" in text


def clip_on_one_rank(rank: int, world_size: int, until: int, rule: str) -> None:
    """Rank 1 clips in the steps before ``until`` alone, as by a look at its own norm."""
    parameter = nn.Parameter(torch.ones(300))
    config = ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0, clip_norm=rule)
    optimizer = ScapeOptimizer([parameter], lr=0.1, config=config)
    for step in range(3):
        give_gradient(parameter, rank, step)
        if rank == 0 or step < until:
            optimizer.clip_grad_norm(1.0)
        optimizer.step()


@pytest.mark.few(1)
@pytest.mark.parametrize(("until", "rule"), [(0, "sketch"), (2, "sketch"), (2, "local")])
def test_ranks_that_do_not_clip_alike_are_an_error_and_no_abort(run_ranks: RunRanks, until: int, rule: str) -> None:
    for text in texts(run_ranks(clip_on_one_rank, 2, until, rule, expect_errors=True, timeout=60.0)):
        assert "got max_norm=1.0 on rank 0 and max_norm=None on rank 1" in text


def clip_where_no_backend_is_named(rank: int, world_size: int, store: str) -> None:
    dist.destroy_process_group()
    dist.init_process_group(store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    assert dist.get_backend() != "gloo"  # which it is all the same
    clip_on_one_rank(rank, world_size, 0, "sketch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there torch takes NCCL")
def test_they_are_where_init_process_group_was_given_no_backend(run_ranks: RunRanks, tmp_path: Path) -> None:
    store = str(tmp_path / "second store")
    for text in texts(run_ranks(clip_where_no_backend_is_named, 2, store, expect_errors=True, timeout=60.0)):
        assert "got max_norm=1.0 on rank 0 and max_norm=None on rank 1" in text


def leave_out_a_step(rank: int, world_size: int) -> None:
    """By a look at its own gradient. Steps taken are counted alike, for the other rank's step waits."""
    parameter, optimizer = make()
    for step in range(5):
        optimizer.zero_grad()
        give_gradient(parameter, rank, step)
        if step == 2 and rank == 1:
            parameter.grad[3] = torch.nan
        if bool(parameter.grad.isfinite().all()):
            before = parameter.detach().clone()
            try:
                optimizer.step()
            except RuntimeError:
                assert torch.equal(parameter, before)
                raise


def test_a_step_that_one_rank_leaves_out_is_an_error_in_that_step(run_ranks: RunRanks) -> None:
    for text in texts(run_ranks(leave_out_a_step, 2, expect_errors=True, timeout=60.0)):
        assert "step 3 of optimizer 0 on rank 0" in text
        assert "step 3 of optimizer 0 after 1 gradients that no step used on rank 1" in text


def leave_out_after_clipping(rank: int, world_size: int) -> float:
    """The other rank waits in a message that is not the step's first."""
    parameter, optimizer = make()
    for step in range(5):
        optimizer.zero_grad()
        give_gradient(parameter, rank, step)
        optimizer.clip_grad_norm(1.0)
        began = time.monotonic()
        try:
            if step != 2 or rank != 1:
                optimizer.step()
        except RuntimeError as error:
            raise RuntimeError(f"{time.monotonic() - began:.0f} s: {error}") from error
    return 0.0


def test_ranks_that_wait_for_one_another_in_different_messages_do_not_wait_for_long(run_ranks: RunRanks) -> None:
    began = time.monotonic()
    for text in texts(run_ranks(leave_out_after_clipping, 2, expect_errors=True, timeout=100.0)):
        assert "All ranks must take the same steps" in text
        for message in ("values", "norm"):
            assert f" in step 3 of optimizer 0 ({message})" in text
    assert time.monotonic() - began < 60


def raise_in_the_middle(rank: int, world_size: int) -> None:
    """An error of one rank alone, in place of a message that the other waits for; the process lives on."""
    parameter, optimizer = make()
    give_gradient(parameter, rank, 0)
    optimizer.clip_grad_norm(1.0)
    if rank == 1:
        parameter.grad.mul_(2)
    try:
        optimizer.step()
    except RuntimeError:
        time.sleep(8 * rank)
        raise


def test_an_error_in_place_of_a_message_reaches_those_that_wait_for_it(run_ranks: RunRanks) -> None:
    first, _ = texts(run_ranks(raise_in_the_middle, 2, expect_errors=True, timeout=100.0))
    assert "got an error on rank 1 in place of its message" in first
    assert "RuntimeError: Gradients must stay as they are" in first


def change_settings(rank: int, world_size: int, name: str, value: Any, ranks: list[int]) -> None:
    parameter, optimizer = make()
    for step in range(4):
        give_gradient(parameter, rank, step)
        if step == 2 and rank in ranks:
            optimizer.param_groups[0][name] = value
        before = parameter.detach().clone()
        try:
            optimizer.step()
        except (RuntimeError, ValueError):
            assert step == 2
            assert torch.equal(before, parameter)
            raise


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("lr", 0.05, "lr = 0.1 on rank 0 and 0.05 on rank 1"),
        ("betas", (0.9, 0.99), "beta2 = 0.95 on rank 0 and 0.99 on rank 1"),
        ("weight_decay", 0.0, "weight_decay = 0.1 on rank 0 and 0.0 on rank 1"),
        ("lr", float("nan"), "`lr` must be >= 0, got nan"),
    ],
)
def test_settings_that_differ_are_an_error_before_anything_is_folded(
    run_ranks: RunRanks, name: str, value: Any, word: str
) -> None:
    for text in texts(run_ranks(change_settings, 2, name, value, [1], expect_errors=True, timeout=60.0)):
        assert word in text


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "value"), [("lr", -1e-3), ("lr", float("nan")), ("betas", (0.9, 1.0))])
def test_settings_that_break_a_rule_in_mid_run_are_an_error(run_ranks: RunRanks, name: str, value: Any) -> None:
    for error in run_ranks(change_settings, 2, name, value, [0, 1], expect_errors=True, timeout=60.0):
        assert isinstance(error, ValueError)
        assert f"`{name}` must be" in str(error)


def freeze_on_one_rank(rank: int, world_size: int) -> None:
    parameter, optimizer = make()
    for step in range(2):
        give_gradient(parameter, rank, step)
        if step == 1 and rank == 1:
            parameter.requires_grad_(False)
        optimizer.step()


def test_an_error_of_one_rank_before_the_first_message_is_one_of_all(run_ranks: RunRanks) -> None:
    first, second = run_ranks(freeze_on_one_rank, 2, expect_errors=True, timeout=60.0)
    assert isinstance(second, ValueError)
    assert "got an error on rank 1: ValueError: Parameters must be frozen or unfrozen before" in str(first)


# ------------------------------------------------------------------------------------------- deciding together


def scale_gradients(rank: int, world_size: int, sharded: bool) -> list[float]:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    parameter, optimizer = make()
    options: dict[str, Any] = {"init_scale": 4.0, "growth_interval": 100}
    scaler = ShardedGradScaler("cpu", **options) if sharded else torch.amp.GradScaler("cpu", **options)
    for step in range(3):
        optimizer.zero_grad()
        loss = (parameter * (torch.inf if step == 1 and rank == 1 else 1.0)).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return [float(scaler.get_scale()), float(optimizer.steps_taken)]


def test_a_scaler_by_which_each_rank_decides_for_itself_is_refused(run_ranks: RunRanks) -> None:
    for text in texts(run_ranks(scale_gradients, 2, False, expect_errors=True, timeout=60.0)):
        assert "got a GradScaler, by which each rank decides for itself. Use" in text
        assert "ShardedGradScaler" in text
    assert scale_gradients(0, 1, False)[1] >= 2


def test_a_scaler_that_asks_all_ranks_skips_on_all(run_ranks: RunRanks) -> None:
    assert run_ranks(scale_gradients, 2, True, timeout=60.0) == [[2.0, 2.0], [2.0, 2.0]]


def ask_all_ranks(rank: int, world_size: int, clip: bool) -> tuple[list[int], torch.Tensor]:
    parameter, optimizer = make()
    taken = []
    for step in range(5):
        optimizer.zero_grad()
        give_gradient(parameter, rank, step)
        if step == 2 and rank == 1:
            parameter.grad[3] = torch.inf
        if clip:
            optimizer.clip_grad_norm(1.0)
        if optimizer.all_finite():
            optimizer.step()
            taken.append(step)
    return taken, parameter.detach()


def ask_without_gradients(rank: int, world_size: int, clip: bool) -> int:
    """Rank 1 has none, and clears none."""
    parameter, optimizer = make()
    for step in range(4):
        optimizer.zero_grad()
        if rank == 0:
            give_gradient(parameter, rank, step)
            parameter.grad[3] += torch.inf if step == 2 else 0.0
        finite = optimizer.clip_grad_norm(1.0).isfinite() if clip else optimizer.all_finite()
        if finite:
            optimizer.step()
    return optimizer.steps_taken


@pytest.mark.few(1)
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_left_out_on_all_ranks_is_no_difference(run_ranks: RunRanks, clip: bool) -> None:
    assert run_ranks(ask_without_gradients, 2, clip, timeout=60.0) == [3, 3]


def clear_twice_on_one_rank(rank: int, world_size: int) -> int:
    parameter, optimizer = make()
    for step in range(3):
        for _ in range(1 + rank):
            optimizer.zero_grad(set_to_none=False)
        (parameter * step).sum().backward()
        optimizer.step()
    return optimizer.steps_taken


def test_zeros_that_are_cleared_are_no_step_left_out(run_ranks: RunRanks) -> None:
    assert run_ranks(clear_twice_on_one_rank, 2, timeout=60.0) == [3, 3]


@pytest.mark.parametrize("clip", [False, True])
def test_ranks_that_ask_together_leave_out_the_same_step(run_ranks: RunRanks, clip: bool) -> None:
    (first, one), (second, other) = run_ranks(ask_all_ranks, 2, clip, timeout=60.0)
    assert first == second == [0, 1, 3, 4]
    assert torch.equal(one, other)


def stop(rank: int, world_size: int) -> list[bool]:
    parameter, optimizer = make()
    found = []
    for step in range(4):
        give_gradient(parameter, rank, step)
        if step == 2 and rank == world_size - 1:
            optimizer.request_stop()
        optimizer.step()
        found.append(optimizer.stop_requested)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_that_was_told_to_stop_tells_all_with_its_next_step(run_ranks: RunRanks, world_size: int) -> None:
    assert run_ranks(stop, world_size, timeout=60.0) == [[False, False, True, True]] * world_size


# ------------------------------------------------------------------------------------------- under the Trainer


class Guarded(Regression):
    """Leaves a step out where its gradient is not finite, as one may under DDP."""

    def __init__(self, bad: int, how: str) -> None:
        super().__init__()
        self.bad, self.how = bad, how
        self.automatic_optimization = how != "manual"
        self.taken: list[int] = []

    def loss(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss * torch.nan if batch_idx == self.bad and self.global_rank == 1 else loss

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch, batch_idx))
        if self.finite():
            optimizer.step()
            self.taken.append(batch_idx)
        return None

    def on_after_backward(self) -> None:
        if self.how == "on_after_backward":
            self.guard(self.zero_grad)

    def guard(self, zero_grad: Callable[[], None]) -> None:
        if self.finite():
            self.taken.append(self.trainer.global_step)
        else:
            zero_grad()

    def finite(self) -> bool:
        return all(bool(p.grad.isfinite().all()) for p in self.parameters())


class GuardedBeforeTheStep(Guarded):
    """In the hook that Lightning offers for it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.guard(optimizer.zero_grad)


class GuardedStep(Guarded):
    """In a step of its own."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        if self.finite():
            optimizer.step()
            self.taken.append(batch_idx)


class Guard(pl.Callback):
    """The same for any module."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, Guarded)
        pl_module.guard(trainer.optimizers[0].zero_grad)


GUARDED = {"on_before_optimizer_step": GuardedBeforeTheStep, "optimizer_step": GuardedStep}


def fit_guarded(rank: int, world_size: int, how: str) -> tuple[list[int], torch.Tensor]:
    model = GUARDED.get(how, Guarded)(2, how)
    make_trainer(callbacks=[Guard()] if how == "callback" else []).fit(model)
    return model.taken, weights(model)


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["manual", "on_after_backward", *GUARDED, "callback"])
def test_a_module_that_looks_at_its_gradients_decides_alike_on_all_ranks(run_ranks: RunRanks, how: str) -> None:
    (first, one), (second, other) = run_ranks(fit_guarded, 2, how, timeout=60.0)
    assert first == second == [0, 1, 3, 4, 5]
    assert torch.equal(one, other)


class Heedless(Guarded):
    """Steps whatever its gradients are."""

    def finite(self) -> bool:
        return True


def warnings_of_heedless(rank: int, world_size: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer().fit(Heedless(2, "manual"))
    return [text for each in caught if "Gradients should stay" in (text := str(each.message))]


def test_what_ranks_tell_each_other_of_gradients_is_not_taken_for_clipping(run_ranks: RunRanks) -> None:
    """On CUDA every backward pass writes it, for nobody waits to see whether it need be."""
    assert run_ranks(warnings_of_heedless, 2, timeout=60.0) == [[], []]


class LeavesOut(Regression):
    """By a criterion that ranks do not share; no gradient says it."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        if batch_idx != 2 or self.global_rank != 1:
            self.optimizers().step()
        self.zero_grad()  # the module's: the optimizer does not see it


def fit_and_leave_out(rank: int, world_size: int) -> None:
    make_trainer().fit(LeavesOut())


def test_under_the_trainer_a_step_is_told_from_the_next_backward_pass(run_ranks: RunRanks) -> None:
    for text in texts(run_ranks(fit_and_leave_out, 2, expect_errors=True, timeout=60.0)):
        assert "got step 3 of optimizer 0 at batch 3 on rank 0 and a backward pass after step 2 on rank 1" in text


class OwnStep(Regression):
    """With automatic optimization: one rank passes a batch over."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == 2 and self.global_rank == 1:
            optimizer_closure()
            self.zero_grad()
        else:
            optimizer.step(closure=optimizer_closure)


def fit_with_own_step(rank: int, world_size: int) -> None:
    make_trainer().fit(OwnStep())


def test_under_the_trainer_batches_are_compared_too(run_ranks: RunRanks) -> None:
    for text in texts(run_ranks(fit_with_own_step, 2, expect_errors=True, timeout=60.0)):
        assert "step 3 of optimizer 0 at batch 3 on rank 0 and a backward pass after step 2 on rank 1" in text


class FailsOnOneRank(Regression):
    """In its own code, after which the process of that rank lives on."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            raise KeyError("the model's own mistake")
        return super().training_step(batch, batch_idx)


def fit_and_fail(rank: int, world_size: int) -> None:
    try:
        make_trainer().fit(FailsOnOneRank())
    except KeyError:
        time.sleep(8)
        raise


def test_an_error_in_the_module_of_one_rank_reaches_the_others_while_its_process_lives(run_ranks: RunRanks) -> None:
    began = time.monotonic()
    first, second = run_ranks(fit_and_fail, 2, expect_errors=True, timeout=100.0)
    assert isinstance(second, KeyError)
    assert "got an error on rank 1 in place of its message" in str(first)
    assert 'KeyError: "the model\'s own mistake". Restart all ranks' in str(first)
    assert time.monotonic() - began < 60


def test_an_error_is_a_sentence_also_where_it_has_no_words() -> None:
    """A rank that was interrupted was told of as "KeyboardInterrupt:  Restart all ranks"."""
    assert show_error(KeyboardInterrupt()) == "KeyboardInterrupt."
    assert show_error(ValueError("It must be 3. Make it so.\n")) == "ValueError: It must be 3. Make it so."


LIGHTNINGS: dict[str, Callable[[Any], Any]] = {
    "reduce": lambda strategy: strategy.reduce(torch.ones(1)),
    "barrier": lambda strategy: strategy.barrier("a name"),
    "all_gather": lambda strategy: strategy.all_gather(torch.ones(1)),
    "broadcast": lambda strategy: strategy.broadcast("a word", src=1),
}


class Meets(pl.Callback):
    """Rank 0 comes to a message of Lightning's own, in whose place an error comes on rank 1."""

    def __init__(self, message: str) -> None:
        self.message = message

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            if trainer.global_rank == 1:
                raise KeyError("the callback's own mistake")
            LIGHTNINGS[self.message](trainer.strategy)


def fail_before_lightnings(rank: int, world_size: int, message: str, strategy: Any) -> None:
    channel.WAITING_SECONDS = 0.3
    try:
        make_trainer(strategy, callbacks=[Meets(message)]).fit(Regression())
    except KeyError:
        time.sleep(5)  # its process lives on
        raise


@pytest.mark.few(2)
@pytest.mark.parametrize("strategy", [ScapeStrategy(0.5), SparseLoCoStrategy(sync_every=100)], ids=["scape", "loco"])
@pytest.mark.parametrize("message", LIGHTNINGS)
def test_an_error_of_one_rank_reaches_those_that_wait_in_a_message_of_lightnings(
    run_ranks: RunRanks, message: str, strategy: Any
) -> None:
    ranks = run_ranks(fail_before_lightnings, 2, message, strategy, expect_errors=True, timeout=60.0)
    assert isinstance(ranks[1], KeyError)
    assert f"got an error on rank 1 in place of its message (Lightning's {message})" in str(ranks[0])
    assert "the callback's own mistake" in str(ranks[0])


class GoesOn(pl.Callback):
    """An error in a step that both ranks catch; one of them then comes late to Lightning's message."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        (optimizer,) = scape_optimizers(trainer.optimizers)
        with pytest.raises(KeyError), optimizer.communicator.watched.at("a step"):
            raise KeyError("caught")
        time.sleep(1.5 * trainer.global_rank)
        trainer.strategy.barrier()


def catch_and_go_on(rank: int, world_size: int) -> int:
    channel.WAITING_SECONDS = 0.3
    trainer = make_trainer(callbacks=[GoesOn()], max_steps=1)
    trainer.fit(Regression())
    return trainer.global_step


def test_an_error_that_was_caught_ends_no_message_of_lightnings(run_ranks: RunRanks) -> None:
    assert run_ranks(catch_and_go_on, 2, timeout=60.0) == [1, 1]


# ------------------------------------------------------------------------------------------- SparseLoCo


def fail_between_exchanges(rank: int, world_size: int) -> None:
    """An error of one rank in the middle of its window, while the others come to the exchange."""
    strategy = SparseLoCoStrategy(sync_every=3)
    try:
        make_trainer(strategy).fit(FailsOnOneRank())
    except KeyError:
        time.sleep(8)
        raise


@pytest.mark.few(0)
def test_an_error_before_an_exchange_of_sparseloco_reaches_those_that_wait_in_it(run_ranks: RunRanks) -> None:
    first, second = run_ranks(fail_between_exchanges, 2, expect_errors=True, timeout=100.0)
    assert isinstance(second, KeyError)
    assert "got an error on rank 1 in place of its message (the exchange at step 3 of SparseLoCo" in str(first)


class SavesAlone(pl.Callback):
    """Rank 0 alone saves in mid-fit: where others take a step next, or at the end of an epoch, where they wait."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.is_global_zero and trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def save_alone(rank: int, world_size: int, strategy: Any, path: Path, step: int) -> None:
    channel.WAITING_SECONDS = 0.3
    make_trainer(strategy, callbacks=[SavesAlone(path, step)]).fit(Regression())


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("strategy", "step"),
    [(ScapeStrategy(0.5), 2), (ScapeStrategy(0.5), BATCHES), (SparseLoCoStrategy(sync_every=2), 2)],
)
def test_under_the_trainer_a_save_by_one_rank_alone_is_an_error_on_all(
    run_ranks: RunRanks, tmp_path: Path, strategy: Any, step: int
) -> None:
    path = tmp_path / "a.ckpt"
    for text in texts(run_ranks(save_alone, 2, strategy, path, step, expect_errors=True, timeout=60.0)):
        assert "All ranks must take the same steps" in text
        assert f"in a save after step {step}" in text


# ------------------------------------------------------------------------------------------- Fabric

FABRICS: dict[str, Callable[[], Any]] = {
    "scape": lambda: FabricScapeStrategy(sparsity=0.5),
    "sparseloco": lambda: FabricSparseLoCoStrategy(sync_every=2),
}
ALONE: dict[str, Callable[..., Any]] = {
    "sync()": lambda fabric, optimizer, path: fabric.strategy.sync(),
    "a save": lambda fabric, optimizer, path: fabric.save(path, {"optimizer": optimizer}),
    "a load": lambda fabric, optimizer, path: fabric.load(path, {"optimizer": optimizer}),
    "collecting the state": lambda fabric, optimizer, path: optimizer.state_dict(),
}


def act_alone(rank: int, world_size: int, name: str, where: str, path: Path) -> None:
    """Rank 1 runs out of batches, or asks on its own for what all ranks must; rank 0 takes its next step."""
    channel.WAITING_SECONDS = 0.3
    fabric = L.Fabric(accelerator="cpu", devices=world_size, strategy=FABRICS[name]())
    fabric.launch()
    net = nn.Linear(3, 1)
    net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
    for step in range(4):
        if step == 3 and rank == 1:
            ALONE[where](fabric, optimizer, path)
        fabric.backward(net(torch.ones(2, 3)).mean())
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "where"),
    [("scape", "a save"), ("scape", "a load"), ("sparseloco", "sync()"), ("sparseloco", "collecting the state")],
)
def test_under_fabric_what_one_rank_alone_asks_for_is_an_error_on_all(
    run_ranks: RunRanks, tmp_path: Path, name: str, where: str
) -> None:
    for text in texts(run_ranks(act_alone, 2, name, where, tmp_path / "a.ckpt", expect_errors=True, timeout=60.0)):
        assert "All ranks must take the same steps" in text
        assert f"in {where}" in text
