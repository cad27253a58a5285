"""Every message of this package: its group, its thread and its bytes.

Each method decides which of them an exchange sends. With one rank nothing is sent at all.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import pickle
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from lightning_scape.core.private_names import broadcast_coalesced, group_timeout

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup
Wait = Callable[[], object]
"""Returns when a message has arrived."""


# ------------------------------------------------------------------------------------------------ groups


def world_size(process_group: ProcessGroup | None = None) -> int:
    """Ranks of the group; 1 where no process group is up."""
    return dist.get_world_size(process_group) if dist.is_initialized() else 1


def check_joined() -> None:
    """Raises ``RuntimeError`` where a launcher started several ranks and no process group joins them."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if not dist.is_initialized() and launched not in ("", "1"):
        raise RuntimeError(
            f"Ranks must be joined in a process group before the optimizer is built, got WORLD_SIZE={launched} and no"
            " process group: each would train on its own. Call torch.distributed.init_process_group() first (backend"
            " 'nccl', or 'gloo' on CPUs), or unset WORLD_SIZE to train on one rank."
        )


def by_gloo(group: ProcessGroup | None) -> bool:
    """Whether gloo carries what lies in host memory, also where ``init_process_group()`` was given no backend."""
    return "cpu:gloo" in dist.get_backend_config(group)


@dataclass
class _Beside:
    """What a process group has beside it as long as it lives, for all fits, strategies and optimizers."""

    groups: dict[str, ProcessGroup] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    """Counts the optimizers as they are built: all ranks count alike."""
    length: int = 0
    """Numbers in each all-reduce of an optimizer: gloo aborts the process where ranks differ in it."""
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "scape-mask"))
    """Sends masks: one for all optimizers, whose masks must go out in the same order on all ranks."""


_all_beside: weakref.WeakKeyDictionary[ProcessGroup, _Beside] = weakref.WeakKeyDictionary()


def _beside(process_group: ProcessGroup | None) -> _Beside:
    base = process_group or dist.group.WORLD
    assert base is not None
    return _all_beside.setdefault(base, _Beside())


def group_beside(process_group: ProcessGroup | None, kind: str) -> ProcessGroup | None:
    """A second group over the same ranks, whose messages never meet those of the first.

    It waits as long as the default group. The first call for a kind is collective. None where nobody is to talk to.

    Args:
        process_group: None is the default group.
        kind: of its messages. ``"masks"`` and ``"steps"`` travel as those of the first group, others in host memory.
    """
    if world_size(process_group) == 1:
        return None
    groups = _beside(process_group).groups
    if kind not in groups:
        groups[kind] = dist.new_group(
            None if process_group is None else dist.get_process_group_ranks(process_group),
            backend=None if kind in ("masks", "steps") else "gloo",
            timeout=group_timeout(dist.group.WORLD),
            use_local_synchronization=process_group is not None,  # else every rank of the job would have to call
        )
        _let_senders_finish()
    return groups[kind]


def leave_groups() -> None:
    """After an error nobody knows what ranks have sent on the groups beside: later fits get others."""
    _all_beside.clear()


def _end_groups() -> None:
    """Joins gloo's own threads: they free the last messages, and would abort a process that ends meanwhile.

    That is what ``destroy_process_group`` does, if neither the script has called it nor Lightning, which does so for
    NCCL alone: 4 of 40 runs of plain DDP over gloo were aborted (torch 2.13). For ten seconds at most: the wait for an
    interrupted message would last until its timeout.
    """
    if dist.is_initialized():
        ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
        ending.start()
        ending.join(10.0)


atexit.register(_end_groups)  # at import: after what others have registered since, who may still send something


# ------------------------------------------------------------------------------------------------ messages


def broadcast_tensors(tensors: Iterable[Tensor], process_group: ProcessGroup | None = None) -> None:
    """Overwrites the tensors with those of the group's first rank, in messages of 64 MB. In place."""
    if world_size(process_group) > 1 and (sent := [each.detach() for each in tensors]):
        broadcast_coalesced(process_group or dist.group.WORLD, sent, 1 << 26)


def all_to_all_into(output: Tensor, tensor: Tensor, group: ProcessGroup | None) -> Wait:
    """Every all-to-all of this package: part j of ``tensor`` goes to rank j; ``output`` has what arrives."""
    if output.device.type == "cpu" and by_gloo(group):
        ranks = dist.get_world_size(group)
        return _exchange(list(output.chunk(ranks)), list(tensor.chunk(ranks)), group)
    sent: Wait = dist.all_to_all_single(output, tensor, group=group, async_op=True).wait
    return sent


