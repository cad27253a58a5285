"""What a message that failed means: gloo and NCCL speak of sockets and timeouts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

NO_ANSWER = (
    "All ranks must answer, got no answer: another rank has died, hangs, or raised an error of its own (look at its"
    " output first), or the network broke. Training cannot go on without it: restart all ranks from the newest"
    " checkpoint. The message failed with: "
)
OF_THIS_RANK = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
"""What fails in a message without a peer: memory, and (from torch 2.8) whatever the device did before."""


@contextlib.contextmanager
def explained_messages() -> Iterator[None]:
    """Explains the messages that code of a user or of torch sends; its other errors stay as they are."""
    try:
        yield
    except RuntimeError as error:
        failed = isinstance(error, dist.DistError) or "gloo" in str(error)
        if isinstance(error, OF_THIS_RANK) or not failed or NO_ANSWER in str(error):
            raise
        raise RuntimeError(f"{NO_ANSWER}{error}") from error
