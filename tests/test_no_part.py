"""What takes no part in a step is not touched, and what the user writes is what training goes on from."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from optimizer_helpers import RunRanks, assert_replicas_equal, parameters, set_gradients
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer, ops

SIZES = ((37, 11), (5,), (300, 7), (3, 3, 3), (641,))
CASES = (
    *(("adamw", "bf16", 0.0), ("adams", "int4", 0.0), ("adams", "bf16", 0.9)),
    *(("adamw", "int4", 0.9), ("adamw", "fp32", 0.9), ("adams", "int8", 0.99)),
)
"""Update, wire, sparsity."""
IDLE = (1, 2)
"""Parameters without a gradient on any rank."""
PRECISIONS = {
    "bf16": [torch.bfloat16] * 5,
    "fp32": [torch.float32] * 5,
    "mixed": [torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.bfloat16],
}


def of_dtypes(dtypes: list[torch.dtype]) -> list[nn.Parameter]:
    return [nn.Parameter(p.detach().to(dtype)) for p, dtype in zip(parameters(SIZES), dtypes, strict=True)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.detach().view(-1).view(torch.uint8), b.detach().view(-1).view(torch.uint8))


# ------------------------------------------------------------------------------------------ without a gradient


def _write_the_idle(rank: int, world_size: int, dtypes: list[torch.dtype], choice: str) -> None:
    """Before every step they are written: an average, a row made anew, what is no number at all."""
    for update, wire, sparsity in CASES:
        params = of_dtypes(dtypes)
        config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0, dense_steps=1, update=update, wire_dtype=wire)
        optimizer = ScapeOptimizer(params, lr=0.01, config=config)
        with ops.using(choice):
            for step in range(5):
                set_gradients(params, rank, step)
                for place in IDLE if step != 1 else ():  # once they do take part: then there is something to undo
                    params[place].grad = None
                    params[place].data.mul_(0.5).add_(step)
                    params[place].data.view(-1)[step] = float("nan") if step == 4 else -0.0
                if step == 3:
                    params[0].grad = torch.full_like(params[0], float("inf"))  # the step is skipped
                    params[0].data.add_(1)
                before = [p.detach().clone() for p in params]
                if step == 3:
                    with pytest.warns(UserWarning, match="skipped") if rank == 0 else nullcontext():
                        optimizer.step()
                else:
                    optimizer.step()
                for place, (p, old) in enumerate(zip(params, before, strict=True)):
                    case = update, wire, sparsity, step, place
                    assert same_bits(p, old) == (step == 3 or (place in IDLE and step != 1)), case
        assert_replicas_equal([p for place, p in enumerate(params) if place not in IDLE])
        assert all(bool(p.isfinite().all()) for place, p in enumerate(params) if place not in IDLE)


@pytest.mark.parametrize(("precision", "choice"), [("mixed", "cpu"), ("fp32", "naive")])
def test_a_parameter_without_a_gradient_stays_as_the_user_wrote_it(
    run_ranks: RunRanks, precision: str, choice: str
) -> None:
    run_ranks(_write_the_idle, 2, PRECISIONS[precision], choice)


# --------------------------------------------------------------------------------------- what the user writes


def _overwrite(rank: int, world_size: int, dtypes: list[torch.dtype], choice: str) -> None:
    """A twin is told; both train alike to the last bit."""
    for update, wire, sparsity in CASES[:4]:
        config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0, update=update, wire_dtype=wire)
        both = [of_dtypes(dtypes) for _ in range(2)]
        optimizers = [ScapeOptimizer(params, lr=1e-3, config=config) for params in both]
        written = torch.zeros(2100, dtype=torch.bool)
        written[torch.randperm(2100, generator=torch.Generator().manual_seed(0))[:600]] = True
        with ops.using(choice):
            for step in range(8):
                for params, optimizer in zip(both, optimizers, strict=True):
                    set_gradients(params, rank, step)
                    if step == 4:
                        params[2].data.view(-1)[written] = 5.0
                    if step == 4 and optimizer is optimizers[1]:
                        optimizer.mark_masters_stale()
                    optimizer.step()
        for ours, theirs in zip(*both, strict=True):
            assert same_bits(ours, theirs)
        assert bool(((both[0][2].view(-1)[written] - 5).abs() < 0.2).all()), (update, wire, sparsity)
        assert_replicas_equal(both[0])


@pytest.mark.parametrize(("precision", "choice"), [("fp32", "cpu"), ("mixed", "naive")])
def test_training_goes_on_from_weights_that_the_user_has_written(
    run_ranks: RunRanks, precision: str, choice: str
) -> None:
    run_ranks(_overwrite, 2, PRECISIONS[precision], choice)


@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_weights_that_were_swapped_and_swapped_back_keep_their_masters(sparsity: float) -> None:
    params = of_dtypes(PRECISIONS["bf16"])
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0))
    state: Any = None
    for step in range(3):
        set_gradients(params, 0, step)
        optimizer.step()
        state = optimizer.engine.state
        kept, weights = state.master.clone(), [p.detach().clone() for p in params]
        for p, weight in zip(params, weights, strict=True):
            p.data.fill_(9.0)
            optimizer.state_dict()  # a checkpoint meanwhile changes nothing either
            p.data.copy_(weight)
        assert torch.equal(state.master, kept)
    unvisited = state.last_step < 3
    set_gradients(params, 0, 3)
    optimizer.step()
    assert torch.equal(state.master[unvisited & (state.last_step < 4)], kept[unvisited & (state.last_step < 4)])
    rounded = [piece.of_blocks(optimizer.engine.layout.block_size) for piece in optimizer.engine.shard.region.pieces]
    for rows, p in zip(rounded, params, strict=True):
        assert torch.equal(state.master.view(-1)[rows].bfloat16(), p.detach().view(-1))
