"""Thousands of small parameters: what a step does for each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_scape import ScapeConfig, ScapeOptimizer


class Calls(TorchDispatchMode):
    """Counts torch's operations."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def calls_in_a_step(count: int) -> int:
    params = [nn.Parameter(torch.randn(16)) for _ in range(count)]
    config = ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0)
    optimizer = ScapeOptimizer.from_optimizer(torch.optim.AdamW(params), config)
    for _ in range(3):
        for parameter in params:
            parameter.grad = torch.randn(16)
        with Calls() as calls:
            optimizer.clip_grad_norm(1.0)
            optimizer.step()
    return calls.count


def test_a_step_makes_no_call_of_torch_for_each_parameter() -> None:
    """Three views for each parameter took most of the step of 3,000 tiny ones."""
    pytest.importorskip("numba", reason="plain operations go through parameters one by one (extra `cpu`)")
    assert calls_in_a_step(300) <= calls_in_a_step(30) + 10


def test_a_parameter_in_other_memory_is_followed() -> None:
    parameter = nn.Parameter(torch.ones(50))
    optimizer = ScapeOptimizer([parameter], lr=0.1, config=ScapeConfig(sparsity=0.0))
    before = parameter.detach().clone()
    for _ in range(3):
        parameter.grad = torch.ones(50)
        optimizer.step()
        assert bool((parameter < before).all())
        parameter.data = parameter.data.clone()  # as module.to() does
        before = parameter.detach().clone()
