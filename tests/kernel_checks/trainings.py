"""Whole trainings, by an implementation and by the definition."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from kernel_checks.inputs import (
    Checks,
    assert_same_bits,
)
from lightning_scape import ScapeConfig, ScapeOptimizer, ops

STEPS = 14
"""Of a training: skipped steps and gaps are among them."""


class Trained(NamedTuple):
    """What a training leaves behind."""

    parameters: list[Tensor]
    residual: Tensor
    exp_avg: Tensor
    last_step: Tensor
    exp_avg_sq: Tensor | None


class TrainingChecks(Checks):
    """Of a few steps of the optimizer."""

    @pytest.mark.parametrize(
        ("sparsity", "dtype", "options"),
        [
            (0.99, torch.bfloat16, {}),
            (0.9, torch.float32, {"update": "adamw"}),
        ],
    )
    def test_steps_on_given_gradients(self, sparsity: float, dtype: torch.dtype, options: dict[str, Any]) -> None:
        config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=3, **options)
        theirs = train(config, "naive", "cpu", dtype, STEPS, follow=False)
        ours = train(config, self.choice, self.device, dtype, STEPS, follow=False)
        # The gradient does not depend on the parameters: every entry is chosen alike, and what is left is the same.
        assert_same_bits(ours.residual.cpu(), theirs.residual)
        assert_same_bits(ours.last_step.cpu(), theirs.last_step)
        torch.testing.assert_close(ours.exp_avg.cpu(), theirs.exp_avg, rtol=1e-5, atol=1e-5)
        if ours.exp_avg_sq is not None:
            torch.testing.assert_close(ours.exp_avg_sq.cpu(), theirs.exp_avg_sq, rtol=1e-5, atol=1e-5)
        self.compare_parameters(ours, theirs, dtype)

    def test_steps_whose_gradients_follow_the_parameters(self) -> None:
        config = ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0, update="adamw")
        theirs = train(config, "naive", "cpu", torch.float32, STEPS, follow=True)
        ours = train(config, self.choice, self.device, torch.float32, STEPS, follow=True)
        self.compare_parameters(ours, theirs, torch.float32)
        torch.testing.assert_close(ours.residual.cpu(), theirs.residual, rtol=0, atol=1e-4)

    @pytest.mark.parametrize(("update", "sparsity"), [("adamw", 0.5), ("adams", 0.0)])
    def test_pads_stay_zero_when_a_state_with_missed_steps_is_loaded(self, update: str, sparsity: float) -> None:
        config = ScapeConfig(sparsity=sparsity, update=update, sparsity_warmup_steps=0)
        saved: dict[str, Any] | None = None
        for _ in range(2):
            parameter = torch.nn.Parameter(torch.ones(13, device=self.device))
            optimizer = ScapeOptimizer([parameter], config=config)
            if saved is not None:
                optimizer.load_state_dict(saved)
            with ops.using("cuda"):
                for step in range(4):
                    parameter.grad = None if step == 1 else torch.ones_like(parameter)
                    optimizer.step()
                optimizer.drain()
            saved, state = optimizer.state_dict(), optimizer.engine.state
            assert state is not None
            for shard in (state.residual, state.exp_avg, state.exp_avg_sq):
                assert shard is None or not shard.view(-1)[13:].any()
            assert parameter.isfinite().all()

    def compare_parameters(self, ours: Trained, theirs: Trained, dtype: torch.dtype) -> None:
        # Of order 1 after up to 50 steps of 1e-2: rounding alone. An entry chosen otherwise would be off by 1e-2.
        rtol = 1e-5 if dtype == torch.float32 else 2**-7  # bf16: the last bit of a weight may go the other way
        for a, b in zip(ours.parameters, theirs.parameters, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=rtol, atol=1e-5)


def train(config: ScapeConfig, choice: str, device: str, dtype: torch.dtype, steps: int, *, follow: bool) -> Trained:
    """Steps with two parameter groups, clipping, skipped steps and gaps; gradients may follow the parameters."""
    generator = torch.Generator().manual_seed(3)
    sizes = (900, 40, 611)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(device, dtype)) for n in sizes]
    goals = [torch.randn(n, generator=generator) for n in sizes]
    groups = [{"params": parameters[:2], "lr": 1e-2}, {"params": parameters[2:], "lr": 5e-3, "weight_decay": 0.0}]
    optimizer = ScapeOptimizer(groups, config=config)
    with ops.using(choice):
        for step in range(steps):
            for parameter, goal in zip(parameters, goals, strict=True):
                noise = torch.randn(goal.shape, generator=generator)
                at = parameter.detach().cpu() if follow else 0.0
                parameter.grad = (at - goal + noise).to(device, dtype)
            if step % 4 == 1:
                parameters[1].grad = None  # on every rank: it is left alone
            if step % 10 == 7:
                parameters[0].grad[3] = float("nan")  # skipped: nothing may have changed
            if step % 3 == 0 and follow:  # back ends add a norm up in other orders
                optimizer.clip_grad_norm(5.0)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.drain()
    state = optimizer.engine.state
    assert state is not None
    assert state.missed is not None
    missed = sum(step % 4 == 1 and step % 10 != 7 for step in range(steps))  # those that were skipped are no steps
    assert state.missed.tolist() == [0, missed, 0]
    return Trained([p.detach() for p in parameters], state.residual, state.exp_avg, state.last_step, state.exp_avg_sq)
