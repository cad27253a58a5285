"""examples/host_memory.py: FSDP2 trains through shared memory as it does through gloo."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from example_modules import load_example
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from two_level_helpers import make_mesh, whole

host_memory = load_example("host_memory")
pytestmark = pytest.mark.skipif(host_memory.missing() is not None, reason=f"needs {host_memory.missing()}")


class Block(nn.Module):
    """Shapes that two ranks cannot share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(7, 13), nn.Linear(13, 7)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(self.inner(x).relu())


def train(rank: int, nodes: int, shared: bool, reshard: bool, dtype: torch.dtype | None, steps: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), *(Block() for _ in range(2)), nn.Linear(7, 3))
    mesh = make_mesh(nodes)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    for block in model[1:3]:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if shared:
        host_memory.share_host_memory(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        for _ in range(2):  # gradients add up
            model(torch.randn(4, 5, generator=generator)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter) for parameter in model.parameters()]


def both_ways(rank: int, world_size: int, nodes: int) -> list[tuple[str, list[Tensor], list[Tensor]]]:
    found = []
    for reshard, dtype in ((True, None), (False, None), (True, torch.float16)):
        plain, shared = (train(rank, nodes, way, reshard, dtype, steps=2) for way in (False, True))
        found.append((f"{reshard} {dtype}", plain, shared))
    return found


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_training_is_bitwise_what_it_is_through_gloo(run_ranks: Any, ranks: int, nodes: int) -> None:
    before = set(os.listdir("/dev/shm"))
    for found in run_ranks(both_ways, ranks, nodes):
        for name, plain, shared in found:
            assert all(torch.equal(a, b) for a, b in zip(plain, shared, strict=True)), name
    assert set(os.listdir("/dev/shm")) <= before


def many_in_flight(rank: int, world_size: int) -> int:
    memory = host_memory.HostMemory(dist.group.WORLD, timeout=20)
    gather, reduce = host_memory.SharedAllGather(memory), host_memory.SharedReduceScatter(memory)
    generator = torch.Generator().manual_seed(0)
    kept = []
    for turn in range(32):
        size = (1, 3, 1000, 5000)[turn % 4]
        dtype = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)[turn // 4 % 4]
        parts = torch.randint(0, 50, (world_size, size), generator=generator).to(dtype)
        output = gather.allocate((world_size * size,), dtype=dtype, device=torch.device("cpu"))
        own = output.narrow(0, rank * size, size)
        own.copy_(parts[rank])
        gather(output, own, dist.group.WORLD)
        kept.append((output[1:], parts.flatten()[1:]))  # a view keeps the memory
        kept = kept[-3:]
        assert all(torch.equal(got, expected) for got, expected in kept)
        given = torch.randint(0, 50, (world_size, world_size * size), generator=generator).to(dtype)
        total = torch.empty(size, dtype=dtype)
        reduce(total, given[rank].clone(), dist.group.WORLD, dist.ReduceOp.SUM)  # not allocated here
        assert torch.equal(total, given.view(world_size, world_size, size)[:, rank].sum(0).to(dtype))
    with pytest.raises(ValueError, match="by SUM or AVG"):
        reduce(total, given[rank], dist.group.WORLD, dist.ReduceOp.MAX)
    return memory.pieces


def test_messages_of_any_size_and_dtype_live_side_by_side(run_ranks: Any) -> None:
    pieces = run_ranks(many_in_flight, 2)
    assert pieces[0] == pieces[1] < 20  # memory is used again


def other_order(rank: int, world_size: int) -> None:
    memory = host_memory.HostMemory(dist.group.WORLD, timeout=20)
    tensors = [memory.allocate(size) for size in (10, 10_000)]
    with pytest.raises(RuntimeError, match=r"same calls in the same order, got pieces \[0, 1\]"):
        memory.meet(tensors[rank])


def alone(rank: int, world_size: int) -> None:
    memory = host_memory.HostMemory(dist.group.WORLD, timeout=0.2, capacity=1 << 20)
    tensor = memory.allocate(10)
    if rank == 0:
        with pytest.raises(TimeoutError, match="must make the same call within 0.2 s"):
            memory.meet(tensor)
    with pytest.raises(MemoryError, match="raise `capacity`"):
        memory.allocate(1 << 20)


@pytest.mark.parametrize("job", [other_order, alone])
def test_calls_that_differ_between_ranks_are_errors(run_ranks: Any, job: Any) -> None:
    run_ranks(job, 2)
