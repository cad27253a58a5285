"""The measured second moment, and optimizers that share the masks' group."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_helpers import parameters, set_gradients
from torch import nn

from lightning_scape import ScapeConfig, ScapeOptimizer, ops

RunRanks = Callable[..., list[Any]]


def test_noise_is_a_running_mean_of_scaled_squares() -> None:
    noise, grad = torch.tensor([1.0, 4.0, 9.0]), torch.tensor([3.0, -1.0, 0.5])
    ops.accumulate_exp_avg_sq(noise, grad, 0.25, 2, torch.tensor(0.5))
    assert noise.tolist() == [0.75 + 0.125 * 2.25, 3.0 + 0.125 * 0.25, 6.75 + 0.125 * 0.0625]
    ops.accumulate_exp_avg_sq(noise, torch.full((3,), float("nan")), 0.25, 2, torch.tensor(0.0))
    assert noise.isfinite().all()
    ops.accumulate_exp_avg_sq(noise, torch.full((3,), 1e30), 0.5, 2, torch.tensor(1.0))
    assert noise.isfinite().all()  # though the square is not
    ops.accumulate_exp_avg_sq(noise, None, 1.0, 2, torch.tensor(1.0))
    assert noise.tolist() == [0.0, 0.0, 0.0]


def test_a_parameter_without_a_gradient_keeps_its_mean_square() -> None:
    """Skipped steps, and steps in which no rank has a gradient of it, are no gradients of zero."""
    parameters = [nn.Parameter(torch.zeros(30)) for _ in range(2)]
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0, update="adamw")
    optimizer = ScapeOptimizer(parameters, config=config)
    squares = []
    for value, here in ((2.0, True), (3.0, False), (float("nan"), True), (4.0, True), *[(5.0, False)] * 8):
        parameters[0].grad = torch.full((30,), value) if here else None
        parameters[1].grad = torch.full((30,), value)
        with contextlib.nullcontext() if value == value else pytest.warns(UserWarning, match="not finite"):
            optimizer.step()
        state = optimizer.engine.state
        assert state is not None
        assert state.exp_avg_sq is not None
        squares.append(state.exp_avg_sq.view(-1)[0].item())
    assert squares[0] == squares[1] == squares[2] > 0
    assert squares[3] > squares[0]
    assert set(squares[4:]) == {squares[3]}


# ------------------------------------------------------------------------------ several optimizers, one group of masks


def train_two(rank: int, world_size: int) -> None:
    models = [parameters(((6000,),)), parameters(((900,),))]
    config = ScapeConfig(check_replicas_every=1, sparsity_warmup_steps=0)
    optimizers = [ScapeOptimizer(params, config=config) for params in models]
    for step in range(60):
        for params, optimizer in zip(models, optimizers, strict=True):
            set_gradients(params, rank, step)
            optimizer.step()


def test_optimizers_that_share_a_mask_group_keep_their_messages_apart(run_ranks: RunRanks) -> None:
    run_ranks(train_two, 2)
