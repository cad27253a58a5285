"""A message that its caller waits for later, and the stream on which some of them run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Work:
    """A message under way. It keeps the memory alive that it reads and writes."""

    result: Tensor
    """Its contents are undefined before :meth:`wait`."""
    sent: Tensor | None = None
    handle: Any = None
    """What torch or the background thread gave; None: the message has arrived."""
    stream: torch.cuda.Stream | None = None
    """The side stream, where the message runs on it."""
    waiting: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    """Surrounds the wait."""
    keeps: Any = None
    """What the side stream reads and writes, beside the result."""
    error: Exception | None = None
    """What went wrong; every wait raises it."""

    def wait(self) -> Tensor:
        """Returns the result; on CUDA the current stream waits, the CPU does not."""
        if self.error is not None:
            raise self.error
        if self.handle is not None:
            try:
                with (self.waiting or contextlib.nullcontext)():
                    self.handle.wait()
            except Exception as error:
                self.error = error
                raise
            self.handle = self.sent = None
        if self.stream is not None:
            current = torch.cuda.current_stream(self.result.device)
            current.wait_stream(self.stream)
            # Allocated on the side stream, read on this one: the allocator must not hand it out again too early.
            self.result.record_stream(current)
            self.stream = self.keeps = None
        return self.result

    def done(self) -> bool:
        """Whether it was waited for."""
        return self.error is not None or (self.handle is None and self.stream is None)

    def __enter__(self) -> Work:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the message after an error inside: half a message left behind breaks every later one."""
        if kind is not None and issubclass(kind, Exception):
            with contextlib.suppress(Exception):
                self.wait()


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