def all_gather_into(output: Tensor, tensor: Tensor, group: ProcessGroup | None) -> Wait:
    """Every all-gather of a step: each rank's ``tensor``, in rank order, in ``output``."""
    if output.dtype == torch.uint16:  # neither gloo nor NCCL knows the type
        output, tensor = output.view(torch.uint8), tensor.view(torch.uint8)
    if output.device.type == "cpu" and by_gloo(group):
        ranks = dist.get_world_size(group)
        places = list(output.chunk(ranks))
        wait = _exchange(places, [tensor] * ranks, group)
        places[dist.get_rank(group)].copy_(tensor)
        return wait
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    gathered: Wait = call(output, tensor, group=group, async_op=True).wait
    return gathered


def _exchange(received: list[Tensor], sent: list[Tensor], group: ProcessGroup | None) -> Wait:
    """Sends ``sent[j]`` to rank j and receives ``received[j]`` from it, all at once; this rank's own stays here.

    It does what gloo's own all-to-all and all-gather do, at up to twice the speed. Those announce a receive behind
    what they send on the same connection, so two ranks send by turns. Here every receive is announced first.
    """
    rank = dist.get_rank(group)
    others = [(rank + hop) % len(sent) for hop in range(1, len(sent))]
    works = [dist.irecv(received[peer], group=group, group_src=peer) for peer in others]
    works += [dist.isend(sent[peer], group=group, group_dst=peer) for peer in others]
    return lambda: [work.wait() for work in works if work is not None]


def _let_senders_finish() -> None:
    """Makes gloo's receiving threads, those of all process groups so far, wait for their turn. They are found by name.

    While a sender holds the lock of a connection, the thread that receives there asks again and again for it. Where
    both run on one core, Linux lets a thread that wakes up go first, so the sender loses its core to a thread that
    waits for it. Under ``SCHED_BATCH`` a thread that wakes up waits for its turn (docs/design.md, 3.5).

    Threads with another policy than the default keep it. If the system forbids the change, all works as before.
    """
    for task in Path("/proc/self/task").glob("*"):  # none but on Linux
        with contextlib.suppress(OSError):  # it has ended
            thread = int(task.name)
            receives = (task / "comm").read_text().strip() == "gloo_tcp_loop"
            if receives and os.sched_getscheduler(thread) == os.SCHED_OTHER:
                os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


@dataclass
class Work:
    """A message under way. It keeps the memory alive that it reads and writes."""

    result: Tensor
    """Its contents are undefined before :meth:`wait`."""
    arrived: Wait | None = None
    """Waits for the message; None: there is nothing that the CPU waits for."""
    sent: Any = None
    stream: torch.cuda.Stream | None = None
    """The side stream, where the message runs on it."""

    def wait(self) -> Tensor:
        """Returns the result; on CUDA the current stream waits, the CPU does not."""
        arrived, self.arrived = self.arrived, None
        if arrived is not None:
            arrived()
        if self.stream is not None:
            current = torch.cuda.current_stream(self.result.device)
            current.wait_stream(self.stream)
            # Allocated on the side stream, read on this one: the allocator must not hand it out again too early.
            self.result.record_stream(current)
        self.sent = self.stream = None
        return self.result


def all_reduce_bytes(parameters: Iterable[Tensor], ranks: int) -> int:
    """What a rank sends for the ring all-reduces of gradients of these parameters, in their own dtypes (DDP)."""
    return 2 * (ranks - 1) * sum(p.numel() * p.element_size() for p in parameters) // ranks


@dataclass
class Traffic:
    """What one rank has sent since :meth:`take`, and how long that took."""

    bytes_sent: Counter[str] = field(default_factory=Counter)
    """Bytes by kind of message."""
    seconds: float = 0.0
    """Seconds of the CPU inside messages, waiting for other ranks included; the mask's are left out."""
    total: int = 0
    """Bytes of all messages since the beginning; checkpoints' are left out."""

    def count(self, kind: str, buffer_bytes: int, ranks: int) -> None:
        """Counts a message's bytes: of its buffer a rank keeps 1/N to itself."""
        sent = buffer_bytes * (ranks - 1) // ranks
        self.bytes_sent[kind] += sent
        self.total += sent

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Counts the seconds inside."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began

    def take(self) -> tuple[Counter[str], float]:
        """The bytes by kind and the seconds, which start again from zero."""
        taken = self.bytes_sent, self.seconds
        self.bytes_sent, self.seconds = Counter(), 0.0
        return taken


