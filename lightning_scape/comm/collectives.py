"""Every message of this package: its group, its stream and its bytes.

Each method decides which of them an exchange sends. With one rank nothing is sent at all.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import pickle
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Self

from lightning_scape.comm import pairs, under_way
from lightning_scape.comm.work import SideStream
from lightning_scape.comm.work import Work as Work
from lightning_scape.comm.worker import end_groups_at_exit
from lightning_scape.core.private_names import group_timeout, groups_of_rank
from lightning_scape.core.tensors import bytes_of

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup
_NOBODY_SENDS = 0x5CA9E
"""A tag that no message has."""
_RAISED_ON = "_lightning_scape_raised_on"
"""An error's attribute: how many ranks have raised it together."""
_numbers: weakref.WeakKeyDictionary[ProcessGroup, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Counts the optimizers over each group as they are built: all ranks count alike."""


def new_group_like(
    process_group: ProcessGroup | None = None,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    device: torch.device | None = None,
) -> ProcessGroup | None:
    """A second group over the ranks of ``process_group``, for messages that travel beside. All of its ranks must call.

    Without ``timeout`` it waits for other ranks as long as ``process_group`` does. None where there is nobody to talk
    to: no process group, or one rank. ``device`` is :attr:`Communicator.device`.
    """
    if world_size(process_group) == 1:
        return None
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    # Without local synchronization every rank of the job, not only of this group, would have to call.
    if ranks is not None:
        _be_in_as_many_groups(Communicator(process_group, device=device))
    group: ProcessGroup = dist.new_group(
        ranks,
        backend=backend,
        timeout=timeout or timeout_of(process_group),
        use_local_synchronization=ranks is not None,
    )
    return group


def _be_in_as_many_groups(ranks: Communicator) -> None:
    """Puts all ranks into equally many groups. Torch names a new group by that number: else they would not meet."""
    for _ in range(max(ranks.all_gather_object(groups_of_rank())) - groups_of_rank()):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def new_node_groups(size: int, timeout: timedelta | None = None) -> tuple[ProcessGroup, ProcessGroup]:
    """The ranks of this rank's node, and the ranks at its place in all nodes: two new groups. All ranks must call.

    Example: 6 ranks in nodes of ``size`` 3 give rank 4 the groups of ranks 3, 4, 5 and of ranks 1, 4.
    """
    nodes = [[*range(first, first + size)] for first in range(0, world_size(), size)]
    found: list[ProcessGroup] = []
    for ranks in [*nodes, *map(list, zip(*nodes, strict=True))]:
        group: ProcessGroup = dist.new_group(ranks, timeout=timeout or timeout_of(None))
        if dist.get_rank() in ranks:
            found.append(group)
    inside, across = found
    return inside, across


def timeout_of(process_group: ProcessGroup | None) -> timedelta | None:
    """A group's timeout; a new group would have its backend's (30 minutes for gloo), whatever the job's is."""
    return group_timeout(process_group or dist.group.WORLD)


def is_distributed() -> bool:
    """Whether a process group is up."""
    return dist.is_available() and dist.is_initialized()


def check_joined() -> None:
    """Raises ``RuntimeError`` where a launcher started several ranks and no process group joins them."""
    launched = os.environ.get("WORLD_SIZE", "1")
    if not is_distributed() and launched not in ("", "1"):
        raise RuntimeError(
            f"Ranks must be joined in a process group before the optimizer is built, got WORLD_SIZE={launched} and no"
            " process group: each would train on its own. Call torch.distributed.init_process_group() first (backend"
            " 'nccl', or 'gloo' on CPUs), or unset WORLD_SIZE to train on one rank."
        )


def world_size(process_group: ProcessGroup | None = None) -> int:
    """Ranks of the group; 1 where no process group is up."""
    return dist.get_world_size(process_group) if is_distributed() else 1


def broadcast_tensors(tensors: Iterable[Tensor], process_group: ProcessGroup | None = None) -> None:
    """Overwrites the tensors with those of the group's first rank, in few fused messages. In place."""
    if world_size(process_group) == 1:
        return
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    with torch.no_grad():
        for same_kind in kinds.values():
            for bucket in in_messages(((tensor, tensor.nbytes) for tensor in same_kind), limit=1 << 26):
                as_bytes = [bytes_of(tensor) for tensor in bucket]
                flat = torch.cat(as_bytes)
                dist.broadcast(flat, group=process_group, group_src=0)
                for tensor, part in zip(bucket, flat.split([len(each) for each in as_bytes]), strict=True):
                    tensor.copy_(part.view(tensor.dtype).view(tensor.shape))


def all_reduce_bytes(parameters: Iterable[Tensor], ranks: int) -> int:
    """What a rank sends for the ring all-reduces of gradients of these parameters, in their own dtypes (DDP)."""
    size: int = sum(p.numel() * p.element_size() for p in parameters)
    return 2 * (ranks - 1) * size // ranks


def in_messages(given: Iterable[tuple[T, int]], limit: int) -> Iterator[list[T]]:
    """Puts things, given with their sizes, in order into lists of at most ``limit``; a larger thing is alone."""
    together: list[T] = []
    filled = 0
    for each, size in given:
        if together and filled + size > limit:
            yield together
            together, filled = [], 0
        together.append(each)
        filled += size
    if together:
        yield together


@dataclass
class Traffic:
    """What one rank has sent since :meth:`take`, and how long that took."""

    bytes_sent: Counter[str] = field(default_factory=Counter)
    """Bytes by kind of message."""
    seconds: float = 0.0
    """Seconds of the CPU inside messages, waiting for other ranks included; the mask's are left out."""
    total: int = 0
    """Bytes of all messages since the beginning, those of no kind included; checkpoints' are counted elsewhere."""

    @staticmethod
    def sent(buffer_bytes: int, ranks: int) -> int:
        """How much of a message's buffer is sent: a rank keeps 1/N of it to itself."""
        return buffer_bytes * (ranks - 1) // ranks

    def count(self, kind: str, buffer_bytes: int, ranks: int) -> None:
        """Counts a message's bytes."""
        self.bytes_sent[kind] += self.sent(buffer_bytes, ranks)
        self.total += self.sent(buffer_bytes, ranks)

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


@dataclass
class Padding:
    """The length of a group's all-reduces: gloo aborts the process where ranks differ in it, as if they step apart."""

    length: int = 0
    """Numbers in each."""
    sketched: int = 0
    """How many of these the sketches sent so far need."""


_of_steps: weakref.WeakKeyDictionary[ProcessGroup, tuple[ProcessGroup | None, Padding]] = weakref.WeakKeyDictionary()
"""Beside each gloo group one on which optimizers alone send messages."""


@dataclass
class Communicator:
    """The messages of one optimizer over one process group. With N = 1 nothing is sent.

    Args:
        process_group: the data-parallel ranks; None is the default group, or no group where none is up.
    """

    process_group: ProcessGroup | None = None
    number: int = 0
    """The optimizer's number, among those over the same ranks."""
    padding: Padding | None = None
    """Where optimizers have a group of their own: on gloo."""
    device: torch.device | None = None
    """The parameters' device, through which NCCL carries objects; None: the current one, perhaps another rank's."""

    def __post_init__(self) -> None:
        self.rank: int = dist.get_rank(self.process_group) if is_distributed() else 0
        self.world_size: int = world_size(self.process_group)
        if self.rank < 0:
            raise ValueError(
                "`process_group` must contain the calling rank, got a group that does not. Build the optimizer only"
                " on the ranks of its group."
            )
        self.traffic = Traffic()
        self.side_stream = SideStream()
        """For messages that travel beside the step."""
        under_way.settle(self.process_group)  # what others began on the group before
        if is_distributed() and pairs.by_gloo(self.process_group):
            end_groups_at_exit()
            pairs.let_senders_finish()

    @classmethod
    def of_optimizer(cls, process_group: ProcessGroup | None) -> Self:
        """The messages of one more optimizer over a group's ranks, on a group that no other code uses. Collective.

        Args:
            process_group: the data-parallel ranks; None is the default group.
        """
        base = process_group or (dist.group.WORLD if is_distributed() else None)
        if base is None or world_size(base) == 1:
            return cls(process_group)
        number = next(_numbers.setdefault(base, itertools.count()))
        if not pairs.by_gloo(base):
            return cls(process_group, number)
        if base not in _of_steps:
            _of_steps[base] = new_group_like(process_group), Padding()
        group, padding = _of_steps[base]
        return cls(group, number, padding)

    @classmethod
    def alone(cls) -> Self:
        """A communicator of this process alone, whatever group it is in."""
        communicator = cls()
        communicator.rank, communicator.world_size = 0, 1
        return communicator

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks; the tensor may be overwritten. On a group of optimizers it travels with zeros behind it."""
        if self.world_size == 1:
            return tensor
        sent, padding = tensor, self.padding
        if padding is not None and tensor.numel() < padding.length:
            sent = torch.cat([tensor.view(-1), tensor.new_zeros(padding.length - tensor.numel())])
        with self.traffic.timed():
            dist.all_reduce(sent, group=self.process_group)
        self.traffic.count("norm", 2 * sent.nbytes, self.world_size)
        return sent.view(-1)[: tensor.numel()].view(tensor.shape)

    def all_to_all(self, values: Tensor) -> Work:
        """Sends shard j of ``values [N*R, q]`` to rank j; ``[N, R, q]`` arrive, the other ranks' values for this shard.

        This rank's own place in the result holds nothing; with one rank there is no other: ``[0, q]``, ``[1, 0, q]``.
        """
        shape = self.world_size, -1, values.shape[1]
        if self.world_size == 1:
            return Work(values.view(shape))
        received = torch.empty_like(values)
        with self.traffic.timed():
            handle = pairs.all_to_all_into(received, values, self.process_group, async_op=True)
        self.traffic.count("values", values.nbytes, self.world_size)
        return Work(received.view(shape), values, handle, waiting=self.traffic.timed)

    def all_gather(self, shard: Tensor) -> Work:
        """``[N*R, q]`` arrive: every rank's ``shard [R, q]``, in rank order."""
        if self.world_size == 1:
            return Work(shard)
        full = shard.new_empty((self.world_size * shard.shape[0], shard.shape[1]))
        with self.traffic.timed():
            handle = pairs.all_gather_into(full, shard, self.process_group, async_op=True)
        self.traffic.count("parameters", full.nbytes, self.world_size)
        return Work(full, shard, handle, waiting=self.traffic.timed)

    def gather(self, flat: Tensor, to: int, device: torch.device, at_once: int = 1 << 22) -> list[Tensor] | None:
        """Every rank's ``flat`` (same length on all) on rank ``to`` in host memory, None elsewhere; for checkpoints.

        Args:
            flat: uint8.
            to: among the group's ranks.
            device: through which it travels: NCCL carries nothing that lives in host memory.
            at_once: bytes of a rank that are on their way at a time.
        """
        if self.world_size == 1:
            return [flat.detach().to("cpu", copy=True)]
        mine = self.rank == to
        count = self.world_size if mine else 0
        whole = [torch.empty(flat.shape, dtype=flat.dtype, device="cpu") for _ in range(count)]
        begin = 0
        for part in flat.detach().split(at_once):
            part = part.to(device).contiguous()
            received = [torch.empty_like(part) for _ in range(count)]
            dist.gather(part, received if mine else None, group=self.process_group, group_dst=to)
            for whole_rank, part_rank in zip(whole, received, strict=True):
                whole_rank[begin : begin + part.numel()] = part_rank
            begin += part.numel()
        return whole if mine else None

    def all_gather_stacked(self, tensor: Tensor) -> Tensor:
        """``[N, ...]``: every rank's small ``tensor`` (same shape on all), on every rank. Counted in ``total`` only."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        flat = tensor.reshape(-1)
        full = flat.new_empty(self.world_size * flat.numel())
        pairs.all_gather_into(full, flat, self.process_group)
        self.traffic.total += self.traffic.sent(full.nbytes, self.world_size)
        return full.view(self.world_size, *tensor.shape)

    def all_gather_facts(self, facts: Tensor) -> Tensor:
        """The same, counted as the message of the norm: ``[N, ...]``, every rank's ``facts``."""
        with self.traffic.timed():
            full = self.all_gather_stacked(facts)
        self.traffic.bytes_sent["norm"] += self.traffic.sent(full.nbytes, self.world_size)
        return full

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every rank's small picklable ``value``, on every rank. Set-up only."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _current(self.device):
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def leave(self, alone: bool) -> None:
        """After an error: later optimizers get another group. On gloo, where they have one of their own.

        Args:
            alone: other ranks may wait for this one: their messages fail at once. Gloo closes a rank's connections
                where a receive is not answered in time.
        """
        for base, (group, _) in list(_of_steps.items()):
            if group is self.process_group:
                del _of_steps[base]
        if self.padding is None or not alone:
            return
        with contextlib.suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
            other = (self.rank + 1) % self.world_size
            receive = dist.irecv(nothing, group=self.process_group, group_src=other, tag=_NOBODY_SENDS)
            assert receive is not None
            receive.wait(timedelta(seconds=0.01))

    def share(self, value: T) -> T:
        """The value; if this rank's is empty or None, that of the first rank which has one. Collective.

        For states that were collected on one rank. If all ranks have one, only a flag of each rank is sent.
        """
        have = self.all_gather_object(bool(value))
        if all(have) or not any(have):
            return value
        first = have.index(True)
        saved = io.BytesIO()  # by torch.save: a tensor of uint16, such as a mask, does not survive a plain pickle
        self.raise_on_all_ranks(lambda: torch.save(value, saved) if self.rank == first else None)
        carried: list[Any] = [saved.getvalue()]
        with _current(self.device):
            dist.broadcast_object_list(carried, group=self.process_group, group_src=first)
        read = functools.partial(torch.load, io.BytesIO(carried[0]), map_location="cpu", weights_only=False)
        shared: T = self.raise_on_all_ranks(lambda: value if self.rank == first else read())
        return shared

    def raise_on_all_ranks(self, act: Callable[[], T]) -> T:
        """Calls ``act`` and returns its result. If it fails on any rank, all ranks raise the first one's error.

        Such calls may be nested: what an inner one has raised on all ranks is not told again.
        """
        result: list[T] = []
        error: Exception | None = None
        try:
            result.append(act())
        except Exception as raised:
            if known_to(raised, self.world_size):
                raise
            error = raised
        self.raise_together(error)
        return result[0]

    def raise_together(self, error: Exception | None) -> None:
        """All ranks raise the first rank's error, if any rank has one."""
        for rank, failure in enumerate(self.all_gather_object(_portable(error))):
            if failure is not None:
                if error is not None and rank == self.rank:
                    _note_ranks(error, self.world_size)
                    raise error
                _note_ranks(failure, self.world_size)
                raise failure from RuntimeError(f"raised on rank {rank}")


def _current(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Inside, a CUDA device is the current one."""
    return contextlib.nullcontext() if device is None or device.type != "cuda" else torch.cuda.device(device)


def _portable(error: Exception | None) -> Exception | None:
    """The error in a form that can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _note_ranks(error: Exception, ranks: int) -> None:
    with contextlib.suppress(AttributeError):  # a class with slots
        setattr(error, _RAISED_ON, ranks)


def known_to(error: Exception, ranks: int) -> bool:
    """Whether so many ranks have raised it together that it need not be told again."""
    return bool(getattr(error, _RAISED_ON, 0) >= ranks)
