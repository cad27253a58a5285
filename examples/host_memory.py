"""All-gather and reduce-scatter of FSDP2 between CPU ranks of one host, through shared memory.

    mesh = init_device_mesh("cpu", (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)
    share_host_memory(model)    # as many training steps as you like

gloo sends what ranks of one host tell each other through TCP on the loopback, and its reduce-scatter is an all-reduce.
GPUs of one node have NVLink. Here a rank writes what it has to say where the others read it, and nothing is sent.
FSDP2 itself copies parameters and gradients into this memory and parameters out of it, as it does on GPUs.

Each message has three parts:
    allocate     a piece of the shared memory, once all ranks have let go of what it held before
    call         the rank notes that it has written its part, and waits for the others
    let go       the tensor is freed, and the rank notes it
Ranks make the same calls in the same order, as for any collective, and so they choose the same piece without a message.
Each call compares the choices, and raises where they differ. A rank that waits sleeps, for ranks may share a core.

The memory has no name (memfd_create): it ends with the last process that maps it, also after a kill, and does not count
against the size of /dev/shm. Needs Linux and x86-64, whose stores other processes see in their order.
"""

from __future__ import annotations

import math
import mmap
import os
import platform
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.tensor import DTensor

AllGather, ReduceScatter = (getattr(_fsdp_api, name, object) for name in ("AllGather", "ReduceScatter"))

CAPACITY = 1 << 36
"""Bytes, at most. Only what is written takes memory."""
PIECES = 256
LINE = 8
"""Numbers in a line of a core's cache."""
PAGE = mmap.PAGESIZE
LONGEST_PAUSE = 2e-3
"""Seconds a waiting rank sleeps at a time, at most."""


def missing() -> str | None:
    """What keeps this machine from sharing memory, with the remedy; None where nothing does."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        found = f"Linux on x86-64: this is {sys.platform} on {platform.machine()}."
    elif AllGather is object:
        found = f"a newer torch: the FSDP2 of {torch.__version__} takes no collectives but its own."
    else:
        return None
    return f"{found} Leave out the methods that end in -shm."


def share_host_memory(module: nn.Module) -> HostMemory:
    """Ranks that shard ``module`` talk to each other through shared memory from now on. Collective.

    Args:
        module: its modules are sharded by ``fully_shard`` over one mesh, whose last dimension is the ranks of a host.
    """
    mesh = next(p.device_mesh for p in module.parameters() if isinstance(p, DTensor))
    memory = HostMemory(mesh.get_group(mesh.ndim - 1))
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.set_custom_all_gather(SharedAllGather(memory))
            each.set_custom_reduce_scatter(SharedReduceScatter(memory))
    return memory


class HostMemory:
    """Memory that the ranks of a group share, in pieces.

    Args:
        group: ranks of one host.
        timeout: seconds to wait for another rank.
        capacity: bytes of all pieces.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float = 300.0, capacity: int = CAPACITY) -> None:
        if problem := missing():
            raise OSError(f"Shared memory needs {problem}")
        self.rank, self.ranks, self.timeout = group.rank(), group.size(), timeout
        self._map = _map_together(group, capacity)
        rows = self.ranks * LINE
        numbers = np.frombuffer(self._map, np.int64, (3 + PIECES) * rows).reshape(-1, self.ranks, LINE)[:, :, 0]
        self._arrived = numbers[0]
        """Calls that each rank has begun."""
        self._chosen = numbers[1:3]
        """The piece of each rank's last even and last odd call."""
        self._released = numbers[3:]
        """How often each rank has let go of each piece."""
        self._calls = 0
        self._end = _pages(numbers.base.nbytes)
        self._pieces: list[tuple[int, int]] = []  # offset and bytes
        self._uses: list[int] = []
        self._busy: dict[int, int] = {}  # address of a living tensor's memory -> its piece

    @property
    def pieces(self) -> int:
        """How many there are."""
        return len(self._pieces)

    def allocate(self, size: int) -> Tensor:
        """``size`` bytes of a piece that no rank uses: the same piece on every rank."""
        busy = set(self._busy.values())
        fitting = (i for i, (_, length) in enumerate(self._pieces) if length == _pages(size) and i not in busy)
        piece = next(fitting, None)
        if piece is None:
            piece = self._add_piece(_pages(size))
        released, uses = self._released[piece], self._uses[piece]
        self._wait(lambda: released.min() >= uses, "let go of its memory")
        self._uses[piece] += 1
        array = np.frombuffer(self._map, np.uint8, size, self._pieces[piece][0])
        tensor = torch.from_numpy(array)
        self._busy[tensor.data_ptr()] = piece
        # torch holds the array for as long as any view of the memory lives.
        weakref.finalize(array, self._release, tensor.data_ptr(), piece).atexit = False
        return tensor

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in this memory."""
        return tensor.untyped_storage().data_ptr() in self._busy

    def meet(self, tensor: Tensor) -> None:
        """Waits until every rank has written its part of the piece that holds ``tensor``."""
        piece = self._busy[tensor.untyped_storage().data_ptr()]
        self._calls += 1
        calls, chosen, arrived = self._calls, self._chosen[self._calls % 2], self._arrived
        chosen[self.rank] = piece
        arrived[self.rank] = calls
        self._wait(lambda: arrived.min() >= calls, "make the same call")
        if (chosen != piece).any():
            raise RuntimeError(
                f"Ranks of a host must make the same calls in the same order, got pieces {chosen.tolist()} in call"
                f" {calls}. Check that all of them run the same modules."
            )

    def _add_piece(self, length: int) -> int:
        if len(self._pieces) == PIECES or self._end + length > len(self._map):
            raise MemoryError(
                f"Shared memory must hold at most {PIECES} pieces in {len(self._map)} bytes, got"
                f" {len(self._pieces) + 1} in {self._end + length}. Shard larger units, or raise `capacity`."
            )
        self._pieces.append((self._end, length))
        self._uses.append(0)
        self._end += length
        return len(self._pieces) - 1

    def _release(self, address: int, piece: int) -> None:
        del self._busy[address]
        self._released[piece, self.rank] += 1

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        began = time.monotonic()
        while not done():
            waited = time.monotonic() - began
            if waited > self.timeout:
                raise TimeoutError(f"Another rank of this host must {what} within {self.timeout:g} s: it did not.")
            # Late by a tenth at most, and rarely awake where the other rank needs the core for long.
            time.sleep(min(LONGEST_PAUSE, max(20e-6, waited / 10)))


def _pages(size: int) -> int:
    return max(1, math.ceil(size / PAGE)) * PAGE


def _map_together(group: dist.ProcessGroup, capacity: int) -> mmap.mmap:
    """Memory without a name: the others find it among the first rank's open files."""
    place: list[Any] = [None]
    descriptor = -1
    if group.rank() == 0:
        descriptor = os.memfd_create("host_memory")
        os.ftruncate(descriptor, capacity)
        place[0] = f"/proc/{os.getpid()}/fd/{descriptor}"
    dist.broadcast_object_list(place, group=group, group_src=0)
    if descriptor < 0:
        descriptor = os.open(place[0], os.O_RDWR | os.O_CLOEXEC)
    shared = mmap.mmap(descriptor, capacity)
    dist.barrier(group)  # the first rank's file must stay open until all have found it
    os.close(descriptor)
    return shared


