"""Messages of a step: how many there are, and that neither parameters nor layers add to them."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_scape import ScapeConfig, ScapeOptimizer, ops
from lightning_scape.comm import collectives
from lightning_scape.comm.collectives import Communicator

MESSAGES = {"all_reduce": 1, "_all_to_all": 2, "_all_gather": 2}
"""Norm; values and votes; parameters and mask. Five in all."""
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

    for home, names in ((dist, CALLS), (collectives, ("_all_to_all", "_all_gather"))):
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
        optimizer.drain()  # mask and votes are exchanged on a thread of their own
        found.append(Counter(counted))
    return found


@pytest.mark.parametrize(("layers", "width"), [(1, 8), (40, 8), (2, 300)])
@pytest.mark.parametrize("clip", [True, False])
def test_a_step_sends_five_messages_however_many_layers_and_parameters(
    run_ranks: Any, layers: int, width: int, clip: bool
) -> None:
    for rank in run_ranks(_count_messages, 2, layers, width, 0.99, clip):
        assert rank[1:] == [MESSAGES] * 3  # the first also compares the replicas, and makes its own mask


def test_their_number_does_not_grow_with_ranks(run_ranks: Any) -> None:
    for rank in run_ranks(_count_messages, 3, 3, 8, 0.99, True):
        assert rank[1:] == [MESSAGES] * 3


def test_a_dense_step_needs_no_mask(run_ranks: Any) -> None:
    for rank in run_ranks(_count_messages, 2, 3, 8, 0.0, True):
        assert rank[1:] == [{"all_reduce": 1, "_all_to_all": 1, "_all_gather": 1}] * 3


def test_a_step_without_votes_sends_four_messages(run_ranks: Any) -> None:
    for rank in run_ranks(_count_messages, 2, 3, 8, 0.9, True):
        assert rank[1:] == [{**MESSAGES, "_all_to_all": 1}] * 3


def _alone(rank: int, world: int) -> float:
    if rank == 0:
        return 0.0
    parameter = torch.nn.Parameter(torch.ones(400))
    parameter.grad = torch.ones(400)
    optimizer = ScapeOptimizer(
        [parameter], config=ScapeConfig(sparsity=0.5, sparsity_warmup_steps=0), communicator=Communicator.alone()
    )
    optimizer.step()
    return float(parameter.detach().sum())


def test_a_rank_may_step_alone_while_the_others_do_not(run_ranks: Any) -> None:
    assert 0.0 < run_ranks(_alone, 2)[1] < 400.0


def _order_of_a_step(rank: int, world: int, sparsity: float) -> list[str]:
    """What a sparse step does around its messages."""
    said: list[str] = []

    def say(home: Any, name: str) -> None:
        call = getattr(home, name)

        def saying(*args: Any, **kwargs: Any) -> Any:
            said.append(name)
            return call(*args, **kwargs)

        setattr(home, name, saying)

    parameter = nn.Parameter(torch.zeros(4000))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=sparsity, sparsity_warmup_steps=0))
    for step in range(3):
        optimizer.drain()
        if step == 2:
            for name in ("exchange", "gather_parameters"):
                say(Communicator, name)
            for name in ("fold", "compact", "select", "vote", "elect", "update", "scatter"):
                say(ops, name)
            say(collectives.Arriving, "wait")
            say(collectives.PendingMask, "depart")
        parameter.grad = torch.randn(4000, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.step()
    optimizer.drain()
    return said


@pytest.mark.parametrize(
    ("sparsity", "ranking", "afterwards"), [(0.9, ["select"], ["wait"]), (0.99, ["vote", "vote"], ["wait", "elect"])]
)
def test_a_step_works_while_its_messages_travel(
    run_ranks: Any, sparsity: float, ranking: list[str], afterwards: list[str]
) -> None:
    """It compacts its own shard while the others' values travel; ranks, and applies its own, while the others' come."""
    around_values = ["fold", "compact", "exchange", "fold", "compact", "wait", "update"]
    around_parameters = ["gather_parameters", *ranking, "scatter", "wait", "scatter", "depart"]
    for order in run_ranks(_order_of_a_step, 2, sparsity):
        assert order[: -len(afterwards)] == [*around_values, *around_parameters]
        assert sorted(order[-len(afterwards) :]) == sorted(afterwards)  # the election is on a thread of its own


def _after_an_error(rank: int, world: int, where: str) -> tuple[bool, float, Tensor]:
    """A step that fails on all ranks, one of them late, then two that do not; did it fail, seconds to drain, and p."""
    parameter = nn.Parameter(torch.zeros(4000, dtype=torch.bfloat16))
    optimizer = ScapeOptimizer([parameter], config=ScapeConfig(sparsity=0.9, sparsity_warmup_steps=0))

    def step(number: int) -> None:
        gradient = torch.randn(4000, generator=torch.Generator().manual_seed(10 * number + rank))
        parameter.grad = gradient.bfloat16()
        optimizer.step()

    def fail(*args: Any) -> None:
        raise MemoryError

    for number in range(2):
        step(number)
    home = optimizer if hasattr(optimizer, where) else ops
    real, real_compact = getattr(home, where), ops.compact

    def late(*args: Any, **kwargs: Any) -> Tensor:
        time.sleep(rank)
        return real_compact(*args, **kwargs)

    ops.compact = late
    setattr(home, where, fail)
    failed = False
    try:
        step(2)
    except MemoryError:
        failed = True
    setattr(home, where, real)
    ops.compact = real_compact
    state = optimizer.engine.state
    assert state is not None
    assert state.master is not None
    if where != "scatter":  # the update happened wholly, or not at all
        own = parameter.detach()[rank * 2000 : (rank + 1) * 2000]
        assert torch.equal(state.master.view(-1)[:2000].bfloat16(), own)
    began = time.perf_counter()
    optimizer.drain()
    waited = time.perf_counter() - began
    for number in (3, 4):
        step(number)
    optimizer.drain()
    return failed, waited, parameter.detach().clone()


@pytest.mark.parametrize("where", ["_compact_own", "select", "scatter"])
def test_an_error_beside_a_message_breaks_no_later_one(run_ranks: Any, where: str) -> None:
    (failed, waited, first), (also, also_waited, second) = run_ranks(_after_an_error, 2, where)
    assert failed
    assert also
    assert max(waited, also_waited) < 1.0  # the mask of the failed step has not been sent, nor is it now
    assert torch.equal(first, second)
    assert first.isfinite().all()
