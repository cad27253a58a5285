"""A message that its caller waits for later."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_scape.comm.lost_ranks import explained_loss


@dataclass
class Work:
    """A message under way. It keeps the memory alive that it reads and writes."""

    result: Tensor
    """Its contents are undefined before :meth:`wait`."""
    sent: Tensor | None = None
    handle: Any = None
    """Of torch or of the background thread; None: the message has arrived."""
    stream: torch.cuda.Stream | None = None
    """The side stream, where the message runs on it."""
    waiting: Callable[[], contextlib.AbstractContextManager[None]] | None = None
    """Surrounds the wait; by default an error is explained."""
    keeps: Any = None
    """What the side stream reads and writes, beside the result."""
    error: Exception | None = None
    """What went wrong; all who wait learn it."""

    def wait(self) -> Tensor:
        """Returns the result; on CUDA the current stream waits, the CPU does not."""
        if self.error is not None:
            raise self.error
        if self.handle is not None:
            try:
                with (self.waiting or explained_loss)():
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