class _Shared:
    def __init__(self, memory: HostMemory) -> None:
        self.memory = memory

    def _share(self, size: int, dtype: torch.dtype) -> Tensor:
        return self.memory.allocate(size * dtype.itemsize).view(dtype)


class SharedAllGather(_Shared, AllGather):
    """The output lies in the shared memory. A rank writes its part, and reads all. Done when the call returns."""

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._share(math.prod(map(int, size)), dtype).view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        memory = self.memory
        shared = output_tensor
        if not memory.holds(output_tensor):
            shared = self._share(output_tensor.numel(), output_tensor.dtype)
        own = shared.view(-1).chunk(memory.ranks)[memory.rank]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(-1))
        memory.meet(shared)
        if shared is not output_tensor:
            output_tensor.view(-1).copy_(shared)


class SharedReduceScatter(_Shared, ReduceScatter):
    """Every rank's input lies in the shared memory. A rank adds up its part of all. Done when the call returns.

    FSDP2 asks for an input first, and then for an output. That becomes the gradient, and is the rank's own memory.
    """

    def __init__(self, memory: HostMemory) -> None:
        super().__init__(memory)
        self._for_input = True

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if not self._for_input:
            return torch.empty(*size, dtype=dtype, device=device)
        self._for_input = False
        return self._rows(math.prod(map(int, size)), dtype)[self.memory.rank].view(*size)

    def _rows(self, size: int, dtype: torch.dtype) -> Tensor:
        """The inputs of all ranks, ``[ranks, size]``."""
        return self._share(self.memory.ranks * size, dtype).view(self.memory.ranks, size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise ValueError(f"Shared memory reduces by SUM or AVG, got {op}. Leave out set_gradient_divide_factor.")
        memory, size = self.memory, input_tensor.numel()
        self._for_input = True
        if memory.holds(input_tensor):
            rows = input_tensor.as_strided((memory.ranks, size), (size, 1), 0)
        else:
            rows = self._rows(size, input_tensor.dtype)
            rows[memory.rank].copy_(input_tensor.view(-1))
        memory.meet(rows)
        parts = rows.view(memory.ranks, memory.ranks, -1)[:, memory.rank]
        total, (first, *others) = output_tensor.view(-1), parts
        if not others:
            total.copy_(first)
        for other in others:  # in rank order
            first = torch.add(first, other, out=total)
        if op == dist.ReduceOp.AVG:
            total /= memory.ranks
