"""Messages of a step: how many there are, and that neither parameters nor layers add to them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.comm import collectives
from lightning_scape.scape.communicator import ScapeCommunicator

MESSAGES = {"all_reduce": 1, "all_to_all_into": 1, "all_gather_into": 2}
"""Norm; values; parameters and mask. Four in all."""
CALLS = (
    *("all_reduce", "reduce", "broadcast", "gather", "scatter", "barrier", "send", "recv"),
    *("all_to_all", "all_to_all_single", "all_gather", "all_gather_object", "reduce_scatter", "broadcast_object_list"),
    *("all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single"),
    *("batch_isend_irecv", "all_reduce_coalesced", "all_gather_coalesced"),
)


def _count_messages(rank: int, world: int, layers: int, width: int, sparsity: float, clip: bool) -> list[Counter[str]]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    optimizer = ScapeOptimizer(model.parameters(), config=ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0))
    counted: Counter[str] = Counter()

    def counting(name: str, call: Any) -> Any:
        def counted_call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return call(*args, **kwargs)

        return counted_call

    for home, names in ((dist, CALLS), (collectives, ("all_to_all_into", "all_gather_into"))):
        for name in names:
            if hasattr(home, name):
                setattr(home, name, counting(name, getattr(home, name)))
    found = []
    for _ in range(4):
        counted.clear()
        model(torch.randn(2, width)).square().mean().backward()
        if clip:
            optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.drain()  # the mask is exchanged on a thread of its own
        found.append(Counter(counted))
    return found


@pytest.mark.parametrize(("ranks", "layers", "width", "clip"), [(2, 40, 8, False), (2, 2, 300, True), (3, 3, 8, True)])
def test_a_step_sends_five_messages_however_many_ranks_layers_and_parameters(
    run_ranks: Any, ranks: int, layers: int, width: int, clip: bool
) -> None:
    for rank in run_ranks(_count_messages, ranks, layers, width, 0.99, clip):
        assert rank[1:] == [MESSAGES] * 3  # the first also compares the replicas, and makes its own mask


def test_a_dense_step_needs_no_mask(run_ranks: Any) -> None:
    for rank in run_ranks(_count_messages, 2, 3, 8, 0.0, True):
        assert rank[1:] == [{"all_reduce": 1, "all_to_all_into": 1, "all_gather_into": 1}] * 3


def _order_of_a_step(rank: int, world: int, sparsity: float, number: int) -> list[str]:
    """What the step of this number does around its messages, and then a drain; ``sweep`` says what it does."""
    said: list[str] = []

    def say(home: Any, name: str) -> None:
        call = getattr(home, name)

        def saying(*args: Any, **kwargs: Any) -> Any:
            said.append(name)
            return call(*args, **kwargs)

        setattr(home, name, saying)

    plain_sweep = ops.sweep

    def sweep(work: ops.Sweep) -> None:
        squares = "" if work.second_moment is None else ", squares"
        what = "fold" if work.values is None else "sweep" if work.grads is None else "sweep with fold"
        said.append(what + squares)
        plain_sweep(work)

    parameter = nn.Parameter(torch.zeros(4000))
    config = ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0, update="adamw")
    optimizer = ScapeOptimizer([parameter], config=config)
    for step in range(number + 1):
        optimizer.drain()
        if step == number:
            for name in ("all_to_all", "all_gather", "gather_mask"):
                say(ScapeCommunicator, name)
            for name in ("select", "update_shard"):
                say(ops, name)
            say(ops, "scatter_params")
            ops.sweep = sweep
            say(collectives.Work, "wait")
        parameter.grad = torch.randn(4000, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.step()
    optimizer.drain()
    return said


WRITE = ["all_gather", "scatter_params", "wait", "scatter_params"]
"""The owners' updates: a rank applies its own while the others' travel. Then the next mask's exchange begins."""


AFTERWARDS = ["gather_mask", "select", "wait"]
"""Beside what follows the step: on a thread of its own."""


@pytest.mark.parametrize("sparsity", [0.9, 0.99])
def test_a_step_works_while_its_messages_travel(run_ranks: Any, sparsity: float) -> None:
    """It sweeps its own shard while the values of the others' travel, and applies its update while theirs come."""
    for order in run_ranks(_order_of_a_step, 2, sparsity, 2):
        then = ["sweep with fold", "all_to_all", "sweep with fold, squares", "wait", "update_shard", *WRITE]
        assert order[: len(then) + 1] == [*then, "gather_mask"]
        assert sorted(order[len(then) :]) == AFTERWARDS


def _broadcast_strided(rank: int, world_size: int) -> list[Tensor]:
    table = torch.arange(14.0).view(7, 2) + 100 * rank
    tensors = [table[:, 1], torch.full((2, 3), float(rank)).t(), torch.tensor(rank), torch.zeros(0)]
    collectives.broadcast_tensors(tensors)
    return [table, *tensors]


def test_tensors_that_do_not_lie_in_one_piece_are_broadcast_in_place(run_ranks: Any) -> None:
    """Such as a buffer that is a column of a table."""
    first, second = run_ranks(_broadcast_strided, 2)
    for mine, theirs in zip(first[1:], second[1:], strict=True):
        assert torch.equal(mine, theirs)
    assert torch.equal(second[0][:, 0], torch.arange(0.0, 14, 2) + 100)  # what was not given stays
