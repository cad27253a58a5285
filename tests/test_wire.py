"""What comes back from the owners: values of parameters in their own dtype; and what never changes a bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer
from lightning_scape.comm import collectives

RunRanks = Callable[..., list[Any]]


def gathers(rank: int, world_size: int, dtypes: list[torch.dtype]) -> list[torch.dtype]:
    """The dtypes in which updated parameters travelled, over three steps of which the first is dense."""
    seen: list[torch.dtype] = []
    real = collectives.Communicator.all_gather

    def spy(self: Any, shard: Tensor, *kind: str) -> collectives.Work:
        seen.extend([] if kind else [shard.dtype])
        return real(self, shard, *kind)

    params = [nn.Parameter(torch.zeros(400, dtype=dtype)) for dtype in dtypes]
    optimizer = ScapeOptimizer(params, config=ScapeConfig(sparsity=0.9, wire_dtype="fp32", sparsity_warmup_steps=1))
    try:
        collectives.Communicator.all_gather = spy
        for _ in range(3):
            for parameter in params:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        optimizer.drain()
    finally:
        collectives.Communicator.all_gather = real
    return list(dict.fromkeys(seen))


@pytest.mark.parametrize(
    ("dtypes", "travels"),
    [
        ([torch.float32], torch.float32),
        ([torch.bfloat16], torch.bfloat16),
        ([torch.float32, torch.bfloat16], torch.float32),
    ],
)
def test_whole_values_travel_in_the_narrowest_dtype_that_holds_all_parameters(
    run_ranks: RunRanks, dtypes: list[torch.dtype], travels: torch.dtype
) -> None:
    assert run_ranks(gathers, 2, dtypes) == [[travels]] * 2


def stand_still(rank: int, world_size: int, sparsity: float, update: str, wire: str) -> bool:
    """Whether steps that are skipped, or without a gradient, leave every bit: of signed zeros and infinities too."""
    parameter = nn.Parameter(torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1e-42, -3.0] * 50))
    other = nn.Parameter(torch.ones(300))
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0, update=update, wire_dtype=wire)  # type: ignore[arg-type]
    optimizer = ScapeOptimizer([parameter, other], config=config)
    before = parameter.detach().clone().view(torch.int32)
    for bad in (float("nan"), float("inf")):
        parameter.grad = torch.full_like(parameter, bad if rank == 0 else 1.0)
        optimizer.step()
    assert (other == 1).all()
    parameter.grad, other.grad = None, torch.ones(300)
    for _ in range(2):
        optimizer.step()
    optimizer.drain()
    assert not (other == 1).all()
    return torch.equal(parameter.detach().view(torch.int32), before)


@pytest.mark.parametrize(
    ("sparsity", "update", "wire"),
    [
        (0.0, "adams", "fp32"),
        (0.9, "adamw", "fp32"),
        (0.9, "adamw", "int4"),
    ],
)
@pytest.mark.filterwarnings("ignore:The gradient norm was not finite")
def test_a_step_that_is_skipped_or_without_a_gradient_changes_no_bit(
    run_ranks: RunRanks, sparsity: float, update: str, wire: str
) -> None:
    assert run_ranks(stand_still, 2, sparsity, update, wire) == [True, True]
