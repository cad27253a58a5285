"""Loops without Lightning: in compiled code, in inference mode, and on groups that have ranks in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer, SparseLoCo

PLAIN = {"density": 1.0, "bits": None, "error_decay": 1.0}


def _net() -> nn.Linear:
    torch.manual_seed(5)
    return nn.Linear(7, 3)


def _scape(net: nn.Module, **options: Any) -> ScapeOptimizer:
    config = ScapeConfig(sparsity=0, wire_dtype="fp32")
    return ScapeOptimizer.from_optimizer(torch.optim.AdamW(net.parameters(), 1e-2), config, **options)


def _backward(net: nn.Module, step: int, rank: int = 0) -> None:
    net(torch.linspace(-1, 1, 7).add(step + 0.1 * rank)).square().sum().backward()


# ---------------------------------------------------------------------------------------- compiled code, inference mode


def _trained(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Tensor:
    net = _net()
    optimizer = _scape(net)

    def step() -> None:
        optimizer.clip_grad_norm(0.1)
        optimizer.step()

    act = around(step)
    for number in range(3):
        _backward(net, number)
        act()
        optimizer.zero_grad()
    return net.weight.detach()


def test_a_step_in_compiled_code_is_the_step() -> None:
    assert torch.equal(_trained(torch.compile(backend="eager")), _trained(lambda step: step))


def _steps_in_inference_mode(rank: int, world_size: int) -> Tensor:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    SparseLoCo(optimizer, sync_every=2, **PLAIN)
    for number in range(4):
        _backward(net, number, rank)
        with torch.inference_mode():
            optimizer.step()
        optimizer.zero_grad()
    return net.weight.detach()


def test_steps_may_be_taken_in_inference_mode(run_ranks: Any) -> None:
    first, second = run_ranks(_steps_in_inference_mode, 2)
    assert torch.equal(first, second)
