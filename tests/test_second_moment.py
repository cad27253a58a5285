"""The measured second moment, and optimizers that share the masks' group."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_helpers import parameters, set_gradients
from torch import nn

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.comm import collectives
from lightning_scape.core.tensors import OnItsWay
from lightning_scape.scape.shard import SAMPLE_INTERVAL, SAMPLE_WEIGHT

RunRanks = Callable[..., list[Any]]


def test_noise_is_a_running_mean_of_scaled_clamped_squares() -> None:
    noise, grad = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([3.0, -1.0, 0.5])
    ops.accumulate_exp_avg_sq([noise], [grad], [0.25], 2, torch.tensor(0.5), 2.0)
    assert noise.tolist() == [0.75 + 0.125 * 1.0, 3.0 + 0.125 * 0.25, 6.75 + 0.125 * 0.0625]
    ops.accumulate_exp_avg_sq([noise], [torch.full((3,), float("nan"))], [0.25], 2, torch.tensor(0.0), None)
    assert noise.isfinite().all()
    ops.accumulate_exp_avg_sq([noise], [torch.full((3,), 1e30)], [0.5], 2, torch.tensor(1.0), None)
    assert noise.isfinite().all()  # though the square is not
    ops.accumulate_exp_avg_sq([noise], [None], [1.0], 2, torch.tensor(1.0), 2.0)
    assert noise.tolist() == [0.0, 0.0, 0.0]


def test_the_owner_samples_its_own_gradient_every_eight_steps() -> None:
    parameter = nn.Parameter(torch.zeros(30))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0))
    for step in range(2 * SAMPLE_INTERVAL + 1):
        parameter.grad = torch.full((30,), float(step))
        optimizer.step()
    state = optimizer.engine.state
    assert state is not None
    assert state.local_exp_avg_sq is not None
    mean = 0.0
    for sample in range(3):
        weight = max(SAMPLE_WEIGHT, 1 / (sample + 1))
        mean += weight * ((sample * SAMPLE_INTERVAL) ** 2 - mean)
    assert state.local_exp_avg_sq.view(-1)[0].item() == pytest.approx(mean, rel=1e-6)


def test_a_skipped_step_is_no_sample() -> None:
    """Loss scalers overflow in their first steps: the mean began with a zero that counted."""
    parameter = nn.Parameter(torch.zeros(30))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0))
    for value in (float("nan"), float("inf"), 2.0, 3.0):
        parameter.grad = torch.full((30,), value)
        with contextlib.nullcontext() if value < 9 else pytest.warns(UserWarning, match="not finite"):
            optimizer.step()
    assert_one_sample(optimizer, 4.0)


@pytest.mark.parametrize("update", ["adams", "adamw"])
def test_a_parameter_without_a_gradient_keeps_its_mean_square(update: str) -> None:
    """Skipped steps, and steps in which no rank has a gradient of it, are no gradients of zero."""
    parameters = [nn.Parameter(torch.zeros(30)) for _ in range(2)]
    config = ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0, update=update)
    optimizer = ScapeOptimizer(parameters, config=config)
    squares = []
    for value, here in ((2.0, True), (3.0, False), (float("nan"), True), (4.0, True), *[(5.0, False)] * 8):
        parameters[0].grad = torch.full((30,), value) if here else None
        parameters[1].grad = torch.full((30,), value)
        with contextlib.nullcontext() if value == value else pytest.warns(UserWarning, match="not finite"):
            optimizer.step()
        state = optimizer.engine.state
        assert state is not None
        measured = state.exp_avg_sq if state.local_exp_avg_sq is None else state.local_exp_avg_sq
        assert measured is not None
        squares.append(measured.view(-1)[0].item())
    assert squares[0] == squares[1] == squares[2] > 0
    assert (squares[3] > squares[0]) == (update == "adamw")  # AdamS samples every eighth step
    assert set(squares[4:]) == {squares[3]}


def assert_one_sample(optimizer: ScapeOptimizer, square: float) -> None:
    """That the noise is one gradient's, whose 30 entries have this square."""
    state = optimizer.engine.state
    assert state is not None
    assert state.local_exp_avg_sq is not None
    assert state.local_samples == 1
    assert state.local_exp_avg_sq.view(-1).tolist() == [square] * 30


