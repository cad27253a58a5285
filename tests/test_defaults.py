"""torch's default dtype is the user's, and LitGPT sets it, too: training is bit for bit the same whatever it is."""

from __future__ import annotations

from typing import Any

import torch
from optimizer_helpers import gradients
from torch import Tensor, nn

from lightning_scape import AdamS, ScapeConfig, ScapeOptimizer, SparseLoCo

SIZES = ((37, 11), (5,), (300, 7), (641,))


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float32)) for size in SIZES]


def scape(rank: int, default: torch.dtype) -> list[Tensor]:
    params, steps = weights(), [gradients(weights(), rank, step) for step in range(5)]
    torch.set_default_dtype(default)
    config = ScapeConfig(sparsity=0.99, sparsity_warmup_steps=2)
    optimizer = ScapeOptimizer(params, config=config)
    for grads in steps:
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
    optimizer.drain()
    return params


def loco(rank: int, default: torch.dtype) -> list[Tensor]:
    params, steps = weights(), [gradients(weights(), rank, step) for step in range(6)]
    torch.set_default_dtype(default)
    optimizer = AdamS(params, lr=0.01)
    wrapped = SparseLoCo(optimizer, density=1 / 8, sync_every=2)
    for grads in steps:
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
    wrapped.sync()
    return params


def _train(rank: int, world_size: int) -> None:
    for train in (scape, loco):
        found = []
        for default in (torch.float32, torch.float64, torch.bfloat16):
            found.append(train(rank, default))
            torch.set_default_dtype(torch.float32)
        assert all(map(torch.equal, found[0] * 2, found[1] + found[2])), train


def test_torchs_default_dtype_changes_no_bit_of_a_training(run_ranks: Any) -> None:
    run_ranks(_train, 2)
