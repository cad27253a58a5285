"""A message that its caller waits for later, and the stream or the thread on which some of them run."""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_LEAVE_SECONDS = 10.0
_threads: weakref.WeakKeyDictionary[dist.ProcessGroup, ThreadPoolExecutor] = weakref.WeakKeyDictionary()


@dataclass
class Work:
    """A message under way. It keeps the memory alive that it reads and writes."""

    result: Tensor
    """Its contents are undefined before :meth:`wait`."""
    arrived: Callable[[], object] | None = None
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


class SideStream:
    """On CUDA a stream of one optimizer's own, beside the one on which it computes. Elsewhere there is none."""

    def __init__(self) -> None:
        self.stream: torch.cuda.Stream | None = None
        """None before the first use."""

    def on(self, device: torch.device) -> torch.cuda.Stream:
        """The stream, on a CUDA device."""
        if self.stream is None:
            self.stream = torch.cuda.Stream(device)
        return self.stream

    @contextlib.contextmanager
    def behind_all(self, device: torch.device) -> Iterator[None]:
        """On CUDA, queues the work inside on the stream, behind all work queued so far. Elsewhere nothing changes.

        Masks are made there from the residual, which the next step overwrites: wait for the :class:`Work` before that.
        """
        if device.type != "cuda":
            yield
            return
        stream = self.on(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            yield


def on_thread(group: dist.ProcessGroup, act: Callable[[], None]) -> Callable[[], None]:
    """Calls ``act``, which sends messages on the group, beside what follows; returns how to wait for its end.

    All ranks must send a group's messages in the same order. So a group has one thread, whichever optimizers share it.
    """
    if group not in _threads:
        _threads[group] = ThreadPoolExecutor(1, "scape-mask")
    return _threads[group].submit(torch.no_grad()(act)).result


def _end_groups() -> None:
    """Joins gloo's own threads: they free the last messages, and would abort a process that ends meanwhile.

    That is what ``destroy_process_group`` does, if neither the script has called it nor Lightning, which does so for
    NCCL alone: 4 of 40 runs of plain DDP over gloo were aborted (torch 2.13). For some seconds at most: the wait for an
    interrupted message would last until its timeout.
    """
    if dist.is_available() and dist.is_initialized():
        ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
        ending.start()
        ending.join(_LEAVE_SECONDS)


atexit.register(_end_groups)  # at import: after what others have registered since, who may still send something