@pytest.mark.parametrize("strict", [None, False, True])
def test_a_state_loaded_after_a_skipped_step_knows_nothing_of_it(strict: bool | None) -> None:
    """The first thing that people try after a NaN; on CUDA what became of it is told late, and is set by hand here."""
    parameter = nn.Parameter(torch.zeros(30))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.9, block_size=10, sparsity_warmup_steps=0))
    dense = torch.optim.AdamW([parameter])
    parameter.grad = torch.full((30,), 2.0)
    dense.step()
    parameter.grad = torch.full((30,), float("nan"))
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    if strict is not None:
        optimizer.engine.clipping.found_inf = OnItsWay(torch.zeros(3)), strict, None
    with pytest.warns(UserWarning, match="not written by SCAPE"):
        optimizer.load_state_dict(dense.state_dict())
    parameter.grad = torch.full((30,), 3.0)
    optimizer.step()
    assert_one_sample(optimizer, 9.0)
    assert optimizer.engine.clipping.skipped_total == 1


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_noise_floors_the_denominator_of_old_entries_only(share: float) -> None:
    one = torch.ones((), dtype=torch.float64)
    hyper = ops.Hyper.of(torch.float64, one, one * 0.9, one * 0.95, one * 0.0, one * 0.0)
    total, tau = torch.tensor([1.0, 1.0, 30.0], dtype=torch.float64), torch.tensor([1.0, 9.0, 9.0]).double()
    still = torch.zeros(3, dtype=torch.float64)
    noise = torch.full((3,), 4.0 / share, dtype=torch.float64)
    with_noise = ops.adams_step(still, still, tau, total, hyper, 1.0, noise, share).theta
    without = ops.adams_step(still, still, tau, total, hyper, 1.0).theta
    assert with_noise[0] == without[0]  # tau = 1: AdamS, term for term
    moved = without * (0.05 * total.square() / tau).sqrt()
    floor = 0.95 * 4.0 * (0.1 / 1.9)
    assert with_noise[1].item() == pytest.approx(float(moved[1] / (floor + 0.05 * 4.0) ** 0.5))
    assert with_noise[2].item() == pytest.approx(float(moved[2] / (floor + 0.05 * 900 / 9) ** 0.5))


@pytest.mark.parametrize(("sparsity", "share"), [(0.5, 0.1), (0.9, 0.5), (0.95, 1.0), (0.99, 1.0), (0.999, 1.0)])
def test_the_share_of_the_noise_grows_with_the_interval_between_visits(
    sparsity: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares: list[float] = []
    plain = ops.update_adams

    def note(*args: Any) -> Any:
        shares.append(inspect.signature(plain).bind(*args).arguments["floor"])
        return plain(*args)

    monkeypatch.setattr(ops, "update_adams", note)
    parameter = nn.Parameter(torch.zeros(3000))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0))
    for _ in range(2):
        parameter.grad = torch.ones(3000)
        optimizer.step()
    assert shares == pytest.approx([share] * 2)


def test_dense_runs_and_adamws_update_keep_no_noise() -> None:
    assert not ScapeConfig(sparsity=0.0).measures_noise
    assert not ScapeConfig(update="adamw").measures_noise  # which has a second moment of its own
    assert not ScapeConfig(second_moment="reconstructed", sparsity_warmup_steps=0).measures_noise
    assert ScapeConfig(sparsity_warmup_steps=0).measures_noise


# --------------------------------------------------------------------------------- several optimizers, one mask group


def train_two(rank: int, world_size: int) -> None:
    group = collectives.new_group_like()
    models = [parameters(((6000,),)), parameters(((900,),))]
    config = ScapeConfig(check_replicas_every=1, sparsity_warmup_steps=0)
    optimizers = [ScapeOptimizer(params, config=config, mask_group=group) for params in models]
    for step in range(60):
        for params, optimizer in zip(models, optimizers, strict=True):
            set_gradients(params, rank, step)
            optimizer.step()


def test_optimizers_that_share_a_mask_group_keep_their_messages_apart(run_ranks: RunRanks) -> None:
    run_ranks(train_two, 2)
