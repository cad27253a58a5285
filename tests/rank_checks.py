"""What ranks do in tests on the CPU and on GPUs alike; top-level functions, for they travel to other processes."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_scape import ScapeConfig, ScapeOptimizer
from lightning_scape.hosts import common
from lightning_scape.sparseloco import SparseLoCo


def train_on(
    rank: int,
    world_size: int,
    device: str,
    wire_dtype: str = "fp32",
    sparsity: float = 0.9,
    update: str = "adams",
    steps: int = 12,
) -> tuple[list[Tensor], Tensor]:
    """Clipped steps on gradients that differ by rank; the parameters, and what this rank has not sent.

    At a sparsity of 0.99 the ranks vote. The second parameter has a gradient on rank 1 only, and at times on none.
    """
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(device)) for n in (700, 33, 512)]
    config = ScapeConfig(sparsity=sparsity, wire_dtype=wire_dtype, sparsity_warmup_steps=0, update=update)
    optimizer = ScapeOptimizer(parameters, lr=1e-2, config=config)
    generator = torch.Generator().manual_seed(100 + rank)
    for step in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        if rank == 0 or step % 4 == 1:
            parameters[1].grad = None
        optimizer.clip_grad_norm(3.0)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.drain()
    assert optimizer.engine.state is not None
    return [p.detach().cpu() for p in parameters], optimizer.engine.state.residual.cpu()


def train_scaled(rank: int, world_size: int, device: str) -> tuple[Tensor, int, float]:
    """Six steps under a loss scaler, in one of which rank 1 meets an inf: parameter, steps taken, last scale."""
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(1000, generator=generator).to(device))
    optimizer = ScapeOptimizer([parameter], lr=1e-2, config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    scaler = common.sharded_scaler(torch.amp.GradScaler(device, init_scale=1024.0), device)
    assert scaler is not None
    for step in range(6):
        factor = float("inf") if (step, rank) == (3, 1) else 1.0 + rank
        scaler.scale((parameter * factor).sum()).backward()
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    optimizer.drain()
    assert optimizer.engine.state is not None
    return parameter.detach().cpu(), optimizer.engine.state.calls, scaler.get_scale()


def train_locally_on(rank: int, world_size: int, device: str, bits: int | None) -> Tensor:
    """Nine local steps of AdamW and three exchanges of SparseLoCo, on gradients that differ by rank: the parameters."""
    generator = torch.Generator().manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(n, generator=generator).to(device)) for n in (700, 33, 512)]
    adamw = torch.optim.AdamW(parameters, lr=1e-2)
    SparseLoCo(adamw, density=1 / 8, bits=bits, sync_every=3)
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(9):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device)
        adamw.step()
    return torch.cat([parameter.detach().cpu() for parameter in parameters])
