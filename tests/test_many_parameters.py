"""Thousands of small parameters: what a step does for each of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizer_helpers import RunRanks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
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


WARM_UP, ROUNDS = 2, 4


def cpu_seconds_of_a_step(rank: int, world_size: int) -> dict[str, float]:
    """Of forward, backward, clipping and step on 3,000 parameters, in turns; the least of several rounds."""
    torch.set_num_threads(1)

    def training(own: bool) -> Callable[[], None]:
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(750)])
        assert len(list(model.parameters())) == 3000
        adamw, inputs = torch.optim.AdamW(model.parameters()), torch.randn(4, 8)
        config = ScapeConfig(sparsity=0.99, sparsity_warmup_steps=0)
        scape = ScapeOptimizer.from_optimizer(adamw, config) if own else None
        replica = model if own else DistributedDataParallel(model)

        def step() -> None:
            replica(inputs).square().mean().backward()
            if scape is None:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                scape.clip_grad_norm(1.0)
            (scape or adamw).step()
            (scape or adamw).zero_grad()

        return step

    steps = {"scape": training(True), "ddp": training(False)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(WARM_UP + ROUNDS):
        for name, step in steps.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    return {name: min(each[WARM_UP:]) for name, each in seconds.items()}


@pytest.mark.few(0)
def test_three_thousand_parameters_cost_no_more_than_under_ddp(run_ranks: RunRanks) -> None:
    """It was 3.1 times DDP's step."""
    pytest.importorskip("numba", reason="plain operations go through parameters one by one (extra `cpu`)")
    for found in run_ranks(cpu_seconds_of_a_step, 2, timeout=120):
        assert found["scape"] <= 1.2 * found["ddp"], found
