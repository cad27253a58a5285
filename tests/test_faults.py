"""Numerical faults: whatever a gradient holds, ranks stay bitwise equal, and nothing that is kept is spoilt."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from optimizer_helpers import assert_replicas_equal
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer

RunRanks = Callable[..., list[Any]]


def scale_gradients(params: list[Any], factor: float) -> None:
    for parameter in params:
        parameter.grad.mul_(factor)


def set_one(params: list[Any], value: float) -> None:
    params[0].grad.view(-1)[5] = value


def drop(params: list[Any]) -> None:
    for parameter in params:
        parameter.grad = None


ONE_RANK: dict[str, tuple[Callable[[list[Any]], None], bool]] = {
    "nan": (lambda p: set_one(p, float("nan")), True),
    "inf": (lambda p: set_one(p, float("inf")), True),
    "minus inf": (lambda p: set_one(p, float("-inf")), True),
    "all nan": (lambda p: scale_gradients(p, float("nan")), True),
    "norm overflows": (lambda p: scale_gradients(p, 1e30), True),
    "zeros": (lambda p: scale_gradients(p, 0.0), False),
    "no gradient": (drop, False),
    "denormal": (lambda p: scale_gradients(p, 1e-42), False),
    "spike of 1e6": (lambda p: scale_gradients(p, 1e6), False),
}
"""What happens to the gradients of rank 1, and whether the step is skipped for it."""
ALL_RANKS = {name: ONE_RANK[name] for name in ("zeros", "no gradient", "denormal", "spike of 1e6", "all nan")}


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    return (model(rows.to(next(model.parameters()).dtype)) - rows[:, :2].sin()).square().mean()


def train_through(rank: int, world_size: int, dtype: torch.dtype, options: dict[str, Any], clip: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 40), nn.Tanh(), nn.Linear(40, 2)).to(dtype)
    params = list(model.parameters())
    optimizer = ScapeOptimizer(params, lr=2e-3, config=ScapeConfig(sparsity=0.9, max_skipped=3, **options))
    script = [(name, True) for name in ONE_RANK] + [(name, False) for name in ALL_RANKS]
    losses, generator = [], torch.Generator().manual_seed(rank)
    for step in range(4 * len(script)):
        rows = torch.randn(8, 7, generator=generator)
        loss_of(model, rows).backward()
        (name, alone), fault, skips = script[step // 4], None, False
        if step % 4 == 3:
            fault, skips = ONE_RANK[name]
            if rank == 1 or not alone:
                fault(params)
        if clip:
            optimizer.clip_grad_norm(1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        optimizer.zero_grad()
        assert optimizer.stats is not None
        assert optimizer.stats.skipped is skips, name
        assert_replicas_equal(params)
        optimizer.drain()
        state = optimizer.engine.state
        assert state is not None
        for held in (state.residual, state.exp_avg, state.master, *params):
            assert held is None or bool(held.isfinite().all()), name
        losses.append(loss_of(model, rows).item())
    return losses


@pytest.mark.parametrize(
    ("dtype", "options", "clip"),
    [
        (torch.float32, {}, True),
        (torch.float32, {"wire_dtype": "fp32"}, False),
        (torch.bfloat16, {}, True),
    ],
)
def test_no_fault_parts_the_ranks_or_spoils_what_is_kept(
    run_ranks: RunRanks, dtype: torch.dtype, options: dict[str, Any], clip: bool
) -> None:
    losses = run_ranks(train_through, 2, dtype, options, clip)[0]
    if clip:  # without, a spike is followed, as it should be
        assert sum(losses[-8:]) < sum(losses[:8])


def empty_batch(rank: int, world_size: int) -> tuple[bool, bool]:
    torch.manual_seed(0)
    model = nn.Linear(6, 50)
    optimizer = ScapeOptimizer(model.parameters(), config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))
    skipped = []
    for step in range(4):
        rows = torch.randn(0 if rank == 1 and step == 2 else 8, 6)
        model(rows).square().mean().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        optimizer.zero_grad()
        assert optimizer.stats is not None
        skipped.append(optimizer.stats.skipped)
        assert_replicas_equal(list(model.parameters()))
    dist.barrier()
    return skipped[2], any(skipped[:2] + skipped[3:])


def test_an_empty_batch_on_one_rank_counts_as_a_zero_gradient(run_ranks: RunRanks) -> None:
    """The mean over nothing is NaN, but nothing flows back through no rows: no step is skipped for it."""
    assert run_ranks(empty_batch, 2) == [(False, False)] * 2
