"""Every message this package sends, on which group and stream, and how many bytes it cost.

A step sends five messages, however many parameters or layers there are:

========== ================================ ============================================ ==================
kind       call                             bytes a rank sends                           when
========== ================================ ============================================ ==================
norm       all-reduce, fp32                 2 (N-1)/N * 16 KB (sketch) or 4 bytes        before the fold
values     all-to-all, wire dtype           (N-1)/N * k * 2 (bf16) or 4 (fp32)           during the compaction
parameters all-gather, wire dtype or own    (N-1)/N * k * itemsize                       after the update
mask       all-gather, uint8 or uint16      (N-1)/N * k * 1 or 2                         during the next step
votes      all-to-all, uint8                (N-1)/N * (P/B) * (V * (2 or 3) + 1)         during the next step
========== ================================ ============================================ ==================

Parameters wider than the wire dtype come back as changes in it. Others, and those with masters, come back as values.
``V`` is ``ScapeConfig.votes``; where it is 0 there is no fifth message. Mask and votes travel on a process group (on
CUDA: communicator and stream) of their own, so that they never queue behind, nor hold up, the messages of the step or
of the model. With one rank nothing is sent at all.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_scape.comm.worker import Worker, end_groups_at_exit

T = TypeVar("T")
ProcessGroup = dist.ProcessGroup
KINDS = ("norm", "values", "parameters", "mask", "votes")


def new_mask_group(
    process_group: ProcessGroup | None = None, *, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup | None:
    """A second group over the ranks of ``process_group``, for the mask exchange alone. All of its ranks must call.

    It waits for other ranks as long as ``process_group`` does, if no ``timeout`` is given. None where there is nobody
    to talk to: no process group, or one rank.
    """
    if world_size(process_group) == 1:
        return None
    ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
    # Without local synchronization every rank of the job, not only of this group, would have to call.
    with _lost_contact():
        group: ProcessGroup = dist.new_group(
            ranks,
            backend=backend,
            timeout=timeout or _timeout_of(process_group),
            use_local_synchronization=ranks is not None,
        )
    return group


def _timeout_of(process_group: ProcessGroup | None) -> timedelta | None:
    """A group's timeout; a new group would have its backend's (30 minutes for gloo), whatever the job's is."""
    group: Any = process_group or dist.group.WORLD
    try:
        timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    except (AttributeError, IndexError, RuntimeError):  # not public: if torch moves it, its default has to do
        return None
    return timeout


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
    source = dist.get_global_rank(process_group, 0) if process_group is not None else 0
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    with torch.no_grad():
        for same_kind in kinds.values():
            for bucket in _buckets(same_kind, limit=1 << 26):
                flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
                as_bytes = flat.view(torch.uint8) if flat.element_size() > 1 or flat.dtype == torch.bool else flat
                dist.broadcast(as_bytes, source, group=process_group)
                for tensor, part in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
                    tensor.copy_(part.view(tensor.shape))