class Communicator:
    """The messages of one optimizer over one process group. With N = 1 nothing is sent.

    Args:
        process_group: the data-parallel ranks; None is the default group, or no group where none is up.
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self.process_group, self._beside = process_group, _Beside()
        self.number = 0
        """The optimizer's, among those over the same ranks."""
        self.rank: int = dist.get_rank(process_group) if dist.is_initialized() else 0
        self.world_size: int = world_size(process_group)
        self.traffic = Traffic()

    @classmethod
    def of_optimizer(cls, process_group: ProcessGroup | None) -> Self:
        """The messages of one more optimizer over a group's ranks, on gloo by a group of optimizers alone. Collective.

        Args:
            process_group: the data-parallel ranks; None is the default group.
        """
        if world_size(process_group) == 1:
            return cls(process_group)
        made = cls(group_beside(process_group, "steps") if by_gloo(process_group) else process_group)
        made._beside = _beside(process_group)
        made.number = next(made._beside.numbers)
        return made

    @classmethod
    def alone(cls) -> Self:
        """A communicator of this process alone, whatever group it is in."""
        communicator = cls()
        communicator.rank, communicator.world_size = 0, 1
        return communicator

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks; the tensor may be overwritten. It travels as long as any optimizer's."""
        if self.world_size == 1:
            return tensor
        sent = tensor
        if (missing := self._beside.length - tensor.numel()) > 0:
            sent = torch.cat([tensor.view(-1), tensor.new_zeros(missing)])
        with self.traffic.timed():
            dist.all_reduce(sent, group=self.process_group)
        self.traffic.count("norm", 2 * sent.nbytes, self.world_size)
        return sent.view(-1)[: tensor.numel()].view(tensor.shape)

    def make_room(self, numbers: int) -> None:
        """Notes how many numbers this optimizer sums up at a time: all over the same ranks send as many."""
        self._beside.length = max(self._beside.length, numbers)

    def all_to_all(self, values: Tensor) -> Work:
        """Sends shard j of ``values [N*R, q]`` to rank j; ``[N, R, q]`` arrive, the other ranks' values for this shard.

        This rank's own place in the result holds nothing; with one rank there is no other: ``[0, q]``, ``[1, 0, q]``.
        """
        shape = self.world_size, -1, values.shape[1]
        if self.world_size == 1:
            return Work(values.view(shape))
        received = torch.empty_like(values)
        with self.traffic.timed():
            wait = all_to_all_into(received, values, self.process_group)
        self.traffic.count("values", values.nbytes, self.world_size)
        return Work(received.view(shape), self.traffic.timed()(wait), values)

    def all_gather(self, shard: Tensor, kind: str = "parameters") -> Work:
        """``[N*R, ...]`` arrive: every rank's ``shard [R, ...]``, in rank order."""
        if self.world_size == 1:
            return Work(shard)
        full = shard.new_empty((self.world_size * len(shard), *shard.shape[1:]))
        with self.traffic.timed():
            wait = all_gather_into(full, shard, self.process_group)
        self.traffic.count(kind, full.nbytes, self.world_size)
        return Work(full, self.traffic.timed()(wait), shard)

    def all_gather_stacked(self, tensor: Tensor, kind: str = "facts") -> Tensor:
        """``[N, ...]``: every rank's small ``tensor`` (same shape on all), on every rank."""
        return self.all_gather(tensor.unsqueeze(0), kind).wait()

    def carry(self, sent: Iterable[Tensor], into: Sequence[Sequence[Tensor]], to: int, device: torch.device) -> None:
        """Copies each rank's tensors to rank ``to``, in pieces that no other message waits for; for checkpoints.

        Args:
            sent: this rank's.
            into: on rank ``to`` tensors of the same sizes for each rank, in host memory.
            to: among the ranks.
            device: by way of which they travel.
        """
        if self.rank != to:
            for part in _in_parts(sent):
                dist.send(part.to(device), group=self.process_group, group_dst=to)
            return
        for place, own in zip(into[to], sent, strict=True):
            place.copy_(own.detach())
        for rank, tensors in enumerate(into):
            for part in _in_parts(tensors) if rank != to else ():
                received = part.to(device)
                dist.recv(received, group=self.process_group, group_src=rank)
                part.copy_(received)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's small picklable ``value``, on every rank. Set-up only."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def raise_on_all_ranks(self, act: Callable[[], T]) -> T:
        """Calls ``act``, which sends nothing, and returns its result. If it fails on any rank, all raise that error."""
        error: Exception | None = None
        try:
            result = act()
        except Exception as raised:
            error = raised
        for rank, failure in enumerate(self.all_gather_object(_portable(error))):
            if rank == self.rank and error is not None:
                raise error
            if failure is not None:
                raise failure from RuntimeError(f"raised on rank {rank}")
        return result


def _in_parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """In 256 KB each: a checkpoint may travel beside a step."""
    for tensor in tensors:
        if tensor.numel():
            yield from tensor.detach().contiguous().view(-1).view(torch.uint8).split(1 << 18)


def _portable(error: Exception | None) -> Exception | None:
    """The error in a form that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