def _buckets(tensors: Iterable[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Groups of tensors of about ``limit`` bytes, in order."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        bucket.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= limit:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


@dataclass
class Arriving:
    """A message under way. Keeps alive what it reads and writes until it has arrived."""

    result: Tensor
    """Its contents are undefined before :meth:`wait`."""
    sent: Tensor | None = None
    work: Any = None
    waiting: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    """Surrounds the wait, in place of what only says what a failed message means."""

    def wait(self) -> Tensor:
        """What has arrived; on CUDA the current stream waits, the host does not."""
        if self.work is not None:
            work, self.work = self.work, None
            with (self.waiting or _lost_contact)():
                work.wait()
            self.sent = None
        return self.result

    def __enter__(self) -> Arriving:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an error inside the message still arrives: what is left half received breaks every later one."""
        if kind is not None and issubclass(kind, Exception):
            with contextlib.suppress(Exception):
                self.wait()


@dataclass
class PendingMask:
    """A mask in the making: its exchange begins when it is told to depart."""

    arriving: Arriving | None = None
    """The mask, ``[blocks, q]``, once it has departed."""
    send: Callable[[], Arriving] | None = None
    """Begins the exchange."""
    stream: torch.cuda.Stream | None = None

    def depart(self) -> None:
        """Sets the exchange off, unless it is."""
        if self.send is not None:
            send, self.send = self.send, None
            self.arriving = send()

    def wait(self) -> tuple[Tensor, float]:
        """The mask and the seconds the host waited; on CUDA the current stream waits, the host does not."""
        assert self.arriving is not None
        began = time.perf_counter()
        mask = self.arriving.wait()
        if self.stream is not None:
            current = torch.cuda.current_stream(mask.device)
            current.wait_stream(self.stream)
            # Allocated on the side stream, read on this one: the allocator must not hand it out again too early.
            mask.record_stream(current)
        return mask, time.perf_counter() - began


@dataclass
class Communicator:
    """The messages of one optimizer over one process group; N = 1 sends nothing and returns what it got.

    Args:
        process_group: the data-parallel ranks; None is the default group, or no group where none is up.
        mask_group: group for the mask exchange, from :func:`new_mask_group`.
    """

    process_group: ProcessGroup | None
    mask_group: ProcessGroup | None
    bytes_sent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    """Bytes this rank sent since :meth:`take_count`, by kind."""
    seconds: float = 0.0
    """Seconds of the host inside messages since then, waiting for other ranks included; the mask's are left out."""
    at_once: bool = False
    """Waits for every message where it departs, so that ``seconds`` are all that it takes."""

    def __post_init__(self) -> None:
        self.rank: int = dist.get_rank(self.process_group) if is_distributed() else 0
        self.world_size: int = world_size(self.process_group)
        if self.rank < 0:
            raise ValueError(
                "`process_group` must contain the calling rank, got a group that does not. Build the optimizer only"
                " on the ranks of its group."
            )
        self._side_stream: torch.cuda.Stream | None = None
        if self.world_size > 1 and "gloo" in str(dist.get_backend(self.process_group)):
            end_groups_at_exit()

    @classmethod
    def alone(cls) -> Communicator:
        """This process, whatever group it is in."""
        communicator = cls(None, None)
        communicator.rank, communicator.world_size = 0, 1
        return communicator

    def take_count(self) -> tuple[dict[str, int], float]:
        """The bytes by kind and the seconds, which start again from zero."""
        counted = self.bytes_sent, self.seconds
        self.bytes_sent, self.seconds = dict.fromkeys(KINDS, 0), 0.0
        return counted

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, in place."""
        if self.world_size > 1:
            with self._timed():
                dist.all_reduce(tensor, group=self.process_group)
            self._count("norm", 2 * tensor.numel() * tensor.element_size())
        return tensor

    def exchange(self, values: Tensor) -> Arriving:
        """Sends shard j of ``values [N*R, q]`` to rank j; ``[N, R, q]`` arrive, the other ranks' values for this shard.

        This rank's own place in what arrives holds nothing; with one rank there is no other: ``[0, q]``, ``[1, 0, q]``.
        """
        shape = self.world_size, -1, values.shape[1]
        if self.world_size == 1:
            return Arriving(values.view(shape))
        received = torch.empty_like(values)
        with self._timed():
            work = _all_to_all(received, values, self.process_group, async_op=True)
        self._count("values", values.numel() * values.element_size())
        return self._under_way(received.view(shape), values, work)

    def gather_parameters(self, shard: Tensor) -> Arriving:
        """``[N*R, q]`` arrive: every rank's ``shard [R, q]``, in rank order."""
        if self.world_size == 1:
            return Arriving(shard)
        full = shard.new_empty((self.world_size * shard.shape[0], shard.shape[1]))
        with self._timed():
            work = _all_gather(full, shard, self.process_group, async_op=True)
        self._count("parameters", full.numel() * full.element_size())
        return self._under_way(full, shard, work)

    def _under_way(self, result: Tensor, sent: Tensor, work: Any) -> Arriving:
        arriving = Arriving(result, sent, work, self._timed)
        if self.at_once:
            arriving.wait()
        return arriving

    @contextlib.contextmanager
    def beside_compute(self, device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """On CUDA, what runs inside goes to one side stream; elsewhere nothing changes.

        There it waits for ``after``, a :meth:`moment`; by default, this one. The side stream reads the residual, which
        the next fold overwrites: :meth:`PendingMask.wait` comes before that.
        """
        after = after or self.moment(device)
        if after is None:
            yield
            return
        stream = self.side_stream(device)
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield

    def moment(self, device: torch.device) -> torch.cuda.Event | None:
        """On CUDA, the end of all work queued so far on the current stream; None elsewhere."""
        return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The one stream beside the compute, on which masks are made and exchanged."""
        if self._side_stream is None:
            self._side_stream = torch.cuda.Stream(device)
        return self._side_stream

    def start_mask(
        self, make_room: Callable[[], Tensor], pick: Callable[[Tensor | None], Tensor], ballots: Tensor | None = None
    ) -> PendingMask:
        """Begins to make the next mask; call inside :meth:`beside_compute`. It is exchanged when told to depart.

        Args:
            make_room: memory for every rank's part of the mask, ``[N*R, q]``.
            pick: makes this rank's part ``[R, q]``, from the ballots cast for its shard ``[N, R, W]`` (None: no votes).
            ballots: ``[N*R, W]``, what this rank has cast; None for no votes. With votes the mask is picked only when
                they have been exchanged.
        """
        if self.world_size == 1:
            return PendingMask(Arriving(pick(None)), stream=self._side_stream)
        if ballots is None:
            send = functools.partial(self._gather_mask, make_room, pick(None))
        else:
            send = functools.partial(self._vote_and_gather, make_room, pick, ballots)
        return PendingMask(send=send, stream=self._side_stream)

    def _gather_mask(self, make_room: Callable[[], Tensor], shard: Tensor) -> Arriving:
        with self.beside_compute(shard.device), _lost_contact():
            full = make_room()
            self._count("mask", full.numel() * full.element_size())
            worker = Worker.existing(self.mask_group)
            if worker is None:
                return Arriving(full, shard, _all_gather(full, shard, self.mask_group, async_op=True))
            return Arriving(full, shard, worker.do(lambda: _all_gather(full, shard, self.mask_group)))

    def _vote_and_gather(
        self, make_room: Callable[[], Tensor], pick: Callable[[Tensor | None], Tensor], ballots: Tensor
    ) -> Arriving:
        def messages() -> None:
            received = torch.empty_like(ballots)
            with _lost_contact():
                _all_to_all(received, ballots, self.mask_group)
            shard = pick(received.view(self.world_size, -1, ballots.shape[1]))
            with _lost_contact():
                _all_gather(full, shard, self.mask_group)

        with self.beside_compute(ballots.device):
            full = make_room()
            self._count("mask", full.numel() * full.element_size())
            self._count("votes", ballots.numel() * ballots.element_size())
            if ballots.device.type == "cuda":  # the stream orders the messages, the host waits for none
                messages()
                return Arriving(full)
        assert self.mask_group is not None
        return Arriving(full, work=Worker.of(self.mask_group).do(messages), waiting=contextlib.nullcontext)

    def collect(self, flat: Tensor, to: int, device: torch.device) -> list[Tensor] | None:
        """Every rank's ``flat`` (same length on all) on rank ``to`` in host memory, None elsewhere; for checkpoints.

        It travels by way of ``device``, in parts: NCCL carries nothing that lives in host memory.
        """
        if self.world_size == 1:
            return [flat.detach().to("cpu", copy=True)]
        mine = self.rank == to
        count = self.world_size if mine else 0
        whole = [torch.empty(flat.shape, dtype=flat.dtype, device="cpu") for _ in range(count)]
        target = dist.get_global_rank(self.process_group, to) if self.process_group is not None else to
        begin = 0
        for part in flat.detach().split(1 << 22):
            part = part.to(device).contiguous()
            received = [torch.empty_like(part) for _ in range(count)]
            with _lost_contact():
                dist.gather(part, received if mine else None, dst=target, group=self.process_group)
            for whole_rank, part_rank in zip(whole, received, strict=True):
                whole_rank[begin : begin + part.numel()] = part_rank
            begin += part.numel()
        return whole if mine else None

    def share(self, tensor: Tensor) -> Tensor:
        """``[N, ...]``: every rank's small ``tensor`` (same shape on all), on every rank. Not counted."""
        if self.world_size == 1:
            return tensor.unsqueeze(0)
        flat = tensor.reshape(-1)
        full = flat.new_empty(self.world_size * flat.numel())
        with _lost_contact():
            _all_gather(full, flat, self.process_group)
        return full.view(self.world_size, *tensor.shape)

    def share_object(self, value: Any) -> list[Any]:
        """Every rank's small picklable ``value``, on every rank. Set-up only."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        with _lost_contact():
            dist.all_gather_object(values, value, group=self.process_group)
        return values

    def together(self, act: Callable[[], T]) -> T:
        """What ``act`` returns here. If it fails on any rank, all raise the error of the first that failed."""
        result: list[T] = []
        error: Exception | None = None
        try:
            result.append(act())
        except Exception as raised:
            error = raised
        for rank, failure in enumerate(self.share_object(_portable(error))):
            if failure is not None:
                if error is not None and rank == self.rank:
                    raise error
                raise failure from RuntimeError(f"raised on rank {rank}")
        return result[0]

    def agree(self, value: Any, device: torch.device) -> bool:
        """Whether ``repr(value)`` is the same on all ranks; one message of 8 bytes."""
        digest = blake2b(repr(value).encode(), digest_size=8).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.int64).to(device)
        everyone = self.share(mine)
        return bool((everyone == everyone[0]).all())  # set-up: waiting for the device is fine

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Counts the seconds inside as spent in messages, and says what a failed one means."""
        began = time.perf_counter()
        with _lost_contact():
            yield
        self.seconds += time.perf_counter() - began

    def _count(self, kind: str, buffer_bytes: int) -> None:
        """A rank keeps 1/N of every buffer to itself."""
        self.bytes_sent[kind] += buffer_bytes * (self.world_size - 1) // self.world_size


def _portable(error: Exception | None) -> Exception | None:
    """The error as it can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


_OF_THIS_RANK = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""What fails in a message without a peer: memory, and (from torch 2.8) whatever the device did before."""


@contextlib.contextmanager
def _lost_contact() -> Iterator[None]:
    """Says what a failed message means: gloo and NCCL speak of sockets and timeouts."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, _OF_THIS_RANK):
            raise
        raise RuntimeError(
            "All ranks must answer, got no answer: another rank has died, hangs, or raised an error of its own (look at"
            " its output first), or the network broke. Training cannot go on without it: restart all ranks from the"
            f" newest checkpoint. The message failed with: {error}"
        ) from error


@dataclass
class _Works:
    """Messages under way that end together."""

    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


def _exchange_by_pairs(received: list[Tensor], sent: list[Tensor], group: ProcessGroup | None) -> _Works:
    """Sends ``sent[j]`` to rank j and receives ``received[j]`` from it, all at once; this rank's own stays here.

    What gloo's own all-to-all and all-gather do, at up to twice the speed: they announce what they can receive behind
    what they send, on the same connection, so that two ranks send by turns. Here every receive is announced first.
    """
    rank = dist.get_rank(group)
    others = [(rank + hop) % len(sent) for hop in range(1, len(sent))]
    works = [dist.irecv(received[peer], group=group, group_src=peer) for peer in others]
    works += [dist.isend(sent[peer], group=group, group_dst=peer) for peer in others]
    return _Works(works)


def _by_pairs(tensor: Tensor, group: ProcessGroup | None) -> bool:
    return tensor.device.type == "cpu" and dist.get_backend(group) == "gloo"


def _all_to_all(output: Tensor, tensor: Tensor, group: ProcessGroup | None, *, async_op: bool = False) -> Any:
    if not _by_pairs(output, group):
        return dist.all_to_all_single(output, tensor, group=group, async_op=async_op)
    ranks = dist.get_world_size(group)
    works = _exchange_by_pairs(list(output.chunk(ranks)), list(tensor.chunk(ranks)), group)
    return works if async_op else works.wait()


def _all_gather(output: Tensor, tensor: Tensor, group: ProcessGroup | None, *, async_op: bool = False) -> Any:
    # 2.13 renamed this call (the old name warns there); older releases have only the old one.
    call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    if output.dtype == torch.uint16:  # neither gloo nor NCCL knows the type
        output, tensor = output.view(torch.uint8), tensor.view(torch.uint8)
    if _by_pairs(output, group):
        ranks = dist.get_world_size(group)
        places = list(output.chunk(ranks))
        works = _exchange_by_pairs(places, [tensor] * ranks, group)
        places[dist.get_rank(group)].copy_(tensor)
        return works if async_op else works.wait()
    return call(output, tensor, group=group, async_op=async_op)
